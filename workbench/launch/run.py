"""Run an ablation: as torchx jobs, or one rank in this process, and leave every run on disk.

One failing run never stops the rest. Whatever way a run ends (an exception, a killed rank, an agent that did
not come up), its directory says so: state.json, and an exit record with rank and traceback or signal.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, Literal

from workbench.errors import LaunchError, RecordError
from workbench.launch.ablation import AblationSpec, Planned
from workbench.launch.component import WORKER, run_job
from workbench.launch.devices import Placement, place, visible_gpus
from workbench.launch.inputs import identify
from workbench.launch.jobs import Job, agent_output, submit
from workbench.runs.store import ENDED, RunDirectory, failure_in_short, project_root

_POLL_S = 0.1


@dataclass(frozen=True)
class RunEvent:
    """Something that happened to a run.

    Attributes:
        number: of the run, from 1, in the order in which runs end; 0 while it goes on.
        total: runs in all.
        name: of the run.
        state: running or an ended state; "reused" if an earlier run's record was taken.
        world_size: its ranks.
        device: where it runs.
        device_note: why it runs there, "" if as asked.
        steps_done: optimizer steps recorded so far.
        steps: optimizer steps in all.
        seconds: since it was started.
        why: what failed, asked and found in a line; "" if nothing did.
    """

    number: int
    total: int
    name: str
    state: str
    world_size: int
    device: str
    device_note: str
    steps_done: int
    steps: int
    seconds: float
    why: str = ""

    def __str__(self) -> str:
        """Say it in a line."""
        width = len(str(self.total))
        count = f"[{self.number or '.':>{width}}/{self.total}]"
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ' '}"
        note = f" ({self.device_note})" if self.device_note else ""
        why = f": {self.why}" if self.why else ""
        return (f"{count} {self.name:<28} {ranks} {self.device}  {self.steps_done}/{self.steps} steps  "
                f"{self.state} {self.seconds:.1f} s{why}{note}")


def launch(ablation: AblationSpec | Sequence[Planned], experiment_dir: Path, *,
           where: Literal["torchx", "here"] = "torchx", project: Path | None = None,
           on_event: Callable[[RunEvent], None] | None = None, reuse: bool = False,
           worker: str = WORKER) -> list[RunDirectory]:
    """Run everything that an ablation asks for, and return when the last run has ended.

    On CPU as many jobs run at a time as have ranks for the cores (a larger one runs alone); on GPUs one at a
    time. Interrupting it (Ctrl-C) cancels what runs; what never started leaves no folder behind.

    Args:
        ablation: the ablation, or some of its runs (`workbench.launch.ablation.select`).
        experiment_dir: run directories are made under its ``runs`` folder.
        where: "torchx" makes a job of each run; "here" runs one rank in this process.
        project: folder that relative paths in specs begin at; None takes `project_root`.
        on_event: told about every step and end of a run, on this thread.
        reuse: take the newest run of the same name, settings, device, recording, checkpoint and code instead, if it
            succeeded.
        worker: module that the ranks run.

    Returns:
        The run directories, in the order of the ablation.

    Raises:
        LaunchError: a run cannot be placed on this machine, or `here` was asked for several ranks.
        SpecError: a recording or checkpoint is not there. In both cases nothing has been started; a run that fails
            later raises nothing: its directory says so.
    """
    planned = ablation.expand() if isinstance(ablation, AblationSpec) else list(ablation)
    project = (project or project_root()).resolve()
    gpus = visible_gpus() if any(run.spec.device != "cpu" for run in planned) else []
    placements = [place(run.name, run.spec, gpus) for run in planned]
    if where == "here":
        _refuse_several_ranks(planned)
    inputs = identify([run.spec for run in planned], project)
    watch = _Watch(len(planned), on_event or (lambda event: None))
    made: dict[str, _Task] = {}
    try:
        for plan, placement, read in _deciding_first(zip(planned, placements, inputs, strict=True)):
            made[plan.name] = _prepare(experiment_dir.resolve() / "runs", plan, placement, read, made, reuse)
        tasks = [made[plan.name] for plan in planned]
        for task in tasks:
            if task.reused:
                watch.ended(task, "reused")
        waiting = [task for task in tasks if not task.reused]
        if where == "here":
            _run_here(waiting, project, watch, worker)
        else:
            _run_jobs(waiting, project, watch, worker)
    finally:
        for task in made.values():
            _leave_nothing_open(task)
    return [task.run for task in tasks]


@dataclass
class _Task:
    run: RunDirectory
    placement: Placement
    world_size: int
    reused: bool = False
    job: Job | None = None
    started: float = 0.0
    steps_done: int = -1


def _deciding_first(planned: Iterable[tuple[Planned, Placement, Any]]) -> Iterator[tuple[Planned, Placement, Any]]:
    """The runs in an order in which each comes after the one whose clip decisions it takes."""
    by_name = {each[0].name: each for each in planned}
    needs = {name: {each[0].spec.frozen_clip} & by_name.keys() for name, each in by_name.items()}
    return (by_name[name] for name in TopologicalSorter(needs).static_order())


def _prepare(runs_dir: Path, plan: Planned, placement: Placement, inputs: Mapping[str, Any],
             made: Mapping[str, _Task], reuse: bool) -> _Task:
    """The earlier run of a plan if it may stand for a new one, or else a new, pending run directory."""
    identity: dict[str, Any] = {"device": placement.device, "inputs": inputs}
    if plan.spec.frozen_clip in made:
        identity["frozen_clip_run"] = made[plan.spec.frozen_clip].run.path.name
    earlier = _reusable(runs_dir, plan, identity) if reuse else None
    if earlier is not None:
        return _Task(earlier, placement, plan.world_size, reused=True)
    run = RunDirectory.create(runs_dir, plan.name, plan.spec)
    run.set_state("pending", device_note=placement.note, world_size=plan.world_size, **identity)
    return _Task(run, placement, plan.world_size)


def _leave_nothing_open(task: _Task) -> None:
    """After an interrupt: stop the job, cancel the run, and remove the folder of one that never started."""
    if task.job:
        task.job.cancel()
    if task.run.state["state"] in ENDED:
        return
    if task.started:
        task.run.set_state("cancelled")
    else:
        shutil.rmtree(task.run.path)


class _Watch:
    """Turns what is on disk into events."""

    def __init__(self, total: int, tell: Callable[[RunEvent], None]) -> None:
        self.total, self.tell, self.count = total, tell, 0

    def going_on(self, task: _Task) -> None:
        """Tell about a step, once."""
        done = _steps_done(task.run)
        if done != task.steps_done:
            task.steps_done = done
            self._tell(task, 0, "running", "")

    def ended(self, task: _Task, state: str) -> None:
        """Tell about an end."""
        self.count += 1
        task.steps_done = _steps_done(task.run)
        failure = task.run.failure() if state in ("failed", "lost") else None
        self._tell(task, self.count, state, failure_in_short(failure) if failure else "")

    def _tell(self, task: _Task, number: int, state: str, why: str) -> None:
        seconds = time.monotonic() - task.started if task.started else 0.0
        self.tell(RunEvent(number, self.total, task.run.name, state, task.world_size, task.placement.device,
                           task.placement.note, task.steps_done, task.run.spec.steps, seconds, why))


def _run_jobs(tasks: list[_Task], project: Path, watch: _Watch, worker: str) -> None:
    waiting, active = list(tasks), []
    while waiting or active:
        while task := _next(waiting, active):
            waiting.remove(task)
            if _start(task, project, worker):
                active.append(task)
                watch.going_on(task)
            else:
                watch.ended(task, "failed")
        for task in list(active):
            state = task.job.poll() if task.job else "failed"
            if state == "running":
                watch.going_on(task)
            else:
                active.remove(task)
                watch.ended(task, _settle(task, state))
        time.sleep(_POLL_S)


def _next(waiting: Sequence[_Task], active: Sequence[_Task]) -> _Task | None:
    """The first run that needs no record of a run that has not ended, if it fits beside those that go on."""
    unfinished = {task.run.name for task in [*waiting, *active]}
    ready = [task for task in waiting if task.run.spec.frozen_clip not in unfinished]
    return ready[0] if ready and _fits(ready[0], active) else None


def _fits(task: _Task, active: Sequence[_Task]) -> bool:
    """Say whether a run may start beside those that go on."""
    if not active:
        return True
    if any(other.placement.gpus for other in [task, *active]):
        return False
    return sum(other.world_size for other in [task, *active]) <= _cores()


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(task: _Task, project: Path, worker: str) -> bool:
    task.started = time.monotonic()
    app = run_job(task.run.name, task.run.path, task.world_size, task.placement, project=project,
                  worker=worker)
    try:
        task.job = submit(app, task.run.path / "torchx")
    except LaunchError as error:
        task.run.write_exit(None, {}, error)
        task.run.set_state("failed")
        return False
    return True


def _settle(task: _Task, job_state: str) -> str:
    """Make the run directory of an ended job say how it ended, whatever its ranks still managed to say."""
    run = task.run
    said = run.state["state"]
    if job_state == "succeeded" and said == "succeeded":
        return said
    if job_state == "cancelled":
        run.set_state("cancelled")
        return "cancelled"
    failure = run.failure()
    if failure is None or failure["connection_error"]:
        _describe_death(run, job_state)
    if said != "failed":
        run.set_state("failed")
    return "failed"


def _describe_death(run: RunDirectory, job_state: str) -> None:
    """Write the exit record that a killed rank could not write, from what the agent saw."""
    output = agent_output(run.path / "torchx")
    silent = [(rank, code) for rank, code in _exit_codes(output) if rank not in run.exits()]
    # the agent stops the surviving ranks with SIGTERM, so any other end comes first
    for rank, code in sorted(silent, key=lambda found: found[1] == -signal.SIGTERM)[:1]:
        killed = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        fix = f"read ranks/{run.log_path(rank).name} in the run directory"
        if code == -signal.SIGKILL:
            fix += "; SIGKILL without a message is often the machine running out of memory"
        run.write_exit(rank, {}, LaunchError(f"rank {rank} {killed}", found=_last_lines(run.log_path(rank)),
                                             rule="a rank ends by itself and says how", fix=fix))
        return
    if run.failure() is None:
        if job_state == "succeeded":
            asked = "every rank ended with exit code 0, and none said that the run succeeded"
        else:
            asked = "the agent that starts the ranks failed before any rank said why"
        last = [line for line in output.splitlines() if line.strip()][-8:]
        run.write_exit(None, {}, LaunchError(asked, found="\n".join(last) or "no output",
                                             rule="rank 0 records how a run ended",
                                             fix="read torchx/*/*/trainer/0/stderr.log in the run directory"))


def _exit_codes(output: str) -> Iterator[tuple[int, int]]:
    """(rank, exit code) of every failed rank in the summary of torch.distributed.run."""
    for found in re.finditer(r"rank\s+: (\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s+: (-?\d+)", output):
        yield int(found[1]), int(found[2])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_lines(log: Path, count: int = 5) -> str:
    if not log.exists():
        return "no output"
    lines = [line for line in log.read_text(encoding="utf8", errors="replace").splitlines() if line.strip()]
    return "its last lines: " + " | ".join(lines[-count:]) if lines else "no output"


def _run_here(tasks: list[_Task], project: Path, watch: _Watch, worker: str) -> None:
    import importlib

    run_here = importlib.import_module(worker).run_here
    left = list(tasks)
    while task := _next(left, []):
        left.remove(task)
        task.started = time.monotonic()
        watch.going_on(task)
        try:
            with _environment("WORKBENCH_DEVICE", task.placement.device):
                run_here(task.run, project)
        except KeyboardInterrupt:
            task.run.set_state("cancelled")
            raise
        except Exception as error:
            if 0 not in task.run.exits():
                task.run.write_exit(0, {}, error)
            task.run.set_state("failed")
        watch.ended(task, task.run.state["state"])


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _refuse_several_ranks(planned: Sequence[Planned]) -> None:
    several = [f"{run.name} ({run.world_size} ranks)" for run in planned if run.world_size > 1]
    if several:
        raise LaunchError("run the ablation here, in one process", found=", ".join(several),
                          rule="here there is one rank", fix="leave these out, or use where='torchx'")


def _reusable(runs_dir: Path, plan: Planned, identity: Mapping[str, Any]) -> RunDirectory | None:
    """The newest run of this plan's settings, if it succeeded and its state says the same device and inputs."""
    same = [run for run in RunDirectory.find(runs_dir, plan.name)
            if run.spec.content_hash() == plan.spec.content_hash()]
    if not same or same[-1].status != "succeeded":
        return None
    state = same[-1].state
    return same[-1] if all(state.get(key) == value for key, value in identity.items()) else None


def _steps_done(run: RunDirectory) -> int:
    try:
        return len(run.steps())
    except RecordError:
        return 0
