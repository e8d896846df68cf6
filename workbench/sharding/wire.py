"""The moves of data that every collective here is made of, over a process group or among ranks simulated in a process.

Nothing here knows of autograd; `workbench.sharding.collectives` says what each move means, and its adjoint. A group is
a `torch.distributed` process group, or anything with ``exchange`` (`SimulatedGroup`), from whose one operation the
others follow. Simulated sums are taken in rank order.

Letters: R ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor


@runtime_checkable
class SimulatedGroup(Protocol):
    """The ranks of a group that live in one process."""

    rank: int

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Everyone's tensor, in rank order; returns when all ranks of the group have come. Nobody may write to them."""
        ...


class SimulatedWorld(SimulatedGroup, Protocol):
    """A group of simulated ranks that can be asked for groups of some of them."""

    def among(self, name: str, ranks: Sequence[int]) -> SimulatedGroup | None:
        """The group of some ranks; None if this one is not among them."""
        ...


Group = dist.ProcessGroup | SimulatedGroup

_GATHER_INTO = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the later name, if it is there
_REDUCE_INTO = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_name(group: Group | None) -> str:
    """What a process group is called in flight records; "" for none, or a simulated one."""
    return group.group_name if isinstance(group, dist.ProcessGroup) else ""


def subgroup(world: Group, name: str, ranks: Sequence[int]) -> Group | None:
    """A new group of some ranks, in ascending order; None on a rank that is not among them. Collective over the job.

    Args:
        world: of process groups, any; of simulated ranks, one that has them all.
        name: what it is called among simulated ranks.
        ranks: of the whole job.
    """
    if not isinstance(world, dist.ProcessGroup):
        return cast(SimulatedWorld, world).among(name, ranks)
    group = dist.new_group(list(ranks))
    return group if dist.get_rank() in ranks else None


def meet(group: Group) -> None:
    """Return when every rank of the group has come here; simulated ranks hand over in every other collective."""
    if isinstance(group, dist.ProcessGroup):
        dist.barrier(group=group)


def release(group: Group) -> None:
    """Give up a group that `subgroup` made; simulated ones hold nothing."""
    if isinstance(group, dist.ProcessGroup):
        dist.destroy_process_group(group)


def all_reduce(tensor: Tensor, group: Group, *, largest: bool = False) -> None:
    """Sum (or maximum) over the group, in place."""
    if isinstance(group, dist.ProcessGroup):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        return
    everyone = group.exchange(tensor.clone())
    total = everyone[0].clone()
    for other in everyone[1:]:
        total = torch.maximum(total, other) if largest else total + other
    tensor.copy_(total)


def all_gather(tensor: Tensor, group: Group, size: int) -> list[Tensor]:
    """Everyone's tensor, in rank order; all of one shape."""
    if isinstance(group, dist.ProcessGroup):
        pieces = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(pieces, tensor, group=group)
        return pieces
    return [piece.clone() for piece in group.exchange(tensor.clone())]


def reduce_scatter(pieces_R: Tensor, group: Group, rank: int) -> Tensor:
    """Everyone's R pieces summed piece by piece; each rank gets the sum of the piece that stands at its own number.

    Shapes: [R, ...] -> [...].
    """
    if isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "nccl":
        own = torch.empty_like(pieces_R[0])
        dist.reduce_scatter(own, list(pieces_R), group=group)
        return own
    whole_R = pieces_R.clone()  # reduce_scatter is absent from some gloo builds
    all_reduce(whole_R, group)
    return whole_R[rank].clone()


def all_gather_into(whole: Tensor, own: Tensor, group: Group) -> None:
    """Everyone's tensor, flat and in rank order, written to ``whole``."""
    if isinstance(group, dist.ProcessGroup):
        _GATHER_INTO(whole, own, group=group)
        return
    whole.copy_(torch.stack(group.exchange(own.clone())).view_as(whole))


def reduce_scatter_into(own: Tensor, whole: Tensor, group: Group) -> None:
    """Everyone's ``whole`` summed; each rank's part of the sum, in rank order, written to its ``own``.

    ``whole`` may be written to.
    """
    if isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "nccl":
        _REDUCE_INTO(own, whole, group=group)
        return
    all_reduce(whole, group)  # reduce_scatter is absent from some gloo builds
    rank = dist.get_rank(group) if isinstance(group, dist.ProcessGroup) else group.rank
    own.copy_(whole.view(-1, own.numel())[rank].view_as(own))


def all_to_all(pieces_R: Tensor, group: Group, rank: int) -> Tensor:
    """Send the r-th piece to rank r; what comes back has at r what rank r sent to this rank.

    Shapes: [R, ...] -> [R, ...].
    """
    if isinstance(group, dist.ProcessGroup):
        received_R = torch.empty_like(pieces_R)
        dist.all_to_all_single(received_R, pieces_R, group=group)
        return received_R
    return torch.stack([everything_R[rank] for everything_R in group.exchange(pieces_R.clone())])


def exchange_rows(rows: Tensor, counts_RR: Tensor, group: Group, rank: int) -> Tensor:
    """Send stretches of rows to the others, and get theirs, in rank order.

    Args:
        rows: what this rank sends to rank 0, then what it sends to rank 1, ...
        counts_RR: [R, R] long, on the host, the same on every rank: rows that go from rank to rank.
        group: the ranks.
        rank: this one.
    """
    received = counts_RR[:, rank].tolist()
    if isinstance(group, dist.ProcessGroup):
        came = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(came, rows.contiguous(), received, counts_RR[rank].tolist(), group=group)
        return came
    padded = rows.new_zeros(int(counts_RR.sum(1).max()), *rows.shape[1:])  # ranks bring one shape
    padded[: len(rows)] = rows
    begins = counts_RR[:, :rank].sum(1).tolist()
    return torch.cat(
        [
            sent[begin : begin + count]
            for sent, begin, count in zip(group.exchange(padded), begins, received, strict=True)
        ]
    )


def start_rotation(
    tensors: Sequence[Tensor], group: Group, rank: int, size: int, step: int = 1
) -> Callable[[], list[Tensor]]:
    """Send tensors ``step`` ranks up the ring, and say how to wait for those that come from ``step`` ranks below.

    The tensors that are sent may not be written to before the wait is over. Every rank of the group starts the same
    rotations in the same order; all tensors of one place have one shape on all ranks.

    Returns:
        A function to call once, which returns the tensors that came.
    """
    after, before = (rank + step) % size, (rank - step) % size
    if not isinstance(group, dist.ProcessGroup):
        everyone = [group.exchange(tensor.clone()) for tensor in tensors]
        return lambda: [pieces[before].clone() for pieces in everyone]
    received = [torch.empty_like(tensor) for tensor in tensors]
    operations: list[Any] = []
    for tensor, arriving in zip(tensors, received, strict=True):
        operations.append(dist.P2POp(dist.isend, tensor, dist.get_global_rank(group, after), group))
        operations.append(dist.P2POp(dist.irecv, arriving, dist.get_global_rank(group, before), group))
    handles = dist.batch_isend_irecv(operations)

    def wait() -> list[Tensor]:
        for handle in handles:
            handle.wait()
        return received

    return wait
