"""Root-cause analysis of failed jobs.

A rank that raises writes its own exit record. One that is killed cannot, and one that hangs does not get there; the
other ranks report only that a connection was lost, often with an earlier time stamp. The evidence afterwards:

    exit records      of the ranks that could write one
    exit_codes.json   of the ranks that ended, in that order; written by the process that started them
    oom.json          number of processes that the machine killed for memory meanwhile, if any; written by the watchdog
    flights           the collective that each rank was in, and which ranks came to something else
    waiting.json      the ranks that the watchdog saw others wait for, with their stacks
    stopped.json      the ranks that the watchdog saw stopped (state T in /proc: SIGSTOP, a debugger)
    last.stack        stack of a rank when it was signalled to stop, or crashed
    the agent's output, if no rank ever began
    the scheduler's reason, where it ended the job: a time limit, a preemption, a node

all under ``ranks`` in the run directory. In the end every rank has an exit record.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import LaunchError
from workbench.launch.component import agent_output, job_folder
from workbench.launch.waits import Wait, find_waits, format_ranks
from workbench.records.agents import read_of_agents
from workbench.records.directory import RunDirectory
from workbench.records.failures import EXIT_CODES, OOM, RECORDED_LAST, STOPPED, WAITING, error_lines
from workbench.records.provenance import without_machine_paths
from workbench.records.requeued import STOPPED_AFTER
from workbench.sharding.flight import FlightView, read_all
from workbench.train.watched import last_stack_path

_PASSED = tuple(f"workbench/sharding/{name}.py" for name in ("collectives", "data_parallel", "flight", "wire"))
_SIGNALS = {each.value: each.name for each in signal.Signals}
_SCHEDULER_FIXES = {
    "TIMEOUT": "run the same command again with a longer time limit: --scheduler time=...",
    "OUT_OF_MEMORY": "request more memory for each rank: --scheduler memory_mb=...",
}
_GAVE_UP = re.compile(r"[Ww]atchdog caught collective operation timeout[^\n]{0,200}")  # NCCL's own, which then aborts
_TIMED_OUT = re.compile(r"timed out|timeout", flags=re.IGNORECASE)
# Threads that only wait for a parent's end: `die_with` of train/watched.py, whose function older records call `look`.
_WATCHING = re.compile(r'(watched|forks)\.py", line \d+ in (poll|look)\b')


def record_end(run: RunDirectory, job_state: str, *, scheduler: str = "") -> str:
    """Record in the run directory of an ended job how it ended, and return the resulting state.

    `scheduler`: the reason of the cluster's scheduler, if it ended the job; "" otherwise.
    """
    if job_state == "cancelled":
        return run.set_state("cancelled")
    if job_state == "succeeded" and run.state["state"] == "succeeded":
        return "succeeded"
    _FailureAnalysis(run, job_state, scheduler).write_records()
    return run.set_state("failed")


def write_hang(
    run: RunDirectory,
    rank: int,
    message: str,
    *,
    certain: bool,
    waited_in: str = "",
    stack: str = "",
    stopped: bool = False,
) -> None:
    """Write the exit record of a rank that others wait for; the message tells which, and where.

    `certain`: waiting longer could not have helped. `waited_in`: the collective that the rank was in itself. `stopped`:
    its process was stopped (state T), not busy.
    """
    stack = without_machine_paths(stack)
    too_long = f"no rank is waited for longer than timeout_s = {run.spec.timeout_s:g}"
    if stopped:
        error = LaunchError(
            f"rank {rank} was stopped: its process was in state T of /proc, as after SIGSTOP, Ctrl-Z or under a "
            f"debugger; {message}",
            found=f"it was still stopped when the agent that started the ranks ended the job and killed rank {rank}",
            rule=too_long,
            fix="find what stopped the process (a debugger, a shell's job control, a scheduler that suspends jobs); "
            "`kill -CONT` on its process continues it, if it is in time",
        )
    else:
        error = LaunchError(
            message,
            found=f"it was at {place_of(stack)}; its stack is stored with this message"
            if stack
            else "its stack is unknown",
            rule="all ranks of an axis come to the same collectives, in the same order" if certain else too_long,
            fix="look for a branch that ranks take differently before that line: on data, on a rank's number, on an "
            "error that one rank swallowed"
            if certain
            else "see where it was; if it was only slow, raise timeout_s",
        )
    run.write_exit(rank, coordinates_of(run, rank), error, cause="hang", waited_in=waited_in, stack=stack)


def write_early_exit(run: RunDirectory, wait: Wait, *, last: str, finished: bool, cause: str = "early exit") -> None:
    """Write the exit record of a rank that ended with exit code 0 while others waited for it.

    `last`: the last collective that it came to. `finished`: it had recorded that its part was done. The cause is "hang"
    if the others did not notice that it was gone, and hung.
    """
    rank = wait.rank
    after = f"after {last}" if last else "before its first collective"
    report = "it reported that its part was done" if finished else "it wrote no exit record, so it left before its end"
    error = LaunchError(
        f"rank {rank} left with exit code 0 {after}, while {format_ranks(wait.waiting)} waited for it in "
        f"{wait.entry}; {wait.why}",
        found=f"{report}; {last_lines(run.log_path(rank))}",
        rule="all ranks of an axis come to the same collectives, and a rank ends when all have done their part",
        fix="look for what ends this rank early: sys.exit or os._exit, a return or break that ranks take differently, "
        "data that is shorter on this rank",
    )
    run.write_exit(rank, coordinates_of(run, rank), error, cause=cause)


def coordinates_of(run: RunDirectory, rank: int) -> dict[str, int]:
    """Coordinates of a rank on the mesh: tp varies fastest, then cp, then dp, then pp, if there are several stages."""
    layout = run.spec.layout
    of_stage = layout.world_size // layout.pp
    place = {
        "dp": rank % of_stage // (layout.tp * layout.cp),
        "cp": rank // layout.tp % layout.cp,
        "tp": rank % layout.tp,
    }
    return {"pp": rank // of_stage} | place if layout.pp > 1 else place


def place_of(stack: str) -> str:
    r"""Innermost place of a stack outside of libraries and of the collectives themselves: file, line, function.

    Example:
        >>> place_of('  File ".../torch/nn.py", line 2 in call\n  File "workbench/train/step.py", line 7 in run_step')
        'workbench/train/step.py:7 in run_step'
    """
    frames = re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', stack)
    if "most recent call last" in stack:
        frames.reverse()
    own = [
        frame
        for frame in frames
        if not (frame[0].startswith(("...", "<")) or "site-packages/" in frame[0] or frame[0] in _PASSED)
    ] or frames
    return f"{own[0][0]}:{own[0][1]} in {own[0][2]}" if own else "an unknown place"


def own_threads(stacks: str) -> str:
    """The stacks that faulthandler wrote, the main thread first, without those that only watch a parent process."""
    threads: list[str] = []
    for line in stacks.splitlines(keepends=True):
        if line.startswith(("Thread ", "Current thread ")):
            threads.append(line)
        elif threads and line.startswith("  "):
            threads[-1] += line
    kept = [thread for thread in reversed(threads) if not (_WATCHING.search(thread) or "<no Python frame>" in thread)]
    return "\n\n".join(thread.strip("\n") for thread in kept) + "\n" if kept else ""


class _FailureAnalysis:
    """The evidence of one job, and the exit records that follow from it."""

    def __init__(self, run: RunDirectory, job_state: str, scheduler: str = "") -> None:
        self.run, self.job_state, self.scheduler = run, job_state, scheduler
        self.output = agent_output(job_folder(run)) or read_text(run.path / "ranks" / "agent.log")
        self.codes = _codes(run, self.output)
        self.oom_kills = sum(content.get("oom_kills", 0) for content in read_of_agents(run.path, OOM))
        self.views = read_all(run.path / "ranks")
        self.stopped = {int(rank) for content in read_of_agents(run.path, STOPPED) for rank in content}
        ended = {rank for rank, view in self.views.items() if view.ended}
        self.left = self._left_by_themselves(ended)
        self.waits = find_waits(self.views, range(run.spec.layout.world_size), ended | self.left)

    def write_records(self) -> None:
        """Write an exit record for each rank that has none, the root cause first."""
        if self.scheduler:  # its signals explain how the ranks ended
            self._record_scheduler()
        else:
            self._record_killed()
            self._record_early_exit()
            self._record_hang()
        if self.run.failure() is None:
            self._record_agent()
        self._record_stopped()

    def _record_scheduler(self) -> None:
        """Record that the scheduler ended the job, unless a rank failed by itself before."""
        failure = self.run.failure()
        if failure is not None and failure["cause"] != "peer":
            return
        state = self.scheduler.partition(" ")[0]
        self.run.write_exit(
            None,
            {},
            LaunchError(
                "the scheduler ended the job",
                found=self.scheduler,
                rule="a job runs within its limits until its ranks end it",
                fix=_SCHEDULER_FIXES.get(state, "run the same command again")
                + ("" if self.run.spec.record.checkpoint_every else "; record.checkpoint_every lets a run resume"),
            ),
            cause="out of memory" if state == "OUT_OF_MEMORY" else "scheduler",
        )

    def _record_killed(self) -> None:
        """Record the first rank that was killed before it could write a record."""
        exits = self.run.exits()
        # A stopped rank cannot end on SIGTERM: the SIGKILL that ended it was the agent's.
        silent = {rank: code for rank, code in self.codes.items() if code and rank not in {*exits, *self.stopped}}
        # The agent stops the survivors with SIGTERM: any other end, or the first end of all, is earlier.
        first = next(iter(self.codes), None)
        silent = {rank: code for rank, code in silent.items() if code != -signal.SIGTERM or rank == first}
        if any(record["cause"] in RECORDED_LAST for record in exits.values()):  # the watchdog stopped all of them
            silent = {rank: code for rank, code in silent.items() if code not in (-signal.SIGTERM, -signal.SIGKILL)}
        if not silent:
            return
        if stopped := self.run.state.get(STOPPED_AFTER) if set(silent.values()) == {-signal.SIGTERM} else None:
            error = LaunchError(
                f"the run was stopped by SIGTERM after {stopped['step']} steps",
                found="a checkpoint that it saved then",
                rule="a run ends by itself after its last step",
                fix="run the same command again: it resumes from the checkpoint",
            )
            self._write(min(silent), error, "killed")
            return
        rank, code = min(silent.items(), key=lambda entry: entry[1] == -signal.SIGTERM)
        gave_up = code == -signal.SIGABRT and _GAVE_UP.search(read_text(self.run.log_path(rank)))
        for_memory = code == -signal.SIGKILL and self.oom_kills > 0
        by = _SIGNALS.get(-code, f"signal {-code}")
        killed = f"was killed by {by}" if code < 0 else f"ended with exit code {code}"
        fix = f"read ranks/{self.run.log_path(rank).name} in the run directory"
        if for_memory:
            times = "" if self.oom_kills == 1 else f" ({self.oom_kills} times)"
            killed += f": out of memory, for which the machine{times} killed a process meanwhile"
            fix = "take more ranks, smaller micro-batches or a machine with more memory"
        elif code == -signal.SIGKILL:
            fix += "; the machine does not report that it ran out of memory, so a user or a limit killed it"
        elif gave_up:
            killed += f" when it had waited too long: {gave_up[0]}"
        error = LaunchError(
            f"rank {rank} {killed}",
            found=last_lines(self.run.log_path(rank)),
            rule="a rank ends by itself and records how",
            fix=fix,
        )
        cause = "out of memory" if for_memory else "peer" if gave_up else "killed" if code < 0 else "exception"
        self._write(rank, error, cause)

    def _left_by_themselves(self, ended: set[int]) -> set[int]:
        """Ranks that ended with exit code 0 before their part was done.

        torch.distributed.run records the codes of failed ranks only. It signals the others that still run to stop,
        which leaves a stack; a rank with neither a code nor a stack had ended before.
        """
        exits = self.run.exits()
        unrecorded = {
            rank
            for rank in self.views
            if self.codes
            and rank not in {*self.codes, *exits, *self.stopped}
            and not read_text(last_stack_path(self.run, rank))
        }
        return ({rank for rank, code in self.codes.items() if code == 0 and rank in self.views} | unrecorded) - ended

    def _record_early_exit(self) -> None:
        """Record the rank that ended with exit code 0 while others, which report a lost connection, waited for it."""
        exits, first = self.run.exits(), self.run.failure()
        if first is not None and first["cause"] != "peer":
            return
        for wait in self.waits:
            finished = exits.get(wait.rank, {"ok": False})["ok"]
            if wait.kind == "ended" and (finished or wait.rank not in exits):
                entries = self.views[wait.rank].entries if wait.rank in self.views else ()
                write_early_exit(self.run, wait, last=str(entries[-1]) if entries else "", finished=finished)
                return

    def _record_hang(self) -> None:
        """Record the rank that the others waited for, if they only report that they waited in vain."""
        exits, first = self.run.exits(), self.run.failure()
        if any(record["cause"] in RECORDED_LAST for record in exits.values()):
            return None
        only_echoes = first is not None and first["cause"] == "peer"
        now_ns = max([view.beat_ns for view in self.views.values()] + [r["time_ns"] for r in exits.values()], default=0)
        for wait in sorted(self.waits, key=lambda wait: wait.rank not in self.stopped):
            record = exits.get(wait.rank, {"ok": True, "traceback": ""})
            # an error inside a collective is only the effect of another rank's failure
            if (wait.kind == "skipped" or only_echoes) and (
                record["ok"] or record["cause"] == "peer" or record["waited_in"]
            ):
                stack = self._stack(wait.rank) or record["traceback"]
                return self._hang(wait.rank, wait.message(now_ns), stack, certain=wait.certain)
        for rank in sorted(self.stopped.difference(exits)) if first is None or only_echoes else ():
            return self._hang(rank, "the ranks that waited for it are unknown", self._stack(rank))
        if first is not None and only_echoes and _TIMED_OUT.search(first["message"]):
            for late in self._last_waits()[:1]:
                self._hang(late["rank"], f"{late['message']}; it came, but too late", late["stack"], stopped=False)
        return None

    def _hang(self, rank: int, message: str, stack: str, *, certain: bool = False, stopped: bool | None = None) -> None:
        write_hang(
            self.run,
            rank,
            message,
            certain=certain,
            waited_in=self._waited_in(rank),
            stack=stack,
            stopped=rank in self.stopped if stopped is None else stopped,
        )

    def _write(self, rank: int, error: LaunchError, cause: str) -> None:
        evidence = {"waited_in": self._waited_in(rank), "stack": self._stack(rank)}
        self.run.write_exit(rank, coordinates_of(self.run, rank), error, cause=cause, **evidence)

    def _record_agent(self) -> None:
        """Record a job without any exit record of a rank, from the agent's output."""
        began = bool(self.views) or "rank0" in self.run.state
        last = error_lines(self.output)
        if self.job_state == "succeeded":
            message = "every rank ended with exit code 0, and none recorded that the run succeeded"
        elif began:
            message = "the process that started the ranks was gone before any of them recorded why"
        else:
            message = "the agent that starts the ranks failed before any rank recorded why"
        places = "; ".join(f"rank {rank} was in {view.inside}" for rank, view in self.views.items() if view.inside)
        # the agent's output, which depends on the backend
        logs = {"processes": "ranks/agent.log", **dict.fromkeys(("slurm", "sbatch"), "torchx/slurm-*.err")}
        log = logs.get(str(self.run.state.get("backend")), "torchx/*/*/trainer/0/stderr.log")
        error = LaunchError(
            message,
            found=last or places or "no output",
            rule="rank 0 records how a run ended",
            fix=f"read {log} in the run directory"
            + (f" {shared}, of the same job" if (shared := self.run.state.get("job_of")) else ""),
        )
        killed = began and self.job_state != "succeeded"
        self.run.write_exit(None, {}, error, cause="killed" if killed else "start")

    def _record_stopped(self) -> None:
        """Record the ranks that were stopped because another one had failed, and the collectives that they were in."""
        failure = self.run.failure()
        first = "the agent" if failure is None or failure["rank"] is None else f"rank {failure['rank']}"
        ended_well = {rank for rank, code in self.codes.items() if code == 0}
        for rank in sorted({*self.codes, *self.views}.difference(self.run.exits(), ended_well)):
            error = LaunchError(
                f"rank {rank} was stopped",
                found="the scheduler ended the job" if self.scheduler else f"{first} had failed",
                rule="a job ends when one of its ranks does",
                fix=f"see {first}",
            )
            self._write(rank, error, "peer")

    def _waited_in(self, rank: int) -> str:
        """The collective that a rank was in, or, if its host had run ahead, in which it waited on the device."""
        view: FlightView | None = self.views.get(rank)
        if view is not None and view.inside is not None:
            return str(view.inside)
        return next((str(wait.entry) for wait in self.waits if rank in wait.waiting), "")

    def _stack(self, rank: int) -> str:
        """Stack of a rank while others waited for it, or else when it was stopped."""
        stack = next((each["stack"] for each in self._last_waits() if each["rank"] == rank), "")
        return stack or without_machine_paths(own_threads(read_text(last_stack_path(self.run, rank))))

    def _last_waits(self) -> Sequence[Mapping[str, Any]]:
        """The last waits that the watchdogs saw, those with a stack first: the agent of the rank's node has it."""
        contents = read_of_agents(self.run.path, WAITING)
        waits = [wait for each in contents for wait in each.get("waiting") or each.get("was") or []]
        return sorted(waits, key=lambda wait: not wait["stack"])


def _codes(run: RunDirectory, output: str) -> dict[int, int]:
    """Exit codes of the ranks, as far as they are known, in the order in which they ended.

    Without the record of them: those in the summary of torch.distributed.run, its root cause first.
    """
    if contents := read_of_agents(run.path, EXIT_CODES):
        return {int(rank): code for content in contents for rank, code in content.items()}
    codes = re.findall(r"rank\s+: (\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s+: (-?\d+)", output)
    return {int(rank): int(code) for rank, code in codes[-1:] + codes[:-1]}


def last_lines(log: Path, count: int = 5) -> str:
    """Return the last lines of a log without machine paths, in one line for a message."""
    lines = [line for line in without_machine_paths(read_text(log)).splitlines() if line.strip()]
    return "its last lines: " + " | ".join(lines[-count:]) if lines else "no output"


def read_text(path: Path) -> str:
    """Content of a file; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf8", errors="replace")
    except OSError:
        return ""
