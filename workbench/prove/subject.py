"""Subject of a proof: it takes one optimizer step on every rank of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from workbench.losses.terms import Loss
from workbench.policy.model import Policy
from workbench.reduction.weights import StepTotals
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.step import LocalRow, StepResult


class Subject(Protocol):
    """A step whose invariants are checked."""

    @property
    def title(self) -> str:
        """Display name."""
        ...

    @property
    def run_spec(self) -> RunSpec:
        """Spec that its rows are prepared with; invariants change layout, packing and head."""
        ...

    @property
    def declared(self) -> tuple[str, ...]:
        """Declared breaks, as entries of `LossSpec.breaks`."""
        ...

    def step(self, policy: Policy, rows: Sequence[LocalRow], totals: StepTotals) -> StepResult:
        """One step on one rank, from rows of `workbench.train.step.prepare_rows`. Collective over all axes."""
        ...


@dataclass(frozen=True)
class WorkbenchSubject:
    """A loss whose weights are data of the step, for `workbench.train.step.run_step`.

    Attributes:
        title: display name.
        run_spec: its ``loss`` gives the weights and the declared breaks.
        loss: pure per-token loss.
        from_spec: True if ``loss`` is the one that the spec describes; a user function need not have the spec's
            clip, and has no clip metrics.
    """

    title: str
    run_spec: RunSpec
    loss: Loss
    from_spec: bool = True

    @property
    def declared(self) -> tuple[str, ...]:
        """Breaks that the spec declares."""
        return self.run_spec.loss.breaks

    def step(self, policy: Policy, rows: Sequence[LocalRow], totals: StepTotals) -> StepResult:
        """See `workbench.train.step.run_step`; every metric is measured."""
        return flow.run_step(
            policy,
            self.loss,
            rows,
            totals,
            keep_gradients=True,
            level="full",
            loss_spec=self.run_spec.loss if self.from_spec else None,
            fused=self.run_spec.policy.fused_loss,
        )
