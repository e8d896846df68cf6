"""Shard plans: which rank holds which token of a row, and the way back.

One permutation moves every tensor of a row, after everything that looks across tokens (shift, document ends,
weights) was computed on the whole row. Which permutation is a matter of the order; see `workbench.sharding.orders`.

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
    """(begin, end) of every stretch of consecutive positions; the end is not in it.

    Example:
        >>> spans([0, 1, 6, 7])
        [(0, 2), (6, 8)]
    """
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found


@dataclass(frozen=True)
class Balance:
    """How the work of causal attention inside documents lies over the ranks.

    Attributes:
        pairs_RR: [R, R] long; (query of rank r, key of rank s) of which the query may see the key.
    """

    pairs_RR: Tensor

    @property
    def of_ranks(self) -> tuple[int, ...]:
        """Pairs of each rank's own queries."""
        return tuple(self.pairs_RR.sum(1).tolist())

    @property
    def max_over_mean(self) -> float:
        """How much longer the slowest rank takes than all would if the work were level; 1 is level."""
        return max(self.of_ranks) * len(self.of_ranks) / sum(self.of_ranks)

    @property
    def in_lock_step(self) -> float:
        """The same for a ring, in which at step i rank r meets the keys of rank r - i and all wait for the slowest."""
        size = len(self.pairs_RR)
        ranks = torch.arange(size)
        slowest = sum(int(self.pairs_RR[ranks, (ranks - step) % size].max()) for step in range(size))
        return slowest * size / sum(self.of_ranks)

    def __repr__(self) -> str:
        """Say the figures and whose they are."""
        return (
            f"Balance(max/mean {self.max_over_mean:.3f}, {self.in_lock_step:.3f} in a ring; pairs of ranks "
            f"{', '.join(f'{pairs:,}' for pairs in self.of_ranks)})"
        )


@dataclass(frozen=True)
class ShardPlan:
    """A permutation of the tokens of a row, cut into equal shards.

    Attributes:
        order: its name.
        cp: ranks that share the row.
        permutation_T: [T] global positions in rank-major order: rank r owns
            ``permutation_T[r * T / cp : (r + 1) * T / cp]``, in the order it holds them.
        inverse_T: [T] where each global position went.
        document_lengths: of the documents of the row with their padding, and of the padding at its end; empty if
            the plan was made without.

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

        Args:
            order: one of `workbench.sharding.orders.ORDERS`.
            num_tokens: of the row, padding included.
            cp: ranks that share it.
            document_lengths: of the documents in the order of the row, each with its padding, and of the padding at
                the end as an entry of its own (`workbench.sharding.orders.document_lengths`). Orders that go by
                document need them; others only draw and count with them.
            block_tokens: of the balanced order.

        Raises:
            ShardingError: unknown order; a row or a document that does not divide; documents that are missing, or
                are not the row.
        """
        check_order(order)
        lengths = None if document_lengths is None else tuple(document_lengths)
        _refuse_row(order, num_tokens, cp, block_tokens)
        _refuse_documents(order, num_tokens, cp, lengths)
        permutation = torch.cat(ORDERS[order](lengths or (num_tokens,), cp, block_tokens))
        return cls(order, cp, permutation, torch.argsort(permutation), lengths or ())

    def __repr__(self) -> str:
        """Say who holds which tokens."""
        shown = [f"rank {rank}: {self._held(rank)}" for rank in range(min(self.cp, 8))]
        more = [f"and {self.cp - 8} more"] if self.cp > 8 else []
        return f"ShardPlan({self.order}, {self.num_tokens} tokens over cp={self.cp}; {'; '.join([*shown, *more])})"

    def _held(self, rank: int) -> str:
        held = [f"{begin}-{end - 1}" for begin, end in spans(sorted(self.positions(rank).tolist()))]
        return ", ".join(held[:4] + ([f"and {len(held) - 4} more"] if len(held) > 4 else []))

    @property
    def num_tokens(self) -> int:
        """T, tokens of the unsplit row."""
        return self.permutation_T.shape[0]

    @property
    def owners_T(self) -> Tensor:
        """[T] the rank that holds each global position."""
        return self.inverse_T // (self.num_tokens // self.cp)

    def positions(self, rank: int) -> Tensor:
        """[T / cp] global positions that a rank holds, in its own order."""
        return self.permutation_T.view(self.cp, -1)[rank]

    def split(self, values_T: Tensor, rank: int) -> Tensor:
        """A rank's share of a token-aligned tensor. [T, ...] -> [T / cp, ...]."""
        return values_T.index_select(0, self.positions(rank).to(values_T.device))

    def merge(self, rank_major_T: Tensor) -> Tensor:
        """Undo the plan: shards concatenated in rank order -> the row in its own order."""
        return rank_major_T.index_select(0, self.inverse_T.to(rank_major_T.device))

    def balance(self, document_ids_T: Tensor | None = None) -> Balance:
        """Count the (query, key) pairs that causal attention inside documents allows, rank by rank.

        Args:
            document_ids_T: [T] of the row; a stretch of padding sees itself. None: the documents of the plan with
                their padding, or one document if it knows none.

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
        """Which rank holds which token, as text: a character a token, or a stretch of tokens if there are more.

        Documents are told apart by letters, ranks by digits (then letters); ``*`` is a stretch of several.

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
            numbers_T = torch.repeat_interleave(
                torch.arange(len(self.document_lengths)), torch.tensor(self.document_lengths)
            )
            rows["documents"] = _cells(numbers_T, edges, "abcdefghijklmnopqrstuvwxyz")
        rows["ranks"] = _cells(self.owners_T, edges, "0123456789abcdefghijklmnopqrstuvwxyz")
        return "\n".join(f"{name:<11}{text}" for name, text in rows.items())


def _begins(lengths: Sequence[int]) -> Tensor:
    """[T] where the document of each position begins."""
    begins = torch.tensor([0, *itertools.accumulate(lengths)][:-1])
    return torch.repeat_interleave(begins, torch.tensor(lengths))


def _cells(labels_T: Tensor, edges: Sequence[int], letters: str) -> str:
    drawn = ""
    for begin, end in itertools.pairwise(edges):
        found = labels_T[begin:end]
        drawn += letters[int(found[0]) % len(letters)] if bool((found == found[0]).all()) else "*"
    return drawn


def _refuse_row(order: str, num_tokens: int, cp: int, block_tokens: int) -> None:
    multiple = padding_rule(order, max(cp, 1), block_tokens=max(block_tokens, 1)).row
    if min(cp, num_tokens, block_tokens) >= 1 and num_tokens % multiple == 0:
        return
    need = {
        "balanced": f"block_tokens * cp = {block_tokens} * {cp} = {multiple}",
        "contiguous": f"cp = {multiple}",
        "striped": f"cp = {multiple}",
    }.get(order, f"2 * cp = {multiple}")
    smaller = ", or take a smaller layout.block_tokens" if order == "balanced" else ""
    raise ShardingError(
        f"shard plan: {order} order of {num_tokens} tokens over cp={cp}",
        found=f"{num_tokens} tokens",
        rule=f"a positive multiple of {need}",
        fix=f"pad the row to {max(1, -(-num_tokens // multiple)) * multiple} tokens "
        f"(pack(..., multiple_of=...); data.multiple_of unset does it){smaller}",
    )


def _refuse_documents(order: str, num_tokens: int, cp: int, lengths: tuple[int, ...] | None) -> None:
    asked = f"shard plan: {order} order of {num_tokens} tokens over cp={cp}"
    if lengths is None:
        if order in BY_DOCUMENT:
            raise ShardingError(
                asked,
                found="no document_lengths",
                rule=f"the {order} order goes by documents",
                fix="give their lengths in the order of the row, the padding at its end last",
            )
        return
    if min(lengths, default=0) < 1 or sum(lengths) != num_tokens:
        raise ShardingError(
            asked,
            found=f"{len(lengths)} documents of {sum(lengths)} tokens in all, "
            f"{min(lengths, default=0)} in the shortest",
            rule="documents with their padding, and the padding at the end, are the row",
            fix="take them from orders.document_lengths(row.document_ids_T, ...)",
        )
    multiple = padding_rule(order, cp).document
    odd = [f"{number} of {length}" for number, length in enumerate(lengths) if length % multiple]
    if odd:
        more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
        raise ShardingError(
            asked,
            found=f"document {', '.join(odd[:4])} tokens{more}",
            rule=f"every document has a multiple of 2 * cp = {multiple} tokens, padding included",
            fix=f"pack(..., document_multiple_of={multiple}); a run does so by itself",
        )
