"""Interface of fast implementations: forward from rows of hidden states to head outputs, and backward.

An engine is bound to one `Head` and processes chunks of rows; it knows neither losses nor the whole row. The driver
decides which rows exist, how they are chunked, what is saved for backward, and when hidden's gradient is all-reduced.

Letters: T rows in all | C rows of a chunk | V vocabulary (this rank's rows of the head) | D model dimension.
"""

from __future__ import annotations

import bisect
import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.policy.logprobs.head import Head, TokenLogprobs

Keep = Literal["no", "scratch", "own"]
Couples = Literal["token", "document", "row"]
"""The rows whose losses depend on each other."""


class RowGradients(NamedTuple):
    """Gradient of the loss by each field of `TokenLogprobs`, per row; None is zero. The same on every tp rank."""

    logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    logsumexp_T: Tensor | None = None
    mean_squared_logit_T: Tensor | None = None
    mean_logit_T: Tensor | None = None

    def of(self, rows: slice | Tensor) -> RowGradients:
        """Return the gradients of some rows."""
        return RowGradients(*(None if gradient_T is None else gradient_T[rows] for gradient_T in self))


def rows_with_gradient(gradients: Iterable[Tensor | None], rows: int, device: torch.device) -> Tensor:
    """[rows] bool: True where any gradient is nonzero; NaN counts as nonzero."""
    nonzero = [gradient_C != 0 for gradient_C in gradients if gradient_C is not None]
    return functools.reduce(torch.logical_or, nonzero, torch.zeros(rows, dtype=torch.bool, device=device))


@dataclass
class Accumulators:
    """Gradient accumulators, None if not required.

    Attributes:
        hidden_TD: [T, D] written; partial over tp, the driver all-reduces it. In the dtype of hidden.
        weight_VD: [V, D] added to; float32 or the weight's dtype (float64 for float64).
        bias_V: [V] added to; float32 (float64 for float64).
    """

    hidden_TD: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None = None

    def clear_head_(self) -> None:
        """Set the gradients of weight and bias to 0."""
        for gradient in (self.weight_VD, self.bias_V):
            if gradient is not None:
                gradient.zero_()


@dataclass
class Chunk:
    """A chunk after its forward pass.

    Attributes:
        hidden_CD: its rows.
        targets_C: ids in the whole vocabulary.
        temperature: one number, or [C].
        head_output: head outputs, [C] each, float32 (float64 of float64 operands), no graph; equal on all tp ranks.
        saved: tensors for the engine's backward; None if nothing was saved.
        overflowed_C: [C] bool: rows that this engine cannot represent, the same on every tp rank. Their
            ``head_output`` is invalid and their gradients are zero; the driver computes them by an exact engine. None:
            there are none.
        outputs_are_exact: True if ``head_output`` is valid on overflowed rows too, so that only gradients are missing.
    """

    hidden_CD: Tensor
    targets_C: Tensor
    temperature: float | Tensor
    head_output: TokenLogprobs
    saved: Any = None
    overflowed_C: Tensor | None = None
    outputs_are_exact: bool = False


class Engine(Protocol):
    """Forward from rows of hidden states to head outputs, and backward."""

    head: Head

    def forward(
        self, hidden_CD: Tensor, targets_C: Tensor, temperature: float | Tensor, *, outputs: frozenset[str], keep: Keep
    ) -> Chunk:
        """Compute the head's outputs of each row in one GEMM.

        Args:
            hidden_CD: rows, contiguous, in the dtype of the weight.
            targets_C: ids in the whole vocabulary; each exists.
            temperature: one positive number, or [C].
            outputs: fields besides the log-probability: entropy, logsumexp, mean_squared_logit, mean_logit.
            keep: what is saved for backward. "no": nothing. "scratch": the engine's one reused buffer, valid until its
                next forward. "own": a buffer for this chunk alone. Outputs are bitwise the same.
        """
        ...

    def backward(self, chunk: Chunk, gradients: RowGradients, into: Accumulators, rows: slice, *, first: bool) -> None:
        """Compute a chunk's gradients from what forward saved, in two GEMMs. May destroy the saved tensors.

        Args:
            chunk: from `forward`, once.
            gradients: of [C]. A row whose gradients are all zero adds nothing, even if its hidden state is not finite.
            into: ``hidden_TD[rows]`` is written; weight and bias are added to, over all their rows.
            rows: the chunk's rows in ``into.hidden_TD``.
            first: weight and bias are overwritten instead, with zeros in the padding rows of the head.
        """
        ...

    def saved_bytes(self, rows: int) -> int:
        """Bytes that `forward` with ``keep="own"`` saves for backward, for this many rows."""
        ...


CHUNK_LOGITS = 4096 * 151936
"""Logits of a chunk by default: of 4,096 rows and Qwen3's vocabulary, 2.5 GB in float32. Measured by hand on an H200:
half as many took 5 to 6 % longer, twice as many at most 2 % less."""


def default_chunk(head: Head, rows: int | None = None) -> int:
    """Rows of a chunk by default: 4,096, or more if this rank's vocabulary is smaller than Qwen3's.

    A chunk's logits then take the same memory whatever the vocabulary, and launches are as rare. With the number of
    ``rows`` in all chunks are about as long: a remainder's GEMMs took up to a tenth more time per row (by hand, on an
    H200). The same on every tp rank.
    """
    columns = -(-head.vocabulary // (1 if head.axis is None else head.axis.size))
    most = max(4096, CHUNK_LOGITS // max(1, columns) // 128 * 128)
    if rows is None or rows <= most:
        return most
    chunks = -(-rows // most)
    return -(-rows // (128 * chunks)) * 128


def check_budgets(what: str, chunk_tokens: int | None, keep_bytes: int) -> None:
    """Raise a SpecError unless a chunk has at least one row and the memory for saved chunks is not negative."""
    if keep_bytes < 0 or (chunk_tokens is not None and chunk_tokens < 1):
        raise SpecError(
            f"{what}: chunk_tokens = {chunk_tokens}, keep_bytes = {keep_bytes}",
            rule="a chunk has at least one row, and a budget is not negative",
            fix="leave them at None and 0, or raise keep_bytes for fewer GEMMs in backward",
        )


def plan_chunks(rows: int, chunk_tokens: int) -> list[slice]:
    """Split rows, in order, into chunks of ``chunk_tokens``; the last chunk has the remainder.

    Example:
        >>> plan_chunks(5, 2)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(start, min(start + chunk_tokens, rows)) for start in range(0, rows, chunk_tokens)]


@dataclass(frozen=True)
class RowPlan:
    """Permutation of the computed rows (None: not reordered), and groups that the loss must see together, in chunks."""

    order_A: Tensor | None
    groups: list[list[slice]]


def plan_rows(rows: int, chunk_tokens: int, couples: Couples, units_A: Tensor | None = None) -> RowPlan:
    """Split computed rows into chunks at the boundaries that a coupling allows.

    Args:
        rows: A.
        chunk_tokens: maximum rows of a chunk.
        couples: "token": anywhere; "document": between units, with units longer than a chunk split evenly and placed
            first (the first one then needs no separate buffer); "row": anywhere, and everything is one group.
        units_A: [A] the label of each row's document, on the CPU.
    """
    if units_A is None or couples != "document":
        chunks = plan_chunks(rows, chunk_tokens)
        return RowPlan(None, [chunks] if couples == "row" and chunks else [[chunk] for chunk in chunks])
    labels_N, sizes_N = units_A.unique_consecutive(return_counts=True)
    order_A = None
    if len(labels_N.unique()) < len(labels_N):  # rows of a label are not contiguous
        names, unit_A = units_A.unique(return_inverse=True)
        first_A = torch.full((len(names),), rows).scatter_reduce(0, unit_A, torch.arange(rows), "amin")[unit_A]
        order_A = torch.argsort(first_A, stable=True)
        sizes_N = first_A[order_A].unique_consecutive(return_counts=True)[1]
    groups, ends = [], sizes_N.cumsum(0).tolist()
    start = taken = 0
    while taken < len(ends):
        fits = bisect.bisect_right(ends, start + chunk_tokens)
        end = ends[max(fits, taken + 1) - 1]
        parts = -(-(end - start) // chunk_tokens)
        size = -(-(end - start) // parts)
        groups.append([slice(start + part.start, start + part.stop) for part in plan_chunks(end - start, size)])
        start, taken = end, max(fits, taken + 1)
    if order_A is not None:
        for group in groups:
            some = slice(group[0].start, group[-1].stop)
            order_A[some] = order_A[some].sort().values
    return RowPlan(order_A, sorted(groups, key=lambda group: len(group) == 1))


@contextmanager
def exact_float32(dtype: torch.dtype) -> Iterator[None]:
    """Disable TF32, which keeps 10 of 23 bits, for GEMMs of float32 operands within this context."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    if dtype != torch.float32 or before == "ieee":
        yield
        return
    setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = before


def add_gemm_(weight_VD: Tensor, gradient_CV: Tensor, hidden_CD: Tensor, *, first: bool) -> None:
    """Compute ``weight_VD += gradient_CV.T @ hidden_CD``, or ``=`` for the first; summed in the dtype of weight_VD."""
    beta = 0 if first else 1
    if weight_VD.dtype == hidden_CD.dtype:
        torch.addmm(weight_VD, gradient_CV.T, hidden_CD, beta=beta, out=weight_VD)
    elif hidden_CD.is_cuda:
        torch.addmm(weight_VD, gradient_CV.T, hidden_CD, beta=beta, out_dtype=weight_VD.dtype, out=weight_VD)
    else:
        wide = weight_VD.dtype
        torch.addmm(weight_VD, gradient_CV.T.to(wide), hidden_CD.to(wide), beta=beta, out=weight_VD)


@dataclass(eq=False)
class GemmCount:
    """GEMMs with the head, in rows (one GEMM of n rows counts n), of one thread; None: of all threads."""

    rows: int = 0
    thread: int | None = None


_counts: list[GemmCount] = []


def count_gemm(rows: int) -> None:
    """Count a GEMM of this many rows with the head, with its transpose, or into its gradient."""
    for count in _counts:
        if count.thread in (None, threading.get_ident()):
            count.rows += rows


@contextmanager
def count_gemms(*, this_thread: bool = False) -> Iterator[GemmCount]:
    """Count the GEMMs of every engine within this context, or only those of the calling thread.

    Simulated ranks are threads of one process, and take turns inside each other's passes. A backward on a GPU runs in
    its own thread.
    """
    count = GemmCount(thread=threading.get_ident() if this_thread else None)
    _counts.append(count)
    try:
        yield count
    finally:
        _counts.remove(count)
