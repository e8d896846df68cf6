"""Jobs of several nodes: how ranks are spread and agents meet; two agents on two emulated hosts, with a verdict."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers import watched_worker
from workbench.errors import LaunchError
from workbench.launch.component import WORKER, agent_arguments
from workbench.launch.failure_analysis import record_end
from workbench.launch.nodes import meeting, own_gpus, spread, this_node
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root
from workbench.specs.run import RunSpec

TWO = ["--nnodes=2", "--nproc-per-node=2", "-m", "worker", "/runs/a", "--nnodes=7"]


@pytest.mark.parametrize(("ranks", "nodes", "taken"), [(8, 1, 1), (8, 2, 2), (1, 2, 1), (2, 4, 2), (6, 3, 3)], ids=str)
def test_ranks_are_spread_evenly(ranks, nodes, taken):
    assert spread("run", ranks, nodes) == taken


@pytest.mark.parametrize(("ranks", "nodes", "said"), [(3, 2, "run x on 2 nodes"), (2, 0, "0 nodes for each job")])
def test_what_cannot_be_spread_is_refused(ranks, nodes, said):
    with pytest.raises(LaunchError, match=said):
        spread("x", ranks, nodes)


def test_agents_of_a_job_meet_at_one_place_and_one_of_them_is_the_host(tmp_path):
    first, second = (
        meeting(TWO, [tmp_path], {"WB_NODE": str(node), "WB_HEAD": "10.0.0.7", "WB_LOCAL_ADDR": f"10.0.0.{7 + node}"})
        for node in (0, 1)
    )
    assert first[0] == "--rdzv-backend=c10d"
    assert first[1].startswith("--rdzv-endpoint=10.0.0.7:2")
    assert first[:3] == second[:3]
    assert [each[3] for each in (first, second)] == ["--rdzv-conf=is_host=1", "--rdzv-conf=is_host=0"]
    assert [each[4] for each in (first, second)] == ["--local-addr=10.0.0.7", "--local-addr=10.0.0.8"]
    other = meeting(TWO, [tmp_path / "b"], {"WB_NODE": "0", "WB_HEAD": "10.0.0.7"})
    assert other[1:3] != first[1:3], "another job on the same machines meets elsewhere"


@pytest.mark.parametrize(
    ("environment", "node", "head"),
    [
        ({"SLURM_NODEID": "1", "SLURM_LAUNCH_NODE_IPADDR": "10.1.1.1", "SLURM_JOB_ID": "7"}, 1, "10.1.1.1"),
        ({"WB_NODE": "1", "WB_HEAD_IN": "VC_X_0_HOSTS", "VC_X_0_HOSTS": "x-0.x,y"}, 1, "x-0.x"),
        ({"WB_NODE": "0", "WB_HEAD_IN": "HOST"}, 0, "localhost"),
        ({"WB_NODE": "0", "SLURM_NODEID": "3", "WB_HEAD": "a"}, 0, "a"),
    ],
    ids=["slurm", "kubernetes", "its first node", "given"],
)
def test_every_scheduler_tells_the_node_and_the_first_one(tmp_path, environment, node, head):
    assert this_node(environment) == node
    assert meeting(TWO, [tmp_path], environment)[1].startswith(f"--rdzv-endpoint={head}:")


def test_a_requeued_job_meets_elsewhere(tmp_path):
    """The agents of its earlier start may still be ending."""
    slurm = {"SLURM_NODEID": "0", "SLURM_LAUNCH_NODE_IPADDR": "a", "SLURM_JOB_ID": "7"}
    assert meeting(TWO, [tmp_path], slurm)[1:3] != meeting(TWO, [tmp_path], slurm | {"SLURM_RESTART_COUNT": "1"})[1:3]


def test_without_a_first_node_the_agent_says_what_is_missing(tmp_path):
    with pytest.raises(LaunchError, match="SLURM_LAUNCH_NODE_IPADDR in the environment"):
        meeting(TWO, [tmp_path], {})
    assert meeting(["--standalone", "--nnodes=1"], [tmp_path], {}) == []


def test_agents_of_one_machine_share_its_gpus():
    gpus = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "WB_NODE": "1"}
    assert own_gpus(TWO, gpus) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert own_gpus(TWO, gpus | {"CUDA_VISIBLE_DEVICES": "0,1"}) == {}, "a machine of its own has its own GPUs"
    assert own_gpus(["--nnodes=1", "--nproc-per-node=4"], gpus) == {}


# ---- two agents --------------------------------------------------------------------------------------------


def hosts():
    """Commands that give a process a host name of its own, where this user may; else both have this machine's."""
    own = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
    allowed = shutil.which("unshare") and not subprocess.run([*own, "x", "true"], capture_output=True).returncode
    return [[*own, name] if allowed else [] for name in ("wb-first", "wb-second")]


@contextlib.contextmanager
def two_agents(folder, *faults, worker=watched_worker.__name__, device="cpu", **settings):
    """A run of two ranks, one under each of two agents; their processes. On GPUs each rank has one of its own."""
    run = RunDirectory.create(folder, "job", RunSpec.model_validate({"layout": {"cp": 2}, "faults": faults} | settings))
    agents = []
    for node, host in enumerate(hosts()):
        output = run.path / f"torchx/app/1/trainer/{node}"
        output.mkdir(parents=True)
        environment = os.environ | {
            "WB_NODE": str(node),
            "WB_HEAD": "127.0.0.1",
            "WB_LOCAL_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",  # the names of the hosts resolve to nothing
            "WB_HANG_S": "2.0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(project_root()), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "WORKBENCH_DEVICE": device,
        }
        if device == "cuda":  # to NCCL these are two machines: it connects them by sockets
            environment = {"CUDA_VISIBLE_DEVICES": "0,1"} | environment | {"NCCL_SOCKET_IFNAME": "lo"}
        command = [*host, sys.executable, *agent_arguments(2, 2, [run.path], folder, worker)]
        with (output / "stderr.log").open("w") as errors:
            agents.append(subprocess.Popen(command, env=environment, stderr=errors, start_new_session=True))
    try:
        yield run, agents
    finally:
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGTERM)
            agent.wait(timeout=60)


def ended(run, agents):
    codes = [agent.wait(timeout=240) for agent in agents]
    assert record_end(run, "failed" if any(codes) else "succeeded") == "failed"
    return codes


def test_a_rank_that_skips_a_collective_is_named_by_the_agent_of_its_node(tmp_path):
    """And the other agent ends its own rank, which would wait for ever."""
    with two_agents(tmp_path, "skip", steps=4, timeout_s=240.0) as (run, agents):
        began = time.monotonic()
        assert all(ended(run, agents))
        assert time.monotonic() - began < 200, "not after the time-out"
    failure = run.failure()
    assert (failure["rank"], failure["cause"]) == (1, "hang")
    assert failure["message"].startswith("rank 1 has not come to all_gather of lengths over cp [#10, helpers/watched_")
    assert " in train\n" in failure["stack"], "only the agent of its node can have taken it"
    recorded = [json.loads(path.read_text()) for path in run.path.glob("ranks/exit_codes*.json")]
    ends = {rank: code for each in recorded for rank, code in each.items()}
    assert len(recorded) == 2, "each agent records its own rank"
    assert ends["1"] == -signal.SIGKILL
    assert ends["0"] in (1, -signal.SIGTERM), "gloo tells it, or its agent ends it"


@pytest.mark.slow
def test_two_agents_run_to_the_end(tmp_path):
    with two_agents(tmp_path, steps=3, timeout_s=120.0) as (run, agents):
        assert [agent.wait(timeout=240) for agent in agents] == [0, 0]
    assert run.ranks_done
    assert len(run.steps()) == 3
    assert not list(run.path.glob("ranks/waiting*.json"))


@pytest.mark.slow
def test_a_killed_rank_of_another_node_is_the_cause(tmp_path):
    with two_agents(tmp_path, "kill", steps=4, timeout_s=60.0) as (run, agents):
        ended(run, agents)
    failure = run.failure()
    assert (failure["rank"], failure["cause"]) == (1, "killed")


@pytest.mark.slow
def test_a_rank_that_left_early_is_named(tmp_path):
    with two_agents(tmp_path, "leave", steps=4, timeout_s=60.0) as (run, agents):
        ended(run, agents)
    failure = run.failure()
    assert failure["rank"] == 1
    assert "left with exit code 0" in failure["message"]


@pytest.mark.slow
def test_a_slow_rank_is_named_with_its_stack_and_then_ended(tmp_path):
    with two_agents(tmp_path, "spin", steps=4, timeout_s=20.0) as (run, agents):
        until = time.monotonic() + 200
        while time.monotonic() < until and not (named := _named(run)):
            time.sleep(0.2)
        assert {each["rank"] for each in named} == {1}
        assert any(" in spin\n" in each["stack"] for each in named), "one of the agents can take its stack"
        ended(run, agents)
    assert run.failure()["rank"] == 1
    assert " in spin\n" in run.failure()["stack"]


@pytest.mark.gpus(2)
@pytest.mark.parametrize("worker", [watched_worker.__name__, WORKER], ids=["collectives", "training"])
def test_two_agents_run_to_the_end_over_nccl(tmp_path, worker):
    data = {"path": str(project_root() / "data/arithmetic/rollouts")}
    with two_agents(tmp_path, worker=worker, device="cuda", steps=3, timeout_s=120.0, data=data) as (run, agents):
        assert [agent.wait(timeout=240) for agent in agents] == [0, 0]
    assert run.ranks_done
    assert len(run.steps()) == 3


@pytest.mark.gpus(2)
def test_a_rank_that_skips_a_collective_over_nccl_is_named(tmp_path):
    with two_agents(tmp_path, "skip", device="cuda", steps=4, timeout_s=240.0) as (run, agents):
        assert all(ended(run, agents))
    assert (run.failure()["rank"], run.failure()["cause"]) == (1, "hang")


def _named(run):
    contents = [json.loads(path.read_text()) for path in run.path.glob("ranks/waiting*.json")]
    named = [each for content in contents for each in content["waiting"]]
    return named if any(each["stack"] for each in named) else []
