"""Sharding of a whole sequence: over cp by a token order, then over tp in contiguous runs (sequence parallelism).

For a module that receives whole sequences on each of its cp ranks. Both groups are passed explicitly, never taken from
a default: on ranks that two modules share, each module has its own groups.

Letters: T tokens of the sequence | R ranks of cp | t tokens of a cp rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import ShardingError
from workbench.sharding.collectives import slice_gather
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan

_ALONE = Axis("tp")


@dataclass(frozen=True)
class SequencePartition:
    """Sharding of a sequence over cp, and over tp within a cp shard.

    Attributes:
        cp: the ranks that share a sequence.
        order: one of `workbench.sharding.orders.ORDERS`.
        tp: ranks that hold one contiguous run each of the cp shard; one rank if they hold it whole.
    """

    cp: Axis
    order: str = "zigzag"
    tp: Axis = _ALONE

    def split(self, whole: Tensor, *, dim: int) -> Tensor:
        """Return this rank's tokens, in its local order.

        Shapes:   [..., T, ...] -> [..., T / (cp tp), ...] along ``dim``.
        Layout:   the same on all ranks of cp and tp -> cp: sharded(T); tp: sharded(t).
        Backward: all-gathered over tp, so that it is the same on each rank; over cp zero at positions of other ranks,
                  so that the sum over cp, which a bridge computes, is complete.
        Raises:   ShardingError: a length that does not divide (I13).
        """
        tokens = whole.shape[dim]
        positions_t = owned_positions(self.order, tokens, self.cp.size)[self.cp.rank].to(whole.device)
        local = whole.index_select(dim, positions_t) if self.cp.size > 1 else whole
        check_tp_divides(tokens, self.cp.size, self.tp.size)
        return slice_gather(local, self.tp, dim=dim)


def check_tp_divides(tokens: int, cp: int, tp: int) -> None:
    """Raise if tp does not divide the tokens of a cp rank.

    Raises:
        ShardingError: they do not divide (I13).
    """
    if tokens // cp % tp:
        raise ShardingError(
            f"sequence of {tokens} tokens over cp={cp} and tp={tp} (I13)",
            found=f"{tokens // cp} tokens on a cp rank",
            rule="tp divides the tokens of a cp rank",
            fix=f"pad to a multiple of 2 * cp * tp = {2 * cp * tp}",
        )


@functools.lru_cache(maxsize=64)
def owned_positions(order: str, tokens: int, cp: int) -> Tensor:
    """[R, t] positions of a sequence on each cp rank, in its local order; on the host, cached, read-only.

    Raises:
        ShardingError: an unknown order, or a length that does not divide.
    """
    if cp == 1:
        return torch.arange(tokens)[None]
    return ShardPlan.make(order, num_tokens=tokens, cp=cp, document_lengths=(tokens,)).permutation_T.view(cp, -1)
