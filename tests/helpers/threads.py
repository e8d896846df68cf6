"""Ranks as threads of one process, which exchange tensors by a barrier: quick, and as many as one likes."""

from __future__ import annotations

import threading

from workbench.sharding.mesh import Axis


class Threads:
    """The simplest simulated group: a barrier and a slot for each rank."""

    def __init__(self, rank, slots, barrier):
        self.rank, self.slots, self.barrier = rank, slots, barrier

    def exchange(self, tensor):
        self.slots[self.rank] = tensor
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone


def on_threads(function, size):
    """Return ``function(rank)`` of each of ``size`` threads; the first exception of any is raised here."""
    result, problems = {}, []

    def run(rank):
        try:
            result[rank] = function(rank)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        # The error that broke a rank, not its effect on those that waited for it.
        raise next((p for p in problems if not isinstance(p, threading.BrokenBarrierError)), problems[0])
    return [result[rank] for rank in range(size)]


def axes(size, inner=1, *, timeout_s=120.0):
    """For each rank of a simulated cp axis: cp, cp_inner and cp_outer."""

    def line(name, ranks):
        slots, barrier = [None] * len(ranks), threading.Barrier(len(ranks), timeout=timeout_s)
        return {
            rank: Axis(
                name, len(ranks), place, Threads(place, slots, barrier) if len(ranks) > 1 else None, tuple(ranks)
            )
            for place, rank in enumerate(ranks)
        }

    made = [line("cp", range(size)), {}, {}]
    for group in range(size // inner):
        made[1] |= line("cp_inner", range(group * inner, (group + 1) * inner))
    for place in range(inner):
        made[2] |= line("cp_outer", range(place, size, inner))
    return [tuple(one[rank] for one in made) for rank in range(size)]
