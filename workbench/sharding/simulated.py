"""All ranks of a mesh in one process: deterministic threads that switch only inside a collective.

Each rank is a thread that runs the code of a real rank (`workbench.sharding.wire` receives a group with ``exchange``
instead of a process group). One rank runs at a time, in rank order, until it waits for others, so a simulation is
deterministic and detects a deadlock immediately. Backward runs in the calling thread, on a GPU too, so collectives
inside backward work.

Per rank, as in a separate process: grad mode, inference mode, autocast, context variables and the number of torch's
threads, initialised from the caller of `simulate`, and torch's random state on the CPU, which starts at the caller's on
every rank.

Not simulated:

* backends: NCCL's order and asynchrony, one collective that overtakes another, time-outs, ranks that die. Mistakes in
  the ranks' own code (a rank that leaves early, another order, another shape) do raise an error;
* summation order: sums are taken in rank order in the precision of the tensors; a ring sums in another order;
* memory and speed: all tensors are in one process, and nothing runs in parallel;
* backward after `simulate` has returned: a graph with collectives is back-propagated by the rank, inside;
* torch.distributed itself: FSDP2, DTensor, `torch.distributed.get_rank`;
* state that threads share: globals, registries, random numbers of Python, of numpy and of a GPU.
"""

from __future__ import annotations

import contextvars
import itertools
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from workbench.errors import LaunchError, ShardingError
from workbench.sharding.mesh import Axis, Mesh, check_ep, check_shard, check_ulysses
from workbench.sharding.wire import Gathered

Result = TypeVar("Result")

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("workbench_simulated", default=False)


def simulate(
    function: Callable[[Mesh], Result],
    *,
    dp: int = 1,
    cp: int = 1,
    tp: int = 1,
    ulysses: int = 1,
    ep: int = 1,
    shard: int = 0,
    pp: int = 1,
    device: torch.device | str = "cpu",
    timeout_s: float = 60.0,
) -> list[Result]:
    """Call a function on every rank of a mesh, all of them in this process.

    The function is called with a rank's mesh, as of `make_mesh`. Ranks share the objects that it closes over, so each
    loads or copies its own model. A rank that computes for ``timeout_s`` without entering a collective ends the
    simulation; its thread cannot be stopped, and continues until it enters one.

    Returns:
        Return values in rank order: tp varies fastest, then cp, then dp, then pp.

    Raises:
        ShardingError: a size below 1; ulysses does not divide cp, or ep or shard dp * cp; called on a simulated rank.
        LaunchError: ranks entered different collectives; a deadlock; a rank took too long.
        Exception: the first exception of a rank, with its rank and coordinates as a note. All other ranks are ended.

    Example:
        >>> from workbench.sharding.collectives import all_sum
        >>> simulate(lambda mesh: float(all_sum(torch.tensor(float(mesh["cp"].rank)), mesh["cp"])), dp=2, cp=3)
        [3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    """
    sizes = ({"pp": pp} if pp != 1 else {}) | {"dp": dp, "cp": cp, "tp": tp}
    layout = " x ".join(f"{name}={size}" for name, size in sizes.items())
    if min(sizes.values()) < 1:
        raise ShardingError(f"simulate {layout}", rule="every size is at least 1", fix="leave out axes of one rank")
    check_ulysses(f"simulate {layout} with ulysses={ulysses}", cp, ulysses)
    check_ep(f"simulate {layout} with ep={ep}", dp * cp, ep)
    check_shard(f"simulate {layout} with shard={shard}", dp * cp, shard)
    if _inside.get():
        raise ShardingError(
            f"simulate {layout} on a simulated rank",
            rule="simulations cannot be nested",
            fix="run simulations one after another, outside",
        )
    inner = {"cp_inner": ulysses, "ep": ep, "shard": shard or dp * cp}
    world = _World(sizes, inner, torch.device(device))
    with torch.random.fork_rng(devices=[]):
        world.run(function, timeout_s)
    return world.results


@dataclass
class _Group:
    """One rank's handle on the group of an axis."""

    world: _World
    axis: str
    rank: int
    ranks: tuple[int, ...]

    def exchange(self, tensor: Tensor) -> Gathered:
        """Return the tensors of all ranks, in rank order."""
        return self.world.exchange(self, tensor)

    def among(self, name: str, ranks: Sequence[int]) -> _Group | None:
        """The group of some ranks of the world; None if this rank is not one of them."""
        me = self.ranks[self.rank]
        return _Group(self.world, name, tuple(ranks).index(me), tuple(ranks)) if me in ranks else None


@dataclass
class _Arrival:
    """A rank's arrival at a collective: name, shape and dtype, caller, tensor."""

    signature: tuple[str, str, str]
    caller: str
    tensor: Tensor

    def describe(self, axis: str) -> str:
        name, shape, dtype = self.signature
        return f"{name} over {axis} of {shape} {dtype} ({self.caller})"


@dataclass
class _Rank:
    """State of a rank: its turn, its random state while it waits, and the collective that it waits in.

    The lock of its turn is free only between the release by the rank before it and its own start.
    """

    number: int
    coordinates: dict[str, int]
    turn: threading.Lock = field(default_factory=threading.Lock)
    random_state: Tensor = field(default_factory=torch.get_rng_state)
    waits: tuple[_Group, _Arrival] | None = None
    received: Gathered = field(default_factory=lambda: Gathered([]))
    ended: bool = False

    def __post_init__(self) -> None:
        self.turn.acquire()

    def __str__(self) -> str:
        return f"rank {self.number} ({', '.join(f'{axis}={at}' for axis, at in self.coordinates.items())})"


class _Ended(BaseException):
    """Ends a rank because another one failed; no ``except Exception`` stops it."""


class _World:
    """Scheduler of the ranks. Only the thread that has the turn accesses its state."""

    def __init__(self, sizes: dict[str, int], inner: dict[str, int], device: torch.device) -> None:
        self.sizes, self.inner, self.device = sizes, inner, device
        places = itertools.product(*(range(size) for size in sizes.values()))  # the last, tp, varies fastest
        self.ranks = [_Rank(number, dict(zip(sizes, place, strict=True))) for number, place in enumerate(places)]
        self.groups = self._groups()
        self.results: list[Any] = [None] * len(self.ranks)
        self.ready: deque[_Rank] = deque(self.ranks)
        self.running: _Rank | None = None
        self.turns = 0
        self.open: dict[tuple[str, tuple[int, ...]], dict[int, _Arrival]] = {}
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self, function: Callable[[Mesh], Any], timeout_s: float) -> None:
        """Run all ranks to completion; raises the first exception of a rank."""
        modes = _callers_modes(self.device)
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._rank, rank, function, modes),
                name=f"simulated rank {rank.number}",
                daemon=True,
            )
            for rank in self.ranks
        ]
        for thread in threads:
            thread.start()
        self._next()
        last_turns = -1
        try:
            while not self.done.wait(timeout_s):
                if last_turns == self.turns:
                    self._too_slow(threads, timeout_s)
                last_turns = self.turns
        except BaseException as error:
            self.error = self.error or error  # ranks that enter a collective from now on are ended there
            raise
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def exchange(self, group: _Group, tensor: Tensor) -> Gathered:
        """Return the tensors of all ranks of the group, once all have arrived."""
        me = self.ranks[group.ranks[group.rank]]
        if me.ended:
            raise LaunchError(
                f"a collective over {group.axis}",
                found=f"simulated {me} has ended",
                rule="collectives, also those of backward, run inside simulate",
                fix="call backward on the rank, and return detached values",
            )
        if self.error is not None:
            raise _Ended("another simulated rank failed")
        arrival = _Arrival(*_which(tensor), tensor)
        arrivals = self.open.setdefault((group.axis, group.ranks), {})
        for number, remote in itertools.islice(arrivals.items(), 1):  # those that have arrived have one signature
            if remote.signature != arrival.signature:
                raise LaunchError(
                    "simulated ranks entered different collectives",
                    found=f"{me}: {arrival.describe(group.axis)}; {self.ranks[number]}: {remote.describe(group.axis)}",
                    rule="every rank of an axis calls the same collectives in the same order, on tensors of one shape",
                    fix="make no collective depend on rank-local data; a rank without tokens passes zeros",
                )
        arrivals[me.number] = arrival
        if len(arrivals) < len(group.ranks):
            me.waits = group, arrival
            self._wait(me)
            return me.received
        del self.open[group.axis, group.ranks]
        gathered = Gathered(arrivals[rank].tensor for rank in group.ranks)
        for rank in group.ranks:
            other = self.ranks[rank]
            if other is not me:
                other.waits, other.received = None, gathered
                self.ready.append(other)
        return gathered

    def _rank(
        self, rank: _Rank, function: Callable[[Mesh], Any], modes: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        _inside.set(True)
        rank.turn.acquire()
        try:
            if self.error is None:
                self._begin(rank)
                with modes():
                    self.results[rank.number] = function(self._mesh(rank))
        except _Ended:
            pass
        except BaseException as error:
            error.add_note(f"on simulated {rank}")
            self._fail(error)
        rank.ended = True
        self._next()

    def _begin(self, rank: _Rank) -> None:
        self.running, self.turns = rank, self.turns + 1
        torch.set_rng_state(rank.random_state)

    def _wait(self, rank: _Rank) -> None:
        rank.random_state = torch.get_rng_state()
        self._next()
        rank.turn.acquire()
        if self.error is not None:
            raise _Ended("another simulated rank failed")
        self._begin(rank)

    def _next(self) -> None:
        """Pass the turn to the next ready rank. If none is ready and some wait, end all ranks."""
        if not self.ready and not all(rank.ended for rank in self.ranks):
            self._fail(self._stuck())
        if self.ready:
            self.ready.popleft().turn.release()
        else:
            self.done.set()

    def _fail(self, error: BaseException) -> None:
        """Keep the first error, and wake all waiting ranks, one after another, to end."""
        if self.error is None:
            self.error = error
        for rank in self.ranks:
            if rank.waits is not None:
                rank.waits = None
                self.ready.append(rank)

    def _stuck(self) -> LaunchError:
        waits = [(rank, *rank.waits) for rank in self.ranks if rank.waits is not None]
        states = [f"{rank} waits in {arrival.describe(group.axis)}" for rank, group, arrival in waits]
        ended = [str(rank) for rank in self.ranks if rank.ended]
        if ended:
            states.append(f"{', '.join(ended)} ended")
        return LaunchError(
            "simulated ranks wait for each other: deadlock",
            found="; ".join(states),
            rule="every rank of an axis calls the same collectives in the same order",
            fix="let no rank leave early or skip one; a rank without tokens passes zeros",
        )

    def _too_slow(self, threads: Sequence[threading.Thread], timeout_s: float) -> NoReturn:
        rank = self.running
        assert rank is not None, "a rank has the turn"
        frame = sys._current_frames().get(threads[rank.number].ident or 0)
        raise LaunchError(
            f"simulated {rank} computes for more than {timeout_s:g} s",
            found="it is here:\n" + "".join(traceback.format_stack(frame)[-3:]).rstrip(),
            rule="a rank enters a collective or ends within timeout_s",
            fix="raise timeout_s, or check what the rank does there",
        )

    def _mesh(self, rank: _Rank) -> Mesh:
        axes = {}
        for name, of_rank in self.groups.items():
            ranks = of_rank[rank.number]
            own = ranks.index(rank.number)
            group = _Group(self, name, own, ranks)
            axes[name] = Axis(name, len(ranks), own, group, ranks) if len(ranks) > 1 else Axis(name)
        return Mesh(axes, self.device)

    def _groups(self) -> dict[str, list[tuple[int, ...]]]:
        """By axis, the ranks with which each rank shares it: those with its coordinates on all other axes.

        dp x cp is split in three ways.
        """

        def outside(rank: _Rank, names: set[str]) -> tuple[int, ...]:
            dp, cp, tp = (rank.coordinates[name] for name in ("dp", "cp", "tp"))
            stage = {"pp": rank.coordinates.get("pp", 0)}
            near = self.inner["cp_inner"]
            split = stage | {"dp": dp, "cp_inner": cp % near, "cp_outer": cp // near, "tp": tp}
            for parts in (("ep", "edp"), ("shard", "replica")):
                if names & set(parts):
                    place, near = dp * self.sizes["cp"] + cp, self.inner[parts[0]]
                    split = stage | {parts[0]: place % near, parts[1]: place // near, "tp": tp}
            return tuple(at for name, at in split.items() if name not in names)

        cp, single = {"cp_inner", "cp_outer"}, ("pp", "dp", "tp", "cp_inner", "cp_outer")
        several = {"cp": cp, "dp_cp": cp | {"dp"}}
        groups = {}
        for name, names in ({name: {name} for name in (*single, "ep", "edp", "shard", "replica")} | several).items():
            places = [outside(rank, names) for rank in self.ranks]
            members: dict[tuple[int, ...], list[int]] = {}
            for number, place in enumerate(places):
                members.setdefault(place, []).append(number)
            groups[name] = [tuple(members[place]) for place in places]
        return groups


def _callers_modes(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Capture the caller's grad, inference and autocast modes and thread count, which torch threads do not inherit.

    In the returned context, backward stays in its thread; on a GPU it would otherwise run in one thread for all ranks.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    num_threads = torch.get_num_threads()
    autocast = {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in dict.fromkeys(("cpu", device.type))
    }

    @contextmanager
    def modes() -> Iterator[None]:
        torch.set_num_threads(num_threads)  # a GEMM of a new thread takes all cores, whatever the caller set
        with ExitStack() as entered:
            for kind, (enabled, dtype) in autocast.items():
                entered.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            entered.enter_context(torch.inference_mode(inference))
            entered.enter_context(torch.set_grad_enabled(grad))
            entered.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield

    return modes


_OWN = {str(Path(__file__).with_name(name)) for name in ("simulated.py", "wire.py", "collectives.py", "pipeline.py")}
_TORCH = f"{os.sep}torch{os.sep}"
_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep


def _which(tensor: Tensor) -> tuple[tuple[str, str, str], str]:
    """The collective that a rank is in (name, shape, dtype), and its caller."""
    frame: FrameType | None = sys._getframe(3)
    name, recorded = "exchange", ""
    while frame is not None and frame.f_code.co_filename in _OWN:
        recorded = recorded or frame.f_locals.get("name", "")  # the name in flight records, where a helper has it
        name, frame = frame.f_code.co_qualname, frame.f_back
    name = recorded or name
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return (name, shape, str(tensor.dtype).removeprefix("torch.")), _caller(frame)


def _caller(frame: FrameType | None) -> str:
    """The innermost source line outside torch: file, relative to the package, and line."""
    while frame is not None:
        file = frame.f_code.co_filename
        if _TORCH not in file and file not in _OWN:
            short = file[len(_PACKAGE) :] if file.startswith(_PACKAGE) else file.rpartition(os.sep)[2]
            return f"{short}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
