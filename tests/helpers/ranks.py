"""Run a function on several real processes joined by gloo, and bring results or every rank's stack back."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, forkserver, spawn
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing as mp

from tests.helpers import warm
from tests.helpers.stand_in import stand_in
from workbench.sharding import wire

START_S = 120.0  # for imports and the rendezvous; seconds, but for a CPU that many tests share


class RanksError(AssertionError):
    """At least one rank failed or hung; the message has the output of each."""


def _entry(rank: int, world: int, folder: str, function: Any, arguments: tuple[Any, ...], timeout_s: float) -> None:
    folder_path = Path(folder)
    log = (folder_path / f"stack{rank}").open("w")
    faulthandler.dump_traceback_later(timeout_s + START_S, file=log, exit=False)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    try:
        import torch.distributed as dist

        if world > 1:
            dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
        faulthandler.dump_traceback_later(
            timeout_s, file=log, exit=False
        )  # the time of a start on a busy CPU is not counted
        result: Any = ("ok", function(*arguments))
        if world > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        result = ("error", traceback.format_exc())
    with (folder_path / f"part{rank}").open("wb") as file:
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(result)
    (folder_path / f"part{rank}").rename(folder_path / f"result{rank}")
    sys.stdout.flush()
    os._exit(0)  # interpreter exit costs a second a rank and tests nothing


class _Pickler(pickle.Pickler):
    """Dense tensors as bytes: torch puts each into an archive of its own, which took ten times as long both ways."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.requires_grad or value.layout != torch.strided:
            return NotImplemented
        if value.device.type != "cpu" or not value.is_contiguous() or value.is_complex():
            return NotImplemented
        return _tensor, (bytearray(value.reshape(-1).view(torch.uint8).numpy()), value.dtype, value.shape)


def _tensor(data: bytearray, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


@contextmanager
def reductions_counted() -> Iterator[list[int]]:
    """Return the count of numbers that each all-reduce of the workbench sums on this rank."""
    sizes: list[int] = []

    def all_reduce(tensor: torch.Tensor, **how: Any) -> None:
        sizes.append(tensor.numel())
        torch.distributed.all_reduce(tensor, **how)

    wire.dist = stand_in(torch.distributed, all_reduce=all_reduce)
    try:
        yield sizes
    finally:
        wire.dist = torch.distributed


def _wait_for(processes: list[Any], folder: Path, deadline: float) -> None:
    """Return when every rank has ended or, where one goes on, has written its whole stack."""
    before: list[int] = []
    while time.monotonic() < deadline:
        connection.wait([process.sentinel for process in processes if process.is_alive()], 0.5)
        going_on = [rank for rank, process in enumerate(processes) if process.is_alive()]
        stacks = [folder / f"stack{rank}" for rank in going_on]
        sizes = [stack.stat().st_size if stack.exists() else 0 for stack in stacks]
        if (all(sizes) and sizes == before) or not going_on:
            return
        before = sizes


def _start_server() -> None:
    """Start the fork server, if there is none, from libraries that are loaded already."""
    interpreter = spawn.get_executable()
    spawn.set_executable(warm.python())
    try:
        forkserver.ensure_running()
    finally:
        spawn.set_executable(interpreter)


def run_ranks(function: Any, world: int, folder: Path, *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call ``function(*arguments)`` on ``world`` ranks; results in rank order.

    The function and its arguments must be importable and picklable. A rank whose call does not return in
    ``timeout_s`` writes its stack, which is part of the error, and is killed.

    Raises:
        RanksError: a rank raised or hung.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preloaded"])
    _start_server()
    processes = [
        context.Process(target=_entry, args=(r, world, str(folder), function, arguments, timeout_s))
        for r in range(world)
    ]
    for process in processes:
        process.start()
    _wait_for(processes, folder, time.monotonic() + timeout_s + 2 * START_S)
    hung = [r for r, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    answers, problems = {}, []
    for rank in range(world):
        path = folder / f"result{rank}"
        if rank in hung or not path.exists():
            stack = (folder / f"stack{rank}").read_text() if (folder / f"stack{rank}").exists() else ""
            problems.append(f"rank {rank} {'hung' if rank in hung else 'died without an answer'}:\n{stack}")
            continue
        kind, value = pickle.loads(path.read_bytes())
        if kind == "ok":
            answers[rank] = value
        else:
            problems.append(f"rank {rank} raised:\n{value}")
    if problems:
        raise RanksError("\n".join(problems))
    return [answers[rank] for rank in range(world)]
