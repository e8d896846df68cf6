"""The agent watches its ranks, reports how they ended, exits with the process that started it, and ends them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers import warm, watched_worker
from workbench.errors import LaunchError
from workbench.launch import processes
from workbench.launch.failure_analysis import record_end
from workbench.records.directory import RunDirectory
from workbench.records.provenance import process_alive, project_root
from workbench.sharding import flight
from workbench.specs.run import RunSpec
from workbench.train.watched import flight_path

# The agent of the test has a child, as torch.distributed.run has, and does `on_sigterm` on request.
AGENT = """
import os, signal, subprocess, sys, time
sys.path.insert(0, {root!r})
from workbench.launch.agent import exit_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
def stop(number, frame):
    child.kill(); child.wait(); print("told to stop", flush=True); os._exit(7)
signal.signal(signal.SIGTERM, {on_sigterm})
exit_with_parent(os.getppid(), poll_s=0.05, grace_s=0.3)
print(os.getpid(), child.pid, flush=True)
time.sleep(300)
"""
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
time.sleep(300)
"""


@pytest.mark.parametrize("on_sigterm", ["stop", "signal.SIG_IGN"], ids=["orderly", "stubborn"])
def test_it_leaves_when_its_parent_was_killed(on_sigterm):
    agent = AGENT.format(root=str(project_root()), on_sigterm=on_sigterm)
    with subprocess.Popen([sys.executable, "-c", PARENT, agent], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        family = [psutil.Process(pid) for pid in pids]
        assert len(family) == 2
        time.sleep(0.2)
        assert all(process.is_running() for process in family)  # it stays while its parent does
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        _, alive = psutil.wait_procs(family, timeout=60)
        text = "" if alive else parent.stdout.read()
    try:
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
        assert ("told to stop" in text) == (on_sigterm == "stop")
    finally:
        for process in alive:
            process.kill()


EVENTS = """
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from workbench.launch.agent import _name_events_by_frames
def record():
    return dynamic_rendezvous.get_method_name()
def next_rendezvous():
    return record(), dynamic_rendezvous.get_method_name(1)
of_torch = dynamic_rendezvous.get_method_name
print(*next_rendezvous())
_name_events_by_frames()
print(*next_rendezvous())
print(dynamic_rendezvous.get_method_name is not of_torch)
"""


def test_events_of_a_rendezvous_have_the_names_that_torch_gives_them():
    """The agent replaces torch's function, which reads the source of every frame."""
    environment = os.environ | {"PYTHONPATH": str(project_root())}
    done = subprocess.run([warm.python(), "-c", EVENTS], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == ["next_rendezvous next_rendezvous"] * 2 + ["True"]


@contextlib.contextmanager
def job(folder, *faults, ranks=2, hang_s=2.0, server=None, **settings):
    """A run of the watched worker under a real agent, its ranks forked unless another server is named."""
    spec = {"steps": 4, "layout": {"cp": ranks}, "faults": faults} | settings
    run = RunDirectory.create(folder, "job", RunSpec.model_validate(spec))
    output = run.path / "torchx/app/1/trainer/0"
    output.mkdir(parents=True)
    environment = os.environ | {
        "WB_HANG_S": str(hang_s),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(project_root()),
        "WB_PARENT_PID": "0",  # a warm program has another
        "WB_FORK_SERVER": processes.address() if server is None else server,
    }
    command = [
        warm.python(),
        "-m",
        "workbench.launch.agent",
        "--standalone",
        "--nnodes=1",
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
        "-m",
        watched_worker.__name__,
        str(run.path),
    ]
    with (output / "stderr.log").open("w") as errors:
        agent = subprocess.Popen(command, env=environment, stderr=errors, start_new_session=True)
    try:
        yield run, agent
    finally:
        agent.terminate()
        agent.wait(timeout=60)


def ended(run, agent):
    """Wait for the end of a job, and return how many seconds after its first collective it came."""
    code = agent.wait(timeout=120)
    assert record_end(run, "failed" if code else "succeeded") == "failed"
    return time.time() - flight.read(flight_path(run, 0)).entries[0].entered_ns / 1e9


FORKED, ELASTIC, GONE = None, "", "/nowhere/forks"
"""Ranks of the launcher's fork server, of torch.distributed.run, and of it because the server is gone."""


@pytest.mark.parametrize("server", [FORKED, ELASTIC], ids=["forked", "elastic"])
def test_a_rank_that_skipped_a_collective_is_named_long_before_any_time_is_over(tmp_path, server):
    with job(tmp_path, "skip", hang_s=600.0, server=server) as (run, agent):
        assert ended(run, agent) < 100  # and not after hang_s
    failure = run.failure()
    assert (failure["rank"], failure["cause"]) == (1, "hang")
    message = failure["message"]
    assert message.startswith("rank 1 has not come to all_gather of lengths over cp [#10, helpers/watched_worker.py:")
    assert (
        "it skipped that all_gather of lengths of 1 int64 and 1 more, and went on to all_sum of 4 float32 "
        "[helpers/watched_worker.py:"
    ) in message
    assert "  found: it was at tests/helpers/watched_worker.py:" in message
    assert " in train\n" in failure["stack"]
    assert failure["waited_in"].startswith("all_sum over cp [#10, ")
    assert failure["also"][0].startswith("all_gather of lengths over cp [#10, ")
    assert " in train\n" in run.exits()[0]["stack"], "the stack of who waited is kept too"
    codes = json.loads((run.path / "ranks/exit_codes.json").read_text())
    assert codes == {"1": -signal.SIGKILL, "0": -signal.SIGTERM}


def test_a_rank_that_hangs_outside_is_named_while_it_hangs_and_after_the_time_out(tmp_path):
    with job(tmp_path, "spin", hang_s=1.0, timeout_s=10.0) as (run, agent):
        named, deadline = run.path / "ranks/waiting.json", time.monotonic() + 60
        while not named.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert agent.poll() is None, "nothing is certain, so nobody is ended"
        [waiting] = json.loads(named.read_text())["waiting"]
        assert (waiting["rank"], waiting["waiting"]) == (1, [0])
        assert waiting["at"].endswith(" in spin")
        assert process_alive(**{key: run.state["agent"][key] for key in ("pid", "create_time")})
        ended(run, agent)
    failure = run.failure()
    assert (failure["rank"], failure["cause"], failure["waited_in"]) == (1, "hang", "")
    assert "found: it was at tests/helpers/watched_worker.py:" in failure["message"]
    assert " in spin\n" in failure["stack"]
    assert run.exits()[0]["cause"] == "peer"
    assert "all_gather of lengths over cp [#10," in failure["also"][0]


@pytest.mark.parametrize(
    ("fault", "cause", "words", "server"),
    [
        ("kill", "killed", "rank 1 was killed by SIGKILL", FORKED),
        ("kill", "killed", "rank 1 was killed by SIGKILL", GONE),
        ("memory", "out of memory", "no room for the batch", FORKED),
    ],
    ids=["kill", "kill, the server is gone", "memory"],
)
def test_a_dead_rank_is_the_cause_and_the_other_reports_its_wait(tmp_path, fault, cause, words, server):
    with job(tmp_path, fault, server=server) as (run, agent):
        ended(run, agent)
    failure = run.failure()
    assert (failure["rank"], failure["cause"]) == (1, cause)
    assert words in failure["message"]
    assert json.loads((run.path / "ranks/exit_codes.json").read_text())["1"] == (-9 if fault == "kill" else 1)
    assert run.exits()[0]["cause"] == "peer"
    assert run.exits()[0]["waited_in"].startswith("all_gather of lengths over cp [#10,")


def test_a_rank_that_leaves_early_is_named_and_not_called_a_hang(tmp_path):
    with job(tmp_path, "leave") as (run, agent):
        ended(run, agent)
    failure = run.failure()
    assert (failure["rank"], failure["cause"]) == (1, "early exit")
    assert failure["message"].startswith("rank 1 left with exit code 0 after all_sum over cp [#9, helpers/watched")
    assert "while rank 0 waited for it in all_gather of lengths over cp [#10, " in failure["message"]
    assert run.exits()[0]["cause"] == "peer"


def ranks_of(run):
    """The processes of the ranks, once they train."""
    deadline = time.monotonic() + 60
    while len(run.steps()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    numbers = range(run.spec.layout.world_size)
    ranks = [psutil.Process(flight.read(flight_path(run, rank)).pid) for rank in numbers]
    assert all(rank.is_running() for rank in ranks)
    return ranks


@pytest.mark.parametrize(("server", "ranks"), [(FORKED, 2), (ELASTIC, 1)], ids=["forked", "elastic"])
def test_ranks_leave_with_an_agent_that_was_killed(tmp_path, server, ranks):
    with job(tmp_path, "slow", steps=1000, server=server, ranks=ranks) as (run, agent):
        ranks = ranks_of(run)
        psutil.Process(run.state["agent"]["pid"]).kill()
        agent.wait(timeout=60)
        _, alive = psutil.wait_procs(ranks, timeout=60)
        assert alive == []
    assert record_end(run, "failed") == "failed"
    assert run.failure()["cause"] == "killed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_forked_ranks_leave_with_the_process_of_their_torchx_job(tmp_path, number):
    with job(tmp_path, "slow", steps=1000) as (run, process):
        ranks = ranks_of(run)
        agent = psutil.Process(run.state["agent"]["pid"])
        assert [rank.ppid() for rank in ranks] == [agent.pid, agent.pid]
        serving = psutil.Process(agent.ppid()).net_connections("unix")
        assert processes.address() in [connection.laddr for connection in serving]
        process.send_signal(number)
        assert process.wait(timeout=60) != 0
        _, alive = psutil.wait_procs([agent, *ranks], timeout=60)
        assert alive == []


def test_a_job_that_waits_for_its_fork_server_can_be_cancelled(tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "x", RunSpec(steps=3))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "forks"))
        listener.listen()
        environment = os.environ | {"WB_FORK_SERVER": str(tmp_path / "forks"), "PYTHONPATH": str(project_root())}
        words = ["--nproc-per-node", "1", "-m", "tests.helpers.acting_worker", str(run.path)]
        process = subprocess.Popen([sys.executable, "-m", "workbench.launch.agent", *words], env=environment)
        try:
            listener.settimeout(60)
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(1)  # the request: now it waits for the answer
                process.terminate()
                assert process.wait(timeout=20) == -signal.SIGTERM
        finally:
            process.kill()
            process.wait()


def test_a_server_that_never_answers_fails_the_run_and_not_the_launcher(tmp_path, monkeypatch):
    run = RunDirectory.create(tmp_path / "runs", "x", RunSpec(steps=3))
    monkeypatch.setattr(processes, "ANSWER_S", 0.2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "forks"))
        listener.listen()
        with pytest.raises(LaunchError, match=r"(?s)no answer from the fork server within 0\.2 s.*state T"):
            processes.request(
                str(tmp_path / "forks"), [run.path], 1, {"PYTHONPATH": ""}, tmp_path, "tests.helpers.acting_worker"
            )
