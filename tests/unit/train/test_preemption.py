"""SIGTERM: every rank stops after the same step with a checkpoint, and the resumed run has the bits of one that was not
stopped. Ranks that cannot come to the end of their step do not wait for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers import warm
from workbench.launch.ablation import PlannedRun
from workbench.launch.run import launch
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root
from workbench.records.requeued import STOPPED_AFTER
from workbench.sharding.flight import read_all
from workbench.specs.run import RunSpec
from workbench.train.watched import last_stack_path

STEPS = 16
WITHIN_S = 120.0


def until(condition):
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def started(folder, **settings):
    spec = RunSpec.model_validate(
        {
            "steps": STEPS,
            "device": "cpu",
            "precision": "float64",
            "model": {"source": "tiny-qwen3"},
            "data": {"documents_per_step": 2},
            "record": {"checkpoint_every": 1000, "certificate": True, "gradients": "none", "tokens": False},
        }
        | settings
    )
    return launch([PlannedRun("a", spec, "", "", "a")], folder, where="processes", project=project_root())


def hashes(run):
    return [record["certificate"] for record in run.steps()]


def ranks_of(run):
    """Pids by rank, from the flight records."""
    return {rank: view.pid for rank, view in read_all(run.path / "ranks").items()}


@pytest.mark.parametrize(("ranks", "signalled"), [(1, [0]), (2, [1])], ids=["one rank", "the second of two"])
def test_a_stopped_run_resumes_from_the_step_it_had_come_to_with_the_same_bits(tmp_path, ranks, signalled):
    settings = {"layout": {"cp": ranks}}
    sweep = started(tmp_path / "stopped", **settings)
    [run] = sweep
    until(lambda: run.steps())
    for rank in signalled:
        os.kill(ranks_of(run)[rank], signal.SIGTERM)
    sweep.wait(WITHIN_S)
    done = run.state[STOPPED_AFTER]["step"]
    assert 1 <= done < STEPS
    assert (list(run.checkpoints()), len(run.steps())) == ([done], done)
    assert run.failure()["cause"] == "killed"
    assert f"stopped by SIGTERM after {done} steps" in run.failure()["message"]

    resumed = started(tmp_path / "stopped", **settings)
    whole = started(tmp_path / "whole", **settings)
    [again], [other] = resumed.wait(WITHIN_S), whole.wait(WITHIN_S)
    assert again.state["continues"] == run.path.name
    assert len(hashes(other)) == STEPS
    assert hashes(again) == hashes(other)


STUCK = """
import os, sys, time
from pathlib import Path
from workbench.records.directory import RunDirectory
from workbench.train.preemption import Preemption
from workbench.train.watched import enable_diagnostics
run = RunDirectory.open(Path(sys.argv[1]))
preemption = Preemption(run, 0)
enable_diagnostics(run, 0, on_sigterm=preemption.on_sigterm)
if "began" in sys.argv:
    preemption.begin_step(0)
print("ready", flush=True)
time.sleep(300)
"""


@contextlib.contextmanager
def stuck(folder, *state, **environment):
    """A process that is rank 0 of two, in a step whose end it does not come to."""
    run = RunDirectory.create(folder, "run", RunSpec(layout={"cp": 2}))
    command = [warm.python(), "-c", STUCK, str(run.path), *state]
    variables = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "2", "WB_GRACE_S": "1000"} | environment
    with subprocess.Popen(
        command, cwd=project_root(), env=os.environ | variables, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield run, process
        finally:
            process.kill()


def test_before_the_first_step_a_rank_ends_at_once(tmp_path):
    with stuck(tmp_path) as (run, process):
        process.terminate()
        assert process.wait(WITHIN_S) == -signal.SIGTERM
    assert last_stack_path(run, 0).read_text()


def test_a_rank_whose_peer_has_failed_does_not_wait_for_it(tmp_path):
    with stuck(tmp_path, "began") as (run, process):
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        run.write_exit(1, {}, ValueError("no"))
        assert process.wait(WITHIN_S) == -signal.SIGTERM


def test_a_rank_whose_peer_is_gone_does_not_wait_for_it(tmp_path):
    with stuck(tmp_path, "began") as (run, process):
        gone = subprocess.run([sys.executable, "-c", FLIGHT, str(run.path)], cwd=project_root(), check=True)
        assert gone.returncode == 0
        process.terminate()
        assert process.wait(WITHIN_S) == -signal.SIGTERM


FLIGHT = """
import os, sys
from pathlib import Path
from workbench.records.directory import RunDirectory
from workbench.sharding import flight
from workbench.train.watched import flight_path
flight.start(flight_path(RunDirectory.open(Path(sys.argv[1])), 1), 1)
os._exit(0)
"""


def test_the_grace_period_ends(tmp_path):
    with stuck(tmp_path, "began", WB_GRACE_S="0.2") as (_, process):
        process.terminate()
        assert process.wait(WITHIN_S) == -signal.SIGTERM
