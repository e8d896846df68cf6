"""Start ablations, kill one of their processes with SIGKILL at a random time, and check the remains.

A process belongs to a story if its environment has the story's mark: it is found under any parent, and no
other process is ever touched.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Hashable
from pathlib import Path

import psutil

from tests.chaos import launcher, stacks
from tests.chaos.worker import acknowledged, checksum
from tests.helpers.left_open import children_of
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root
from workbench.records.states import ENDED

MARK = "WB_CHAOS"
LEAVE_S = 120.0
"""How long processes may stay without doing anything after the launcher is gone."""

END_S = 180.0
"""How long nothing of an ablation may move before it ends by itself, when anything else was killed."""

_PATIENCE = 5
"""Such times that may pass in all, however much moves: a story takes some 20 s on an idle machine."""

_LOOK_S = 5.0
"""Interval at which it is looked whether anything moved."""

VICTIMS = {
    "torchx": ("launcher", "agent", "rank", "parent"),
    "processes": ("launcher", "agent", "rank", "parent", "server"),
}

# Whatever a kernel or a command is started from; it waits for it.
PARENT = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"


class Story:
    """One experiment that is launched again and again, and killed in between.

    Args:
        folder: of the experiment.
        where: how its runs are launched.
        seed: of everything random.
    """

    def __init__(self, folder: Path, where: str, seed: int) -> None:
        self.folder, self.where, self.random = folder, where, random.Random(f"{where} {seed}")
        self.mark = uuid.uuid4().hex
        self.told: list[str] = []
        self.kills, self.killing = 0, list[str]()
        self.strangers = set[int]()  # looked at and without the mark; only `start` gives it to who had none
        self.seen: dict[str, dict[int, int]] = {}
        self.own: set[tuple[int, float]] = set()
        recording = folder / "data/own"
        recording.mkdir(parents=True)
        (recording / "manifest.json").write_text("{}")

    # ---- actions -------------------------------------------------------------------------------------

    def tell(self, kills: int) -> None:
        """Launch and kill until that many processes were killed, then let everything finish."""
        launches = 0
        while self.kills < kills:
            launches += 1
            assert launches <= 4 * kills, f"too few could be killed\n{self.story()}"
            self.launch_and_kill(runs=launches)
        self.finish(runs=launches)

    def launch_and_kill(self, runs: int) -> None:
        """Launch, kill one process if it can be found in time, and check that nothing is lost or left behind."""
        victim = self._next_victim()
        parent = self.start(runs)
        if self.kills < len(VICTIMS[self.where]) or self.random.random() < 0.5:  # each kind once while ranks run
            moment = "while ranks ran"
            self.wait_for("rank", parent)
            time.sleep(self.random.uniform(0.5, 2.5))
        else:
            moment = "whenever it was"
            time.sleep(self.random.uniform(0.0, 5.0))
        target = self.wait_for(victim, parent)
        if target is not None and _kill(target):
            self.told.append(f"{victim} of {runs} runs killed {moment}")
            self.kills += 1
        else:
            self.told.append(f"{victim} of {runs} runs had ended")
        # runs with a live launcher finish their work; the others exit
        self.wait_until_nobody_is_left(LEAVE_S if victim == "launcher" else END_S)
        code = self.exit_code(parent)
        assert code == 0 or victim in ("launcher", "parent"), f"the launcher failed\n{self.story()}"
        self.check()

    def _next_victim(self) -> str:
        """Every kind once, in a random order, and then again."""
        if self.kills % len(VICTIMS[self.where]) == 0 and not self.killing[self.kills :]:
            self.killing += self.random.sample(VICTIMS[self.where], len(VICTIMS[self.where]))
        return self.killing[self.kills]

    def finish(self, runs: int) -> None:
        """Launch once more without a kill, and check that everything is complete."""
        parent = self.start(runs)
        assert self.exit_code(parent) == 0, self.story()
        self.wait_until_nobody_is_left(LEAVE_S)
        self.check()
        newest = {run.name: run for run in sorted(self.runs(), key=lambda run: run.state["created_ns"])}
        assert sorted(newest) == sorted(f"run{number}" for number in range(runs)), self.story()
        assert {run.status for run in newest.values()} == {"succeeded"}, self.story()

    def check(self) -> None:
        """Compare every run directory with its acknowledged records, now and the last time."""
        missing = {name for name, steps in self.seen.items() if steps} - {run.path.name for run in self.runs()}
        assert not missing, f"{missing} are gone\n{self.story()}"
        for run in self.runs():
            state = run.status
            assert state in ENDED, f"{run.path.name} is {state}\n{self.story()}"
            steps = run.steps()
            assert [record["step"] for record in steps] == list(range(len(steps))), self.story()
            results = {record["step"]: checksum(record) for record in steps}
            promised = acknowledged(run) | self.seen.get(run.path.name, {})
            assert promised.items() <= results.items(), f"{run.path.name} has lost steps\n{self.story()}"
            if state == "succeeded":
                assert len(steps) == launcher.STEPS, f"{run.path.name} says succeeded\n{self.story()}"
            if state == "failed":
                assert run.failure() is not None, f"{run.path.name} does not say why\n{self.story()}"
            self.seen[run.path.name] = results

    def runs(self) -> list[RunDirectory]:
        return [RunDirectory.open(path.parent) for path in sorted(self.folder.glob("runs/*/config.json"))]

    def story(self) -> str:
        """Everything so far, for the message of a failure."""
        runs = [f"{run.path.name}: {run.status}, {(run.failure() or {}).get('message', '')}" for run in self.runs()]
        return "\n".join([*self.told, *runs, (self.folder / "output").read_text()[-3000:]])

    def end(self) -> None:
        """Leave nothing of the story, whatever went wrong."""
        for process in self.processes():
            process.kill()

    # ---- processes -----------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Every living process of the story.

        One that was seen with the mark stays one of it until it is a zombie: while a process ends, which takes its time
        on a busy machine, it has no environment any more, and its run is `running`.
        """
        mark, results = f"{MARK}={self.mark}".encode(), []
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 (quicker)
        self.strangers &= pids
        seen = {pid for pid, _ in self.own}
        for pid in sorted(pids & seen | pids - self.strangers):
            environment = b""
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()  # of a process that ends it is empty
            marked = mark in environment.split(b"\0")
            if not marked and pid not in seen:
                if environment:
                    self.strangers.add(pid)
                continue
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                identity = pid, process.create_time()
                if marked:
                    self.own.add(identity)
                if identity in self.own and process.status() != psutil.STATUS_ZOMBIE:
                    results.append(process)
        return results

    def start(self, runs: int) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            MARK: self.mark,
            "PYTHONPATH": str(project_root()),
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        command = [
            sys.executable,
            "-c",
            PARENT,
            sys.executable,
            "-m",
            "tests.chaos.launcher",
            str(self.folder),
            self.where,
            str(runs),
        ]
        with (self.folder / "output").open("a") as output:
            return subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=project_root())

    def wait_for(self, victim: str, parent: subprocess.Popen[bytes]) -> psutil.Process | None:
        """One of the processes of that kind, as soon as there is one; None if everything ended before."""
        while parent.poll() is None:
            family = psutil.Process(parent.pid)  # it stays, if only as a zombie, until it is waited for
            result = [family] if victim == "parent" else self._of_kind(victim, family)
            if result:
                return self.random.choice(result)
            time.sleep(0.05)
        return None

    def _of_kind(self, victim: str, parent: psutil.Process) -> list[psutil.Process]:
        generations: list[Callable[[psutil.Process], bool]] = [
            lambda process: "tests.chaos.launcher" in process.cmdline()
        ]
        if self.where == "processes":
            generations.append(lambda process: any(part.endswith("forkserver.py") for part in process.cmdline()))
        generations += [lambda process: True, lambda process: True]
        kinds = ["launcher", "agent", "rank"] if self.where == "torchx" else ["launcher", "server", "agent", "rank"]
        family = [parent]
        for kind, belongs in zip(kinds, generations, strict=True):
            children = []
            for process in family:
                for pid in children_of(process.pid):
                    with contextlib.suppress(psutil.Error):
                        if belongs(child := psutil.Process(pid)):
                            children.append(child)
            if kind == victim:
                return children
            family = children
        raise AssertionError(f"no kind of process is called {victim}")

    def exit_code(self, process: subprocess.Popen[bytes], seconds: float = END_S) -> int:
        """The exit code of a launcher, when it has ended by itself."""
        self._wait_until(lambda: process.poll() is not None, seconds, "a launcher did not end")
        return process.wait()

    def wait_until_nobody_is_left(self, seconds: float) -> None:
        """Wait for the end of every process of the story."""
        self._wait_until(lambda: not self.processes(), seconds, "processes are left")

    def _wait_until(self, done: Callable[[], bool], seconds: float, otherwise: str) -> None:
        """Wait as long as anything moves; say where every process is once nothing has for that long.

        A time alone would tell a machine with too much to do from a story that hangs only by guessing.
        """
        began = looked = moved = time.monotonic()
        before = self._movement()
        while not done():
            time.sleep(0.2)
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                if (movement := self._movement()) != before:
                    before, moved = movement, now
            if now - moved > seconds or now - began > _PATIENCE * seconds:
                seen = f"{now - began:.0f} s after the start, {now - moved:.0f} s after the last movement"
                found = stacks.last_look(self.processes(), self.folder)
                raise AssertionError(f"{otherwise}: {seen}\n{self.story()}\n{found}")

    def _movement(self) -> Hashable:
        """What changes while a story goes on: its processes, and the sizes of what they write."""
        sizes = []
        for path in self.folder.rglob("*"):
            with contextlib.suppress(OSError):
                sizes.append((str(path), path.stat().st_size))
        return frozenset(process.pid for process in self.processes()), frozenset(sizes)


def _kill(process: psutil.Process) -> bool:
    """Kill a process, and return whether it was still alive."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True
