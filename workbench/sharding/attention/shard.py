"""What attention must know of a row and of who holds which of its tokens.

A cp axis is cut in two: *inner* ranks exchange heads (each then has all tokens of the inner ranks, for some heads), and
*outer* ranks exchange keys and values of the heads they have. gathered and ring have no inner ranks, ulysses has no
outer ones, hybrid has both.

Letters: T packed tokens | G outer ranks | U inner ranks | t tokens of a rank | s = U * t tokens after the exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from workbench.errors import ShardingError
from workbench.rollouts.batch import PADDING
from workbench.sharding.attention.block import Block
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan

ALGORITHMS = ("gathered", "ring", "ulysses", "hybrid")
ONE_INNER, ONE_OUTER = Axis("cp_inner"), Axis("cp_outer")


@dataclass(frozen=True, eq=False)
class AttentionShard:
    """A row's tokens and documents, and how ranks come to each other's keys and values.

    Attributes:
        positions_GUt: [G, U, t] places in the row that each rank holds, in its own order, on the host.
        documents_T: [T] number of the document at each place, on the host; each is one stretch of the row.
        algorithm: one of `ALGORITHMS`.
        kernel: name of what computes a block; see `workbench.sharding.attention.kernels`.
        inner: the ranks that exchange heads.
        outer: the ranks that exchange keys and values.
        real_T: [T] bool: which places hold a token of a document, on the host; None: all.
        attend: what computes instead of the algorithm: of query, key, value, this, window and scale. None: the
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
    _blocks: dict[tuple[int | None, int | None], Block] = field(default_factory=dict, repr=False)
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
        """Say who holds what, and how they exchange it.

        Args:
            plan: which rank holds which token.
            document_ids_T: [T] of the whole row, in its own order. Padding is a document of its own wherever it stands,
                so that every query sees at least itself.
            axis: the context-parallel axis.
            algorithm: one of `ALGORITHMS`; all are the same on an axis of one rank.
            kernel: what computes a block.
            inner: for hybrid: the neighbours on the axis that exchange heads.
            outer: for hybrid: the ranks at the same place among their neighbours.

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
                found="no axes of neighbours and of rings that make up cp",
                rule="cp is inner times outer",
                fix="make_mesh(cp=..., ulysses=...) lays both",
            )
        # Numbered by stretches: a document id never comes back later in the row, and neither does padding.
        _, stretches_T = torch.unique_consecutive(document_ids_T.cpu(), return_inverse=True)
        positions_GUt = plan.permutation_T.cpu().view(outer.size, inner.size, -1)
        return cls(positions_GUt, stretches_T, algorithm, kernel, inner, outer, document_ids_T.cpu() != PADDING)

    @cached_property
    def held_Gs(self) -> Tensor:
        """[G, s] places that each outer rank holds after heads were exchanged, in their order then.

        With inner ranks the places are in the order of the row, so that a document is in as few pieces as can be.
        """
        held_Gs = self.positions_GUt.flatten(1)
        return held_Gs if self.inner.size == 1 else held_Gs.sort(dim=1).values

    def row_order_on(self, device: torch.device, *, back: bool = False) -> Tensor | None:
        """Where each token of `held_Gs` of this rank stands among the inner ranks' own, in rank order.

        Args:
            device: where the answer is wanted; made once for each.
            back: the inverse: where each token of the inner ranks stands in `held_Gs`.

        Returns:
            [s] places; None where both orders are the same.
        """
        if (device, back) not in self._orders:
            order_s = self.positions_GUt[self.outer.rank].flatten().argsort()
            same = torch.equal(order_s, torch.arange(len(order_s)))
            self._orders[device, back] = None if same else (order_s.argsort() if back else order_s).to(device)
        return self._orders[device, back]

    def block(self, source: int | None = None, *, window: int | None = None) -> Block:
        """This rank's queries against the keys of one outer rank, or of all in rank order."""
        known = self._blocks.get((source, window))
        if known is None:
            query_s = self.held_Gs[self.outer.rank]
            key_k = self.held_Gs.flatten() if source is None else self.held_Gs[source]
            known = Block(query_s, key_k, self.documents_T[query_s], self.documents_T[key_k], window)
            self._blocks[source, window] = known
        return known
