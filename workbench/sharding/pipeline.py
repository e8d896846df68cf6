"""Pipeline parallelism: the actions of each rank, transfers between stages, and what all stages then share.

The layers of a model are cut into stages, one after another; stage s is on rank s % ranks of the axis pp. Each
micro-batch passes forward through all stages and backward through them again. A schedule is the order of these
computations on each rank; `schedule` adds the transfers in one order for the whole axis, of which each rank has its
part: ranks that all wait for each transfer to be met would still not wait in a ring.

A transfer is in the flight records of both ranks, as an entry of its stage boundary and direction: of the sender when
it is sent, which does not wait, and of the receiver while it waits.

Source: GPipe, arXiv 1811.06965; 1F1B and interleaved stages, arXiv 2104.04473, section 2.2. The orders are those of
        `torch.distributed.pipelining.schedules` 2.13 (`tests/unit/sharding/test_pipeline.py` compares them).

Letters: R ranks of the axis.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from workbench.errors import ShardingError
from workbench.sharding import flight, wire
from workbench.sharding.collectives import gather_many
from workbench.sharding.mesh import Axis, Mesh

Kind = Literal["forward", "backward", "send activation", "receive activation", "send gradient", "receive gradient"]


class Action(NamedTuple):
    """One entry of a rank's schedule: a computation of a stage on a micro-batch, or a transfer from or to it."""

    kind: Kind
    stage: int
    micro_batch: int


def schedule(name: str, *, ranks: int, stages_per_rank: int, micro_batches: int) -> list[list[Action]]:
    """Return the actions of every rank, with transfers between stages on different ranks.

    Args:
        name: gpipe, 1f1b or interleaved_1f1b; the first two have one stage per rank.
        ranks: of the axis.
        stages_per_rank: stages of each rank, that far apart.
        micro_batches: any number from 1; a schedule of few is that of more, without the computations of the others.

    Raises:
        ShardingError: an unknown name.
    """
    if name not in _ORDERS:
        raise ShardingError(
            f"pipeline schedule {name!r}",
            rule=f"one of {', '.join(_ORDERS)}",
            fix="choose one; zero-bubble schedules split the gradients of inputs and weights, and are not proven",
        )
    orders = [_ORDERS[name](rank, ranks, stages_per_rank, micro_batches) for rank in range(ranks)]
    return _with_transfers(orders, ranks, ranks * stages_per_rank)


def _gpipe(rank: int, ranks: int, stages_per_rank: int, micro_batches: int) -> list[Action]:
    return _alternating(range(rank, rank + 1), micro_batches, micro_batches, micro_batches)


def _1f1b(rank: int, ranks: int, stages_per_rank: int, micro_batches: int) -> list[Action]:
    return _alternating(range(rank, rank + 1), micro_batches, micro_batches, ranks - 1 - rank)


def _interleaved(rank: int, ranks: int, stages_per_rank: int, micro_batches: int) -> list[Action]:
    """Micro-batches pass in rounds; torch needs rounds of equal size, so others are dropped from a longer schedule."""
    rounds = max(1, micro_batches // ranks)
    even = micro_batches if micro_batches % rounds == 0 else -(-micro_batches // ranks) * ranks
    together = even // max(1, even // ranks)
    warmup = (stages_per_rank - 1) * together + 2 * (ranks - 1 - rank)
    stages = range(rank, rank + ranks * stages_per_rank, ranks)
    return [action for action in _alternating(stages, even, together, warmup) if action.micro_batch < micro_batches]


_ORDERS: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved_1f1b": _interleaved,
}


def _alternating(stages: Sequence[int], micro_batches: int, together: int, warmup: int) -> list[Action]:
    """Forward passes, of which some come first, then one backward after each; the remaining backward passes last.

    ``together`` micro-batches pass through all stages of the rank before the next.
    """
    rounds = [range(first, min(first + together, micro_batches)) for first in range(0, micro_batches, together)]
    forward = [Action("forward", stage, at) for one in rounds for stage in stages for at in one]
    backward = [Action("backward", stage, at) for one in rounds for stage in reversed(stages) for at in one]
    warmup = min(warmup, len(forward))
    pairs = itertools.chain.from_iterable(zip(forward[warmup:], backward, strict=False))
    return [*forward[:warmup], *pairs, *backward[len(forward) - warmup :]]


def _with_transfers(orders: Sequence[list[Action]], ranks: int, stages: int) -> list[list[Action]]:
    """Add transfers: each rank in turn takes its next computation if its input is there, and sends its output at once.

    The receiver's action is appended at that moment, so all transfers are in one order, and each rank has its part.
    """
    pending, actions = [list(order) for order in orders], [list[Action]() for _ in range(ranks)]
    ready = {Action("forward", 0, at) for order in orders for _, _, at in order}
    while any(pending):
        waiting = sum(map(len, pending))
        for rank, order in enumerate(pending):
            if not order or order[0] not in ready:
                continue
            action = order.pop(0)
            actions[rank].append(action)
            kind, stage, at = action
            if kind == "forward" and stage == stages - 1:
                ready.add(Action("backward", stage, at))
                continue
            target = stage + 1 if kind == "forward" else stage - 1
            if target < 0:
                continue
            ready.add(Action(kind, target, at))
            if target % ranks != rank:
                send: Kind = "send activation" if kind == "forward" else "send gradient"
                receive: Kind = "receive activation" if kind == "forward" else "receive gradient"
                actions[rank].append(Action(send, stage, at))
                actions[target % ranks].append(Action(receive, target, at))
        assert sum(map(len, pending)) < waiting, "a schedule computes nothing before its input"
    return actions


# -- transfers ---------------------------------------------------------------------------------------------------------


def start_send(value: Tensor, action: Action, axis: Axis) -> Callable[[], None]:
    """Send a tensor to the rank of the neighbouring stage, outside autograd; it must not be overwritten before.

    Adjoint: of an activation its gradient, which the schedule sends back. Returns a function that waits until the
    tensor may be overwritten.
    """
    target = action.stage + (1 if action.kind == "send activation" else -1)
    return _send(value, axis, (axis.rank, target % axis.size), *_boundary(action.stage, target, action.micro_batch))


def start_receive(like: Tensor, action: Action, axis: Axis) -> Callable[[], Tensor]:
    """Receive a tensor of the shape and dtype of ``like``, which is overwritten, from the neighbouring stage.

    Returns a function to call once, which waits for the tensor.
    """
    source = action.stage + (-1 if action.kind == "receive activation" else 1)
    return _receive(like, axis, (source % axis.size, axis.rank), *_boundary(source, action.stage, action.micro_batch))


def sum_of_ends(values: Sequence[Tensor], axis: Axis) -> None:
    """Sum tensors that the first and the last rank of an axis both hold, in place, in that order on both.

    Backward: none. Ranks between them have nothing to do.
    """
    ends = (0, axis.size - 1)
    if axis.group is None or axis.rank not in ends:
        return
    remote = ends[axis.rank == 0]
    for number, value in enumerate(values):
        local, name = value.detach().contiguous(), f"{flight.TRANSFER}, shared weight {number}"
        # The order of the two transfers is the same on both ranks, which may wait for each in turn.
        if axis.rank == 0:
            sent = _send(local, axis, (0, remote), name, "first to last")
            total = local + _receive(torch.empty_like(local), axis, (remote, 0), name, "last to first")()
        else:
            arrived = _receive(torch.empty_like(local), axis, (remote, axis.rank), name, "first to last")()
            sent = _send(local, axis, (axis.rank, remote), name, "last to first")
            total = arrived + local
        sent()
        value.copy_(total)


def _boundary(source: int, target: int, micro_batch: int) -> tuple[str, str]:
    """Name of a transfer, and of the direction over a stage boundary, in which micro-batches pass in one order."""
    boundary = f"{flight.TRANSFER} {source} > {target}"
    return f"{boundary}, micro-batch {micro_batch}", boundary


def _send(value: Tensor, axis: Axis, pair: tuple[int, int], name: str, direction: str) -> Callable[[], None]:
    value = value.detach().contiguous()
    with _in(value, axis, pair, name, direction):
        return wire.start_send(value, _group(axis), pair)


def _receive(like: Tensor, axis: Axis, pair: tuple[int, int], name: str, direction: str) -> Callable[[], Tensor]:
    arrival = wire.start_receive(like, _group(axis), pair)

    def arrive() -> Tensor:
        with _in(like, axis, pair, name, direction):
            return arrival()

    return arrive


def _in(value: Tensor, axis: Axis, pair: tuple[int, int], name: str, direction: str) -> AbstractContextManager[None]:
    """Record a transfer under its direction: sender and receiver number the entries of one in the same order."""
    ranks = tuple(axis.ranks[place] for place in pair)
    return flight.entering(
        name, axis.name, ranks, f"{wire.group_name(axis.group)} {direction}", value.shape, value.dtype
    )


def _group(axis: Axis) -> wire.Group:
    assert axis.group is not None, "a pipeline of one rank has no transfers"
    return axis.group


# -- results that some stages have, on all ranks of the axis -----------------------------------------------------------


def share_json(value: Any, mesh: Mesh) -> list[Any]:
    """Return the values of all ranks of the axis pp, in rank order: what JSON keeps; numbers keep all bits."""
    if mesh["pp"].group is None:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(mesh.device)
    return [json.loads(bytes(piece.tolist())) for piece in next(gather_many([text], mesh["pp"]))]


def share_tensors(values: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Return the tensors of all ranks of the axis pp by name; of a name that several have, that of the first.

    Ranks have different names, or none. Outside autograd. Collective over pp.
    """
    axis = mesh["pp"]
    if axis.group is None:
        return dict(values)
    heads = [[name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in values.items()]
    owners: dict[str, tuple[int, torch.dtype, list[int]]] = {}
    for rank, heads_of_rank in enumerate(share_json(heads, mesh)):
        for name, dtype, shape in heads_of_rank:
            owners.setdefault(name, (rank, getattr(torch, dtype), shape))
    sent = [
        (values[name].detach() if rank == axis.rank else torch.empty(0, dtype=dtype)).reshape(-1).to(mesh.device)
        for name, (rank, dtype, _) in owners.items()
    ]
    pieces = zip(owners.items(), gather_many(sent, axis), strict=True)
    return {name: of_ranks[rank].view(shape) for (name, (rank, _, shape)), of_ranks in pieces}
