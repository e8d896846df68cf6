"""The job of a run starts this interpreter, from this source tree, with absolute paths."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from workbench.launch.component import run_job
from workbench.launch.devices import Placement
from workbench.runs.store import project_root

CPU = Placement("cpu")


def role_of(placement=CPU, **more):
    app = run_job("cp2", Path("runs/cp2-0"), 2, placement, project=Path("proj"), **more)
    assert app.name == "cp2"
    [role] = app.roles
    return role


def test_the_command():
    role = role_of()
    assert role.entrypoint == sys.executable
    here = Path.cwd()
    assert role.args == ["-m", "workbench.launch.agent", "--standalone", "--nnodes=1", "--nproc-per-node=2",
                         "--max-restarts=0", "-m", "workbench.runs.worker", str(here / "runs/cp2-0"),
                         "--project", str(here / "proj")]
    assert role.num_replicas == 1


def test_the_environment_on_cpu(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    env = role_of().env
    assert env == {"OMP_NUM_THREADS": "1", "WORKBENCH_DEVICE": "cpu", "WB_PARENT_PID": str(os.getpid()),
                   "PYTHONPATH": f"{project_root()}{os.pathsep}/elsewhere"}


def test_gpus_are_given_out_by_us():
    role = role_of(Placement("cuda", gpus=("3", "7")))
    assert role.env["CUDA_VISIBLE_DEVICES"] == "3,7"
    assert role.env["WORKBENCH_DEVICE"] == "cuda"
    assert role.resource.gpu == 0  # or torchx sets CUDA_VISIBLE_DEVICES from device 0 in every job


def test_on_a_cluster_the_job_outlives_us_and_the_scheduler_gives_gpus():
    role = role_of(Placement("cuda", gpus=("3", "7")), local=False)
    assert "WB_PARENT_PID" not in role.env
    assert "CUDA_VISIBLE_DEVICES" not in role.env
    assert role.entrypoint == "python"
    assert role.resource.gpu == 2


@pytest.mark.parametrize("scheduler", ["local_cwd", "slurm"])
def test_torchx_accepts_it(scheduler, tmp_path):
    from workbench.launch.jobs import _runner

    local = scheduler == "local_cwd"
    app = run_job("cp2", tmp_path, 2, CPU, project=tmp_path, local=local)
    plan = str(_runner().dryrun(app, scheduler, cfg={"log_dir": str(tmp_path)} if local else {}))
    assert "workbench.launch.agent" in plan
    assert str(tmp_path) in plan
