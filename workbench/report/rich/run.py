"""Run directory: its state, and the cause of a failure."""

from __future__ import annotations

from typing import Any

from workbench.records.directory import RunDirectory
from workbench.report.markup import Markup, join, tag
from workbench.report.rich.spec import as_html as spec_html
from workbench.report.rows import table_of
from workbench.report.trial import TrialReader, elapsed_s


def as_html(run: RunDirectory) -> Markup:
    """Return its row in a panel, the failure in full, and the spec."""
    trial = TrialReader(run).read()
    failure = run.failure() if trial.state == "failed" else None
    return join(
        [
            table_of(run.path.name, [trial], elapsed_s([trial]), more=_failure(failure) if failure else None),
            spec_html(run.spec),
        ]
    )


def _failure(failure: dict[str, Any]) -> Markup:
    """Return the message; the traceback, and the stack of a rank that hung, on request."""
    rank = "before any rank" if failure.get("rank") is None else f"rank {failure['rank']}"
    waited = f", in {failure['waited_in']}" if failure.get("waited_in") else ""
    also = [rank for rank in failure.get("also_failed", []) if rank is not None]
    parts = [
        tag(
            "p",
            tag("strong", f"{rank}{waited}: {failure.get('exception') or 'failed'}"),
            f" ({failure['cause']})" if failure.get("cause") else "",
            f"; after it ranks {', '.join(map(str, also))}" if also else "",
        ),
        tag("pre", failure.get("message") or "no message"),
    ]
    for key, title in (("traceback", "traceback"), ("stack", "stack of the rank that hung")):
        if failure.get(key):
            parts.append(tag("details", tag("summary", title), tag("pre", failure[key])))
    return tag("div", parts)
