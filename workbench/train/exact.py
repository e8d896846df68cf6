"""The reproducible mode of a step, in which every layout gives the same bits, for `workbench.train.step`.

The network is `workbench.reproducible`'s. Nothing after it may depend on how a row was split or padded, or on which
rank holds it:

    loss and metrics    on the whole row, up to its last document, on the CPU of every rank that shares it; each row
                        gives one number, and rows are added in the order of their own numbers
    gradients           of the loss times a power of two, so that 1 / N takes no bits from the sums; divided out again
    range               a step whose sums overflow is repeated with the bits that fit, the same on every rank

Letters: T packed tokens | R rows of a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import SpecError
from workbench.metrics.quantities import DocumentSlots
from workbench.metrics.values import Value, finish_in_order
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.model import Policy
from workbench.reduction.document_sums import ShardedSums
from workbench.reduction.partial import Scalar
from workbench.reduction.weights import StepTotals, TokenWeights
from workbench.reproducible import OutOfRange, reproducibly
from workbench.reproducible.rows import sum_in_order, whole_row
from workbench.rollouts.batch import PADDING
from workbench.rollouts.targets import TrainingRow
from workbench.sharding.mesh import Axis, Mesh
from workbench.sharding.plan import ShardPlan
from workbench.specs.run import RunSpec

if TYPE_CHECKING:
    from workbench.train.step import LocalRow, StepResult

RETRIES = 6
"""Limit on the repetitions of a step whose sums overflow."""


@dataclass(frozen=True)
class WholeRow:
    """The row on which every rank that shares it evaluates the loss: not split, without the padding at its end.

    On the CPU, where any loss and metric is deterministic: a GPU sums documents with atomics. Some kilobytes a row are
    copied each way while the GPU continues.

    Attributes:
        number: of the row in the step; see `row_numbers`.
        row: the tokens, in the order of the row.
        weights: as in `LocalRow`.
        documents: as in `LocalRow`.
        plan: how the row is split.
        axis: the ranks that share it.
    """

    number: int
    row: TrainingRow
    weights: Mapping[str, TokenWeights]
    documents: DocumentSlots
    plan: ShardPlan
    axis: Axis


@contextmanager
def reproducible_mode(policy: Policy, spec: RunSpec) -> Iterator[None]:
    """Replace the modules of a policy by those of the reproducible mode if the spec sets it; restore them on exit.

    Raises:
        SpecError: a module that is not known to be exact.
    """
    mode = spec.reproducible
    if mode.block_tokens is None:
        yield
        return
    with reproducibly(policy, block_tokens=mode.block_tokens, weight_chunks=mode.weight_chunks, bits=mode.bits):
        yield


def kernels_of(policy: Policy) -> dict[str, str]:
    """Return the kernels that determine a policy's bits in the reproducible mode, for a record; {} outside it."""
    return {} if policy.exact is None else {"reproducible_kernels": policy.exact.pieces.kernels.NAME}


def up_to_last_document(row: TrainingRow) -> TrainingRow:
    """Return a row without the padding at its end, whose length depends on the layout; at least one token."""
    real = torch.nonzero(row.document_ids_T != PADDING)
    length = int(real[-1]) + 1 if len(real) else 1
    return row.map(lambda values_T: values_T[:length])


def row_numbers(rows: Sequence[TrainingRow]) -> list[int]:
    """Return the place of each row in the order of the rows' first targets in the source batch; empty rows come last.

    Independent of the layout: of the rank that holds a row, and of the grouping of rows into micro-batches.
    """

    def first(row: TrainingRow) -> float:
        targets = row.source_T[row.source_T != PADDING]
        return int(targets.min()) if len(targets) else math.inf

    order = sorted(range(len(rows)), key=lambda at: first(rows[at]))
    return [order.index(at) for at in range(len(rows))]


def power_of_two(rows: Sequence[TrainingRow], weights: Sequence[Mapping[str, TokenWeights]]) -> float:
    """Return the factor of the loss that makes the mean gradient weight of a trained target about 1.

    Formula:  2^-e with mean = m 2^e, 1/2 <= m < 1, over all rows of the step; 1 if all weights are 0.
    """
    trained = [named["policy"].gradient_T[row.loss_mask_T].abs() for row, named in zip(rows, weights, strict=True)]
    tokens = sum(map(len, trained))
    mean = math.fsum(float(weights_T.sum()) for weights_T in trained) / max(tokens, 1)
    return 2.0 ** -math.frexp(mean)[1] if 0 < mean < math.inf else 1.0


def unsplit(local: LocalRow, head_output: TokenLogprobs) -> tuple[LocalRow, TokenLogprobs]:
    """Return the whole row and the head outputs of all its tokens in the reproducible mode; else both unchanged.

    Backward: each rank takes its own tokens of the gradient; see `whole_row`.
    """
    whole = local.whole
    if whole is None:
        return local, head_output
    tokens = len(whole.row.tokens_T)
    head_output = TokenLogprobs(
        *(None if part is None else whole_row(part, whole.plan, whole.axis, "cpu")[:tokens] for part in head_output)
    )
    sums = ShardedSums(whole.row, torch.arange(tokens), Axis("cp"))
    return replace(local, row=whole.row, weights=whole.weights, sums=sums, documents=whole.documents), head_output


def in_row_order(
    parts: Sequence[Mapping[str, Scalar]], metrics: Sequence[Mapping[str, Value]], rows: Sequence[LocalRow], mesh: Mesh
) -> tuple[dict[str, Scalar], dict[str, float]]:
    """Return the loss, term by term, and the final metrics of a step, from those of this rank's rows. float64."""
    numbers_r = torch.tensor([local.whole.number for local in rows if local.whole], device=mesh.device)
    lines = torch.stack([torch.stack([part.value.detach().double() for part in named.values()]) for named in parts])
    total = sum_in_order(lines, numbers_r, mesh["dp"])
    loss = {name: Scalar(value, frozenset()) for name, value in zip(parts[0], total.unbind(), strict=True)}
    return loss, finish_in_order(metrics, numbers_r, mesh["dp"])


def within_range(step: Callable[..., StepResult]) -> Callable[..., StepResult]:
    """Repeat a step in the reproducible mode until its sums fit, and record the number of bits.

    Every rank of the job takes the same decision. The next step starts with the bits of the spec again, so the result
    of a step does not depend on earlier steps.

    Raises:
        SpecError: rows of the ordinary mode.
        OutOfRange: a gradient that is not finite, or no number of bits that fits.
    """

    @functools.wraps(step)
    def retry(policy: Policy, loss: Any, rows: Sequence[LocalRow], totals: StepTotals, **options: Any) -> StepResult:
        exact = policy.exact
        if exact is None:
            return step(policy, loss, rows, totals, **options)
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
