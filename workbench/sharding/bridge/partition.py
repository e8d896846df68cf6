"""A whole sequence cut for a rank: over cp by an order, then over tp in stretches (sequence parallelism).

What a module does with a sequence that came whole to each of its cp ranks. Both groups are given by name, never taken
from a default: on ranks that two modules share, each has its own.

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
    """How a sequence lies over cp, and over tp inside of it.

    Attributes:
        cp: the ranks that share a sequence.
        order: one of `workbench.sharding.orders.ORDERS`.
        tp: ranks that hold a stretch each of what cp left; one rank where they hold it whole.
    """

    cp: Axis
    order: str = "zigzag"
    tp: Axis = _ALONE

    def split(self, whole: Tensor, *, dim: int) -> Tensor:
        """This rank's tokens, in its order.

        Shapes:   [..., T, ...] -> [..., T / (cp tp), ...] along ``dim``.
        Layout:   the same on all ranks of cp and tp -> cp: sharded(T); tp: sharded(t).
        Backward: over tp all-gathered, so that it is the same on each; over cp zero in places of other ranks, so that
                  the sum over cp, which a bridge takes, is whole.
        Raises:   ShardingError: a length that does not divide (I13).
        """
        tokens = whole.shape[dim]
        positions_t = owned(self.order, tokens, self.cp.size)[self.cp.rank].to(whole.device)
        mine = whole.index_select(dim, positions_t) if self.cp.size > 1 else whole
        check_stretches(tokens, self.cp.size, self.tp.size)
        return slice_gather(mine, self.tp, dim=dim)


def check_stretches(tokens: int, cp: int, tp: int) -> None:
    """Refuse tokens of a cp rank that tp ranks cannot share evenly.

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
def owned(order: str, tokens: int, cp: int) -> Tensor:
    """[R, t] positions of a sequence that each cp rank holds, in its order; on the host, not to be written to.

    Raises:
        ShardingError: an unknown order, or a length that does not divide.
    """
    if cp == 1:
        return torch.arange(tokens)[None]
    return ShardPlan.make(order, num_tokens=tokens, cp=cp, document_lengths=(tokens,)).permutation_T.view(cp, -1)
