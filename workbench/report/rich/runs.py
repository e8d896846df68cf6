"""Settings and runs: a spec, an ablation, a run directory and a sweep."""

from __future__ import annotations

import json
import math
from typing import Any

from workbench.atomic import to_json
from workbench.errors import SpecError
from workbench.launch.ablation import AblationSpec, changed_settings
from workbench.launch.sweep import Sweep
from workbench.records.directory import RunDirectory
from workbench.report.markup import Markup, breakable, join, table, tag
from workbench.report.numbers import significant
from workbench.report.rich.strips import framed
from workbench.report.rows import table_of
from workbench.report.trial import TrialReader, elapsed_s
from workbench.specs.reading import flatten
from workbench.specs.run import RunSpec


def spec_html(spec: RunSpec) -> Markup:
    """Return a table of the changed settings; every setting below it."""
    everything = to_json(spec.model_dump(mode="json")).decode().rstrip()
    steps = f"{spec.steps} step{'s' if spec.steps > 1 else ''}"
    head = tag("p", tag("strong", "RunSpec"), f" {spec.content_hash()}: {spec.layout}, {spec.precision}, {steps}")
    return framed(head, _changes(spec), tag("details", tag("summary", "every setting"), tag("pre", everything)))


def setting_text(value: Any) -> str:
    """Format a setting as in YAML; infinity as its sign."""
    if isinstance(value, float) and not math.isfinite(value):
        return significant(value)
    return value if isinstance(value, str) else json.dumps(value)


def _changes(spec: RunSpec) -> Markup:
    default = flatten(RunSpec().model_dump(mode="json"))
    rows = [
        [tag("code", key), setting_text(value), setting_text(default[key])]
        for key, value in flatten(spec.model_dump(mode="json")).items()
        if value != default[key]
    ]
    if not rows:
        return tag("p", "Every setting is as it is by default.", class_="quiet")
    return table(["setting", "here", "by default"], rows, class_="table")


def ablation_html(ablation: AblationSpec) -> Markup:
    """Return a row for each run: its reference, and the settings in which it differs from that."""
    head = tag("p", tag("strong", "AblationSpec"), " ", ablation.question or "(it asks no question)")
    try:
        planned = ablation.expand()
    except SpecError as error:
        return framed(head, tag("pre", str(error), class_="trouble"))
    rows = []
    for run in planned:
        changes = [f"{key}: {setting_text(value)}" for key, value in changed_settings(run, planned).items()]
        name, role = tag("strong", breakable(run.name)), ablation.role(run, planned)
        rows.append([name, role, str(run.world_size), ", ".join(changes) or "nothing changed"])
    return framed(head, table(["run", "role", "ranks", "differs in"], rows, numbers=[2], class_="table"))


def run_html(run: RunDirectory) -> Markup:
    """Return its row in a panel, the failure in full, and the spec."""
    trial = TrialReader(run).read()
    failure = run.failure() if trial.state == "failed" else None
    more = _failure(failure) if failure else None
    return join([table_of(run.path.name, [trial], elapsed_s([trial]), more=more), spec_html(run.spec)])


def _failure(failure: dict[str, Any]) -> Markup:
    """Return the message; the traceback, and the stack of a rank that hung, on request."""
    rank = "before any rank" if failure.get("rank") is None else f"rank {failure['rank']}"
    waited = f", in {failure['waited_in']}" if failure.get("waited_in") else ""
    also = [rank for rank in failure.get("also_failed", []) if rank is not None]
    cause = f" ({failure['cause']})" if failure.get("cause") else ""
    after = f"; after it ranks {', '.join(map(str, also))}" if also else ""
    head = tag("p", tag("strong", f"{rank}{waited}: {failure.get('exception') or 'failed'}"), cause, after)
    parts = [
        tag("details", tag("summary", title), tag("pre", failure[key]))
        for key, title in (("traceback", "traceback"), ("stack", "stack of the rank that hung"))
        if failure.get(key)
    ]
    return tag("div", head, tag("pre", failure.get("message") or "no message"), parts)


def sweep_html(sweep: Sweep) -> Markup:
    """Return a row for each run, and how to follow them."""
    trials = [TrialReader(run).read() for run in sweep.runs]
    in_progress = not all(trial.ended for trial in trials)
    hint = tag("p", "As it stood. ", tag("code", "experiment.panel()"), " follows it.", class_="hint")
    return table_of(sweep.experiment_dir.name, trials, elapsed_s(trials), more=hint if in_progress else None)
