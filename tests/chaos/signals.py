"""Ranks that are stopped, or that end too early, and clocks that jump: the watchdog and the record name what happened.

The ranks are processes without torch (`tests.helpers.pretended_ranks`), the watchdog and the analysis the real ones.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.pretended_ranks import pretended_ranks
from tests.helpers.stand_in import stand_in
from workbench.launch import watchdog as watching
from workbench.launch.failure_analysis import record_end
from workbench.launch.watchdog import Watchdog
from workbench.records.failures import EXIT_CODES

KINDS = ("stopped", "ended early", "clock")

_LONG_S = 60.0


@contextmanager
def _changed(name: str, value: Any) -> Iterator[None]:
    """The watchdog with another constant or module meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, name, value)
        yield


def tell(folder: Path, kind: str, draw: random.Random) -> None:
    """Let one of some ranks do it at a random place, and check the verdict."""
    ranks = draw.randint(2, 3)
    guilty = draw.randrange(ranks)
    before = " ".join(draw.choice("abc") for _ in range(draw.randint(1, 12)))
    {"stopped": _stopped, "ended early": _ended_early, "clock": _clock}[kind](folder, ranks, guilty, before, draw)


def _plans(ranks: int, guilty: int, others: str, own: str) -> list[str]:
    return [own if rank == guilty else others for rank in range(ranks)]


def _stopped(folder: Path, ranks: int, guilty: int, before: str, draw: random.Random) -> None:
    """A rank that gets SIGSTOP is named as stopped, not as killed."""
    plans = _plans(ranks, guilty, f"{before} (b", f"{before} |300")
    with _changed("_BACKEND_S", 0.2), pretended_ranks(folder, *plans, timeout_s=0.5) as (run, each):
        each[guilty].send_signal(signal.SIGSTOP)
        dog = Watchdog(run, {rank: process.pid for rank, process in enumerate(each)}, hang_s=0.5, poll_s=0.1).start()
        codes = {rank: process.wait(timeout=_LONG_S) for rank, process in enumerate(each)}
        dog.stop()
        run.write_json(EXIT_CODES, {str(rank): code for rank, code in codes.items()})
        assert record_end(run, "failed") == "failed"
        failure = run.failure()
    assert failure is not None
    assert (failure["rank"], failure["cause"]) == (guilty, "hang"), failure
    assert "state T" in failure["message"], failure["message"]


def _ended_early(folder: Path, ranks: int, guilty: int, before: str, draw: random.Random) -> None:
    """A rank that ends with exit code 0 while others wait is named as such."""
    plans = _plans(ranks, guilty, f"{before} (b", f"{before} {draw.choice(['end', 'gone'])}")
    with _changed("_GONE_S", 0.2), pretended_ranks(folder, *plans) as (run, each):
        each[guilty].wait(timeout=_LONG_S)
        dog = Watchdog(run, {rank: process.pid for rank, process in enumerate(each)}, poll_s=0.1).start()
        codes = {rank: process.wait(timeout=_LONG_S) for rank, process in enumerate(each)}
        dog.stop()
        run.write_json(EXIT_CODES, {str(rank): code for rank, code in codes.items()})
        assert record_end(run, "failed") == "failed"
        failure = run.failure()
    assert failure is not None
    assert failure["rank"] == guilty, failure
    assert "left with exit code 0" in failure["message"], failure["message"]


def _clock(folder: Path, ranks: int, guilty: int, before: str, draw: random.Random) -> None:
    """A slow rank is left alone, whatever the clock of the machine does meanwhile."""
    jump_ns = draw.choice([-1, 1]) * draw.choice([60, 3600, 86400 * 400]) * 10**9
    plans = _plans(ranks, guilty, f"{before} (b", f"{before} |go b")
    began = time.monotonic()
    with pretended_ranks(folder, *plans) as (run, each):
        after_s = draw.uniform(0.0, 1.0)

        def jumping() -> int:
            return time.time_ns() + (jump_ns if time.monotonic() - began > after_s else 0)

        with _changed("time", stand_in(time, time_ns=jumping)):
            dog = Watchdog(run, {rank: process.pid for rank, process in enumerate(each)}, poll_s=0.1).start()
            time.sleep(after_s + 3.0)
            dog.stop()
        assert [process.poll() for process in each] == [None] * ranks, "the watchdog ended a healthy job"
        assert not run.exits(), run.exits()
        assert not (run.path / "ranks/waiting.json").exists(), "a rank was named after three seconds"
