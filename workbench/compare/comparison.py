"""Comparison of an ablation's runs: tables, and a verdict for every configuration.

Pure data; `workbench.compare.align` builds it from run directories, `workbench.report` renders it. Everything in
it fits in JSON, so a saved comparison is a record that a report or a README can quote.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.atomic import from_json, to_json, write_whole
from workbench.columns import columns
from workbench.compare import columnar
from workbench.errors import RecordError, VerdictError
from workbench.specs.groups import LayoutSpec
from workbench.specs.losses import LossSpec, with_compat
from workbench.specs.reading import flatten

if TYPE_CHECKING:
    import pandas as pd

VERDICTS = {
    "reference": "what the others are compared with",
    "equal": "every gradient is that of the baseline: within 1e-12 of it in float64, or bit for bit",
    "within budget": "below float64: no further from the float64 truth than the baseline, with a measured margin",
    "different": "a gradient is out of its budget: the report names the first step and parameter, and the factor",
    "vacuous": "nothing was trained in one of the two runs, so that they would agree whatever is wrong",
    "unsound baseline": "baseline or truth is not finite, or further off than rounding explains: nothing can be judged",
    "failed": "the run ended without its result; its page has rank, cause and traceback",
}
"""Verdict on a configuration -> meaning; see `workbench.compare.reading` for vacuous and unsound baseline."""

AGREES = ("reference", "equal", "within budget")
"""Verdicts under which a configuration computes the same as its baseline, or is one."""

PLACE = ("frozen_clip",)
"""Settings that only name another run of the same experiment."""

AMPLIFIED = 1e-6
"""A float64 difference below this may be rounding: correct float32 runs differ by more (5.1e-6 of the gradient in
``experiments/layout_parity/comparison.json``)."""


LONG = 20_000
"""Rows of steps and parameters above which they are columns: JSON has 500 bytes a row (2.4 MB for 4,620 rows in
``experiments/layout_parity/comparison.json``), so a comparison in one file stays below 10 MB."""

TABLES = ("steps", "parameters", "whole_gradient", "ratios")
"""Attributes of a `Configuration` that grow with the steps."""

BROKEN_UNDER = {
    "dp": "data-parallel ranks",
    "cp": "context-parallel ranks",
    "micro_batch": "micro-batches",
    "packing": "packing order",
    "masked_rows": "documents without trained tokens",
}
"""Entry of `LossSpec.breaks` -> the change under which a loss declares to differ: expected, not a defect."""


@dataclass(frozen=True)
class ParameterDifference:
    """One parameter's gradient in one step, against the baseline's.

    Attributes:
        norm: L2 norm of this configuration's gradient; ``reference_norm`` is the baseline's.
        norm_ratio: norm / reference_norm.
        relative_l2: ||g - reference|| / ||reference||.
        cosine: between the two.
        distance: ||g - truth||, compared with the budget.
        budget: largest allowed distance.
        judged_by: origin of the budget: the parameter's own "gradient"; the "floor", where that gradient is too small
            to judge by; or, below float64, the baseline's relative error of the "whole gradient".
        within: distance <= budget.
    """

    step: int
    parameter: str
    norm: float
    reference_norm: float
    norm_ratio: float
    relative_l2: float
    cosine: float
    distance: float
    budget: float
    judged_by: str
    within: bool


@dataclass(frozen=True)
class Configuration:
    """One configuration of an ablation: its settings, its records, and its verdict.

    Attributes:
        name: unique in the ablation.
        settings: the whole spec, as JSON data.
        run: run folder, relative to the experiment.
        state: "succeeded" or "failed" (or another state of a run directory).
        device: "cpu" or "cuda", as it ran; with the reason in ``device_note`` where another was requested.
        device_note: reason for the device, "" if as requested.
        world_size: ranks.
        against: name of the configuration that it is compared with; "" for a baseline.
        verdict: one of `VERDICTS`.
        why: explanation of the verdict, one sentence.
        factor: median over parameters of the gradient-norm ratio in the first step that differs; None if none.
        factor_meaning: expression that equals the factor (such as "1 / cp"), "" if nothing simple.
        first_step: first step that differs, None if none.
        first_parameter: first parameter, in the model's order, that differs in that step.
        whole_gradient: per step, {"step", "distance", "budget", "relative_l2", "bitwise_equal", "flipped_clips"}.
        steps: the step records, metric key -> value (keys are ``group/name/statistic``, and ``step``).
        parameters: per step and parameter differences.
        diverged_step: first step whose loss or gradient is not finite, None if all are.
        evidence: what the comparison could have seen, from `workbench.metrics.evidence.Evidence.as_json`; {} for
            runs of earlier versions, which did not count it.
        ratios: per step (as text), {"edges": [...], "counts": [...]} of the importance ratio of trained tokens.
        failure: {"rank", "exception", "traceback"} of the first failure, None if it ran.
    """

    name: str
    settings: Mapping[str, Any]
    run: str = ""
    state: str = "succeeded"
    device: str = "cpu"
    device_note: str = ""
    world_size: int = 1
    against: str = ""
    verdict: str = "reference"
    why: str = ""
    factor: float | None = None
    factor_meaning: str = ""
    first_step: int | None = None
    first_parameter: str | None = None
    whole_gradient: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    parameters: list[ParameterDifference] = field(default_factory=list)
    ratios: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failure: dict[str, Any] | None = None
    diverged_step: int | None = None
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def relative_error(self) -> float | None:
        """||g - reference|| / ||reference|| of the whole gradient in the worst step; None if not measured."""
        return _largest(w["relative_l2"] for w in self.whole_gradient)

    @property
    def times_budget(self) -> float | None:
        """Distance over budget in the worst step; None where nothing was measured against a budget."""
        return _largest(w["distance"] / w["budget"] for w in self.whole_gradient if w.get("budget"))

    @property
    def error_text(self) -> str:
        """Both as text, "" if not measured.

        Example:
            >>> Configuration("a", {}, whole_gradient=[{"relative_l2": 0.009, "distance": 9, "budget": 1}]).error_text
            'relative error 0.009, 9 times budget'
        """
        if self.relative_error is None:
            return ""
        of_budget = "" if self.times_budget is None else f", {self.times_budget:.2g} times budget"
        return f"relative error {self.relative_error:.2g}{of_budget}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the verdict: divergence, what it could have seen, what the loss declares of itself."""
        diverged = "" if self.diverged_step is None else f"diverged: not finite from step {self.diverged_step} on"
        evidence = f"could have seen: {self.evidence['summary']}" if self.evidence else ""
        warnings = [f"weak evidence: {warning}" for warning in self.evidence.get("warnings", ())]
        notes = (diverged, evidence, *warnings, self._amplified, declared_note(self.settings))
        return tuple(note for note in notes if note)

    @property
    def _amplified(self) -> str:
        """Note on a float64 difference so small that rounding, amplified by a cancelling gradient, explains it."""
        exact, error = self.settings.get("precision") == "float64", self.relative_error
        if self.verdict != "different" or not exact or error is None or not error < AMPLIFIED:
            return ""
        return (
            f"the whole gradient differs by less than {AMPLIFIED:.0e} of itself: rounding alone does that where "
            "the gradient cancels or an earlier step amplified it"
        )


def _largest(values: Iterable[float]) -> float | None:
    """The largest value; NaN is larger than any other."""
    return max(values, key=lambda value: (math.isnan(value), value), default=None)


@dataclass(frozen=True)
class Comparison:
    """All configurations of one ablation, baselines included and in its order, each compared with its baseline.

    Attributes:
        experiment: name of the ablation.
        question: of the ablation, one sentence.
        provenance: versions, git state, command, machine; root-relative paths and no host name.
    """

    experiment: str
    question: str
    configurations: list[Configuration]
    provenance: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Configuration:
        if (match := next((c for c in self.configurations if c.name == name), None)) is not None:
            return match
        raise RecordError(
            f"comparison of {self.experiment}: configuration {name!r}",
            found=", ".join(c.name for c in self.configurations),
            rule="a configuration of the ablation",
            fix="choose one that is there",
        )

    def check(self, *names: str) -> None:
        """Raise unless configurations agree, see `disagreeing`; for the end of a script, a notebook or a CI job.

        Raises:
            VerdictError: one is different, vacuous, measured against an unsound baseline, or failed; the message lists
                each verdict.
        """
        bad, of = self.disagreeing(*names), len(names or self._without_faults())
        if bad:
            raise VerdictError(
                f"{self.experiment}: {len(bad)} of {of} configurations do not agree",
                found="; ".join(f"{c.name} is {c.verdict} ({c.why})" for c in bad),
                rule="equal or within budget of the reference",
                fix="read the report, worst first",
            )

    def disagreeing(self, *names: str) -> list[Configuration]:
        """The configurations that do not agree with their baselines.

        Without names: of all in which no known fault is switched on.
        """
        chosen = [self[name] for name in names] if names else self._without_faults()
        return [c for c in chosen if c.verdict not in AGREES]

    def _without_faults(self) -> list[Configuration]:
        return [c for c in self.configurations if not c.settings.get("faults")]

    def setting_changes(self, name: str) -> dict[str, tuple[Any, Any]]:
        """The settings in which a configuration differs from its baseline, as (baseline's, own); {} for a baseline."""
        own = self[name]
        if not own.against:
            return {}
        baseline, flat = flatten(self[own.against].settings), flatten(own.settings)
        return {
            key: (baseline.get(key), flat.get(key))
            for key in dict.fromkeys((*flat, *baseline))
            if key not in PLACE and repr(baseline.get(key)) != repr(flat.get(key))
        }

    def table(self) -> pd.DataFrame:
        """One row per configuration: verdict, factor, first difference, worst distance over budget."""
        import pandas as pd

        rows = [
            {
                "configuration": c.name,
                "layout": layout_of(c.settings),
                "precision": c.settings["precision"],
                "device": c.device,
                "verdict": c.verdict,
                "factor": c.factor,
                "meaning": c.factor_meaning,
                "relative_l2": c.relative_error,
                "of_budget": c.times_budget,
                "first_step": c.first_step,
                "first_parameter": c.first_parameter,
                "diverged_step": c.diverged_step,
                "gradient_documents": c.evidence.get("gradient_document_share"),
                "gradient_tokens": c.evidence.get("gradient_token_share"),
                "clipped": c.evidence.get("clipped_share"),
                "why": c.why,
            }
            for c in self.configurations
        ]
        return pd.DataFrame(rows).set_index("configuration")

    def steps(self) -> pd.DataFrame:
        """One row per configuration and step, one column per metric."""
        import pandas as pd

        return pd.DataFrame([{"configuration": c.name} | step for c in self.configurations for step in c.steps])

    def parameters(self) -> pd.DataFrame:
        """One row per configuration, step and parameter."""
        import pandas as pd

        return pd.DataFrame([{"configuration": c.name} | asdict(p) for c in self.configurations for p in c.parameters])

    def settings_that_differ(self) -> pd.DataFrame:
        """One row per configuration, one column per setting that is not the same everywhere."""
        import pandas as pd

        flat = pd.DataFrame(
            [flatten(c.settings) for c in self.configurations], index=[c.name for c in self.configurations]
        )
        differing = [key for key in flat.columns if flat[key].map(repr).nunique() > 1]
        return flat[differing]

    def save(self, path: Path) -> None:
        """Write the whole comparison, atomically: as JSON, and its tables as columns next to it if they are long.

        See `LONG` and `workbench.compare.columnar`; the JSON names these files, and `load` reads both.
        """
        configurations = [vars(c) | {"parameters": [vars(p) for p in c.parameters]} for c in self.configurations]
        files = {}
        if sum(len(c.steps) + len(c.parameters) for c in self.configurations) > LONG:
            tables = {name: [c.pop(name) for c in configurations] for name in TABLES}
            tables["ratios"] = [[{"step": step, **ratio} for step, ratio in each.items()] for each in tables["ratios"]]
            files = {"tables": {name: columnar.write_table(path, name, table) for name, table in tables.items()}}
        # in the order in memory: a page shows settings in this order
        write_whole(path, to_json(vars(self) | {"configurations": configurations} | files, indent=None))
        columnar.forget_tables(path, [saved["file"] for saved in files.get("tables", {}).values()])

    @classmethod
    def load(cls, path: Path | str) -> Comparison:
        """Read a saved comparison: a comparison.json, or the folder that holds one.

        Raises:
            RecordError: missing, damaged, or written by another version.
        """
        path = Path(path) / "comparison.json" if Path(path).is_dir() else Path(path)
        try:
            data = from_json(path.read_bytes())
            for name, entry in data.pop("tables", {}).items():
                for c, records in zip(data["configurations"], columnar.read_table(path, entry), strict=True):
                    c[name] = {r.pop("step"): r for r in records} if name == "ratios" else records
            data["configurations"] = [
                Configuration(**(c | {"parameters": [ParameterDifference(**p) for p in c["parameters"]]}))
                for c in data["configurations"]
            ]
            return cls(**data)
        except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise RecordError(
                f"read comparison {path}",
                found=f"{type(error).__name__}: {error}",
                rule="a file written by Comparison.save, and the files of its tables next to it",
                fix="run the ablation again",
            ) from None

    def __repr__(self) -> str:
        """The verdicts as text; see `verdict_lines`."""
        return "\n".join([f"{self.experiment}: {self.question}", *self.verdict_lines()])

    def verdict_lines(self, width: int | None = None) -> list[str]:
        """A line for every configuration: verdict, factor, relative error, settings that differ, explanation.

        The last lines are the notes (what the comparisons could have seen, what a loss declares of itself), each once
        for all configurations that share it.
        """
        rows = []
        for c in self.configurations:
            parts = [
                "" if c.factor is None else f"x {c.factor:.4g}",
                f"= {c.factor_meaning}" if c.factor_meaning else "",
                c.error_text,
                _changes(self.setting_changes(c.name)),
                c.why,
            ]
            rows.append((c.name, c.verdict, "  ".join(filter(None, parts))))
        shared: dict[str, list[str]] = {}
        for c in self.configurations:
            for note in c.notes:
                shared.setdefault(note, []).append(c.name)
        lines = columns(rows, width=width, least=(0, 16))  # the longest verdict, "unsound baseline"
        return lines + [f"{note} ({_listed(names, len(self.configurations))})" for note, names in shared.items()]


def declared_note(settings: Mapping[str, Any]) -> str:
    """Return a sentence on the invariants that the loss of a spec (JSON data) declares to break.

    "" if there are none, or if this version cannot read the loss, such as one of an older record.

    Example:
        >>> declared_note({"loss": {"name": "bnpo"}})
        'bnpo declares that it depends on micro-batches, packing order and data-parallel ranks'
    """
    try:
        breaks = LossSpec.model_validate(with_compat(settings["loss"])).breaks
    except (KeyError, TypeError, ValueError):  # also pydantic's ValidationError
        return ""
    if not (names := [BROKEN_UNDER.get(name, name) for name in breaks]):
        return ""
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return f"{settings['loss'].get('name', 'the loss')} declares that it depends on {listed}"


def _changes(changes: Mapping[str, tuple[Any, Any]], most: int = 4) -> str:
    """Settings that differ, in brackets; "" for none."""
    listed = [f"{key}={own}" for key, (_, own) in changes.items()]
    if len(listed) > most + 1:
        listed[most:] = [f"and {len(listed) - most} more"]
    return f"[{', '.join(listed)}]" if listed else ""


def _listed(names: Sequence[str], of: int, most: int = 3) -> str:
    """Names, or their number."""
    if len(names) <= most:
        return ", ".join(names)
    return f"all {of} configurations" if len(names) == of else f"{len(names)} of {of} configurations"


def layout_of(settings: Mapping[str, Any]) -> str:
    """Short description of a spec's layout."""
    return str(LayoutSpec.model_validate(settings["layout"]))
