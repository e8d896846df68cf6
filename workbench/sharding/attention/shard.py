"""Description of a row for attention: positions by rank, documents, and the exchange algorithm.

A cp axis is split in two: *inner* ranks exchange heads (each then has all tokens of the inner ranks, for some heads),
and *outer* ranks exchange keys and values of their heads. gathered and ring have no inner ranks, ulysses has no outer
ranks, hybrid has both.

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
    """A row's tokens and documents, and how ranks exchange keys and values.

    Attributes:
        positions_GUt: [G, U, t] positions in the row of each rank's tokens, in its local order, on the host.
        documents_T: [T] document number at each position, on the host; each document is one run of the row.
        algorithm: one of `ALGORITHMS`.
        kernel: name of the kernel; see `workbench.sharding.attention.kernels`.
        inner: the ranks that exchange heads.
        outer: the ranks that exchange keys and values.
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
        """Build the description of a row from its shard plan.

        Args:
            plan: the assignment of tokens to ranks.
            document_ids_T: [T] of the whole row, in its original order. Each run of padding is a separate document,
                so that every query sees at least itself.
            axis: the context-parallel axis.
            algorithm: one of `ALGORITHMS`; all are the same on an axis of one rank.
            kernel: name of the kernel that computes a block.
            inner: for hybrid: the neighbours on the axis that exchange heads.
            outer: for hybrid: the ranks with the same inner coordinate.

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
        """Index of each token of `held_Gs` of this rank in the inner ranks' tokens, concatenated in rank order.

        Args:
            device: device of the result, cached per device.
            back: the inverse: index of each token of the inner ranks in `held_Gs`.

        Returns:
            [s] indices; None if both orders are the same.
        """
        if (device, back) not in self._orders:
            order_s = self.positions_GUt[self.outer.rank].flatten().argsort()
            same = torch.equal(order_s, torch.arange(len(order_s)))
            self._orders[device, back] = None if same else (order_s.argsort() if back else order_s).to(device)
        return self._orders[device, back]

    def block(self, source: int | None = None, *, window: int | None = None) -> Block:
        """This rank's queries against the keys of one outer rank, or of all in rank order."""
        cached = self._blocks.get((source, window))
        if cached is None:
            query_s = self.outer_positions_Gs[self.outer.rank]
            key_k = self.outer_positions_Gs.flatten() if source is None else self.outer_positions_Gs[source]
            cached = Block(query_s, key_k, self.documents_T[query_s], self.documents_T[key_k], window)
            self._blocks[source, window] = cached
        return cached
