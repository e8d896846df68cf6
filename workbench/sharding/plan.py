"""Shard plans: the permutation that assigns the tokens of a row to ranks, and its inverse.

One permutation moves every tensor of a row, after everything that depends on several tokens (shift, document ends,
weights) was computed on the whole row. The order defines the permutation; see `workbench.sharding.orders`.

Letters: T packed tokens | R ranks of the cp axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import ShardingError
from workbench.sharding.orders import BY_DOCUMENT, ORDERS, check_order, padding_rule


def spans(positions: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) of every run of consecutive positions, end exclusive.

    Example:
        >>> spans([0, 1, 6, 7])
        [(0, 2), (6, 8)]
    """
    runs: list[tuple[int, int]] = []
    for position in positions:
        begin = runs.pop()[0] if runs and runs[-1][1] == position else position
        runs.append((begin, position + 1))
    return runs


@dataclass(frozen=True)
class Balance:
    """Balance of causal attention work inside documents over the ranks.

    Attributes:
        pairs_RR: [R, R] long; number of (query of rank r, key of rank s) pairs in which the query may see the key.
    """

    pairs_RR: Tensor

    @property
    def pairs_by_rank(self) -> tuple[int, ...]:
        """Pairs of each rank's own queries."""
        return tuple(self.pairs_RR.sum(1).tolist())

    @property
    def max_over_mean(self) -> float:
        """Work of the slowest rank over the mean; 1 is perfectly balanced."""
        return max(self.pairs_by_rank) * len(self.pairs_by_rank) / sum(self.pairs_by_rank)

    @property
    def in_lock_step(self) -> float:
        """`max_over_mean` for a ring, where at step i rank r uses the keys of rank r - i and all await the slowest."""
        size = len(self.pairs_RR)
        ranks = torch.arange(size)
        slowest = sum(int(self.pairs_RR[ranks, (ranks - step) % size].max()) for step in range(size))
        return slowest * size / sum(self.pairs_by_rank)

    def __repr__(self) -> str:
        return (
            f"Balance(max/mean {self.max_over_mean:.3f}, {self.in_lock_step:.3f} in a ring; pairs of ranks "
            f"{', '.join(f'{pairs:,}' for pairs in self.pairs_by_rank)})"
        )


@dataclass(frozen=True)
class ShardPlan:
    """A permutation of the tokens of a row, cut into equal shards.

    Attributes:
        order: name of the token order.
        cp: ranks that share the row.
        permutation_T: [T] global positions in rank-major order: rank r owns
            ``permutation_T[r * T / cp : (r + 1) * T / cp]``, in its local order.
        inverse_T: [T] the rank-major index of each global position.
        document_lengths: of the documents of the row with their padding, and of the padding at its end; empty if
            not given.

    Example:
        >>> plan = ShardPlan.make("zigzag", num_tokens=8, cp=2)
        >>> [plan.positions(rank).tolist() for rank in range(2)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    order: str
    cp: int
    permutation_T: Tensor
    inverse_T: Tensor
    document_lengths: tuple[int, ...] = ()

    @classmethod
    def make(
        cls,
        order: str,
        *,
        num_tokens: int,
        cp: int,
        document_lengths: Sequence[int] | None = None,
        block_tokens: int = 128,
    ) -> ShardPlan:
        """Plan a row of ``num_tokens`` for ``cp`` ranks.

        Tokens of the row include padding. ``document_lengths`` are those of the documents in the order of the row, each
        with its padding, and of the padding at the end as a separate entry (`orders.document_lengths`). Orders in
        `BY_DOCUMENT` need them; others use them for drawings and counts only. The balanced order has ``block_tokens``.

        Raises:
            ShardingError: unknown order; a row or a document that does not divide; documents that are missing, or
                do not add up to the row.
        """
        check_order(order)
        lengths = None if document_lengths is None else tuple(document_lengths)
        _refuse_row(order, num_tokens, cp, block_tokens)
        _refuse_documents(order, num_tokens, cp, lengths)
        permutation = torch.cat(ORDERS[order](lengths or (num_tokens,), cp, block_tokens))
        return cls(order, cp, permutation, torch.argsort(permutation), lengths or ())

    def __repr__(self) -> str:
        shown = [f"rank {rank}: {self._ranges(rank)}" for rank in range(min(self.cp, 8))]
        more = [f"and {self.cp - 8} more"] if self.cp > 8 else []
        return f"ShardPlan({self.order}, {self.num_tokens} tokens over cp={self.cp}; {'; '.join([*shown, *more])})"

    def _ranges(self, rank: int) -> str:
        ranges = [f"{begin}-{end - 1}" for begin, end in spans(sorted(self.positions(rank).tolist()))]
        return ", ".join(ranges[:4] + ([f"and {len(ranges) - 4} more"] if len(ranges) > 4 else []))

    @property
    def num_tokens(self) -> int:
        """T, tokens of the unsplit row."""
        return self.permutation_T.shape[0]

    @property
    def owners_T(self) -> Tensor:
        """[T] the rank that holds each global position."""
        return self.inverse_T // (self.num_tokens // self.cp)

    def positions(self, rank: int) -> Tensor:
        """[T / cp] global positions of a rank, in its local order."""
        return self.permutation_T.view(self.cp, -1)[rank]

    def split(self, values_T: Tensor, rank: int) -> Tensor:
        """Return a rank's shard of a token-aligned tensor. [T, ...] -> [T / cp, ...]."""
        return values_T.index_select(0, self.positions(rank).to(values_T.device))

    def merge(self, rank_major_T: Tensor) -> Tensor:
        """Invert the plan: shards concatenated in rank order -> the row in its original order."""
        return rank_major_T.index_select(0, self.inverse_T.to(rank_major_T.device))

    def balance(self, document_ids_T: Tensor | None = None) -> Balance:
        """Count the (query, key) pairs that causal attention inside documents allows, rank by rank.

        Documents are given by their ids, [T], where a run of padding sees itself, or are those of the plan with their
        padding, or one document if it has none.

        Example:
            >>> ShardPlan.make("contiguous", num_tokens=8, cp=2).balance()
            Balance(max/mean 1.444, 1.444 in a ring; pairs of ranks 10, 26)
        """
        begins_T = (
            _begins(self.document_lengths or (self.num_tokens,))
            if document_ids_T is None
            else _begins(torch.unique_consecutive(document_ids_T.cpu(), return_counts=True)[1].tolist())
        )
        owners_T = self.owners_T
        pairs_RR = torch.zeros(self.cp, self.cp, dtype=torch.int64)
        for holder in range(self.cp):
            keys = torch.nn.functional.pad((owners_T == holder).long().cumsum(0), (1, 0))
            pairs_RR[:, holder].index_add_(0, owners_T, keys[1:] - keys[begins_T])
        return Balance(pairs_RR)

    def drawing(self, width: int = 96) -> str:
        """Text diagram of the plan: one character per token, or per run of tokens if there are more than ``width``.

        Documents are letters, ranks are digits (then letters); ``*`` is a run with several of them.

        Example:
            >>> print(ShardPlan.make("document_zigzag", num_tokens=12, cp=2, document_lengths=(8, 4)).drawing())
            tokens     0         11
            documents  aaaaaaaabbbb
            ranks      001111000110
        """
        cells = min(width, self.num_tokens)
        edges = [cell * self.num_tokens // cells for cell in range(cells + 1)]
        rows = {"tokens": f"0{self.num_tokens - 1:>{max(cells, 2) - 1}}"}
        if self.document_lengths:
            numbers_T = torch.arange(len(self.document_lengths)).repeat_interleave(torch.tensor(self.document_lengths))
            rows["documents"] = _cells(numbers_T, edges, "abcdefghijklmnopqrstuvwxyz")
        rows["ranks"] = _cells(self.owners_T, edges, "0123456789abcdefghijklmnopqrstuvwxyz")
        return "\n".join(f"{name:<11}{text}" for name, text in rows.items())


def _begins(lengths: Sequence[int]) -> Tensor:
    """[T] start of the document of each position."""
    begins = torch.tensor([0, *itertools.accumulate(lengths)][:-1])
    return torch.repeat_interleave(begins, torch.tensor(lengths))


def _cells(labels_T: Tensor, edges: Sequence[int], letters: str) -> str:
    text = ""
    for begin, end in itertools.pairwise(edges):
        labels = labels_T[begin:end]
        text += letters[int(labels[0]) % len(letters)] if bool((labels == labels[0]).all()) else "*"
    return text


def _refuse_row(order: str, num_tokens: int, cp: int, block_tokens: int) -> None:
    multiple = padding_rule(order, max(cp, 1), block_tokens=max(block_tokens, 1)).row
    if min(cp, num_tokens, block_tokens) >= 1 and num_tokens % multiple == 0:
        return
    need = {
        "balanced": f"block_tokens * cp = {block_tokens} * {cp} = {multiple}",
        "contiguous": f"cp = {multiple}",
        "striped": f"cp = {multiple}",
    }.get(order, f"2 * cp = {multiple}")
    smaller = ", or use a smaller layout.block_tokens" if order == "balanced" else ""
    raise ShardingError(
        f"shard plan: {order} order of {num_tokens} tokens over cp={cp}",
        found=f"{num_tokens} tokens",
        rule=f"a positive multiple of {need}",
        fix=f"pad the row to {max(1, -(-num_tokens // multiple)) * multiple} tokens "
        f"(pack(..., multiple_of=...); data.multiple_of unset does it){smaller}",
    )


def _refuse_documents(order: str, num_tokens: int, cp: int, lengths: tuple[int, ...] | None) -> None:
    requested = f"shard requested: {order} order of {num_tokens} tokens over cp={cp}"
    if lengths is None:
        if order in BY_DOCUMENT:
            raise ShardingError(
                requested,
                found="no document_lengths",
                rule=f"the {order} order depends on the documents",
                fix="pass their lengths in the order of the row, the padding at its end last",
            )
        return
    if min(lengths, default=0) < 1 or sum(lengths) != num_tokens:
        raise ShardingError(
            requested,
            found=f"{len(lengths)} documents of {sum(lengths)} tokens in all, "
            f"{min(lengths, default=0)} in the shortest",
            rule="documents with their padding, and the padding at the end, add up to the row",
            fix="compute them with orders.document_lengths(row.document_ids_T, ...)",
        )
    multiple = padding_rule(order, cp).document
    odd = [f"{number} of {length}" for number, length in enumerate(lengths) if length % multiple]
    if odd:
        more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
        raise ShardingError(
            requested,
            found=f"document {', '.join(odd[:4])} tokens{more}",
            rule=f"every document has a multiple of 2 * cp = {multiple} tokens, padding included",
            fix=f"pack(..., document_multiple_of={multiple}); a run does so automatically",
        )
