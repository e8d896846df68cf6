"""The result of a check: stages, the first that differs, its causes, and what the dump cannot decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from workbench.check.against import StepsCompared
from workbench.check.numbers import Numbers
from workbench.check.stages import Mismatch
from workbench.columns import columns
from workbench.errors import listed

Status = Literal["agrees", "differs", "not recorded", "not recomputed"]


@dataclass(frozen=True)
class Stage:
    """One stage of the loss.

    Attributes:
        name: of the stage.
        status: "agrees", "differs", "not recorded", or "not recomputed": an input or a setting is missing.
        compared: quantities that were compared.
        mismatches: those that differ, the first one first.
        missing: what would be needed, if nothing was compared.
    """

    name: str
    status: Status
    compared: tuple[str, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Cause:
    """A mistake under which the step's own numbers of the first stage that differs come out.

    Attributes:
        kind: factor, denominator, mask, shift, order, estimator, stale, rounded, temperature, group, clip, penalty,
            correction.
        description: of what the trainer would have done.
        explains: stages that agree under it.
        differs: stages that still differ under it.
        stage: the stage that it is a cause of.
    """

    kind: str
    description: str
    explains: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    stage: str = ""


@dataclass(frozen=True)
class OfModel:
    """Values that the step's checkpoint gives.

    Attributes:
        model: the checkpoint.
        layout: in which it was passed.
        precision: of the trainer's model, whose rounding is the tolerance.
        gradient_norm: L2 norm of the gradient of the step's loss, in float64; None: its loss is not known.
        logprobs_T: [T] nats, of the tokens that train; no part of the JSON form, as gradients.
        gradients: by parameter, whole.
    """

    model: str
    layout: str
    precision: str
    gradient_norm: float | None
    logprobs_T: Tensor = field(repr=False, compare=False)
    gradients: Mapping[str, Tensor] = field(repr=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        """Return the numbers as JSON data."""
        names = ("model", "layout", "precision", "gradient_norm")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        norm = "" if self.gradient_norm is None else f"; the norm of this step's gradient is {self.gradient_norm:.9g}"
        return f"model {self.model}, {self.layout}, tolerance of {self.precision}{norm}"


@dataclass(frozen=True)
class StepCheck:
    """Verdict on one step.

    Attributes:
        origin: the dump.
        verdict: "agrees", "differs", or "vacuous": nothing was compared, or nothing could have differed.
        stages: all stages, in order.
        causes: of the first stage that differs, the one that explains most first; then of the next stage that none
            of them explains.
        places: document and token of its largest difference, and where the others lie.
        undecided: what the dump cannot decide, a sentence each.
        evidence: what was there to compare.
        unknown_metrics: recorded metrics that are not recomputed.
        numbers: of the step, as tensors; no part of the JSON form.
        against: comparison with another system's step, if one was requested.
        of_model: numbers of the step's checkpoint, if one was given.
    """

    origin: str
    verdict: Literal["agrees", "differs", "vacuous"]
    stages: tuple[Stage, ...]
    causes: tuple[Cause, ...] = ()
    places: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    evidence: str = ""
    unknown_metrics: tuple[str, ...] = ()
    numbers: Numbers | None = field(default=None, repr=False, compare=False)
    against: StepsCompared | None = field(default=None, repr=False)
    of_model: OfModel | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        """True if everything that was recorded agrees, and there was something to compare; also with another step."""
        return self.verdict == "agrees" and (self.against is None or self.against.ok)

    @property
    def first(self) -> Stage | None:
        """The first stage that differs."""
        return next((stage for stage in self.stages if stage.status == "differs"), None)

    def as_json(self) -> dict[str, Any]:
        """Return the check as JSON data."""
        flat = asdict(replace(self, numbers=None, against=None, of_model=None))
        del flat["numbers"], flat["against"], flat["of_model"]
        parts = {"against": self.against, "of_model": self.of_model}
        more = {name: part.as_json() for name, part in parts.items() if part is not None}
        return {"first": self.first and self.first.name, **flat, **more}

    def __str__(self) -> str:
        rows = [(stage.name, stage.status, _detail(stage)) for stage in self.stages]
        lines = [f"{self.verdict}: {self.origin}", f"  {self.evidence}"]
        lines += [""] if self.of_model is None else [f"  {self.of_model}", ""]
        lines += columns(rows, ("stage", "status", "quantities"), width=118)
        if self.first is not None:
            lines += ["", f"first difference: {self.first.name}", *(f"  {place}" for place in self.places)]
            lines += [
                "",
                "causes, the one that explains most first:" if self.causes else "no known mistake explains it",
            ]
        for number, cause in enumerate(self.causes, start=1):
            lines.append(f"  {number}. {cause.kind}: {cause.description}")
            rest = f"; still differ: {', '.join(cause.differs)}" if cause.differs else ""
            lines.append(f"     explains {', '.join(cause.explains)}{rest}")
        if self.unknown_metrics:
            lines += ["", f"recorded, but not recomputed: {listed(self.unknown_metrics, 6)}"]
        if self.undecided:
            lines += ["", "this dump cannot decide:", *(f"  - {sentence}" for sentence in self.undecided)]
        if self.against is not None:
            lines += ["", str(self.against)]
        return "\n".join(lines)


def _detail(stage: Stage) -> str:
    if stage.missing:
        return stage.missing
    if not stage.mismatches:
        return listed((name.partition("/")[2] or name for name in stage.compared), 4)
    worst = stage.mismatches[0]
    count = f", {worst.tokens} of {worst.of} tokens" if worst.token is not None else ""
    return f"{worst.quantity}: recorded {worst.recorded:.7g}, expected {worst.expected:.7g}{count}"
