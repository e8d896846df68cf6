"""Run an ablation: here, in ready processes, as torchx jobs, or on a cluster; and store every run on disk.

One failing run never stops the rest. Any end of a run (an exception, a killed rank, an agent that did not come
up) is recorded in its directory: state.json, and an exit record with cause, rank and traceback or signal.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, Literal, get_args

from workbench.errors import LaunchError, SpecError, did_you_mean
from workbench.launch import jobs, processes, resume
from workbench.launch.ablation import AblationSpec, PlannedRun
from workbench.launch.checks import check_runs
from workbench.launch.component import WORKER
from workbench.launch.devices import Placement, cores, place, visible_gpus
from workbench.launch.nodes import spread
from workbench.launch.options import LOCAL
from workbench.launch.sweep import Starter, Sweep
from workbench.launch.task import RunEvent, Task, share
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root, this_process
from workbench.records.states import CLUSTERS

Where = Literal["torchx", "processes", "here", "slurm", "sbatch", "kubernetes"]
"""torchx: a job of its own for every run. processes: ranks from a server that has torch loaded already. here: one rank
in this process, for a debugger. slurm, kubernetes: torchx jobs on a cluster. sbatch: a job of Slurm without torchx."""


def launch(
    ablation: AblationSpec | Sequence[PlannedRun],
    experiment_dir: Path,
    *,
    where: Where = "torchx",
    project: Path | None = None,
    on_event: Callable[[RunEvent], None] | None = None,
    fresh: bool = False,
    force: bool = False,
    trial: bool = False,
    options: Mapping[str, str] | None = None,
    per_job: int | None = None,
    nodes: int = 1,
    worker: str = WORKER,
    before: Callable[[Sequence[RunDirectory]], object] | None = None,
) -> Sweep:
    """Start the missing runs of an ablation; return at once.

    On this machine as many jobs run at a time as have devices of their own: a GPU for each rank, or a core (a run of
    more ranks than cores has them all). The devices of this user's other launchers are taken into account.

    Args:
        ablation: the ablation, or some of its runs (`workbench.launch.ablation.select`).
        experiment_dir: run directories are created under its ``runs`` folder.
        where: how the ranks start, see `Where`. `here` returns when the last run has ended.
        project: folder that paths in specs are relative to; None takes `project_root`.
        on_event: called with every step and end of a run, on the watching thread (`Sweep.follow` calls on yours).
        fresh: run everything again. Otherwise the newest run of the same name, settings, device, rollout dataset,
            checkpoint and code is reused, if it succeeded, and resumed, if it has a checkpoint and did not.
        force: run configurations that changed since the last launch again, instead of refusing.
        trial: the experiment does not use these runs: they are neither compared with its earlier runs nor replace them.
        options: of the cluster's scheduler, such as {"partition": "gpu"} or {"queue": "default"}.
        per_job: runs of one world size that a torchx job executes one after another in the same ranks, which import
            their libraries once. Each run has a directory, a failure and a log of its own, and the bits of a job of its
            own; if one fails, the remaining ones get another job. None: see `workbench.launch.task.share`.
        nodes: machines for each job, with equally many ranks on each; a run of fewer ranks takes one for each. On this
            machine (``torchx``) they are agents of their own that meet as those of a cluster do, for trying it out.
        worker: module that the ranks run.
        before: called with the directories of the runs that start now, before the first does.

    Raises:
        LaunchError: a run cannot be placed on this machine, or `here` was requested for several ranks.
        SpecError: a rollout dataset or checkpoint is missing; a configuration changed, or is running already.
            In all these cases nothing was started; a run that fails later raises nothing: its directory records it.
    """
    _refuse_unknown(where)
    planned = ablation.expand() if isinstance(ablation, AblationSpec) else list(ablation)
    project, experiment_dir = (project or project_root()).resolve(), experiment_dir.resolve()
    runs_dir = experiment_dir / "runs"
    gpus = visible_gpus() if where not in CLUSTERS and any(run.spec.device != "cpu" for run in planned) else []
    check_runs(planned, project, where=where, gpus=gpus)
    placements = [_place(run, where, gpus, nodes) for run in planned]
    if where == "here":
        _refuse_sharded_parameters(planned)
    inputs = resume.identify([run.spec for run in planned], project)
    with resume.launch_lock(runs_dir):
        resume.refuse_running(runs_dir, planned)
        if not (force or trial):
            resume.refuse_changed(runs_dir, planned, inputs)
        prepared: dict[str, Task] = {}
        try:
            for plan, placement, read in _deciding_first(zip(planned, placements, inputs, strict=True)):
                prepared[plan.name] = _prepare(runs_dir, plan, placement, read, prepared, where, fresh=fresh)
            tasks = [prepared[plan.name] for plan in planned]
            resume.write_record(runs_dir, planned, [task.run for task in tasks], trial=trial)
        except BaseException:
            for task in prepared.values():
                if not task.reused:
                    shutil.rmtree(task.run.path)
            raise
    if before is not None:
        before([task.run for task in tasks if not task.reused])
    sweep = Sweep(tasks, experiment_dir, on_event=on_event)
    if where == "here":
        return sweep.here(functools.partial(_run_here, project=project, worker=worker))
    if where == "processes":
        start: Starter = functools.partial(processes.start, project=project, worker=worker)
    else:
        start = functools.partial(jobs.start, **_job(where, project, options, worker))
    per_job = 1 if where == "processes" else per_job
    return sweep.in_jobs(start, gpus=gpus, leased=where not in CLUSTERS, per_job=per_job)


def _refuse_unknown(where: str) -> None:
    if where not in get_args(Where):
        raise SpecError(
            f"launch with where={where!r}",
            found=f"no such place {did_you_mean(where, get_args(Where))}".strip(),
            rule=f"one of {', '.join(get_args(Where))}",
            fix="on this machine: 'processes', or 'torchx' for jobs of their own",
        )


def _job(where: Where, project: Path, options: Mapping[str, str] | None, worker: str) -> dict[str, Any]:
    """Arguments of `jobs.start` and `jobs.describe` that all runs share."""
    scheduler = LOCAL if where == "torchx" else where
    return {"project": project, "worker": worker, "scheduler": scheduler, "options": options}


def requests(
    planned: Sequence[PlannedRun],
    experiment_dir: Path,
    *,
    where: Where,
    project: Path | None = None,
    options: Mapping[str, str] | None = None,
    per_job: int | None = None,
    nodes: int = 1,
    worker: str = WORKER,
) -> dict[str, str]:
    """Return the exact scheduler request of each job, by the names of its runs. Nothing is created or contacted.

    Raises:
        LaunchError: a run cannot be placed on this machine, an option that the scheduler does not know, or a way of
            running without a scheduler.
    """
    _refuse_unknown(where)
    project = (project or project_root()).resolve()
    gpus = visible_gpus() if where not in CLUSTERS else []
    check_runs(planned, project, where=where, gpus=gpus)
    if where in ("here", "processes"):
        raise LaunchError(
            f"show the request of a run that goes to {where!r}",
            found="no scheduler is asked",
            rule="torchx, slurm, sbatch and kubernetes take requests",
            fix="choose one of them with --where",
        )
    placements = [_place(plan, where, gpus, nodes) for plan in planned]
    kinds = [(plan.world_size, placement.device) for plan, placement in zip(planned, placements, strict=True)]
    slots = {} if where in CLUSTERS else {"cpu": len(cores()), "cuda": len(gpus)}
    sizes = share([(kind, plan.spec.steps) for kind, plan in zip(kinds, planned, strict=True)], slots, per_job)
    common, descriptions = _job(where, project, options, worker), {}
    for kind, size in sizes.items():
        members = [index for index, other in enumerate(kinds) if other == kind]
        for job in (members[start : start + size] for start in range(0, len(members), size)):
            plans = [planned[index] for index in job]
            names = [plan.name for plan in plans]
            runs_dir = experiment_dir.resolve() / "runs"
            paths = [RunDirectory.next_path(runs_dir, plan.name, plan.spec) for plan in plans]
            descriptions[", ".join(names)] = jobs.describe(
                names,
                paths,
                kind[0],
                placements[job[0]],
                resumable=all(plan.spec.record.checkpoint_every for plan in plans),
                **common,
            )
    return descriptions


def _place(plan: PlannedRun, where: Where, gpus: Sequence[str], nodes: int) -> Placement:
    """Placement of a run. A cluster cannot be inspected: there each rank gets a GPU, unless the spec says cpu."""
    taken = spread(plan.name, plan.world_size, nodes)
    if taken > 1 and where in ("processes", "here"):
        raise LaunchError(
            f"run {plan.name} on {nodes} nodes with where={where!r}",
            found="ranks of one process",
            rule="each node has an agent of its own",
            fix="choose torchx, slurm, sbatch or kubernetes",
        )
    if where not in CLUSTERS:
        return replace(place(plan.name, plan.spec, gpus), nodes=taken)
    if plan.spec.device == "cpu":
        return Placement("cpu", nodes=taken)
    return Placement("cuda", gpus=tuple(str(rank) for rank in range(plan.world_size)), nodes=taken)


def _prepare(
    runs_dir: Path,
    plan: PlannedRun,
    placement: Placement,
    inputs: Mapping[str, Any],
    prepared: Mapping[str, Task],
    where: Where,
    *,
    fresh: bool,
) -> Task:
    """Return the earlier run of a plan if it can be reused, or else create a new, pending run directory."""
    resume.mark_lost(runs_dir, plan.name)
    identity: dict[str, Any] = {"device": placement.device, "inputs": inputs}
    deciding = plan.spec.frozen_clip
    if deciding is not None and deciding in prepared:
        identity["frozen_clip_run"] = prepared[deciding].run.path.name
    note, notes = placement.note, [placement.note]
    if (earlier := None if fresh else resume.reusable(runs_dir, plan, identity)) is not None:
        if not (broken := resume.damage(earlier)):
            return Task(plan, earlier, placement, reused=True)
        notes.append(f"runs again, because the record of the earlier run is damaged: {broken}")
    interrupted, resume_note = (None, "") if fresh else resume.interrupted(runs_dir, plan, identity)
    placement = replace(placement, note="; ".join(filter(None, [*notes, resume_note])))
    if interrupted is not None:
        identity["continues"] = interrupted.path.name
    run = RunDirectory.create(
        runs_dir,
        plan.name,
        plan.spec,
        launcher=this_process(),
        backend=where,
        device_note=note,
        world_size=plan.world_size,
        fresh=fresh,
        **({"nodes": placement.nodes} if placement.nodes > 1 else {}),
        **identity,
    )
    return Task(plan, run, placement)


def _deciding_first(
    planned: Iterable[tuple[PlannedRun, Placement, Any]],
) -> Iterator[tuple[PlannedRun, Placement, Any]]:
    """Sort runs so that each comes after the one whose clip decisions it takes."""
    by_name = {each[0].name: each for each in planned}
    needs = {name: by_name.keys() & {each[0].spec.frozen_clip} for name, each in by_name.items()}
    return (by_name[name] for name in TopologicalSorter(needs).static_order())


def _run_here(task: Task, *, project: Path, worker: str) -> None:
    before = os.environ.get("WORKBENCH_DEVICE")
    os.environ["WORKBENCH_DEVICE"] = task.placement.device
    try:
        importlib.import_module(worker).run_here(task.run, project)
    finally:
        if before is None:
            del os.environ["WORKBENCH_DEVICE"]
        else:
            os.environ["WORKBENCH_DEVICE"] = before


def _refuse_sharded_parameters(planned: Sequence[PlannedRun]) -> None:
    sharded = [run for run in planned if run.world_size > 1 and run.spec.layout.shard_parameters]
    if sharded:
        raise LaunchError(
            "run the ablation here, in one process",
            found="shard_parameters in " + ", ".join(f"{run.name} ({run.world_size} ranks)" for run in sharded),
            rule="here ranks are simulated, and FSDP2 needs real ones",
            fix="leave these out, or use where='processes' or 'torchx'",
        )
