"""What a step does otherwise where every layout must give the same bits, for `workbench.train.step`.

The network is `workbench.reproducible`'s. Of what comes after it nothing may depend on how a row was cut, on how far it
was padded for that, or on which rank holds it:

    loss and metrics    on the whole row, up to its last document, on the CPU of every rank that shares it; one number
                        a row is left, and the rows are added in the order of their own numbers
    gradients           of the loss times a power of two, so that 1 / N takes no bits from the sums; divided out again
    range               a step whose sums left it is done again with the bits that fit, the same on every rank

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
"""How often a step whose sums left their range is done again."""


@dataclass(frozen=True)
class WholeRow:
    """A row as every rank that shares it evaluates the loss on it: not split, without the padding at its end.

    On the CPU, where any loss and any metric is the same every time: a GPU adds up a document with atomics. Some
    kilobytes a row go there and back, and the GPU computes on meanwhile.

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
def as_asked(policy: Policy, spec: RunSpec) -> Iterator[None]:
    """Swap the modules of a policy for those of the reproducible mode, where the spec asks for it, and swap them back.

    Raises:
        SpecError: a module that nobody knows to be exact.
    """
    asked = spec.reproducible
    if asked.block_tokens is None:
        yield
        return
    with reproducibly(policy, block_tokens=asked.block_tokens, weight_chunks=asked.weight_chunks, bits=asked.bits):
        yield


def kernels_of(policy: Policy) -> dict[str, str]:
    """Which kernels the bits of a policy in the reproducible mode are of, for a record; {} outside it."""
    return {} if policy.exact is None else {"reproducible_kernels": policy.exact.pieces.kernels.NAME}


def up_to_last_document(row: TrainingRow) -> TrainingRow:
    """A row without the padding at its end, of which a layout has more and another less; one token at least."""
    real = torch.nonzero(row.document_ids_T != PADDING)
    length = int(real[-1]) + 1 if len(real) else 1
    return row.map(lambda values_T: values_T[:length])


def row_numbers(rows: Sequence[TrainingRow]) -> list[int]:
    """The place of each row in the order of the rows' first targets in the source batch; rows without any come last.

    No layout changes it: neither which rank holds a row, nor how rows are grouped into micro-batches.
    """

    def first(row: TrainingRow) -> float:
        known = row.source_T[row.source_T != PADDING]
        return int(known.min()) if len(known) else math.inf

    order = sorted(range(len(rows)), key=lambda at: first(rows[at]))
    return [order.index(at) for at in range(len(rows))]


def power_of_two(rows: Sequence[TrainingRow], weights: Sequence[Mapping[str, TokenWeights]]) -> float:
    """What the loss is multiplied with, so that the mean gradient weight of a target that counts is about 1.

    Formula:  2^-e with mean = m 2^e, 1/2 <= m < 1, over all rows of the step; 1 if nothing weighs anything.
    """
    kept = [named["policy"].gradient_T[row.loss_mask_T].abs() for row, named in zip(rows, weights, strict=True)]
    tokens = sum(map(len, kept))
    mean = math.fsum(float(weights_T.sum()) for weights_T in kept) / max(tokens, 1)
    return 2.0 ** -math.frexp(mean)[1] if 0 < mean < math.inf else 1.0


def unsplit(local: LocalRow, said: TokenLogprobs) -> tuple[LocalRow, TokenLogprobs]:
    """In the reproducible mode the whole row, and what the head says of all its tokens; else both as they are.

    Backward: each rank takes its own tokens of the gradient; see `whole_row`.
    """
    whole = local.whole
    if whole is None:
        return local, said
    tokens = len(whole.row.tokens_T)
    said = TokenLogprobs(
        *(None if part is None else whole_row(part, whole.plan, whole.axis, "cpu")[:tokens] for part in said)
    )
    sums = ShardedSums(whole.row, torch.arange(tokens), Axis("cp"))
    return replace(local, row=whole.row, weights=whole.weights, sums=sums, documents=whole.documents), said


def in_row_order(
    parts: Sequence[Mapping[str, Scalar]], metrics: Sequence[Mapping[str, Value]], rows: Sequence[LocalRow], mesh: Mesh
) -> tuple[dict[str, Scalar], dict[str, float]]:
    """The loss, term by term, and the finished metrics of a step, from those of this rank's rows. float64."""
    numbers_r = torch.tensor([local.whole.number for local in rows if local.whole], device=mesh.device)
    lines = torch.stack([torch.stack([part.value.detach().double() for part in named.values()]) for named in parts])
    total = sum_in_order(lines, numbers_r, mesh["dp"])
    loss = {name: Scalar(value, frozenset()) for name, value in zip(parts[0], total.unbind(), strict=True)}
    return loss, finish_in_order(metrics, numbers_r, mesh["dp"])


def within_range(step: Callable[..., StepResult]) -> Callable[..., StepResult]:
    """Do a step in the reproducible mode until its sums fit, and note with how many bits they did.

    Every rank of the job finds the same, and does the same. The next step begins with the bits of the spec again, so
    what a step finds does not depend on those before.

    Raises:
        SpecError: rows of the ordinary mode.
        OutOfRange: a gradient that is not finite, or no number of bits that fits.
    """

    @functools.wraps(step)
    def again(policy: Policy, loss: Any, rows: Sequence[LocalRow], totals: StepTotals, **how: Any) -> StepResult:
        exact = policy.exact
        if exact is None:
            return step(policy, loss, rows, totals, **how)
        if any(local.whole is None for local in rows):
            raise SpecError(
                "a step of a policy in the reproducible mode",
                found="rows that were prepared without it",
                rule="the loss is evaluated on whole rows then",
                fix="prepare_rows(..., spec) with spec.reproducible.block_tokens",
            )
        tried = [exact.resolution.bits]
        while True:
            exact.start(totals.scale, tried[-1])
            try:
                result = step(policy, loss, rows, totals, **how)
            except OutOfRange as error:
                if error.bits is None or error.bits in tried or len(tried) > RETRIES:
                    error.add_note(f"tried with {', '.join(map(str, tried))} bits")
                    raise
                tried.append(error.bits)
            else:
                used = min((bits for bits in exact.used_bits.values() if bits), default=0)
                found = {"bits": tried[-1], "used_bits": used, "scale": totals.scale, "retries": len(tried) - 1}
                return replace(result, range=found)

    return again
