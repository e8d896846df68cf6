"""Strategies of a step: `step.PLAIN`, `step.FUSED` (functions in `fused`), `exact.REPRODUCIBLE`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from workbench.metrics.quantities import DocumentSlots
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.model import Policy
from workbench.reduction.evaluate import Evaluated
from workbench.reduction.partial import Scalar
from workbench.reduction.weights import StepTotals, TokenWeights
from workbench.rollouts.targets import TrainingRow
from workbench.sharding.early_sums import EarlySums
from workbench.train.rows import LocalRow, WholeRow

if TYPE_CHECKING:
    from workbench.train.step import StepLoss

Head = Callable[[Policy, Tensor, LocalRow, "StepLoss"], tuple[LocalRow, TokenLogprobs]]
EvaluateRow = Callable[[Policy, Tensor, LocalRow, "StepLoss"], tuple[LocalRow, Evaluated, str | None]]
Reduced = tuple[dict[str, float], dict[str, Scalar], dict[str, float]]
"""Norms of the complete gradients by parameter, loss by term, metrics by key; the same on every rank."""


@dataclass(frozen=True)
class StepStrategy:
    """The places in which plain, fused and reproducible steps differ.

    Attributes:
        weighed: packed rows -> the rows on which the weights of the step are computed.
        to_split: a row with its weights and documents -> those that are split over cp, and the row itself if every rank
            that shares it evaluates the loss on all of it.
        scaled: totals, rows and weights of the step -> totals, with the factor of the loss before backward.
        head: policy, hidden states, row and loss -> the tokens on which the loss is evaluated and their head outputs;
            of a fused row without gradient.
        row_loss: the same -> these tokens, the loss on them, and the reason for more than three GEMMs of a fused row.
        early_sums: policy -> sums of gradients that start in the last backward; None: none do.
        reduce: policy, rows, loss and metrics of each, and the early sums -> loss and metrics of the step.
    """

    weighed: Callable[[list[TrainingRow]], list[TrainingRow]]
    to_split: Callable[[WholeRow], tuple[Mapping[str, TokenWeights], DocumentSlots, WholeRow | None]]
    scaled: Callable[..., StepTotals]
    head: Head
    row_loss: EvaluateRow
    early_sums: Callable[[Policy], EarlySums | None]
    reduce: Callable[..., Reduced]


def loss_after(head: Head) -> EvaluateRow:
    """Return the function that evaluates the loss of a row on the outputs of a head."""

    def row_loss(
        policy: Policy, hidden_TD: Tensor, local: LocalRow, loss: StepLoss
    ) -> tuple[LocalRow, Evaluated, None]:
        local, head_output = head(policy, hidden_TD, local, loss)
        return local, loss(local, head_output), None

    return row_loss
