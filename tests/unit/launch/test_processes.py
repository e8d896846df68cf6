"""Ranks from ready processes: fast, each in its place, and gone with their launcher, however that ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers import warm
from tests.helpers.interruptible import INTERRUPTIBLE, UNINTERRUPTIBLE
from workbench.errors import LaunchError
from workbench.launch import forks, processes
from workbench.launch.devices import Placement
from workbench.records.directory import RunDirectory
from workbench.records.failures import EXIT_CODES
from workbench.records.provenance import process_alive, project_root, this_process
from workbench.specs.run import RunSpec

CPU = Placement("cpu")
ACTING = "tests.helpers.acting_worker"
GONE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def no_server_is_left():
    yield
    server = processes.server_process()
    processes.shut_down()
    assert server is not None
    assert not process_alive(**server)
    assert processes.server_process() is None


@pytest.fixture
def start(tmp_path):
    """Starts ranks that run commands; at the end all of them must be gone."""
    started = []

    def start(*acts, ranks=2, placement=CPU, worker=ACTING):
        run = RunDirectory.create(tmp_path / "runs", "x", RunSpec(steps=3, layout={"cp": ranks}, faults=list(acts)))
        job = processes.start([run], ranks, placement, project=tmp_path, worker=worker)
        started.append((job, family_of(job)))
        return job, run

    yield start
    for job, family in started:
        job.cancel()
        assert_gone(family)


def family_of(job):
    """(pid, start time) of the agent and the ranks that are still there."""
    family = []
    for pid in [job.agent["pid"], *job.ranks.values()]:
        try:
            family.append((pid, psutil.Process(pid).create_time()))
        except psutil.NoSuchProcess:
            continue
    return family


def assert_gone(family, within_s=GONE_S):
    until = time.monotonic() + within_s
    while left := [pid for pid, born in family if process_alive(pid, born)]:
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.02)


def wait(job, within_s=120.0):
    until = time.monotonic() + within_s
    while job.poll() == "running":
        assert time.monotonic() < until
        time.sleep(0.01)
    return job.poll()


def told(run, name, within_s=120.0):
    """The report of a rank, as soon as it exists."""
    until = time.monotonic() + within_s
    while not (path := run.path / f"{name}.json").exists():
        assert time.monotonic() < until, f"nobody told {name}; {[f.read_text() for f in run.path.glob('ranks/*.log')]}"
        time.sleep(0.01)
    return json.loads(path.read_text())


class TestARank:
    def test_finds_its_place_in_its_environment(self, start, tmp_path):
        job, run = start(placement=Placement("cuda", gpus=("3", "7")), ranks=2)
        assert wait(job) == "succeeded"
        for rank in (0, 1):
            seen = told(run, f"seen{rank}")
            assert seen["argv"] == [str(run.path), "--project", str(tmp_path)]
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "OMP_NUM_THREADS": "1",
                "WORKBENCH_DEVICE": "cuda",
                "CUDA_VISIBLE_DEVICES": "3,7",
            }
            assert {key: seen["environment"].get(key) for key in place} == place
            assert seen["environment"]["WB_AGENT_PID"] == str(job.agent["pid"])
            assert seen["threads"] == 1
            assert seen["process"]["pid"] == job.ranks[rank]
            assert seen["parent"] == job.agent["pid"]

    def test_has_the_environment_and_folder_of_now_and_not_of_the_servers_start(self, start, monkeypatch, tmp_path):
        processes.warm_up()
        monkeypatch.setenv("SAID_LATER", "yes")
        monkeypatch.setenv("WB_PARENT_PID", "1")
        monkeypatch.chdir(tmp_path)
        job, run = start(ranks=1)
        assert wait(job) == "succeeded"
        seen = told(run, "seen0")
        assert seen["environment"]["SAID_LATER"] == "yes"
        assert "WB_PARENT_PID" not in seen["environment"]
        assert seen["folder"] == str(tmp_path)

    def test_a_changed_environment_starts_a_new_server(self, start, monkeypatch):
        """The running one is not disturbed by the new server."""
        first, run = start("wait", ranks=1)
        told(run, "waiting0")
        before = processes.server_process()
        monkeypatch.setenv("PYTHONSOMETHING", "new")
        second, _ = start("print", ranks=1)
        assert processes.server_process() != before
        assert not process_alive(**before)
        assert wait(second) == "succeeded"
        assert first.poll() == "running"

    def test_has_torch_and_transformers_before_it_begins(self, start, monkeypatch):
        processes.shut_down()
        monkeypatch.setattr(processes, "sys", sys)  # nothing is loaded when it starts
        job, run = start(ranks=1)
        assert wait(job) == "succeeded"
        assert {"torch", "transformers", "safetensors", "pydantic", "numpy"} <= set(told(run, "seen0")["loaded"])
        assert told(run, "seen0")["collects"], "the server loads without the garbage collector, and its forks have it"

    def test_imports_from_the_source_tree_and_not_from_the_folder_of_the_server(self, start):
        job, run = start(ranks=1)
        assert wait(job) == "succeeded"
        path = told(run, "seen0")["path"]
        assert path[0] == str(project_root())
        assert not [entry for entry in path if entry.endswith("workbench/launch")]

    def test_keeps_no_file_of_its_agent_open_and_reads_nothing(self, start):
        """A rank that kept the agent's connection open would hide the agent's death from the launcher."""
        job, run = start(ranks=2)
        assert wait(job) == "succeeded"
        for rank in (0, 1):
            seen = told(run, f"seen{rank}")
            assert seen["stdin"] == "/dev/null"
            assert not [file for file in seen["files"] if "socket" in file]

    def test_has_random_numbers_of_its_own(self, start):
        job, run = start(ranks=2)
        assert wait(job) == "succeeded"
        assert told(run, "seen0")["random"] != told(run, "seen1")["random"]

    def test_writes_to_its_own_log(self, start):
        _, run = start("print", "wait", ranks=2)
        told(run, "waiting1")
        text = run.log_path(1).read_text()  # while it runs: nothing waits in a buffer
        assert "rank 1 says this\n" in text
        assert "and its shell says that\n" in text
        assert "rank 0" not in text

    def test_meets_the_others(self, start):
        job, run = start("meet", ranks=4)
        assert wait(job) == "succeeded"
        assert [told(run, f"met{rank}") for rank in range(4)] == [4.0] * 4


class TestEnds:
    @pytest.mark.parametrize(
        ("act", "ranks", "state", "codes"),
        [("print", 2, "succeeded", {0: 0, 1: 0}), ("exit_3", 1, "failed", {0: 3}), ("say_no", 1, "failed", {0: 1})],
    )
    def test_exit_codes_are_reported_and_written(self, start, act, ranks, state, codes):
        job, run = start(act, ranks=ranks)
        assert wait(job) == state
        assert job.exit_codes == codes
        written = json.loads((run.path / EXIT_CODES).read_text())
        assert {int(rank): code for rank, code in written.items()} == codes

    @pytest.mark.parametrize(("act", "code"), [("raise_1", 1), ("kill_1", -signal.SIGKILL)])
    def test_when_one_rank_dies_the_others_are_stopped_and_the_first_comes_first(self, start, act, code):
        job, run = start(act, "wait", ranks=3)
        begin = time.monotonic()
        assert wait(job) == "failed"
        assert time.monotonic() - begin < 6.0
        assert next(iter(job.exit_codes.items())) == (1, code)
        assert job.exit_codes == {1: code, 0: -signal.SIGTERM, 2: -signal.SIGTERM}
        assert list(json.loads((run.path / EXIT_CODES).read_text())) == [str(rank) for rank in job.exit_codes]

    def test_an_exception_is_in_the_log(self, start):
        job, run = start("raise_1", ranks=2)
        assert wait(job) == "failed"
        assert "ValueError: the second rank had enough" in run.log_path(1).read_text()

    def test_a_whole_run_is_on_disk(self, tmp_path, start):
        job, run = start(worker="tests.helpers.fake_worker")
        assert wait(job) == "succeeded"
        assert run.state["state"] == "succeeded"
        assert [record["ranks/all/sum"] for record in run.steps()] == [2.0, 2.0, 2.0]
        assert run.state["agent"]["pid"] == job.agent["pid"]

    def test_a_worker_that_fails_to_import_is_refused_at_once(self, start):
        with pytest.raises(LaunchError) as caught:
            start(worker="tests.helpers.no_such_worker")
        assert "No module named 'tests.helpers.no_such_worker'" in str(caught.value)

    def test_edits_of_the_workbench_and_the_worker_are_seen(self, start, tmp_path, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        for number in (1, 2):
            (tmp_path / "edited.py").write_text(f"import sys\ndef main(): sys.exit({number})\n# {'x' * number}\n")
            job, _ = start(worker="edited", ranks=1)
            assert wait(job) == "failed"
            assert job.exit_codes == {0: number}


class TestCancel:
    def test_ends_the_ranks_and_their_children(self, start):
        job, run = start("child", "wait", ranks=2)
        children = [(pid, psutil.Process(pid).create_time()) for pid in (told(run, "child0"), told(run, "child1"))]
        assert all(process_alive(*child) for child in children)
        job.cancel()
        assert job.poll() == "cancelled"
        assert job.exit_codes == {0: -signal.SIGTERM, 1: -signal.SIGTERM}
        assert_gone(children)

    def test_a_stubborn_rank_is_killed_after_the_grace(self, start):
        job, run = start("stubborn", ranks=1)
        told(run, "waiting0")
        begin = time.monotonic()
        job.cancel()
        assert job.exit_codes == {0: -signal.SIGKILL}
        assert forks.GRACE_S <= time.monotonic() - begin < forks.GRACE_S + 3

    def test_a_run_that_has_ended_stays_as_it_ended(self, start):
        job, _ = start("print", ranks=1)
        wait(job)
        job.cancel()
        assert job.poll() == "succeeded"

    def test_another_process_ends_it_by_stopping_the_agent(self, start):
        job, run = start("wait", ranks=2)
        told(run, "waiting1")
        os.kill(job.agent["pid"], signal.SIGTERM)
        assert wait(job) == "cancelled"
        assert set(job.exit_codes.values()) == {-signal.SIGTERM}


class TestNothingIsLeft:
    def test_ranks_die_with_an_agent_that_was_killed(self, start):
        job, run = start("stubborn", ranks=2)
        told(run, "waiting0"), told(run, "waiting1")
        family = family_of(job)
        assert len(family) == 3
        os.kill(job.agent["pid"], signal.SIGKILL)
        assert_gone(family, 5)  # without a poll so far
        assert wait(job, 5) == "failed"

    def test_a_run_survives_its_server_and_the_next_one_gets_another(self, start):
        job, run = start("wait", ranks=1)
        told(run, "waiting0")
        before = processes.server_process()
        os.kill(before["pid"], signal.SIGKILL)
        assert_gone([tuple(before.values())])
        assert job.poll() == "running"
        other, _ = start("print", ranks=1)
        assert wait(other) == "succeeded"
        assert processes.server_process() != before

    LAUNCHER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from workbench.launch import processes
from workbench.launch.devices import Placement
from workbench.records.directory import RunDirectory
run = RunDirectory.open(Path(sys.argv[1]))
job = processes.start([run], 2, Placement("cpu"), project=run.path, worker={worker!r})
print(processes.server_process()["pid"], job.agent["pid"], *job.ranks.values(), flush=True)
time.sleep({stay_s})
"""

    @pytest.mark.parametrize(
        "how", ["killed", "at its end", "interrupted", "told to stop", "told to stop in the background"]
    )
    def test_everything_leaves_with_the_launcher(self, tmp_path, how):
        """Also without a main guard: the launcher's own script is not run again."""
        act = "stubborn" if how == "killed" else "wait"
        run = RunDirectory.create(tmp_path / "runs", "x", RunSpec(layout={"cp": 2}, faults=[act]))
        script = tmp_path / "launcher.py"
        script.write_text(
            self.LAUNCHER.format(root=str(project_root()), worker=ACTING, stay_s=1 if how == "at its end" else 300)
        )
        prefix = UNINTERRUPTIBLE if how.endswith("background") else INTERRUPTIBLE
        with subprocess.Popen(
            [*prefix, warm.python(), str(script), str(run.path)],
            stdout=subprocess.PIPE,
            text=True,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as launcher:
            try:
                pids = [int(pid) for pid in launcher.stdout.readline().split()]
                family = [(pid, psutil.Process(pid).create_time()) for pid in pids]
                assert len(family) == 4
                told(run, "waiting0"), told(run, "waiting1")
                assert all(process_alive(*process) for process in family)
                number = {
                    "killed": signal.SIGKILL,
                    "interrupted": signal.SIGINT,
                    "told to stop": signal.SIGTERM,
                    "told to stop in the background": signal.SIGTERM,
                }
                if how in number:
                    launcher.send_signal(number[how])
                launcher.wait(120)
            finally:
                launcher.kill()
        assert_gone(family)


class TestTheServer:
    def test_a_failed_start_is_reported_too(self, monkeypatch, start):
        processes.shut_down()
        monkeypatch.setattr(processes, "PRELOAD", ("no_such_library",))
        with pytest.raises(LaunchError, match="No module named 'no_such_library'"):
            processes.warm_up()
        monkeypatch.undo()
        job, _ = start("print", ranks=1)
        assert wait(job) == "succeeded"

    def test_ranks_are_ready_quickly(self, start):
        """The bar of 0.3 s is measured by the benchmark; this only sees a worker that loads its libraries again."""
        processes.warm_up()
        job, run = start("meet", ranks=2)
        assert wait(job) == "succeeded"
        for rank in (0, 1):
            assert told(run, f"seen{rank}")["cpu_s"] < 1.5  # since its fork; loading torch alone takes 2 s of a core


def test_a_running_job_is_remembered(start):
    """Dropping the handle must not end the job."""
    import gc

    job, run = start("wait", ranks=1)
    agent = job.agent
    assert this_process()["pid"] != agent["pid"]
    del job
    gc.collect()
    told(run, "waiting0")
    assert process_alive(**agent)
