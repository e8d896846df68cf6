"""Description of a row for attention: positions by rank, documents, the exchange algorithm, and masks of its blocks.

A cp axis is split in two: *inner* ranks exchange heads (each then has all tokens of the inner ranks, for some heads),
and *outer* ranks exchange keys and values of their heads. gathered and ring have no inner ranks, ulysses has no outer
ranks, hybrid has both. A mask depends only on *global* positions and document ids, so it is correct for every token
order. One block, with all that is derived from it, serves all layers, forward and backward.

Letters: T packed tokens | G outer ranks | U inner ranks | t tokens of a rank | s = U * t tokens after the exchange |
q queries | k keys.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from workbench.errors import ShardingError
from workbench.rollouts.batch import PADDING
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan


@dataclass(frozen=True, eq=False)
class Block:
    """Some queries and some keys of a row, in the order of their tensors.

    Query i sees key j iff both are of one document, j is not later in the row, and j is among the last ``window``
    tokens up to i.

    Attributes:
        query_positions_q: [q] int64 positions in the row, on the host; key_positions_k: [k] those of the keys.
        query_documents_q: [q] int64 document numbers, each document one run of the row; key_documents_k: [k] likewise.
        window: maximum number of tokens that a query sees, itself included; None: its whole document.
    """

    query_positions_q: Tensor
    key_positions_k: Tensor
    query_documents_q: Tensor
    key_documents_k: Tensor
    window: int | None = None
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(q, k)."""
        return self.query_positions_q.shape[0], self.key_positions_k.shape[0]

    @cached_property
    def allowed_qk(self) -> Tensor:
        """[q, k] bool, on the host: query may see key. The reference for all other descriptions of a block."""
        return self.allowed_on("cpu")

    def allowed_on(self, device: torch.device | str, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """`allowed_qk` of some of the queries and keys, computed on a device."""
        query_q, key_k = self.query_positions_q[queries].to(device)[:, None], self.key_positions_k[keys].to(device)
        documents_q = self.query_documents_q[queries].to(device)[:, None]
        allowed_qk = (documents_q == self.key_documents_k[keys].to(device)) & (query_q >= key_k)
        return allowed_qk if self.window is None else allowed_qk & (query_q - key_k < self.window)

    @cached_property
    def sees_q(self) -> Tensor:
        """[q] bool, on the host: the query sees any key. Builds no mask."""
        if 0 in self.shape:
            return torch.zeros(self.shape[0], dtype=torch.bool)
        # Documents are contiguous in the row: a query that sees any key sees the last one that is not after it.
        sorted_k, order_k = self.key_positions_k.sort()
        last_q = torch.searchsorted(sorted_k, self.query_positions_q, right=True) - 1
        nearest_q = order_k[last_q.clamp_min(0)]
        sees_q = (last_q >= 0) & (self.key_documents_k[nearest_q] == self.query_documents_q)
        if self.window is not None:
            sees_q &= self.query_positions_q - self.key_positions_k[nearest_q] < self.window
        return sees_q

    @cached_property
    def is_empty(self) -> bool:
        """True if no query sees any key."""
        return not bool(self.sees_q.any())

    @cached_property
    def every_query_sees(self) -> bool:
        """True if every query sees a key."""
        return bool(self.sees_q.all())

    def once(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of ``make``, computed at the first call under this name and cached."""
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]


@dataclass(frozen=True)
class Shared:
    """The keys of each outer rank that queries of others see: a run of its tokens, as long on every rank.

    Attributes:
        first_G: place of the first of them among a rank's tokens.
        count: how many of a rank's tokens; 0 where every document is on one rank.
        hops: places in the ring of outer ranks from a rank to the farthest one that sees any of its keys. Of a document
            every query sees the keys before it; a window may hide some that are counted.
    """

    first_G: tuple[int, ...]
    count: int
    hops: int

    def rows(self, rank: int) -> slice:
        """Places of a rank's shared keys among its tokens."""
        return slice(self.first_G[rank], self.first_G[rank] + self.count)


ALGORITHMS = ("gathered", "ring", "ulysses", "hybrid")
ONE_INNER, ONE_OUTER = Axis("cp_inner"), Axis("cp_outer")


@dataclass(frozen=True, eq=False)
class AttentionShard:
    """A row's tokens and documents, and how ranks exchange keys and values.

    Attributes:
        positions_GUt: [G, U, t] positions in the row of each rank's tokens, in its local order, on the host.
        documents_T: [T] document number at each position, on the host; each document is one run of the row.
        algorithm: one of `ALGORITHMS`.
        kernel: name of the kernel; see `workbench.sharding.attention.kernels`.
        real_T: [T] bool, the position holds a token of a document, on the host; None: all.
        attend: replaces the algorithm: called with query, key, value, this shard, window and scale. None: the
            algorithm.
    """

    positions_GUt: Tensor
    documents_T: Tensor
    algorithm: str = "gathered"
    kernel: str = "auto"
    inner: Axis = ONE_INNER
    outer: Axis = ONE_OUTER
    real_T: Tensor | None = None
    attend: Callable[..., Tensor] | None = None
    _blocks: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _orders: dict[tuple[torch.device, bool], Tensor | None] = field(default_factory=dict, repr=False)

    @classmethod
    def make(
        cls,
        plan: ShardPlan,
        document_ids_T: Tensor,
        axis: Axis,
        *,
        algorithm: str = "gathered",
        kernel: str = "auto",
        inner: Axis | None = None,
        outer: Axis | None = None,
    ) -> AttentionShard:
        """Build the description of a row from its shard plan.

        Document ids are those of the whole row, in its original order. Each run of padding is a separate document, so
        that every query sees at least itself. All algorithms are the same on an axis of one rank. Hybrid needs
        ``inner``, the neighbours on the axis that exchange heads, and ``outer``, the ranks with one inner coordinate.

        Raises:
            ShardingError: an unknown algorithm, or hybrid without its two axes.
        """
        if algorithm not in ALGORITHMS:
            raise ShardingError(
                f"attention algorithm {algorithm!r}",
                rule=f"one of {', '.join(ALGORITHMS)}",
                fix="correct layout.attention",
            )
        if axis.size == 1 or algorithm in ("gathered", "ring"):
            inner, outer = ONE_INNER, axis
        elif algorithm == "ulysses":
            inner, outer = axis, ONE_OUTER
        if inner is None or outer is None or inner.size * outer.size != plan.cp:
            raise ShardingError(
                "hybrid attention",
                found="no inner and outer axes that make up cp",
                rule="cp is inner times outer",
                fix="make_mesh(cp=..., ulysses=...) creates both",
            )
        # Numbered by runs, so that separate runs of padding (all with one id) are separate documents.
        _, runs_T = torch.unique_consecutive(document_ids_T.cpu(), return_inverse=True)
        positions_GUt = plan.permutation_T.cpu().view(outer.size, inner.size, -1)
        return cls(positions_GUt, runs_T, algorithm, kernel, inner, outer, document_ids_T.cpu() != PADDING)

    @cached_property
    def outer_positions_Gs(self) -> Tensor:
        """[G, s] positions of each outer rank after heads were exchanged, in their order then.

        With inner ranks the positions are in the order of the row, so that a document is in as few pieces as possible.
        """
        positions_Gs = self.positions_GUt.flatten(1)
        return positions_Gs if self.inner.size == 1 else positions_Gs.sort(dim=1).values

    def row_order_on(self, device: torch.device, *, back: bool = False) -> Tensor | None:
        """[s] index of each of this rank's `outer_positions_Gs` in the inner ranks' tokens, in rank order; cached.

        ``back``: the inverse. None if both orders are the same.
        """
        if (device, back) not in self._orders:
            order_s = self.positions_GUt[self.outer.rank].flatten().argsort()
            same = torch.equal(order_s, torch.arange(len(order_s)))
            self._orders[device, back] = None if same else (order_s.argsort() if back else order_s).to(device)
        return self._orders[device, back]

    def shared(self, window: int | None = None) -> Shared:
        """The keys that others see, of every outer rank; cached.

        The first query of another rank at or after a key sees it, if any does.
        """
        return self._once(("shared", window), lambda: self._find_shared(window))

    def _find_shared(self, window: int | None) -> Shared:
        positions_Gs, total = self.outer_positions_Gs, len(self.documents_T)
        ranks, tokens = positions_Gs.shape
        rank_T = torch.empty(total, dtype=torch.int64)
        rank_T[positions_Gs] = torch.arange(ranks)[:, None].expand(-1, tokens)
        _, lengths = torch.unique_consecutive(rank_T, return_counts=True)
        other_T = lengths.cumsum(0).repeat_interleave(lengths)  # first position after this one on another rank
        seen_T = (other_T < total) & (self.documents_T == self.documents_T[other_T.clamp_max(total - 1)])
        if window is not None:
            seen_T &= other_T - torch.arange(total) < window
        places = [seen_s.nonzero()[:, 0] for seen_s in seen_T[positions_Gs]]
        count = max(int(place[-1] - place[0]) + 1 if len(place) else 0 for place in places)
        starts_G = (min(int(place[0]), tokens - count) if len(place) else 0 for place in places)
        if not count:
            return Shared(tuple(starts_G), 0, 0)
        documents_Gs, shape = self.documents_T[positions_Gs], (ranks, int(self.documents_T[-1]) + 1)
        first_GN = torch.full(shape, total).scatter_reduce_(1, documents_Gs, positions_Gs, "amin")
        last_GN = torch.full(shape, -1).scatter_reduce_(1, documents_Gs, positions_Gs, "amax")
        seen_by = [hop for hop in range(1, ranks) if bool((last_GN.roll(-hop, 0) >= first_GN).any())]
        return Shared(tuple(starts_G), count, max(seen_by))

    def shared_block(self, source: int, *, window: int | None = None) -> tuple[slice, Block]:
        """The shared keys of another rank, and this rank's queries from the first to the last that sees one; cached.

        Returns:
            Places of these queries among this rank's tokens, and the block.
        """
        return self._once(("shared block", source, window), lambda: self._find_shared_block(source, window))

    def _find_shared_block(self, source: int, window: int | None) -> tuple[slice, Block]:
        key_k = self.outer_positions_Gs[source][self.shared(window).rows(source)]
        seeing = self._block_of(slice(None), key_k, window).sees_q.nonzero()[:, 0]
        queries = slice(int(seeing[0]), int(seeing[-1]) + 1) if len(seeing) else slice(0, 0)
        return queries, self._block_of(queries, key_k, window)

    def gathered_block(self, *, window: int | None = None) -> Block:
        """This rank's queries against its own keys, all, and the shared ones of the others, in rank order; cached."""

        def make() -> Block:
            shared = self.shared(window)
            key_Gs = [key_s[shared.rows(rank)] for rank, key_s in enumerate(self.outer_positions_Gs)]
            key_Gs[self.outer.rank] = self.outer_positions_Gs[self.outer.rank]
            return self._block_of(slice(None), torch.cat(key_Gs), window)

        return self._once(("gathered block", window), make)

    def block(self, source: int | None = None, *, window: int | None = None) -> Block:
        """This rank's queries against the keys of one outer rank, or of all in rank order; cached."""
        key_k = self.outer_positions_Gs.flatten() if source is None else self.outer_positions_Gs[source]
        return self._once(("block", source, window), lambda: self._block_of(slice(None), key_k, window))

    def _block_of(self, queries: slice, key_k: Tensor, window: int | None) -> Block:
        query_q = self.outer_positions_Gs[self.outer.rank][queries]
        return Block(query_q, key_k, self.documents_T[query_q], self.documents_T[key_k], window)

    def _once(self, name: Hashable, make: Callable[[], Any]) -> Any:
        if name not in self._blocks:
            self._blocks[name] = make()
        return self._blocks[name]
