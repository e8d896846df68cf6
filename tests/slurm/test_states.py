"""Runs on a real Slurm: each end has its state and its cause in the run directory soon after Slurm knows it."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from datetime import datetime

import pytest

from tests.helpers.programs import write_program
from tests.slurm.cluster import NODE_DOWN_S, until
from workbench.launch.ablation import PlannedRun
from workbench.launch.run import launch
from workbench.launch.status import list_runs
from workbench.specs.run import RunSpec

pytestmark = pytest.mark.slurm

RIGHT_WITHIN_S = 30.0
"""Time from an end in Slurm to its state and cause in the run directory."""

FAKE, ACTING = "tests.helpers.fake_worker", "tests.helpers.acting_worker"
WATCHED = "tests.helpers.watched_worker"
START_S = 120.0  # until an agent and its ranks run, on a busy machine


@pytest.fixture
def begin(tmp_path):
    """Launch runs of a worker by name; what is left at the end is cancelled."""
    sweeps = []

    def begin(*names, worker=ACTING, steps=2, faults=("wait",), ranks=1, per_job=1, where="slurm", nodes=1, **options):
        spec = RunSpec(steps=steps, device="cpu", faults=faults, layout={"cp": ranks})
        planned = [PlannedRun(name, spec.merged({"seed": seed}), "", "", name) for seed, name in enumerate(names)]
        sweeps.append(
            launch(
                planned,
                tmp_path / "exp",
                where=where,
                worker=worker,
                per_job=per_job,
                nodes=nodes,
                options={"memory_mb": "50", **options},
            )
        )
        return sweeps[-1]

    yield begin
    for sweep in sweeps:
        sweep.cancel()
        sweep.wait(60)


def handle(run):
    """Number of the job of a run, once it was submitted."""
    until(lambda: "handle" in run.state, 60)
    return run.state["handle"].rpartition("/")[2]


def measured(text):
    """Show a measurement where the output of tests is shown (pytest -s)."""
    sys.stdout.write(f"\n{text}\n")


def ranks_wait(run, rank=0):
    until(lambda: (run.path / f"waiting{rank}.json").exists(), START_S)


def ended(cluster, sweep, *, within_s=START_S):
    """Wait for the end; the state has to follow Slurm's own end soon. Returns the failure."""
    sweep.wait(within_s)
    [run] = sweep
    end = datetime.fromisoformat(cluster.job(handle(run))["EndTime"]).timestamp()
    late_s = run.state["ended_ns"] / 1e9 - end
    measured(f"{run.name}: {run.state['state']} {late_s:.1f} s after its end; {run.state.get('scheduler')}")
    assert late_s < RIGHT_WITHIN_S
    return run.failure()


class TestEnds:
    def test_a_run_succeeds(self, any_slurm, begin):
        sweep = begin("good", worker=FAKE, faults=())
        assert ended(any_slurm, sweep) is None
        assert sweep.states() == {"good": "succeeded"}

    def test_configurations_share_a_job(self, slurm, begin):
        sweep = begin("a", "b", "c", worker=FAKE, faults=(), per_job=3)
        sweep.wait(START_S)
        assert set(sweep.states().values()) == {"succeeded"}
        assert len({run.state["handle"] for run in sweep}) == 1

    def test_a_rank_that_raises(self, any_slurm, begin):
        sweep = begin("bad", worker=FAKE, ranks=2, faults=("raise_on_1",))
        failure = ended(any_slurm, sweep)
        assert (failure["rank"], failure["cause"], failure["exception"]) == (1, "exception", "ValueError")

    def test_a_wrong_interpreter(self, any_slurm, begin):
        sweep = begin("lost", python="/no/such/python")
        failure = ended(any_slurm, sweep)
        assert failure["cause"] == "start"
        assert "execve(): .../python: No such file or directory" in failure["message"].splitlines()[1]

    def test_an_interpreter_without_the_libraries(self, any_slurm, begin, tmp_path):
        bare = tmp_path / "python"
        bare.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
        bare.chmod(0o755)
        failure = ended(any_slurm, begin("bare", python=str(bare)))
        assert failure["cause"] == "start"
        assert failure["message"].splitlines()[1].startswith("  found: ModuleNotFoundError: No module named")

    def test_a_time_limit(self, any_slurm, begin):
        failure = ended(any_slurm, begin("long", time="1"), within_s=240)
        assert failure["cause"] == "scheduler"
        assert "TIMEOUT" in failure["message"]

    def test_scancel(self, any_slurm, begin):
        sweep = begin("a")
        [run] = sweep
        ranks_wait(run)
        any_slurm.command("scancel", handle(run))
        ended(any_slurm, sweep)
        assert sweep.states() == {"a": "cancelled"}

    def test_cancel(self, any_slurm, begin):
        sweep = begin("a")
        [run] = sweep
        ranks_wait(run)
        began = time.monotonic()
        sweep.cancel()
        sweep.wait(RIGHT_WITHIN_S)
        assert sweep.states() == {"a": "cancelled"}
        until(lambda: any_slurm.job(handle(run))["JobState"] == "CANCELLED", RIGHT_WITHIN_S)
        measured(f"cancelled in {time.monotonic() - began:.1f} s")

    def test_preemption(self, any_slurm, begin):
        sweep = begin("low", partition="low")
        [run] = sweep
        ranks_wait(run)
        any_slurm.command("sbatch", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
        failure = ended(any_slurm, sweep)
        assert (failure["cause"], "PREEMPTED" in failure["message"]) == ("scheduler", True)


class TestNodes:
    def test_a_drained_node_takes_no_new_job_and_the_reason_is_shown(self, slurm, begin):
        for node in ("node1", "node2"):
            slurm.command("scontrol", "update", f"node={node}", "state=drain", "reason=test")
        sweep = begin("waits", worker=FAKE, faults=())
        [run] = sweep
        try:
            until(lambda: "DRAINED" in run.state.get("scheduler", ""), RIGHT_WITHIN_S)
            [listed] = list_runs(sweep.experiment_dir)
            assert listed.state == "pending"
            assert listed.why.startswith("PENDING (")
        finally:
            for node in ("node1", "node2"):
                slurm.command("scontrol", "update", f"node={node}", "state=resume")
        assert ended(slurm, sweep) is None

    def test_a_node_that_is_lost(self, slurm, begin):
        sweep = begin("unlucky")
        [run] = sweep
        ranks_wait(run)
        node = slurm.job(handle(run))["NodeList"]
        slurm.stop_node(node)
        try:
            failure = ended(slurm, sweep, within_s=NODE_DOWN_S + 120)
            assert failure["cause"] == "scheduler"
            assert f"NODE_FAIL (NodeDown, {node})" in failure["message"]
        finally:
            slurm.continue_node(node)


class TestSeveralNodes:
    """An agent on each node, started by srun; the names of both emulated nodes are this machine's."""

    @pytest.mark.parametrize("where", ["slurm", "sbatch"])
    def test_two_nodes_share_the_ranks_of_a_run(self, slurm, begin, where):
        sweep = begin("wide", worker=FAKE, faults=(), ranks=2, nodes=2, where=where)
        [run] = sweep
        assert ended(slurm, sweep) is None
        assert run.state["nodes"] == 2
        assert run.ranks_done
        job = slurm.job(handle(run))
        assert (job["NumNodes"], job["NumTasks"], job["NodeList"]) == ("2", "2", "node[1-2]")

    def test_a_rank_of_another_node_that_raises(self, slurm, begin):
        sweep = begin("bad", worker=FAKE, ranks=2, faults=("raise_on_1",), nodes=2)
        failure = ended(slurm, sweep)
        assert (failure["rank"], failure["cause"], failure["exception"]) == (1, "exception", "ValueError")

    def test_a_rank_of_another_node_that_hangs_is_named_with_its_stack(self, slurm, begin):
        sweep = begin("stuck", worker=WATCHED, ranks=2, steps=4, faults=("skip",), nodes=2)
        failure = ended(slurm, sweep)
        assert (failure["rank"], failure["cause"]) == (1, "hang")
        assert " in train\n" in failure["stack"]


class TestPlainScripts:
    """`--where sbatch`: the same ends without torchx."""

    def test_a_run_that_fails_and_one_that_succeeds(self, any_slurm, begin):
        sweep = begin("bad", worker=FAKE, ranks=2, faults=("raise_on_1",), where="sbatch")
        failure = ended(any_slurm, sweep)
        assert (failure["rank"], failure["cause"], failure["exception"]) == (1, "exception", "ValueError")
        assert ended(any_slurm, begin("good", worker=FAKE, faults=(), where="sbatch")) is None

    def test_a_wrong_interpreter(self, slurm, begin):
        failure = ended(slurm, begin("lost", python="/no/such/python", where="sbatch"))
        assert failure["cause"] == "start"
        assert "No such file or directory" in failure["message"].splitlines()[1]

    def test_a_time_limit(self, slurm, begin):
        failure = ended(slurm, begin("long", time="1", where="sbatch"), within_s=240)
        assert (failure["cause"], "TIMEOUT" in failure["message"]) == ("scheduler", True)

    def test_cancel(self, slurm, begin):
        sweep = begin("a", where="sbatch")
        [run] = sweep
        ranks_wait(run)
        sweep.cancel()
        sweep.wait(RIGHT_WITHIN_S)
        assert sweep.states() == {"a": "cancelled"}
        until(lambda: slurm.job(handle(run))["JobState"] == "CANCELLED", RIGHT_WITHIN_S)


def test_thirty_configurations(slurm, begin, tmp_path):
    """Thirty jobs at once; they run a light program instead of the agent, which would need thirty imports of torch."""
    quick = tmp_path / "quick"
    write_program(quick, QUICK)
    began = time.monotonic()
    sweep = begin(*(f"c{number}" for number in range(30)), python=str(quick))
    sweep.wait(300)
    measured(f"thirty jobs in {time.monotonic() - began:.0f} s")
    assert set(sweep.states().values()) == {"succeeded"}
    assert len({run.state["handle"] for run in sweep}) == 30


QUICK = """
import sys
from pathlib import Path
from workbench.records.directory import RunDirectory
run = RunDirectory.open(next(Path(word) for word in sys.argv if (Path(word) / "config.json").exists()))
run.set_state("running")
run.write_exit(0, {}, None)
run.set_state("succeeded")
"""


def test_an_ablation_from_the_command_line_to_its_report(any_slurm, tmp_path):
    (tmp_path / "tiny.yaml").write_text(
        "question: Is cp equal to one rank?\n"
        "base: {steps: 1, device: cpu, precision: float64}\nreference: one_rank\n"
        "configurations:\n  one_rank: {}\n  cp2: {layout: {cp: 2}}\n"
    )
    command = ["run", str(tmp_path / "tiny.yaml"), "--where", "slurm", "--scheduler", "memory_mb=50", "--per-job", "1"]
    done = subprocess.run([sys.executable, "-m", "workbench", *command], capture_output=True, text=True, timeout=400)
    measured(done.stdout)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("report.html"))
