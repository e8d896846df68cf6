"""All ranks of a mesh in one process, exactly: threads that take turns, and hand over only inside a collective.

Each rank is a thread that runs the code of a real rank: the same functions, the same autograd, the same collectives
(`workbench.sharding.wire` finds a group with ``exchange`` instead of a process group). One rank runs at a time, in
rank order, until it waits for others, so a simulation does the same thing each time, and knows at once when nobody can
go on. Backward runs in the thread that asks for it, on a GPU too, so collectives inside of backward work.

What a rank sees as its own, as in a process of its own: grad mode, inference mode, autocast and context variables, as
they are where `simulate` is called, and torch's random state on the CPU, which starts at the caller's on every rank.

What it cannot show:

* what a backend does: NCCL's order and asynchrony, one collective that overtakes another, a time-out, a rank that dies.
  What the ranks' own code does wrong (a rank that leaves early, another order, another shape) is an error in words;
* another order of summing: sums are taken in rank order in the precision of the tensors, and a ring has another;
* memory and speed: everybody's tensors are in one process, and nothing runs side by side;
* what comes after: a graph that goes through collectives is gone back through by the rank, inside;
* what asks torch.distributed itself: FSDP2, DTensor, `torch.distributed.get_rank`;
* what a process has and threads share: globals, registries, random numbers of Python, of numpy and of a GPU.
"""

from __future__ import annotations

import contextvars
import os
import re
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
from workbench.sharding.mesh import Axis, Mesh

Result = TypeVar("Result")

_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("workbench_simulated", default=False)


def simulate(
    function: Callable[[Mesh], Result],
    *,
    dp: int = 1,
    cp: int = 1,
    tp: int = 1,
    ulysses: int = 1,
    device: torch.device | str = "cpu",
    timeout_s: float = 60.0,
) -> list[Result]:
    """Call a function on every rank of a mesh, all of them in this process.

    Args:
        function: what a rank does, with its mesh. Ranks share what it closes over, so each loads a model of its own, or
            copies one.
        dp: data-parallel ranks.
        cp: context-parallel ranks.
        tp: tensor-parallel ranks.
        ulysses: neighbours on cp that make up the axis cp_inner; cp_outer goes over the others.
        device: where every rank computes.
        timeout_s: a rank that computes this long without coming to a collective ends the simulation. Its thread cannot
            be ended, and goes on until it comes to one.

    Returns:
        What the function returned, in rank order: tp varies fastest, then cp, then dp.

    Raises:
        ShardingError: a size below 1, or ulysses does not divide cp; called on a simulated rank.
        LaunchError: ranks came to different collectives; nobody can go on; a rank took too long.
        Exception: what a rank raised, the first one, with its rank and place as a note. All others are ended.

    Example:
        >>> from workbench.sharding.collectives import all_sum
        >>> simulate(lambda mesh: float(all_sum(torch.tensor(float(mesh["cp"].rank)), mesh["cp"])), dp=2, cp=3)
        [3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    """
    sizes = {"dp": dp, "cp": cp, "tp": tp}
    words = " x ".join(f"{name}={size}" for name, size in sizes.items())
    if min(sizes.values()) < 1:
        raise ShardingError(f"simulate {words}", rule="every size is at least 1", fix="leave out axes of one rank")
    if ulysses < 1 or cp % ulysses:
        raise ShardingError(
            f"simulate {words} with ulysses={ulysses}",
            rule="ulysses divides cp",
            fix="choose how many neighbours on cp exchange heads among the divisors of cp",
        )
    if _inside.get():
        raise ShardingError(
            f"simulate {words} on a rank that is simulated itself",
            rule="ranks have no ranks",
            fix="simulate one after another, outside",
        )
    world = _World(sizes, ulysses, torch.device(device))
    with torch.random.fork_rng(devices=[]):
        world.run(function, timeout_s)
    return world.results


@dataclass
class _Group:
    """The group of one axis, as one of its ranks has it."""

    world: _World
    axis: str
    rank: int
    ranks: tuple[int, ...]

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Everyone's tensor, in rank order."""
        return self.world.exchange(self, tensor)

    def among(self, name: str, ranks: Sequence[int]) -> _Group | None:
        """The group of some ranks of the world; None if this one is not among them."""
        me = self.ranks[self.rank]
        return _Group(self.world, name, tuple(ranks).index(me), tuple(ranks)) if me in ranks else None


@dataclass
class _Arrival:
    """A rank that came to a collective: which one, from where, with what."""

    what: tuple[str, str, str]
    caller: str
    tensor: Tensor

    def words(self, axis: str) -> str:
        name, shape, dtype = self.what
        return f"{name} over {axis} of {shape} {dtype} ({self.caller})"


@dataclass
class _Rank:
    """A rank: its turn, its random state while it waits, and the collective that it waits in."""

    number: int
    coordinates: dict[str, int]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    random_state: Tensor = field(default_factory=torch.get_rng_state)
    waits: tuple[_Group, _Arrival] | None = None
    brought: list[Tensor] = field(default_factory=list)
    ended: bool = False

    def __str__(self) -> str:
        return f"rank {self.number} ({', '.join(f'{axis}={at}' for axis, at in self.coordinates.items())})"


class _Ended(BaseException):
    """Ends a rank because another one failed; no ``except Exception`` stops it."""


class _World:
    """Whose turn it is. Only the thread whose turn it is touches anything here."""

    def __init__(self, sizes: dict[str, int], ulysses: int, device: torch.device) -> None:
        self.sizes, self.ulysses, self.device = sizes, ulysses, device
        self.size = sizes["dp"] * sizes["cp"] * sizes["tp"]
        self.ranks = [_Rank(number, self._coordinates(number)) for number in range(self.size)]
        self.results: list[Any] = [None] * self.size
        self.ready: deque[_Rank] = deque(self.ranks)
        self.running: _Rank | None = None
        self.turns = 0
        self.open: dict[tuple[str, tuple[int, ...]], dict[int, _Arrival]] = {}
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self, function: Callable[[Mesh], Any], timeout_s: float) -> None:
        """All ranks from beginning to end; raises what the first of them raised."""
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
        seen = -1
        try:
            while not self.done.wait(timeout_s):
                if seen == self.turns:
                    self._too_slow(threads, timeout_s)
                seen = self.turns
        except BaseException as error:
            self.error = self.error or error  # who comes to a collective now is ended there
            raise
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def exchange(self, group: _Group, tensor: Tensor) -> list[Tensor]:
        """What every rank of the group brought, once all have come."""
        me = self.ranks[group.ranks[group.rank]]
        if me.ended:
            raise LaunchError(
                f"a collective over {group.axis}",
                found=f"simulated {me} has ended",
                rule="what goes through collectives, backward too, is done inside of simulate",
                fix="call backward on the rank, and return numbers that are detached",
            )
        if self.error is not None:
            raise _Ended("another simulated rank failed")
        arrival = _Arrival(*_which(tensor), tensor)
        came = self.open.setdefault((group.axis, group.ranks), {})
        for other, theirs in came.items():
            if theirs.what != arrival.what:
                raise LaunchError(
                    "simulated ranks came to different collectives",
                    found=f"{me}: {arrival.words(group.axis)}; {self.ranks[other]}: {theirs.words(group.axis)}",
                    rule="every rank of an axis calls the same collectives in the same order, on tensors of one shape",
                    fix="let no collective depend on what only some ranks hold; a rank without tokens brings zeros",
                )
        came[me.number] = arrival
        if len(came) < len(group.ranks):
            me.waits = group, arrival
            self._wait(me)
            return me.brought
        del self.open[group.axis, group.ranks]
        everyone = [came[rank].tensor for rank in group.ranks]
        for rank in group.ranks:
            other = self.ranks[rank]
            if other is not me:
                other.waits, other.brought = None, everyone
                self.ready.append(other)
        return everyone

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
        """Hand over to whoever can go on. If nobody can, and somebody waits, all are ended."""
        if not self.ready and not all(rank.ended for rank in self.ranks):
            self._fail(self._stuck())
        if self.ready:
            self.ready.popleft().turn.release()
        else:
            self.done.set()

    def _fail(self, error: BaseException) -> None:
        """Remember the first error, and wake everybody, one after another, to end."""
        if self.error is None:
            self.error = error
        for rank in self.ranks:
            if rank.waits is not None:
                rank.waits = None
                self.ready.append(rank)

    def _stuck(self) -> LaunchError:
        waits = [(rank, *rank.waits) for rank in self.ranks if rank.waits is not None]
        found = [f"{rank} waits in {arrival.words(group.axis)}" for rank, group, arrival in waits]
        ended = [str(rank) for rank in self.ranks if rank.ended]
        if ended:
            found.append(f"{', '.join(ended)} ended")
        return LaunchError(
            "simulated ranks that wait for each other: nobody can go on",
            found="; ".join(found),
            rule="every rank of an axis comes to the same collectives in the same order",
            fix="let no rank leave early or skip one; a rank without tokens brings zeros",
        )

    def _too_slow(self, threads: Sequence[threading.Thread], timeout_s: float) -> NoReturn:
        rank = self.running
        assert rank is not None, "somebody has the turn"
        frame = sys._current_frames().get(threads[rank.number].ident or 0)
        raise LaunchError(
            f"simulated {rank} computes for more than {timeout_s:g} s",
            found=_caller(frame),
            rule="a rank comes to a collective or ends within timeout_s",
            fix="raise timeout_s, or look at what the rank does there:\n" + "".join(traceback.format_stack(frame)[-3:]),
        )

    def _coordinates(self, number: int) -> dict[str, int]:
        cp, tp = self.sizes["cp"], self.sizes["tp"]
        return {"dp": number // (cp * tp), "cp": number // tp % cp, "tp": number % tp}

    def _mesh(self, rank: _Rank) -> Mesh:
        """Each axis holds the ranks at the same place on everything that it does not go along."""

        def place(other: _Rank) -> dict[str, int]:
            at = other.coordinates
            return {**at, "cp_inner": at["cp"] % self.ulysses, "cp_outer": at["cp"] // self.ulysses}

        fixed = {
            "dp": ("cp", "tp"),
            "cp": ("dp", "tp"),
            "tp": ("dp", "cp"),
            "dp_cp": ("tp",),
            "cp_inner": ("dp", "cp_outer", "tp"),
            "cp_outer": ("dp", "cp_inner", "tp"),
        }
        axes = {}
        for name, same in fixed.items():
            ranks = tuple(
                other.number for other in self.ranks if all(place(other)[axis] == place(rank)[axis] for axis in same)
            )
            own = ranks.index(rank.number)
            axes[name] = (
                Axis(name, len(ranks), own, _Group(self, name, own, ranks), ranks) if len(ranks) > 1 else Axis(name)
            )
        return Mesh(axes, self.device)


def _callers_modes(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """What a thread of torch starts without: a context manager that makes it as it is here, and now.

    In it, backward stays in its thread, where a GPU's would otherwise go through one thread that all ranks share.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    narrow = {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in dict.fromkeys(("cpu", device.type))
    }

    @contextmanager
    def modes() -> Iterator[None]:
        with ExitStack() as entered:
            for kind, (enabled, dtype) in narrow.items():
                entered.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            entered.enter_context(torch.inference_mode(inference))
            entered.enter_context(torch.set_grad_enabled(grad))
            entered.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield

    return modes


_OWN = {str(Path(__file__).with_name(name)) for name in ("simulated.py", "wire.py", "collectives.py")}
_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep


def _which(tensor: Tensor) -> tuple[tuple[str, str, str], str]:
    """The collective that a rank is in (name, shape, dtype), and who called it."""
    frame: FrameType | None = sys._getframe(3)
    name = "exchange"
    while frame is not None and frame.f_code.co_filename in _OWN:
        name, frame = frame.f_code.co_qualname, frame.f_back
    name = re.sub(r"^_(\w+)\.backward$", r"backward of \1", name).removeprefix("_").removesuffix(".forward")
    name = re.sub(r"(?<=[a-z])([A-Z])", r"_\1", name).lower()
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return (name, shape, str(tensor.dtype).removeprefix("torch.")), _caller(frame)


def _caller(frame: FrameType | None) -> str:
    """The innermost place outside of torch: file, relative to the package, and line."""
    while frame is not None:
        file = frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}" not in file and file not in _OWN:
            short = file[len(_PACKAGE) :] if file.startswith(_PACKAGE) else Path(file).name
            return f"{short}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
