"""Fast path of a bridge: at most one all-gather along the batch, and the completion of the gradient over cp.

The gradient of a cp rank that received the whole sequence is zero outside the tokens that it used. An all-reduce
completes it exactly, because only one term of each sum is nonzero; or, if an order defines these tokens, an all-gather
and the inverse permutation, for half the bytes.

Letters: b samples of a rank | s tokens of a sequence | R ranks of cp | k slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.sharding import flight
from workbench.sharding.collectives import all_sum, gather_equal
from workbench.sharding.mesh import Axis


@dataclass(frozen=True, eq=False)
class Direct:
    """One rank's parameters of the fast path.

    Attributes:
        kind: fan-in, fan-out or equal.
        slot: this rank's slot of the batch.
        slots: k.
        batch_dim: of the activation.
        sequence_dim: of the activation.
        gather: the ranks that gather along the batch, in the order of their slots.
        cp: the cp ranks of the destination.
        owned_Rt: [R, s / R] the positions that each of them uses; None: unknown.
    """

    kind: str
    slot: int
    slots: int
    batch_dim: int
    sequence_dim: int
    gather: Axis
    cp: Axis
    owned_Rt: Tensor | None = None


def cross_directly(values: Tensor, direct: Direct) -> Tensor:
    """Return this rank's samples at the destination, whole sequences.

    Shapes:   [b, s, h] (or [s, b, h]) -> [b k, s, h], [b / k, s, h] or [b, s, h].
    Layout:   tp: replicated -> tp: replicated, cp: replicated.
    Backward: the sum over cp, then this rank's slot (fan-in), or the slots of all consumers concatenated (fan-out).
              The latter is also a sum: the source rank is a replica whose copies went to k different consumers.
    """
    anchor = values.new_zeros((), requires_grad=torch.is_grad_enabled())
    return _HandOver.apply(values, anchor, direct)


class _HandOver(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, anchor: Tensor, direct: Direct) -> Tensor:
        ctx.direct, ctx.caller = direct, flight.caller()
        if direct.kind == "fan-in":
            return gather_slots(values, direct, ctx.caller)
        return own_slot(values, direct) if direct.kind == "fan-out" else values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        direct = ctx.direct
        complete = summed_over_cp(gradient, direct, ctx.caller)
        if direct.kind == "fan-in":
            complete = own_slot(complete, direct)
        elif direct.kind == "fan-out":
            complete = gather_slots(complete, direct, ctx.caller)
        return complete, None, None


def gather_slots(values: Tensor, direct: Direct, caller: str | None) -> Tensor:
    """Gather the batches of all slots, in the order of the slots."""
    return _gathered(values, direct.gather, direct.batch_dim, caller)


def own_slot(values: Tensor, direct: Direct) -> Tensor:
    """Return this rank's slot of a batch."""
    each = values.shape[direct.batch_dim] // direct.slots
    return values.narrow(direct.batch_dim, direct.slot * each, each).contiguous()


def summed_over_cp(gradient: Tensor, direct: Direct, caller: str | None) -> Tensor:
    """Complete the gradient of whole sequences over all cp ranks."""
    if direct.cp.size == 1:
        return gradient
    if direct.owned_Rt is None:
        return all_sum(gradient, direct.cp)
    local = gradient.index_select(direct.sequence_dim, direct.owned_Rt[direct.cp.rank].to(gradient.device))
    rank_major = _gathered(local, direct.cp, direct.sequence_dim, caller)
    return rank_major.index_select(direct.sequence_dim, torch.argsort(direct.owned_Rt.flatten()).to(gradient.device))


def _gathered(local: Tensor, axis: Axis, dim: int, caller: str | None) -> Tensor:
    """The tensors of all ranks of an axis, concatenated along a dimension in rank order."""
    return gather_equal(local, axis, caller=caller).movedim(0, dim).flatten(dim, dim + 1)
