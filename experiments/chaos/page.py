"""The campaigns of chaos as a section of docs/benchmarks.md: what was tried, and what failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

HEAD = ("cases", "number")

KINDS = (
    ("SIGKILL at a file operation of a run", ("SIGKILL at a file operation",)),
    ("SIGKILL of a launcher, its parent, an agent, a rank or the fork server", ("SIGKILL of a ",)),
    ("SIGSTOP of a rank", ("SIGSTOP",)),
    ("a rank that ends early with exit code 0", ("early exit",)),
    ("an error of the operating system at a file operation", ("E",)),
    ("a limit on descriptors or on the size of a file", ("limit on",)),
    ("a file system that is full, out of inodes or read-only", ("file system",)),
    ("a clock that jumps", ("jump of the clock",)),
    ("two launchers of one experiment", ("two launchers",)),
    ("run directories deleted while their runs write", ("deleted while running",)),
    ("malformed specs", ("malformed spec",)),
    ("damaged datasets and imports", ("rollouts: ",)),
    ("damaged records", ("damaged record",)),
)
"""Label -> beginnings of the names in `cases`."""


def rows(record: Mapping[str, Any]) -> list[list[str]]:
    """Cases by kind, of all campaigns."""
    cases: Counter[str] = Counter()
    for campaign in record["campaigns"]:
        cases.update(campaign["cases"])
    counted = [(label, sum(n for name, n in cases.items() if name.startswith(begins))) for label, begins in KINDS]
    assert sum(count for _, count in counted) == cases.total(), "a kind of case is in no row, or in two"
    return [[label, f"{count:,}"] for label, count in counted]


def answer(record: Mapping[str, Any]) -> str:
    """Runs that were tried, and failures."""
    campaigns = record["campaigns"]
    minutes = sum(campaign["minutes"] for campaign in campaigns)
    failures = [failure["kind"] for campaign in campaigns for failure in campaign["failures"]]
    since = next((n for n, campaign in enumerate(reversed(campaigns)) if campaign["failures"]), len(campaigns))
    kinds = ", ".join(f"{count} in {kind}" for kind, count in sorted(Counter(failures).items()))
    return (
        f"{len(campaigns)} campaigns of {minutes:.0f} minutes in all, on {campaigns[-1]['cpu_count']} CPU cores. After "
        "each case: nothing that was acknowledged is lost, no process is left, every run says how it ended and why, "
        f"bad input ends without a traceback. It did not hold {len(failures)} times ({kinds}), never in the "
        f"last {since} campaigns; the record has each, with the commit."
    )
