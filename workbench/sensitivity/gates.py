"""Other checks' tolerances, and the share of planted faults that they would have rejected.

A gate compares a few numbers of a run with those of a trusted one: the loss, the gradient norm, log-probabilities,
weights after the last step. It is applied to the runs that were measured for the comparison's own score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from workbench.errors import SpecError

if TYPE_CHECKING:
    from workbench.sensitivity.distances import Apart, Change, Distances
    from workbench.sensitivity.record import FaultResult


@dataclass(frozen=True)
class Tolerance:
    """The largest difference that a gate accepts: ``absolute + relative * |trusted|``; both 0 demand equality.

    Attributes:
        relative: share of a value; of tensors, of the quantity that `of` names.
        absolute: in the unit of the value.
        of: for tensors, what is bounded: the "largest" or the "mean" absolute difference of an element, or the "norm".
        relative_to: of numbers, the value that `relative` is a share of: the "trusted" one, the "other" one, or the
            "larger" of both.
        joined: how both parts join: their "sum" (numpy, torch) or their "maximum" (`math.isclose`).
    """

    relative: float = 0.0
    absolute: float = 0.0
    of: Literal["largest", "mean", "norm"] = "largest"
    relative_to: Literal["trusted", "other", "larger"] = "trusted"
    joined: Literal["sum", "maximum"] = "sum"

    def __post_init__(self) -> None:
        for name in ("relative", "absolute"):
            value = getattr(self, name)
            if not (isinstance(value, float | int) and math.isfinite(value) and value >= 0):
                raise SpecError(
                    f"Tolerance({name}={value!r})",
                    found=repr(value),
                    rule="a tolerance is a finite number of at least 0",
                    fix="give the tolerance of the gate, such as 0.05 for 5 %",
                )

    def accepts_number(self, change: Change) -> bool:
        """True if a number is within the tolerance; False if it is not finite."""
        trusted, other = abs(change.clean), abs(change.faulty)
        size = {"trusted": trusted, "other": other, "larger": max(trusted, other)}[self.relative_to]
        return math.isfinite(change.absolute) and change.absolute <= self._allowed(size)

    def accepts_tensor(self, apart: Apart) -> bool:
        """True if a tensor is within the tolerance."""
        distance = {"largest": apart.largest, "mean": apart.mean, "norm": apart.norm}[self.of]
        size = apart.clean_norm if self.of == "norm" else apart.largest_clean
        return distance <= self._allowed(size)

    def _allowed(self, size: float) -> float:
        parts = (self.absolute, self.relative * size)
        return max(parts) if self.joined == "maximum" else sum(parts)


@dataclass(frozen=True)
class Gate:
    """A check by tolerances. A plain number is a relative tolerance of a loss or norm, an absolute one of tensors.

    Attributes:
        name: for tables.
        loss: of the total loss of each step; ``first_loss`` that of the first one, if it has another.
        gradient_norm: of the reported global norm of each step.
        logprobs: of log-probabilities of trained tokens, nats, in each step.
        weights_after: of all weights after the last step.
        steps: number of first steps that it looks at; None: all.
        source: repository, file and commit of its tolerances.

    Example:
        >>> Gate(loss=0.005).loss
        Tolerance(relative=0.005, absolute=0.0, of='largest')
    """

    loss: Tolerance | float | None = None
    gradient_norm: Tolerance | float | None = None
    logprobs: Tolerance | float | None = None
    weights_after: Tolerance | float | None = None
    name: str = "gate"
    steps: int | None = None
    source: str = ""
    first_loss: Tolerance | None = None

    def __post_init__(self) -> None:
        for name, absolute in (("loss", False), ("gradient_norm", False), ("logprobs", True), ("weights_after", True)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Tolerance):
                tolerance = Tolerance(absolute=value) if absolute else Tolerance(relative=value)
                object.__setattr__(self, name, tolerance)
        if all(getattr(self, name) is None for name in ("loss", "gradient_norm", "logprobs", "weights_after")):
            raise SpecError(
                f"gate {self.name!r}",
                found="no tolerance",
                rule="a gate bounds loss, gradient_norm, logprobs or weights_after",
                fix="give at least one of them, such as Gate(loss=0.005)",
            )
        if self.steps is not None and self.steps < 1:
            raise SpecError(
                f"gate {self.name!r} with steps={self.steps}",
                rule="a gate looks at one step or more",
                fix="give a number of steps, or None for all",
            )

    def accepts(self, distances: Distances | None) -> bool:
        """True if a run with these distances passes; False for a run that failed."""
        if distances is None:
            return False
        first, rest = (distances.loss[:1], distances.loss[1:]) if self.first_loss else ((), distances.loss)
        rest = rest[: self.steps if self.steps is None else self.steps - len(first)]
        norms = distances.gradient_norm[: self.steps]
        for tolerance, changes in ((self.first_loss, first), (self.loss, rest), (self.gradient_norm, norms)):
            if isinstance(tolerance, Tolerance) and not all(map(tolerance.accepts_number, changes)):
                return False
        steps = distances.logprobs[: self.steps]
        if isinstance(self.logprobs, Tolerance) and not all(map(self.logprobs.accepts_tensor, steps)):
            return False
        if isinstance(self.weights_after, Tolerance):
            return distances.weights is not None and self.weights_after.accepts_tensor(distances.weights)
        return True

    def score(self, results: Sequence[FaultResult]) -> GateScore:
        """Return the share of faults that the gate rejects."""
        passed = tuple(result.fault for result in results if self.accepts(result.distances))
        return GateScore(self.name, len(results) - len(passed), len(results), passed, self.source)


@dataclass(frozen=True)
class GateScore:
    """The kill rate of a gate.

    Attributes:
        name: of the gate.
        killed: faults that it rejects, of ``admissible`` ones.
        survivors: names of those that pass.
        source: of its tolerances.
    """

    name: str
    killed: int
    admissible: int
    survivors: tuple[str, ...]
    source: str = ""

    @property
    def share(self) -> float:
        """Killed over admissible; NaN without any."""
        return self.killed / self.admissible if self.admissible else math.nan
