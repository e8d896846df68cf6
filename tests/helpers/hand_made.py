"""Synthetic run directories: any state, records, logs and failures that a test of read-only verbs needs.

Nothing here ran. Times are fixed, so that what is shown of them can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.atomic import from_json, to_json, write_whole
from workbench.records.directory import RunDirectory
from workbench.records.provenance import this_process
from workbench.specs.run import RunSpec

BEGAN_NS = 1_700_000_000 * 10**9
SECOND_NS = 10**9
NOBODY = {"pid": 2**22 + 1, "create_time": 1.0}
"""A process that is not there: its number is above what Linux gives out."""


def make_project(folder: Path) -> Path:
    """Make a folder one that `project_root` takes, by an (empty) rollout dataset, and return it."""
    (folder / "data" / "rollouts").mkdir(parents=True)
    (folder / "data" / "rollouts" / "manifest.json").write_text("{}")
    return folder


def make_run(
    experiment: Path,
    name: str,
    *,
    state: str = "succeeded",
    done: int | None = None,
    at_s: float = 0.0,
    took_s: float = 3.0,
    error: Exception | None = None,
    rank: int = 0,
    logs: Mapping[int, str] | None = None,
    records: list[dict[str, Any]] | None = None,
    fields: Mapping[str, Any] | None = None,
    **settings: Any,
) -> RunDirectory:
    """A run of an experiment.

    Args:
        experiment: folder that gets ``runs``.
        name: of the configuration.
        state: an ended one, pending, running (by this process) or lost (by a process that is gone).
        done: steps recorded; None for all.
        at_s: when it was asked for, after a fixed moment; it begins a second later.
        took_s: how long it took.
        error: what a rank raised.
        rank: which one.
        logs: rank -> content of its log.
        records: of the steps, in place of plain ones.
        fields: more fields of the state.
        settings: of the spec.
    """
    run = RunDirectory.create(experiment / "runs", name, RunSpec(**{"steps": 4} | settings))
    created = BEGAN_NS + round(at_s * SECOND_NS)
    began = {"created_ns": created, "device": "cpu", "backend": "processes", "world_size": run.spec.layout.world_size}
    if state != "pending":
        began |= {"started_ns": created + SECOND_NS, "rank0": NOBODY if state == "lost" else this_process()}
    if state not in ("pending", "running", "lost"):
        began |= {"ended_ns": created + SECOND_NS + round(took_s * SECOND_NS)}
    own = from_json((run.path / "state.json").read_bytes())
    output = own | began | {"state": "running" if state == "lost" else state} | dict(fields or {})
    write_whole(run.path / "state.json", to_json(output))
    for record in records if records is not None else map(step_record, range(run.spec.steps if done is None else done)):
        run.append_step(record)
    for number, content in (logs or {}).items():
        run.log_path(number).write_text(content, encoding="utf8")
    if error is not None:
        run.write_exit(rank, {"cp": rank}, error)
    elif state == "succeeded":
        for number in range(run.spec.layout.world_size):
            run.write_exit(number, {"cp": number}, None)
    return run


def step_record(number: int) -> dict[str, Any]:
    """A plain step record; every number is known from its step."""
    return {
        "step": number,
        "loss/total/sum": 0.5**number + 0.1,
        "gradient/norm/global": 1.0 / (number + 3),
        "time/step_ms": 1000.0 if number == 0 else 40.0 + number,
        "memory/peak_bytes": 242_221_057 + number,
        "gradient_norms": {"model.norm.weight": 0.1 * (number + 1)},
    }
