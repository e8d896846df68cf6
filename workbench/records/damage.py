"""Files of a run directory whose content is not what its writer writes: a value of another type is damage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import RecordError

STATE_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("created_ns", "started_ns", "ended_ns", "world_size", "nodes"), (int,)),
    **dict.fromkeys(("rank0", "agent", "launcher", "inputs"), (dict,)),
    **dict.fromkeys(("backend", "handle", "job_of", "scheduler", "device", "continues"), (str,)),
    "device_note": (str,),
}
EXIT_TYPES: dict[str, tuple[type, ...]] = {
    "rank": (int, type(None)),
    "coordinates": (dict,),
    "time_ns": (int,),
    "ok": (bool,),
    "cause": (str, type(None)),
    "exception": (str, type(None)),
    "message": (str,),
    "traceback": (str,),
    "waited_in": (str,),
}
CLUSTER_RANKS = 16_384
"""Ranks of a cluster's job: GPUs of the largest published training run (Llama 3 report, arXiv 2407.21783)."""
COUNTS = ("world_size", "nodes")
"""Keys that count ranks, or machines of ranks."""
LAST_NS = 2**63 - 1
"""The last moment that 64 bits of nanoseconds since 1970 tell, in the year 2262; calendars end soon after it."""


def check_types(path: Path, content: dict[str, Any], types: Mapping[str, tuple[type, ...]]) -> None:
    """Raise an error for a key of a damaged file whose value no writer gives it: of another type, no moment, no job."""
    for key in types.keys() & content.keys():
        if type(content[key]) not in types[key]:
            names = " or ".join(kind.__name__.replace("NoneType", "null") for kind in types[key])
            raise unfit(path, {key: content[key]}, f"{key} is {names}")
        if key in COUNTS and not 1 <= content[key] <= CLUSTER_RANKS:
            raise unfit(path, {key: content[key]}, f"{key} is at least 1 and at most {CLUSTER_RANKS}")
        if key.endswith("_ns") and not 0 <= content[key] <= LAST_NS:
            raise unfit(path, {key: content[key]}, f"{key} counts nanoseconds since 1970, at most {LAST_NS}")


def unfit(path: Path, content: Any, rule: str) -> RecordError:
    """Error of a file whose content is not what its writer writes."""
    fix = "it was damaged after it was written; run the configuration again"
    return RecordError(f"read {path}", found=f"{content!r:.80}", rule=rule, fix=fix)
