"""A run whose ranks wait for each other, by flight records alone."""

from __future__ import annotations

import contextlib

from workbench.records.directory import RunDirectory
from workbench.sharding import flight


@contextlib.contextmanager
def one_waits(run: RunDirectory):
    """Rank 0 stands in a second all_reduce, to which rank 1 has not come."""
    with contextlib.ExitStack() as inside:
        for rank in (1, 0):
            flight.start(run.path / "ranks" / f"rank{rank:05d}.flight", rank)
            with flight.entering("all_reduce", "cp", range(2), "cp", (4,), "float32"):
                pass
            if rank == 0:
                inside.enter_context(flight.entering("all_reduce", "cp", range(2), "cp", (4,), "float32"))
        yield
    flight.stop()
