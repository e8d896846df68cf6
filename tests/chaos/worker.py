"""Ranks for the chaos tests: rank 0 records steps and acknowledges each once it is on disk; the others only join.

The note (``acknowledged`` in the run directory) is what the tests hold the record to: whatever it names may not be
lost by anything that happens later.

A rank whose agent or launcher is gone stays for ten minutes unless it is ended: an orphan that would
soon be done anyway would prove nothing.
"""

from __future__ import annotations

import os
import random
import sys
import time
import zlib

from workbench.atomic import to_json
from workbench.launch.agent import run_dirs_of
from workbench.records.directory import RunDirectory
from workbench.records.provenance import is_process_alive
from workbench.sharding import flight
from workbench.train.watched import enable_diagnostics

STEP_S = 0.04


def main() -> None:
    agent = os.getppid()
    for path in run_dirs_of(["-m", "", *sys.argv[1:]]):
        execute(RunDirectory.open(path), int(os.environ["RANK"]), agent)


def execute(run: RunDirectory, rank: int, agent: int) -> None:
    """Record the steps of one run; a job may share its ranks between several."""
    enable_diagnostics(run, rank)
    if rank == 0:
        run.set_state("running")
    started_by = run.state["launcher"]
    lengths = random.Random(run.spec.seed)
    for step in range(run.spec.steps):
        if rank == 0:
            record = {"step": step, "noise": "x" * lengths.randrange(20000)}
            run.append_step(record)
            acknowledge(run, record)
        time.sleep(STEP_S if os.getppid() == agent and is_process_alive(started_by) else 600.0)
    run.write_exit(rank, {}, None)
    if rank == 0:
        run.set_state("succeeded")
    flight.stop()


def acknowledge(run: RunDirectory, record: dict[str, object]) -> None:
    with (run.path / "acknowledged").open("ab") as file:
        file.write(b"%d %d\n" % (record["step"], checksum(record)))


def acknowledged(run: RunDirectory) -> dict[int, int]:
    """Return step -> checksum of everything that rank 0 acknowledged; the last line may be torn."""
    path = run.path / "acknowledged"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return {int(step): int(check) for step, check in (line.split() for line in lines)}


def checksum(record: dict[str, object]) -> int:
    return zlib.crc32(to_json(record, sort_keys=True))


if __name__ == "__main__":
    main()
