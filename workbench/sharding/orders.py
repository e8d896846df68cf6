"""Token orders: how the tokens of a row are dealt to the ranks that share it, and what must divide for that.

Every order deals equally many tokens to every rank. They differ in who gets which, and so in how level the work of
causal attention is, in how much moves between ranks, and in how much a row must be padded.

    contiguous        rank r holds the r-th piece. Nearby tokens stay together; the last rank works most.
    zigzag            2 cp chunks, rank r holds r and 2 cp - 1 - r. Level over a row that is one document.
    striped           token t lies on rank t mod cp. Level to a token a row, and no token has its neighbour.
    document_zigzag   zigzag inside each document. Level whatever the documents; each is padded.
    balanced          blocks, dealt by their work. Level whatever the documents, up to a block; none is padded.

Letters: T packed tokens | N documents (the padding at the end of a row counts as one) | B blocks of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import ShardingError
from workbench.rollouts.batch import PADDING


@dataclass(frozen=True)
class Multiples:
    """What must divide: the tokens of a row by ``row``, those of each document in it by ``document``."""

    row: int = 1
    document: int = 1


def padding_rule(order: str, cp: int, *, block_tokens: int = 128, tp: int = 1) -> Multiples:
    """What rows and documents are padded to.

    Args:
        order: the name of an order.
        cp: ranks that share a row.
        block_tokens: of the balanced order.
        tp: ranks that share the tokens of a cp rank between cut layers (sequence parallel); 1 where they do not.

    Formula: row = lcm(order's own, cp tp), the order's own being cp (contiguous, striped), 2 cp (zigzag,
             document_zigzag) or block_tokens cp (balanced); document = 2 cp for document_zigzag, else 1.

    Raises:
        ShardingError: unknown order, or a number below 1.

    Example:
        >>> padding_rule("document_zigzag", 4)
        Multiples(row=8, document=8)
    """
    check_order(order)
    if min(cp, block_tokens, tp) < 1:
        raise ShardingError(
            f"{order} order with cp={cp}, block_tokens={block_tokens}, tp={tp}",
            rule="all are at least 1",
            fix="correct the layout",
        )
    own = {"zigzag": 2, "document_zigzag": 2, "balanced": block_tokens}.get(order, 1) * cp
    return Multiples(math.lcm(own, cp * tp), 2 * cp if order == "document_zigzag" else 1)


def check_order(order: str) -> None:
    """Refuse a name that is no order.

    Raises:
        ShardingError: it is none.
    """
    if order not in ORDERS:
        raise ShardingError(
            f"shard plan with order {order!r}", rule=f"one of {', '.join(ORDERS)}", fix="correct layout.order"
        )


def document_lengths(document_ids_T: Tensor, multiple_of: int = 1) -> tuple[int, ...]:
    """The lengths of the documents of a packed row, each with its own padding, and of what is left at the end.

    Args:
        document_ids_T: [T] 0, 1, 2, ... along the row; `PADDING` after a document and at the end of the row.
        multiple_of: to which each document was padded.

    Raises:
        ShardingError: a document that does not begin where the padding of the one before it ends.

    Example:
        >>> document_lengths(torch.tensor([0, 0, 0, -1, 1, -1, -1, -1]), multiple_of=2)
        (4, 2, 2)
    """
    ids_T = document_ids_T.cpu()
    real_T = torch.nonzero(ids_T != PADDING).squeeze(1)
    counts = torch.bincount(ids_T[real_T]).tolist()
    lengths = [-(-count // multiple_of) * multiple_of for count in counts]
    begins = [0]
    for length in lengths:
        begins.append(begins[-1] + length)
    expected_T = torch.cat(
        [torch.arange(begin, begin + count) for begin, count in zip(begins, counts, strict=False)] or [real_T]
    )
    if not torch.equal(real_T, expected_T):
        raise ShardingError(
            f"the documents of a row, padded to multiples of {multiple_of}",
            found=f"{len(counts)} document(s) of {counts[:8]} tokens, not one after another",
            rule="a document begins where the padding of the one before it ends",
            fix=f"pack(..., document_multiple_of={multiple_of})",
        )
    rest = len(ids_T) - begins[-1]
    return tuple(lengths + [rest] * (rest > 0))


def contiguous(lengths: Sequence[int], cp: int, block_tokens: int) -> list[Tensor]:
    """Rank r holds the r-th of cp equal pieces."""
    return list(torch.arange(sum(lengths)).view(cp, -1))


def zigzag(lengths: Sequence[int], cp: int, block_tokens: int) -> list[Tensor]:
    """The row is cut into 2 cp chunks; rank r holds chunks r and 2 cp - 1 - r.

    Source: Llama 3 report, arXiv 2407.21783, context parallelism.
    """
    return _zigzag(0, sum(lengths), cp)


def striped(lengths: Sequence[int], cp: int, block_tokens: int) -> list[Tensor]:
    """Rank r holds tokens r, r + cp, r + 2 cp, ...

    Source: Striped Attention, arXiv 2311.09431.
    """
    return list(torch.arange(sum(lengths)).view(-1, cp).T)


def document_zigzag(lengths: Sequence[int], cp: int, block_tokens: int) -> list[Tensor]:
    """Zigzag inside each document, one document after another: a rank holds the head and the tail of each.

    Source: the partition of packed rows in Transformer Engine ("THD"), which Megatron-LM, verl and slime use.
    """
    begins = [sum(lengths[:number]) for number in range(len(lengths))]
    dealt = [_zigzag(begin, length, cp) for begin, length in zip(begins, lengths, strict=True)]
    return [torch.cat(mine) for mine in zip(*dealt, strict=True)]


def balanced(lengths: Sequence[int], cp: int, block_tokens: int) -> list[Tensor]:
    """Blocks of tokens, sorted by their work, and dealt to the ranks there and back again.

    The work of a block is how many blocks its queries look at. Sorted from most to least and written in rows of cp, of
    which every second is reversed, the blocks of a column are a rank's; it holds them in the order of the row.

    Source: processing-time-based round robin, the PTRR load balancer of torch.distributed.tensor.experimental.
    """
    work_B = block_work(lengths, block_tokens)
    dealt = torch.argsort(work_B, descending=True, stable=True).view(-1, cp)
    dealt[1::2] = dealt[1::2].flip(1)
    inside = torch.arange(block_tokens)
    return [(mine.sort().values[:, None] * block_tokens + inside).flatten() for mine in dealt.T]


def block_work(lengths: Sequence[int], block_tokens: int) -> Tensor:
    """[B] blocks that hold a key which some query of the block may see: causal, inside its own document.

    Only the first document of a block can reach back beyond it.
    """
    begins_B = torch.arange(0, sum(lengths), block_tokens)
    ends_N = torch.tensor(lengths).cumsum(0)
    document_B = torch.searchsorted(ends_N, begins_B, right=True)
    starts_N = ends_N - torch.tensor(lengths)
    return begins_B // block_tokens - starts_N[document_B] // block_tokens + 1


ORDERS: dict[str, Callable[[Sequence[int], int, int], list[Tensor]]] = {
    function.__name__: function for function in (contiguous, zigzag, striped, document_zigzag, balanced)
}
"""By name: lengths of the documents (the whole row counts where an order does not look at them), ranks and tokens of a
block to the [T / cp] positions of each rank, in the order in which it holds them."""

BY_DOCUMENT = ("document_zigzag", "balanced")
"""Orders that look at the documents."""


def _zigzag(begin: int, length: int, cp: int) -> list[Tensor]:
    chunk = torch.arange(begin, begin + length).view(2 * cp, -1)
    return [torch.cat([chunk[rank], chunk[2 * cp - 1 - rank]]) for rank in range(cp)]
