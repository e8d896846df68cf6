"""What is proved: something that takes one optimizer step on every rank of a mesh."""

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
    """A step that laws are held against."""

    @property
    def title(self) -> str:
        """What a table calls it."""
        ...

    @property
    def run_spec(self) -> RunSpec:
        """What its rows are prepared with; laws change layout, packing and head."""
        ...

    @property
    def declared(self) -> tuple[str, ...]:
        """Laws that it says it breaks, in the words of `LossSpec.breaks`."""
        ...

    def step(self, policy: Policy, rows: Sequence[LocalRow], totals: StepTotals) -> StepResult:
        """One step on one rank, from rows of `workbench.train.step.prepare_rows`. Collective over all axes."""
        ...


@dataclass(frozen=True)
class WorkbenchSubject:
    """A loss whose dividing is data of the step: what `workbench.train.step.run_step` takes.

    Attributes:
        title: what a table calls it.
        run_spec: its ``loss`` makes the weights, and says which laws it breaks.
        loss: pure per-token loss.
        made_from_spec: whether ``loss`` is the one that the spec describes; a function of somebody's own need not have
            the spec's clip, and has no metrics of it.
    """

    title: str
    run_spec: RunSpec
    loss: Loss
    made_from_spec: bool = True

    @property
    def declared(self) -> tuple[str, ...]:
        """What the spec says that it breaks."""
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
            loss_spec=self.run_spec.loss if self.made_from_spec else None,
            fused=self.run_spec.policy.fused_loss,
        )
