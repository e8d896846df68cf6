"""The reproducible mode of a step, in which every layout gives the same bits, for `workbench.train.step`.

The network is `workbench.reproducible`'s. Nothing after it may depend on how a row was split or padded, or on which
rank holds it: README.md has how loss, metrics and gradients are computed instead.

Letters: T packed tokens | R rows of a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.document_sums import DocumentSums
from workbench.metrics.values import Value, finish_in_order
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.model import Policy
from workbench.reduction.partial import Scalar
from workbench.reduction.weights import StepTotals, TokenWeights
from workbench.reproducible import Exact, OutOfRange, reproducibly
from workbench.reproducible.rows import sum_in_order, whole_row
from workbench.rollouts.batch import PADDING
from workbench.rollouts.targets import TrainingRow
from workbench.specs.run import RunSpec
from workbench.train.rows import LocalRow
from workbench.train.strategy import Reduced, StepStrategy, loss_after

if TYPE_CHECKING:
    from workbench.train.step import StepLoss, StepResult

RETRIES = 6
"""Limit on the repetitions of a step whose sums overflow."""


def reproducible_mode(policy: Policy, spec: RunSpec) -> AbstractContextManager[Any]:
    """Replace the modules of a policy by those of the reproducible mode if the spec sets it; restore them on exit.

    Raises:
        SpecError: a module that is not known to be exact.
    """
    mode = spec.reproducible
    if mode.block_tokens is None:
        return nullcontext()
    return reproducibly(policy, block_tokens=mode.block_tokens, weight_chunks=mode.weight_chunks, bits=mode.bits)


def _mode(policy: Policy) -> Exact | None:
    """The mode of a policy, or None outside it; only `workbench.reproducible` implements the protocol."""
    return cast("Exact | None", policy.exact)


def kernels_of(policy: Policy) -> dict[str, str]:
    """Return the kernels that determine a policy's bits in the reproducible mode, for a record; {} outside it."""
    exact = _mode(policy)
    return {} if exact is None else {"reproducible_kernels": exact.pieces.kernels.NAME}


def up_to_last_document(row: TrainingRow) -> TrainingRow:
    """Return a row without the padding at its end, whose length depends on the layout; at least one token."""
    real = torch.nonzero(row.document_ids_T != PADDING)
    length = int(real[-1]) + 1 if len(real) else 1
    return row.map(lambda values_T: values_T[:length])


def power_of_two(rows: Sequence[TrainingRow], weights: Sequence[Mapping[str, TokenWeights]]) -> float:
    """Return the factor of the loss that makes the mean gradient weight of a trained target about 1.

    Formula:  2^-e with mean = m 2^e, 1/2 <= m < 1, over all rows of the step; 1 if all weights are 0.
    """
    trained = [named["policy"].gradient_T[row.loss_mask_T].abs() for row, named in zip(rows, weights, strict=True)]
    tokens = sum(map(len, trained))
    mean = math.fsum(float(weights_T.sum()) for weights_T in trained) / max(tokens, 1)
    return 2.0 ** -math.frexp(mean)[1] if 0 < mean < math.inf else 1.0


def whole_row_head(
    policy: Policy, hidden_TD: Tensor, local: LocalRow, loss: StepLoss
) -> tuple[LocalRow, TokenLogprobs]:
    """Return the whole row and the head outputs of all its tokens, on every rank that shares it.

    Backward: each rank takes its own tokens of the gradient; see `whole_row`.
    """
    whole, parts = local.whole, local.token_logprobs(policy, hidden_TD, loss.outputs)
    assert whole is not None, "`prepare_rows` keeps the row in this mode"
    tokens = len(whole.row.tokens_T)
    head_output = parts.map(lambda part: whole_row(part, whole.plan, whole.axis, "cpu")[:tokens])
    sums = DocumentSums.of_row(whole.row)
    return replace(local, row=whole.row, weights=whole.weights, sums=sums, documents=whole.documents), head_output


def sum_in_row_order(
    policy: Policy,
    rows: Sequence[LocalRow],
    parts: Sequence[Mapping[str, Scalar]],
    metrics: Sequence[Mapping[str, Value]],
    early: None,
) -> Reduced:
    """Complete the gradients; return their norms, the loss term by term, and the final metrics. float64."""
    exact = _mode(policy)
    assert exact is not None, "the strategy of this mode"
    assert early is None, "integers are complete after backward"
    exact.reduce()
    mesh, norms = policy.mesh, exact.norms()
    numbers_r = torch.tensor([local.whole.number for local in rows if local.whole], device=mesh.device)
    lines = torch.stack([torch.stack([part.value.detach().double() for part in named.values()]) for named in parts])
    total = sum_in_order(lines, numbers_r, mesh["dp"])
    loss = {name: Scalar(value, frozenset()) for name, value in zip(parts[0], total.unbind(), strict=True)}
    return norms, loss, finish_in_order(metrics, numbers_r, mesh["dp"])


REPRODUCIBLE = StepStrategy(
    weighed=lambda packed: [up_to_last_document(row) for row in packed],
    # Only the network sees split rows: the loss and the metrics get the whole one.
    to_split=lambda row: ({}, row.documents._replace(segment_lengths_T=None), row),
    scaled=lambda totals, rows, weights: replace(totals, scale=power_of_two(rows, weights)),
    head=whole_row_head,
    row_loss=loss_after(whole_row_head),
    early_sums=lambda policy: None,
    reduce=sum_in_row_order,
)


def within_range(step: Callable[..., StepResult]) -> Callable[..., StepResult]:
    """Repeat a step in the reproducible mode until its sums fit, and record the number of bits.

    Every rank of the job takes the same decision. The next step starts with the bits of the spec again, so the result
    of a step does not depend on earlier steps.

    Raises:
        SpecError: rows of the ordinary mode; a fused step.
        OutOfRange: a gradient that is not finite, or no number of bits that fits.
    """

    @functools.wraps(step)
    def retry(policy: Policy, loss: Any, rows: Sequence[LocalRow], totals: StepTotals, **options: Any) -> StepResult:
        exact = _mode(policy)
        if exact is None:
            return step(policy, loss, rows, totals, **options)
        if options.get("fused"):
            raise SpecError(
                "a fused step of a policy in the reproducible mode",
                rule="the head of this mode computes all log-probabilities of a row before the loss",
                fix="leave fused out",
            )
        if any(local.whole is None for local in rows):
            raise SpecError(
                "a step of a policy in the reproducible mode",
                found="rows that were prepared without it",
                rule="this mode evaluates the loss on whole rows",
                fix="prepare_rows(..., spec) with spec.reproducible.block_tokens",
            )
        tried = [exact.resolution.bits]
        while True:
            exact.start(totals.scale, tried[-1])
            try:
                result = step(policy, loss, rows, totals, **options)
            except OutOfRange as error:
                if error.bits is None or error.bits in tried or len(tried) > RETRIES:
                    error.add_note(f"tried with {', '.join(map(str, tried))} bits")
                    raise
                tried.append(error.bits)
            else:
                used = min((bits for bits in exact.used_bits.values() if bits), default=0)
                sums = {"bits": tried[-1], "used_bits": used, "scale": totals.scale, "retries": len(tried) - 1}
                return replace(result, range=sums)

    return retry
