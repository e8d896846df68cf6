"""Token orders: how the tokens of a row are dealt to the ranks that share it, and the divisibility they need.

Every order deals the same number of tokens to every rank. Orders differ in the balance of causal attention work, which
the README of this package compares, in communication volume and in padding.

Letters: T packed tokens | N documents (the padding at the end of a row counts as one) | B blocks of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workbench.errors import ShardingError
from workbench.rollouts.batch import PADDING
from workbench.sharding.divisibility import Multiples as Multiples
from workbench.sharding.divisibility import check_order as check_order
from workbench.sharding.divisibility import padding_rule as padding_rule


def document_lengths(document_ids_T: Tensor, multiple_of: int = 1) -> tuple[int, ...]:
    """Lengths of the documents of a packed row, each with its own padding, and of the padding at the end.

    Document ids, [T], are 0, 1, 2, ... along the row, and `PADDING` after a document and at the end of the row.

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
    """Rank r holds chunks r and 2 cp - 1 - r of 2 cp.

    Source: Llama 3 report, arXiv 2407.21783, context parallelism.
    """
    return _zigzag(0, sum(lengths), cp)


def striped(lengths: Sequence[int], cp: int, block_tokens: int) -> list[Tensor]:
    """Rank r holds tokens r, r + cp, r + 2 cp, ...

    Source: Striped Attention, arXiv 2311.09431.
    """
    return list(torch.arange(sum(lengths)).view(-1, cp).T)


def document_zigzag(lengths: Sequence[int], cp: int, block_tokens: int) -> list[Tensor]:
    """Zigzag inside each document, one document after another: a rank holds an early and a late chunk of each.

    Source: the partition of packed rows in Transformer Engine ("THD"), which Megatron-LM, verl and slime use.
    """
    begins = [sum(lengths[:number]) for number in range(len(lengths))]
    dealt = [_zigzag(begin, length, cp) for begin, length in zip(begins, lengths, strict=True)]
    return [torch.cat(chunks) for chunks in zip(*dealt, strict=True)]


def whole_documents(lengths: Sequence[int], cp: int, block_tokens: int) -> list[Tensor]:
    """Documents whole where they fit, so that attention and the loss have little to fetch from other ranks.

    From the longest on: a document of more than half a rank's tokens is dealt as in `document_zigzag`; another goes to
    the rank with the least attention work of those with room, or with the most room. The documents of all ranks in
    turn, short ones at the seams, are then cut into equal shares: a seam cuts one document, between neighbours. A rank
    holds its tokens in the order of the row.

    Source: the choice between whole and cut documents by their length: WLB-LLM, arXiv 2503.17924.
    """
    begins, each = [0, *itertools.accumulate(lengths)], sum(lengths) // cp
    shares: list[list[Tensor]] = [[] for _ in range(cp)]
    members: list[list[int]] = [[] for _ in range(cp)]
    room, work = [each] * cp, [0] * cp
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        begin, length = begins[number], lengths[number]
        if 2 * length > each:
            for rank, tokens in enumerate(_zigzag(begin, length, cp)):
                shares[rank].append(tokens)
                room[rank] -= len(tokens)
            continue
        roomy = [rank for rank in range(cp) if room[rank] >= length]
        rank = min(roomy, key=lambda rank: (work[rank], rank)) if roomy else max(range(cp), key=lambda rank: room[rank])
        members[rank].append(number)
        room[rank] -= length
        work[rank] += length * (length + 1) // 2
    line = [
        torch.arange(begins[number], begins[number + 1]) for some in members for number in some[1::2][::-1] + some[::2]
    ]
    whole = torch.cat([*line, torch.arange(0)])
    return [torch.cat([*zigzags, own]).sort().values for zigzags, own in zip(shares, whole.view(cp, -1), strict=True)]


def balanced(lengths: Sequence[int], cp: int, block_tokens: int) -> list[Tensor]:
    """Blocks of tokens, sorted by their work and dealt to the ranks in alternating direction.

    The work of a block is the number of blocks that its queries see. Blocks are sorted from most to least work and
    written in rows of cp with every second row reversed; each column is a rank's, held in the order of the row.

    Source: processing-time-based round robin, the PTRR load balancer of torch.distributed.tensor.experimental.
    """
    work_B = block_work(lengths, block_tokens)
    dealt = torch.argsort(work_B, descending=True, stable=True).view(-1, cp)
    dealt[1::2] = dealt[1::2].flip(1)
    offsets = torch.arange(block_tokens)
    return [(blocks.sort().values[:, None] * block_tokens + offsets).flatten() for blocks in dealt.T]


def block_work(lengths: Sequence[int], block_tokens: int) -> Tensor:
    """[B] number of blocks with a key that some query of the block may see: causal, inside its own document.

    Only the first document of a block can extend back beyond it.
    """
    begins_B = torch.arange(0, sum(lengths), block_tokens)
    ends_N = torch.tensor(lengths).cumsum(0)
    document_B = torch.searchsorted(ends_N, begins_B, right=True)
    starts_N = ends_N - torch.tensor(lengths)
    return begins_B // block_tokens - starts_N[document_B] // block_tokens + 1


ORDERS: dict[str, Callable[[Sequence[int], int, int], list[Tensor]]] = {
    function.__name__: function
    for function in (contiguous, zigzag, striped, document_zigzag, whole_documents, balanced)
}
"""Name -> function of document lengths (the whole row for orders that ignore documents), ranks and block tokens that
returns each rank's [T / cp] positions, in its local order."""

BY_DOCUMENT = ("document_zigzag", "whole_documents", "balanced")
"""Orders that depend on the documents."""


def _zigzag(begin: int, length: int, cp: int) -> list[Tensor]:
    chunk = torch.arange(begin, begin + length).view(2 * cp, -1)
    return [torch.cat([chunk[rank], chunk[2 * cp - 1 - rank]]) for rank in range(cp)]
