"""The job of a run starts this interpreter, from this source tree, with absolute paths."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from workbench.launch.component import agent_output, run_job
from workbench.launch.devices import Placement
from workbench.launch.options import Cluster
from workbench.records.provenance import project_root

CPU = Placement("cpu")
GPUS = Placement("cuda", gpus=("3", "7"))


def role_of(placement=CPU, **more):
    app = run_job("cp2", [Path("runs/cp2-0")], 2, placement, project=Path("proj"), **more)
    assert app.name == "cp2"
    [role] = app.roles
    return role


def test_the_command():
    role = role_of()
    assert role.entrypoint == sys.executable
    here = Path.cwd()
    assert role.args == [
        "-m",
        "workbench.launch.agent",
        "--standalone",
        "--nnodes=1",
        "--nproc-per-node=2",
        "--max-restarts=0",
        "-m",
        "workbench.train.worker",
        str(here / "runs/cp2-0"),
        "--project",
        str(here / "proj"),
    ]
    assert role.num_replicas == 1


def test_the_environment_on_cpu(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert role_of().env == {
        "OMP_NUM_THREADS": "1",
        "WORKBENCH_DEVICE": "cpu",
        "WB_PARENT_PID": str(os.getpid()),
        "PYTHONPATH": f"{project_root()}{os.pathsep}/elsewhere",
    }


def test_gpus_are_given_out_by_us():
    role = role_of(GPUS)
    assert role.env["CUDA_VISIBLE_DEVICES"] == "3,7"
    assert role.env["WORKBENCH_DEVICE"] == "cuda"
    assert role.resource.gpu == 0  # or torchx sets CUDA_VISIBLE_DEVICES from device 0 in every job


@pytest.mark.parametrize(("given", "expected"), [(None, "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")])
def test_gpus_are_counted_in_nvidia_smi_order_unless_set_by_the_user(monkeypatch, given, expected):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if given:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", given)
    assert role_of(GPUS).env["CUDA_DEVICE_ORDER"] == expected


class TestOnACluster:
    def test_the_job_outlives_us_and_the_scheduler_gives_gpus(self):
        role = role_of(GPUS, cluster=Cluster())
        assert set(role.env) == {"OMP_NUM_THREADS", "WORKBENCH_DEVICE", "PYTHONPATH"}
        assert role.entrypoint == sys.executable
        assert role.resource.gpu == 2

    @pytest.mark.parametrize(
        ("placement", "memory_mb", "expected"),
        [(CPU, None, 2 * 4096), (GPUS, None, 2 * 16384), (CPU, 500, 1000), (CPU, 0, 0)],
    )
    def test_memory_is_requested_per_rank(self, placement, memory_mb, expected):
        assert role_of(placement, cluster=Cluster(memory_mb=memory_mb)).resource.memMB == expected

    def test_the_container_has_its_requirements(self):
        role = role_of(cluster=Cluster("/opt/python", image="img:1", mounts=("type=volume", "src=c", "dst=/shared")))
        [mount] = role.mounts
        assert (role.entrypoint, role.image, mount.src, mount.dst_path) == ("/opt/python", "img:1", "c", "/shared")


def test_the_output_of_agents_has_the_errors_of_slurm_and_not_its_script(tmp_path):
    (tmp_path / "slurm-7.out").write_text("+ srun --output=x\nsrun: error: node1: task 0: Exited with exit code 2\n")
    (tmp_path / "slurm-7-trainer-0.err").write_text("slurmstepd: error: execve(): nothing: No such file")
    assert agent_output(tmp_path).splitlines() == [
        "slurmstepd: error: execve(): nothing: No such file",
        "srun: error: node1: task 0: Exited with exit code 2",
    ]


def test_what_srun_says_of_a_task_that_ended_comes_after_the_cause_that_was_heard_later(tmp_path):
    """As a Slurm 22.05 on a busy machine wrote it."""
    ends = [
        "srun: error: node1: task 0: Exited with exit code 2",
        "srun: launch/slurm: _step_signal: Terminating StepId=2.0",
    ]
    cause = "slurmstepd-node1: error: execve(): /no/such/python: No such file or directory"
    (tmp_path / "slurm-2.err").write_text("\n".join([*ends, cause]))
    assert agent_output(tmp_path).splitlines() == [cause, *ends]
