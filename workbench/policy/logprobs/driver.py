"""Token log-probabilities without full logits: chunks of rows over an engine, forward and backward.

Backward needs a chunk's logits, or what its engine stores for them: as many chunks as ``keep_bytes`` allows save them
(3 GEMMs with the head in all), the others are recomputed (4), except rows whose incoming gradient is zero. A row's
outputs are bitwise the same with and without a gradient, whatever is saved.

Even if rows are skipped, every result stays in the graph of hidden states, weight and bias, so that every rank takes
part in every collective: gradients are then zeros, not None.

Letters: T tokens | A rows that are computed | R rows that are recomputed | C rows of a chunk
| V vocabulary (this rank's rows of the head) | D model dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from workbench.policy.logprobs.chunked import ChunkedEngine
from workbench.policy.logprobs.engine import (
    Accumulators,
    Chunk,
    Engine,
    Keep,
    RowGradients,
    check_budgets,
    default_chunk,
    plan_chunks,
    rows_with_gradient,
)
from workbench.policy.logprobs.head import (
    FIELDS,
    Head,
    TokenLogprobs,
    active_rows,
    check_expected_rows,
    make_head,
    queue_row_checks,
    upcast,
)
from workbench.policy.logprobs.truncated_support import SupportChunk, TruncatedSupport, check_support, full_where_empty
from workbench.policy.logprobs.truncated_support import backward as kept_backward
from workbench.policy.logprobs.truncated_support import forward as kept_forward
from workbench.sharding.collectives import all_max, identity_sum

EXACT_TOKENS = 256
"""Maximum rows at a time of those that the engine could not represent: their logits need additional memory."""


def token_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    engine: Callable[[Head], Engine],
    temperature: float | Tensor = 1.0,
    active_T: Tensor | None = None,
    support: TruncatedSupport | None = None,
    outputs: Iterable[str] = ("entropy", "logsumexp"),
    expected_rows: int | None = None,
    fp32_head: bool = False,
    chunk_tokens: int | None = None,
    keep_bytes: int = 0,
    **head_settings: Any,
) -> TokenLogprobs:
    """Compute the head's outputs per token, a chunk of rows at a time, on the engine that ``engine`` builds for a head.

    The other arguments are those of `logprobs.token_logprobs`; further ones are those of `head.make_head`.

    Shapes:   hidden_TD [T, D], weight_VD [V, D], targets_T [T] -> [T] each.
    Units:    nats.
    Backward: hidden: summed over tp, once; weight and bias: local. The incoming gradients must be the same on every tp
              rank. Weight and bias are accumulated in float32 over all chunks, then cast once.
    Raises:   ShapeError, SpecError: see `head` and `truncated_support`.
    """
    check_budgets("token_logprobs", chunk_tokens, keep_bytes)
    if fp32_head:
        hidden_TD, weight_VD = upcast(hidden_TD), upcast(weight_VD)
    head, outputs = make_head(weight_VD, **head_settings), frozenset(outputs)
    counted = queue_row_checks(head, hidden_TD, targets_T, temperature=temperature, active_T=active_T, outputs=outputs)
    first_engine = engine(head)
    check_expected_rows("token_logprobs", expected_rows, targets_T)
    if support is not None:
        check_support(support, targets_T, head)
    if head.axis is not None:
        hidden_TD = identity_sum(hidden_TD, head.axis)

    def of_rows(count: int) -> TokenLogprobs:
        """Outputs of all tokens, of which this many are computed."""
        index_A = active_rows(targets_T, active_T, count)
        rows, hidden_AD = Rows(targets_T, temperature, support), hidden_TD
        if index_A is not None:
            rows, hidden_AD = rows.at(index_A), hidden_TD.index_select(0, index_A)
        leaves = hidden_AD, weight_VD, head.bias_V
        with_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
        at_once = chunk_tokens or default_chunk(head, count)
        call = _Call(head, engine, first_engine, rows, outputs, at_once, keep_bytes if with_gradient else 0)
        head_output = TokenLogprobs(*_DriverFunction.apply(hidden_AD.contiguous(), weight_VD, head.bias_V, call))
        if rows.support is not None:
            head_output = full_where_empty(head_output, rows.support.untruncated(hidden_TD.device))
        if index_A is None:
            return head_output
        return head_output.map(lambda x_A: x_A.new_zeros(len(targets_T)).index_copy(0, index_A, x_A))

    if expected_rows is None:
        return of_rows(counted())
    head_output = of_rows(expected_rows)
    if (count := counted()) == expected_rows:
        return head_output
    del head_output  # with what it saved for backward
    return of_rows(count)


@dataclass(frozen=True)
class Rows:
    """Inputs of rows besides their hidden states: ids in the whole vocabulary, one temperature or [A], A supports."""

    targets_A: Tensor
    temperature: float | Tensor
    support: TruncatedSupport | None = None

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.targets_A)

    def tensors(self) -> list[Tensor]:
        """Tensors that must not change between forward and backward."""
        ids_P = None if self.support is None else self.support.ids_P
        return [value for value in (self.targets_A, self.temperature, ids_P) if isinstance(value, Tensor)]

    def at(self, rows: slice | Tensor) -> Rows:
        """Select rows by a slice or by indices."""
        temperature = self.temperature[rows] if isinstance(self.temperature, Tensor) else self.temperature
        return Rows(self.targets_A[rows], temperature, None if self.support is None else self.support.rows(rows))

    def kept_forward(self, head: Head, hidden_AD: Tensor) -> SupportChunk | None:
        """Outputs of all rows over their truncated supports."""
        if self.support is None:
            return None
        return kept_forward(head, hidden_AD, self.targets_A, self.temperature, self.support)


@dataclass
class _Call:
    """Requested outputs, rows and chunking of one call; and what it saves for backward.

    Attributes:
        make_engine: of the head; forward and backward have one each, so that no buffer is idle between them.
        first_engine: of forward, which takes it.
        keep_bytes: how much may be saved; 0 without gradient.
        saved_chunks: chunks whose backward has not run, with their rows.
        overflowed_A: rows that the engine could not represent, on their device; None: there are none.
    """

    head: Head
    make_engine: Callable[[Head], Engine]
    first_engine: Engine | None
    rows: Rows
    requested: frozenset[str]
    chunk_tokens: int
    keep_bytes: int
    saved_chunks: list[tuple[slice, Chunk]] = field(default_factory=list)
    overflowed_A: Tensor | None = None

    def take_engine(self) -> Engine:
        """Engine of forward, which alone holds it."""
        engine, self.first_engine = self.first_engine, None
        return engine or self.make_engine(self.head)

    def forward(
        self, engine: Engine, hidden_AD: Tensor, place: slice | Tensor, keep: Keep
    ) -> tuple[Chunk, SupportChunk | None]:
        """Outputs of some rows, over the vocabulary and over their truncated supports."""
        rows, hidden_CD = self.rows.at(place), hidden_AD[place]
        chunk = engine.forward(hidden_CD, rows.targets_A, rows.temperature, outputs=self.requested, keep=keep)
        return chunk, rows.kept_forward(self.head, hidden_CD)

    def work(
        self, nonzero_A: Tensor, exact_A: Tensor, device: torch.device
    ) -> Iterator[tuple[Engine, Chunk | None, slice | Tensor]]:
        """Pieces of work for backward: engine, the chunk if it was saved, and its rows."""
        engine, again_A = self.make_engine(self.head), nonzero_A & ~exact_A
        while self.saved_chunks:
            piece, chunk = self.saved_chunks.pop(0)
            if again_A[piece].any():
                yield engine, chunk, piece
            again_A[piece] = False
        for place in _pieces(again_A, self.chunk_tokens, device):
            yield engine, None, place
        engine = ChunkedEngine(self.head)
        for place in _pieces(nonzero_A & exact_A, min(EXACT_TOKENS, self.chunk_tokens), device):
            yield engine, None, place

    def empty_outputs(self) -> list[Tensor | None]:
        """Allocate every requested field."""
        fields = {"logprobs_T", *(f"{name}_T" for name in self.requested)}
        if self.rows.support is not None:
            fields |= {"support_logprobs_T"} | ({"support_entropy_T"} if "entropy" in self.requested else set())
        return [
            self.head.weight_VD.new_empty(len(self.rows), dtype=self.head.wide) if name in fields else None
            for name in TokenLogprobs._fields
        ]


def _chunks_to_save(engine: Engine, rows: int, chunk_tokens: int, keep_bytes: int) -> int:
    """Number of leading chunks that fit the budget together: the same on every tp rank, however uneven the head."""
    if not keep_bytes:
        return 0
    count, left = 0, keep_bytes
    for piece in plan_chunks(rows, chunk_tokens):
        left -= engine.saved_bytes(piece.stop - piece.start)
        if left < 0:
            break
        count += 1
    if engine.head.axis is not None:
        count = -int(all_max(torch.tensor(-count, device=engine.head.weight_VD.device), engine.head.axis))
    return count


class _DriverFunction(Function):
    """Hidden states of rows, weight and bias to the fields of `TokenLogprobs`; None if not requested."""

    @staticmethod
    def forward(
        ctx: Any, hidden_AD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, call: _Call
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_AD, weight_VD, bias_V, *call.rows.tensors())
        ctx.call = call
        engine, outputs = call.take_engine(), call.empty_outputs()
        all_exact = True
        to_save = _chunks_to_save(engine, len(call.rows), call.chunk_tokens, call.keep_bytes)
        for number, piece in enumerate(plan_chunks(len(call.rows), call.chunk_tokens)):
            is_saved = number < to_save
            chunk, kept_chunk = call.forward(engine, hidden_AD, piece, "own" if is_saved else "no")
            if is_saved:
                call.saved_chunks.append((piece, chunk))
            if chunk.overflowed_C is not None:
                if call.overflowed_A is None:
                    call.overflowed_A = torch.zeros(len(call.rows), dtype=torch.bool, device=hidden_AD.device)
                call.overflowed_A[piece] = chunk.overflowed_C
            all_exact &= chunk.outputs_are_exact
            _write(outputs, piece, chunk, kept_chunk)
        if call.overflowed_A is not None and not all_exact:
            exact = ChunkedEngine(call.head)
            for place in _pieces(call.overflowed_A.cpu(), min(EXACT_TOKENS, call.chunk_tokens), hidden_AD.device):
                _write(outputs, place, *call.forward(exact, hidden_AD, place, "no"))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients_A: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_AD, weight_VD, bias_V, *_ = ctx.saved_tensors
        call: _Call = ctx.call
        nonzero_A, exact_A = _nonzero_and_overflowed(gradients_A, call, hidden_AD.device)
        adjoint = _Adjoint(call, gradients_A, exact_A, hidden_AD, weight_VD, bias_V, ctx.needs_input_grad)
        for engine, chunk, place in call.work(nonzero_A, exact_A, hidden_AD.device):
            if chunk is None:
                adjoint.add(engine, *call.forward(engine, hidden_AD, place, "scratch"), place)
            else:
                kept_chunk = call.rows.at(place).kept_forward(call.head, chunk.hidden_CD)
                adjoint.add(engine, chunk, kept_chunk, place, was_saved=True)
        return *adjoint.result(hidden_AD, weight_VD, bias_V), None


def _write(outputs: list[Tensor | None], place: slice | Tensor, chunk: Chunk, kept_chunk: SupportChunk | None) -> None:
    """Write a chunk's outputs to its rows."""
    support = (None, None) if kept_chunk is None else (kept_chunk.logprobs_C, kept_chunk.entropy_C)
    for output_A, values_C in zip(outputs, (*chunk.head_output[:FIELDS], *support), strict=True):
        if output_A is not None:
            output_A[place] = values_C


def _nonzero_and_overflowed(
    gradients_A: tuple[Tensor | None, ...], call: _Call, device: torch.device
) -> tuple[Tensor, Tensor]:
    """[A] bool each, on the host: rows with a nonzero gradient, and rows for an exact engine.

    The same on every tp rank. Synchronizes with the device once.
    """
    nonzero_A = rows_with_gradient(gradients_A, len(call.rows), device)
    if call.head.axis is not None:
        nonzero_A = all_max(nonzero_A.to(torch.int32), call.head.axis).bool()
    overflowed_A = torch.zeros_like(nonzero_A) if call.overflowed_A is None else call.overflowed_A
    nonzero_A, overflowed_A = torch.stack([nonzero_A, overflowed_A]).cpu()
    return nonzero_A, overflowed_A


def _pieces(rows_A: Tensor, chunk_tokens: int, device: torch.device) -> Iterator[slice | Tensor]:
    """Indices of the rows that are set, a chunk at a time: a slice if they are contiguous."""
    index_R = torch.nonzero(rows_A)[:, 0]
    for piece in plan_chunks(len(index_R), chunk_tokens):
        first, last = int(index_R[piece.start]), int(index_R[piece.stop - 1])
        contiguous = last - first == piece.stop - piece.start - 1
        yield slice(first, last + 1) if contiguous else index_R[piece].to(device)


class _Adjoint:
    """Gradients accumulated over chunks: of hidden in its dtype, of weight and bias in float32 (float64 for float64).

    A single chunk is rounded once in either case, so its gradient is computed in the weight's own dtype.
    """

    def __init__(
        self,
        call: _Call,
        gradients_A: tuple[Tensor | None, ...],
        exact_A: Tensor,
        hidden_AD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        required: tuple[bool, ...],
    ) -> None:
        self.call, self.gradients, self.kept_gradients = call, RowGradients(*gradients_A[:FIELDS]), gradients_A[FIELDS:]
        self.exact_A = exact_A
        wide = call.head.wide
        is_one = len(call.rows) <= call.chunk_tokens and call.rows.support is None and not exact_A.any()
        self.into = Accumulators(
            torch.zeros_like(hidden_AD) if required[0] else None,
            torch.empty_like(weight_VD, dtype=weight_VD.dtype if is_one else wide) if required[1] else None,
            torch.empty_like(bias_V, dtype=wide) if bias_V is not None and required[2] else None,
        )
        self.is_first = True

    def add(
        self,
        engine: Engine,
        chunk: Chunk,
        kept_chunk: SupportChunk | None,
        place: slice | Tensor,
        *,
        was_saved: bool = False,
    ) -> None:
        """Add the gradients of one chunk, whose rows are a slice or indices in any order."""
        into, hidden_AD = self.into, self.into.hidden_TD
        rows = slice(0, len(place)) if isinstance(place, Tensor) else place
        if isinstance(place, Tensor) and hidden_AD is not None:
            into = replace(into, hidden_TD=torch.empty_like(chunk.hidden_CD))
        engine.backward(chunk, self.gradients.of(place), into, rows, first=self.is_first)
        self.is_first = False
        if kept_chunk is not None:
            gradients_C = [None if gradient_A is None else gradient_A[place] for gradient_A in self.kept_gradients]
            if was_saved:  # rows that overflowed in it are recomputed in another chunk
                exact_C = self.exact_A[place].to(chunk.hidden_CD.device)
                gradients_C = [
                    None if gradient_C is None else gradient_C.masked_fill(exact_C, 0) for gradient_C in gradients_C
                ]
            logprobs_C, entropy_C = gradients_C
            kept_backward(self.call.head, kept_chunk, logprobs_C, entropy_C, into, rows)
        if isinstance(place, Tensor) and hidden_AD is not None and into.hidden_TD is not None:
            hidden_AD.index_copy_(0, place, into.hidden_TD)

    def result(self, *leaves: Tensor | None) -> list[Tensor | None]:
        """Return each gradient in the dtype of its leaf; None if not required."""
        into = self.into
        if self.is_first:
            into.clear_head_()
        return [
            None if sums is None or leaf is None else sums.to(leaf.dtype)
            for sums, leaf in zip((into.hidden_TD, into.weight_VD, into.bias_V), leaves, strict=True)
        ]
