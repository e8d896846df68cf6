"""What a comparison is: tables, and a verdict for every configuration.

Pure data; `workbench.compare.align` makes it from run directories, `workbench.report` draws it. Everything in
it fits in JSON, so a saved comparison is a record that a report or a README can quote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.errors import RecordError, VerdictError
from workbench.runs.spec import LayoutSpec, flatten
from workbench.runs.store import from_json, to_json, write_whole

VERDICTS = ("reference", "equal", "within budget", "different", "failed")


@dataclass(frozen=True)
class ParameterDifference:
    """One parameter's gradient in one step, against the reference's.

    Attributes:
        step: optimizer step, from 0.
        parameter: name in the model.
        norm: L2 norm of this configuration's gradient.
        reference_norm: L2 norm of the reference's.
        norm_ratio: norm / reference_norm.
        relative_l2: ||g - reference|| / ||reference||.
        cosine: between the two.
        distance: ||g - truth||, what is held against the budget.
        budget: what distance may be.
        judged_by: what set the budget: the parameter's own "gradient"; the "floor", where that gradient is too small
            to judge by; or, below float64, the reference's relative error of the "whole gradient".
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
    """One configuration of an ablation: what it was, what it recorded, and the verdict on it.

    Attributes:
        name: unique in the ablation.
        settings: the whole spec, as JSON data.
        run: run folder, relative to the experiment.
        state: "succeeded" or "failed" (or another state of a run directory).
        device: "cpu" or "cuda", as it ran; with the reason in ``device_note`` where another was wanted.
        device_note: why it ran there, "" if as asked.
        world_size: ranks.
        against: name of the configuration that it is compared with; "" for a reference.
        verdict: one of `VERDICTS`.
        why: the verdict in a sentence.
        factor: median over parameters of the gradient-norm ratio in the first step that differs; None if none.
        factor_meaning: what that factor equals (such as "1 / cp"), "" if nothing simple.
        first_step: first step that differs, None if none.
        first_parameter: first parameter, in the model's order, that differs in that step.
        whole_gradient: per step, {"step", "distance", "budget", "relative_l2", "bitwise_equal", "flipped_clips"}.
        steps: the step records, metric key -> value (keys are ``group/name/statistic``, and ``step``).
        parameters: per step and parameter differences.
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


@dataclass(frozen=True)
class Comparison:
    """All configurations of one ablation, each held against its reference.

    Attributes:
        experiment: name of the ablation.
        question: what the ablation asks, one sentence.
        configurations: in the order of the ablation, references included.
        provenance: versions, git state, command, machine; root-relative paths and no host name.

    Example:
        >>> comparison.table()        # doctest: +SKIP
        >>> comparison["cp2"].verdict # doctest: +SKIP
    """

    experiment: str
    question: str
    configurations: list[Configuration]
    provenance: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Configuration:
        for configuration in self.configurations:
            if configuration.name == name:
                return configuration
        raise RecordError(f"comparison of {self.experiment}: configuration {name!r}",
                          found=", ".join(c.name for c in self.configurations),
                          rule="a configuration of the ablation", fix="choose one that is there")

    def check(self, *names: str) -> None:
        """Pass if configurations agree with their references; for the end of a script, a notebook or a CI job.

        Args:
            *names: which ones; none means all in which no known fault is switched on.

        Raises:
            VerdictError: one is different or failed; the message says each verdict.
        """
        asked = [self[name] for name in names] or [c for c in self.configurations if not c.settings.get("faults")]
        bad = [c for c in asked if c.verdict in ("different", "failed")]
        if bad:
            raise VerdictError(f"{self.experiment}: {len(bad)} of {len(asked)} configurations do not agree",
                               found="; ".join(f"{c.name} is {c.verdict} ({c.why})" for c in bad),
                               rule="equal or within budget of the reference", fix="read the report, worst first")

    def table(self) -> pd.DataFrame:
        """One row a configuration: verdict, factor, first difference, worst distance over budget."""
        rows = []
        for c in self.configurations:
            judged = [w for w in c.whole_gradient if w.get("budget")]
            rows.append({
                "configuration": c.name, "layout": layout_of(c.settings), "precision": c.settings["precision"],
                "device": c.device, "verdict": c.verdict, "factor": c.factor, "meaning": c.factor_meaning,
                "relative_l2": max((w["relative_l2"] for w in c.whole_gradient), default=None),
                "of_budget": max((w["distance"] / w["budget"] for w in judged), default=None),
                "first_step": c.first_step, "first_parameter": c.first_parameter, "why": c.why})
        return pd.DataFrame(rows).set_index("configuration")

    def steps(self) -> pd.DataFrame:
        """One row a configuration and step, one column a metric."""
        return pd.DataFrame([{"configuration": c.name} | step for c in self.configurations for step in c.steps])

    def parameters(self) -> pd.DataFrame:
        """One row a configuration, step and parameter."""
        return pd.DataFrame([{"configuration": c.name} | asdict(p)
                             for c in self.configurations for p in c.parameters])

    def settings_that_differ(self) -> pd.DataFrame:
        """One row a configuration, one column each setting that is not the same everywhere."""
        flat = pd.DataFrame([flatten(c.settings) for c in self.configurations],
                            index=[c.name for c in self.configurations])
        differing = [key for key in flat.columns if flat[key].map(repr).nunique() > 1]
        return flat[differing]

    def save(self, path: Path) -> None:
        """Write the whole comparison as JSON, whole or not at all."""
        write_whole(path, to_json(asdict(self), sort_keys=True))

    @classmethod
    def load(cls, path: Path) -> Comparison:
        """Read a saved comparison.

        Raises:
            RecordError: missing, damaged, or written by another version.
        """
        try:
            data = from_json(path.read_bytes())
            data["configurations"] = [
                Configuration(**(c | {"parameters": [ParameterDifference(**p) for p in c["parameters"]]}))
                for c in data["configurations"]]
            return cls(**data)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RecordError(f"read comparison {path}", found=f"{type(error).__name__}: {error}",
                              rule="a file written by Comparison.save", fix="run the ablation again") from None

    def __repr__(self) -> str:
        """Say every verdict in a line."""
        width = max((len(c.name) for c in self.configurations), default=0)
        lines = [f"{c.name:<{width}}  {c.verdict:<13}  {c.why}" for c in self.configurations]
        return "\n".join([f"{self.experiment}: {self.question}", *lines])


def load_comparison(path: Path | str) -> Comparison:
    """Read a saved comparison: an experiment's folder, or its comparison.json.

    Raises:
        RecordError: missing, damaged, or written by another version.
    """
    path = Path(path)
    return Comparison.load(path / "comparison.json" if path.is_dir() else path)


def layout_of(settings: Mapping[str, Any]) -> str:
    """The layout of a spec in a few words."""
    return str(LayoutSpec.model_validate(settings["layout"]))
