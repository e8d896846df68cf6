"""What every fast implementation is made of: rows of hidden states in, what the head says out, and back.

An engine is bound to one `Head` and knows chunks of rows; it knows neither losses nor the whole row. Who drives it
decides which rows exist, how they are cut, what is kept for backward, and when ranks add up the gradient of hidden.

Letters: T rows in all | C rows of a chunk | V vocabulary (this rank's rows of the head) | D model dimension.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from workbench.policy.logprobs.head import Head, TokenLogprobs

Keep = Literal["no", "scratch", "own"]


class RowGradients(NamedTuple):
    """What the loss wants from each row, by field of `TokenLogprobs`; None is zero. The same on every tp rank."""

    logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    logsumexp_T: Tensor | None = None
    mean_squared_logit_T: Tensor | None = None

    def of(self, rows: slice | Tensor) -> RowGradients:
        """Those of some rows."""
        return RowGradients(*(None if gradient_T is None else gradient_T[rows] for gradient_T in self))


def rows_moved(gradients: Iterable[Tensor | None], rows: int, device: torch.device) -> Tensor:
    """[rows] bool: from which something is wanted. A gradient that is no number wants something."""
    wanted = [gradient_C != 0 for gradient_C in gradients if gradient_C is not None]
    return functools.reduce(torch.logical_or, wanted, torch.zeros(rows, dtype=torch.bool, device=device))


@dataclass
class Accumulators:
    """Where gradients go; None where nobody wants one.

    Attributes:
        hidden_TD: [T, D] written; partial over tp, who drives adds it up. In the dtype of hidden.
        weight_VD: [V, D] added to; float32 or the weight's dtype (float64 for float64).
        bias_V: [V] added to; float32 (float64 for float64).
    """

    hidden_TD: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None = None


@dataclass
class Chunk:
    """A chunk that went forward.

    Attributes:
        hidden_CD: its rows.
        targets_C: ids in the whole vocabulary.
        temperature: one number, or [C].
        said: [C] each, float32 (float64 for float64 operands), without a graph; the same on every tp rank.
        saved: what the engine's backward needs; None when nothing was kept.
        overflowed_C: [C] bool: rows that this engine cannot represent, the same on every tp rank. Their ``said`` is
            meaningless, their gradients come out as zero; who drives asks an exact engine. None: there are none.
        said_exactly: whether ``said`` is right where it overflowed too, so that gradients alone are missing.
    """

    hidden_CD: Tensor
    targets_C: Tensor
    temperature: float | Tensor
    said: TokenLogprobs
    saved: Any = None
    overflowed_C: Tensor | None = None
    said_exactly: bool = False


class Engine(Protocol):
    """Rows of hidden states to what the head says, and back."""

    head: Head

    def forward(
        self, hidden_CD: Tensor, targets_C: Tensor, temperature: float | Tensor, *, wanted: frozenset[str], keep: Keep
    ) -> Chunk:
        """One product: what the head says about each row.

        Args:
            hidden_CD: rows, contiguous, in the dtype of the weight.
            targets_C: ids in the whole vocabulary; each exists.
            temperature: one positive number, or [C].
            wanted: fields besides the log-probability: entropy, logsumexp, mean_squared_logit.
            keep: what backward will find. "no": nothing. "scratch": the engine's one reused buffer, good until its next
                forward. "own": a buffer of this chunk's own. The numbers said are bit for bit the same.
        """
        ...

    def backward(self, chunk: Chunk, gradients: RowGradients, into: Accumulators, rows: slice, *, first: bool) -> None:
        """Two products: the gradients of a chunk whose forward kept something. May destroy what was kept.

        Args:
            chunk: from `forward`, once.
            gradients: of [C]. A row that nothing is wanted from adds nothing, whatever it holds.
            into: ``hidden_TD[rows]`` is written; weight and bias are added to, over all their rows.
            rows: where the chunk lies in ``into.hidden_TD``.
            first: weight and bias are overwritten instead, with zeros where the head has no valid column.
        """
        ...

    def bytes_kept(self, rows: int) -> int:
        """Bytes that `forward` with ``keep="own"`` holds until backward, for this many rows."""
        ...


def plan_chunks(rows: int, chunk_tokens: int) -> list[slice]:
    """Rows in order, ``chunk_tokens`` at a time; the last chunk takes what is left.

    Example:
        >>> plan_chunks(5, 2)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(start, min(start + chunk_tokens, rows)) for start in range(0, rows, chunk_tokens)]


@dataclass(eq=False)
class ProductCount:
    """Matrix products with the head, in rows: one product of n rows counts n.

    Attributes:
        rows: so far.
        thread: the only thread whose products count; None: those of all threads.
    """

    rows: int = 0
    thread: int | None = None


_counts: list[ProductCount] = []


def note_product(rows: int) -> None:
    """Say that this many rows were multiplied with the head, or with its transpose, or into its gradient."""
    for count in _counts:
        if count.thread in (None, threading.get_ident()):
            count.rows += rows


@contextmanager
def count_products(*, this_thread: bool = False) -> Iterator[ProductCount]:
    """Count the matrix products of every engine while this is open.

    Args:
        this_thread: count only those made in the calling thread. Simulated ranks are threads of one process, and take
            turns inside each other's passes. A backward on a GPU runs in a thread of its own.
    """
    count = ProductCount(thread=threading.get_ident() if this_thread else None)
    _counts.append(count)
    try:
        yield count
    finally:
        _counts.remove(count)
