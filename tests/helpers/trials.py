"""Runs that a test writes itself, as a rank would: nothing is launched."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from workbench.launch.ablation import PlannedRun
from workbench.launch.sweep import Sweep
from workbench.records.directory import RunDirectory
from workbench.records.provenance import this_process
from workbench.specs.run import RunSpec

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>&\"'"
"""A text that would do something on a page that did not escape it."""


def make_run(root: Path, name: str = "cp2", *, steps: int = 4, cp: int = 1, launched: bool = True) -> RunDirectory:
    """A pending run; launched by this process by default."""
    run = RunDirectory.create(root / "runs", name, RunSpec(steps=steps, layout={"cp": cp}))
    run.note(world_size=cp, **({"launcher": this_process()} if launched else {}))
    return run


def make_sweep(root: Path, *names: str) -> Sweep:
    """A sweep of pending runs that are never started."""
    sweep = Sweep([], root)
    sweep.runs = [make_run(root, name) for name in names]
    sweep.planned = [PlannedRun(name, run.spec, "", "", name) for name, run in zip(names, sweep.runs, strict=True)]
    return sweep


def write_steps(run: RunDirectory, losses, *, begin: int = 0) -> None:
    """Step records with these losses, and twice as large gradient norms."""
    for index, loss in enumerate(losses, start=begin):
        run.append_step({"step": index, "loss/total/sum": loss, "gradient/norm/global": 2 * loss})


def rename(run: RunDirectory, name: str) -> None:
    """Give a run a name that no launcher would, as a user with an editor could."""
    run.note(name=name)


class Writer(threading.Thread):
    """Simulate training: append a step now and then until all are done or a cancel is requested."""

    def __init__(self, run: RunDirectory, *, every_s: float = 0.05) -> None:
        super().__init__(name=f"writer of {run.path.name}", daemon=True)
        self.run_directory, self.every_s, self.leave = run, every_s, threading.Event()

    def run(self) -> None:
        self.run_directory.set_state("running")
        for step in range(self.run_directory.spec.steps):
            if self.leave.wait(self.every_s) or self.run_directory.cancel_requested:
                self.run_directory.set_state("cancelled")
                return
            write_steps(self.run_directory, [1 / (step + 1)], begin=step)
            with self.run_directory.log_path(0).open("a") as log:
                log.write(f"step {step}\n")
        self.run_directory.set_state("succeeded")


def wait_for(condition, timeout_s: float = 120.0) -> bool:
    """True if a condition becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())
