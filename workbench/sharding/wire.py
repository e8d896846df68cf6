"""Communication primitives of the collectives, over a process group or among ranks simulated in one process.

Nothing here uses autograd; `workbench.sharding.collectives` adds meaning and adjoints. A group is a
`torch.distributed` process group, or any object with ``exchange`` (`SimulatedGroup`), on which the other operations
are built. Simulated sums are taken in rank order.

Letters: R ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor


class Gathered(list[Tensor]):
    """The tensors of all simulated ranks, in rank order: one object for all of them, and so is each reduction of it.

    Otherwise each of R ranks adds R tensors, and a collective grows with the square of its ranks.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__(tensors)
        self._reduced: dict[bool, Tensor] = {}

    def reduced(self, *, largest: bool) -> Tensor:
        """Sum (or maximum) in rank order, in the precision of the tensors. It must not be overwritten."""
        if largest not in self._reduced:
            total = self[0].clone()
            for other in self[1:]:
                total = torch.maximum(total, other) if largest else total + other
            self._reduced[largest] = total
        return self._reduced[largest]


@runtime_checkable
class SimulatedGroup(Protocol):
    """A group of ranks simulated in one process; `simulate`'s also have ``among(name, ranks)``, for subgroups."""

    rank: int

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order, once all have called. They must not be overwritten.

        One `Gathered` for all ranks where reductions shall be computed once.
        """
        ...


Group = dist.ProcessGroup | SimulatedGroup

_GATHER_INTO = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer name, if present
_REDUCE_INTO = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_name(group: Group | None) -> str:
    """Name of a process group in flight records; "" for none, or a simulated one."""
    return group.group_name if isinstance(group, dist.ProcessGroup) else ""


def subgroup(world: Group, name: str, ranks: Sequence[int]) -> Group | None:
    """Create a group of some ranks of the job, in ascending order; None on other ranks. Collective over the job.

    ``world`` is any process group; for simulated ranks, the group of all of them. They know it by its name.
    """
    if not isinstance(world, dist.ProcessGroup):
        return cast(Any, world).among(name, ranks)
    group = dist.new_group(list(ranks))
    return group if dist.get_rank() in ranks else None


def meet(group: Group) -> None:
    """Barrier over the group; a no-op for simulated ranks, which synchronize in every other collective."""
    if isinstance(group, dist.ProcessGroup):
        dist.barrier(group=group)


def release(group: Group) -> None:
    """Destroy a group created by `subgroup`; simulated groups hold no resources."""
    if isinstance(group, dist.ProcessGroup):
        dist.destroy_process_group(group)


def all_reduce(tensor: Tensor, group: Group, *, largest: bool = False) -> None:
    """Sum (or maximum) over the group, in place."""
    if isinstance(group, dist.ProcessGroup):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        return
    gathered = group.exchange(tensor.clone())
    tensor.copy_((gathered if isinstance(gathered, Gathered) else Gathered(gathered)).reduced(largest=largest))


def start_all_reduce(tensor: Tensor, group: Group) -> Callable[[], None]:
    """Start the sum of `all_reduce`; return a function that waits for it. Simulated ranks meet at the start."""
    if not isinstance(group, dist.ProcessGroup):
        all_reduce(tensor, group)
        return lambda: None
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None, "this rank is in the group"
    return work.wait


def all_gather(tensor: Tensor, group: Group, size: int) -> list[Tensor]:
    """Gather the tensors of all ranks, in rank order; all of one shape."""
    if isinstance(group, dist.ProcessGroup):
        pieces = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(pieces, tensor, group=group)
        return pieces
    return [piece.clone() for piece in group.exchange(tensor.clone())]


def all_gather_into(whole: Tensor, own: Tensor, group: Group) -> None:
    """Gather the tensors of all ranks, flat and in rank order, into ``whole``."""
    if isinstance(group, dist.ProcessGroup):
        _GATHER_INTO(whole, own, group=group)
        return
    whole.copy_(torch.stack(group.exchange(own.clone())).view_as(whole))


def start_all_gather_into(whole: Tensor, own: Tensor, group: Group) -> Callable[[], None]:
    """Start `all_gather_into`; return a function that waits for it. On a GPU other kernels run meanwhile."""
    if not overlaps(group):
        all_gather_into(whole, own, group)
        return lambda: None
    return _GATHER_INTO(whole, own, group=group, async_op=True).wait


def start_reduce_scatter_into(own: Tensor, whole: Tensor, group: Group) -> Callable[[], None]:
    """Start `reduce_scatter_into`; return a function that waits for it. On a GPU other kernels run meanwhile."""
    if not _reduces_and_scatters(group):
        reduce_scatter_into(own, whole, group)
        return lambda: None
    return _REDUCE_INTO(own, whole, group=group, async_op=True).wait


def overlaps(group: Group) -> bool:
    """True if a started collective of the group runs while this rank computes.

    Torch's fake backend, which moves nothing, stands for NCCL in a measurement of one rank alone.
    """
    return isinstance(group, dist.ProcessGroup) and dist.get_backend(group) in ("nccl", "fake")


def _reduces_and_scatters(group: Group) -> bool:
    """True if the group has a reduce-scatter: some gloo builds have none, and some fake ones leave its output unset."""
    return isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "nccl"


def reduce_scatter_into(own: Tensor, whole: Tensor, group: Group) -> None:
    """Sum ``whole`` over ranks and write each rank's part of the sum, in rank order, to its ``own``.

    ``whole`` may be overwritten.
    """
    if _reduces_and_scatters(group):
        _REDUCE_INTO(own, whole, group=group)
        return
    all_reduce(whole, group)
    rank = dist.get_rank(group) if isinstance(group, dist.ProcessGroup) else group.rank
    own.copy_(whole.view(-1, own.numel())[rank].view_as(own))


def all_to_all(pieces_R: Tensor, group: Group, rank: int) -> Tensor:
    """Send the r-th piece to rank r; [R, ...] -> [R, ...], which holds at r the piece that rank r sent here."""
    if isinstance(group, dist.ProcessGroup):
        received_R = torch.empty_like(pieces_R)
        dist.all_to_all_single(received_R, pieces_R, group=group)
        return received_R
    return torch.stack([sent_R[rank] for sent_R in group.exchange(pieces_R.clone())])


def start_all_to_all(pieces_R: Tensor, group: Group, rank: int) -> Callable[[], Tensor]:
    """Start `all_to_all`; return a function that waits for its result. On a GPU other kernels run meanwhile."""
    if not isinstance(group, dist.ProcessGroup) or not overlaps(group):
        received_R = all_to_all(pieces_R, group, rank)
        return lambda: received_R
    received_R = torch.empty_like(pieces_R)
    work = dist.all_to_all_single(received_R, pieces_R, group=group, async_op=True)
    assert work is not None, "this rank is in the group"

    def wait() -> Tensor:
        work.wait()
        return received_R

    return wait


def exchange_rows(rows: Tensor, counts_RR: Tensor, group: Group, rank: int) -> Tensor:
    """Exchange runs of rows between all ranks, in rank order; see `collectives.exchange_rows`."""
    received = counts_RR[:, rank].tolist()
    if isinstance(group, dist.ProcessGroup):
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, counts_RR[rank].tolist(), group=group)
        return output
    padded = rows.new_zeros(int(counts_RR.sum(1).max()), *rows.shape[1:])  # ``exchange`` needs one shape on all ranks
    padded[: len(rows)] = rows
    begins = counts_RR[:, :rank].sum(1).tolist()
    sources = zip(group.exchange(padded), begins, received, strict=True)
    return torch.cat([sent[begin : begin + count] for sent, begin, count in sources])


def start_rotation(tensor: Tensor, group: Group, rank: int, size: int, places: int = 1) -> Callable[[], Tensor]:
    """Send a tensor some places on in the ring; see `collectives.start_rotation`. All have one shape."""
    after, before = (rank + places) % size, (rank - places) % size
    if not isinstance(group, dist.ProcessGroup):
        gathered = group.exchange(tensor.clone())
        return lambda: gathered[before].clone()
    received = torch.empty_like(tensor)
    handles = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, dist.get_global_rank(group, after), group),
            dist.P2POp(dist.irecv, received, dist.get_global_rank(group, before), group),
        ]
    )

    def wait() -> Tensor:
        for handle in handles:
            handle.wait()
        return received

    return wait


def start_send(tensor: Tensor, group: Group, pair: tuple[int, int]) -> Callable[[], None]:
    """Send a tensor to the second rank of a pair of the group; see `pipeline.start_send`.

    Simulated ranks meet: both come to their transfers in one order.
    """
    if not isinstance(group, dist.ProcessGroup):
        _pair(group, pair).exchange(tensor.clone())
        return lambda: None
    work = dist.isend(tensor, dist.get_global_rank(group, pair[1]), group=group)

    def wait() -> None:
        if work is not None:
            work.wait()
        tensor.detach()  # alive until it has left

    return wait


def start_receive(like: Tensor, group: Group, pair: tuple[int, int]) -> Callable[[], Tensor]:
    """Receive a tensor from the first rank of a pair of the group; see `pipeline.start_receive`."""
    if not isinstance(group, dist.ProcessGroup):
        sent = _pair(group, pair).exchange(like)[0].clone()
        return lambda: sent
    work = dist.irecv(like, dist.get_global_rank(group, pair[0]), group=group)

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return like

    return wait


def _pair(group: SimulatedGroup, pair: tuple[int, int]) -> SimulatedGroup:
    """The group of two simulated ranks, the sender first."""
    whole = cast(Any, group)
    return cast(SimulatedGroup, whole.among(whole.axis, [whole.ranks[place] for place in pair]))
