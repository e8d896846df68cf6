"""Plain batch scripts: their content, what sbatch answers, and that none of it needs torchx."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.errors import LaunchError
from workbench.launch import jobs, sbatch
from workbench.launch.devices import Placement
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root
from workbench.specs.run import RunSpec

RUN = Path("/shared/experiment/runs/cp2-0a1b2c3d")
GPUS = Placement("cuda", gpus=("0", "1", "2", "3"), nodes=2)


def script(placement=GPUS, *, resumable=False, **options):
    return sbatch.script(["a", "b"], [RUN], 4, placement, project=Path("/p"), options=options, resumable=resumable)


def directives(text):
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_a_job_of_two_nodes_has_an_agent_on_each_and_its_share_of_everything():
    text = script(partition="gpu", time="00:10:00", exclusive="")
    assert directives(text) == {
        "job-name": "a-and-1-more",
        "chdir": f"{RUN}/torchx",
        "output": "slurm-%j.out",
        "error": "slurm-%j.err",
        "nodes": "2",
        "ntasks": "2",
        "cpus-per-task": "2",
        "mem": "32768M",
        "gpus-per-task": "2",
        "no-requeue": "",
        "partition": "gpu",
        "time": "00:10:00",
        "exclusive": "",
    }
    assert "CUDA_VISIBLE_DEVICES" not in text, "the cluster assigns GPUs"
    [step] = [shlex.split(line) for line in text.splitlines() if line.startswith("srun")]
    agent = step[step.index(sys.executable) :]
    assert agent[1:5] == ["-m", "workbench.launch.agent", "--nnodes=2", "--nproc-per-node=2"]
    assert agent[-5:] == ["-m", "workbench.train.worker", str(RUN), "--project", "/p"]
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_a_resumable_job_may_be_requeued_and_adds_to_its_output():
    assert directives(script(resumable=True)).items() >= {"requeue": "", "open-mode": "append"}.items()


def test_values_reach_the_job_as_they_are(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/shared/a,b c'd")
    text = script(comment="two words", memory_mb="0", python="/other python")
    assert "--comment='two words'" in text
    assert "mem" not in directives(text)
    assert "'/other python' -m workbench.launch.agent" in text
    exports = "".join(f"{line}\n" for line in text.splitlines() if line.startswith("export"))
    shown = subprocess.run(["bash", "-c", f'{exports} printf %s "$PYTHONPATH"'], capture_output=True, text=True).stdout
    assert shown.endswith("/shared/a,b c'd")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nodes": "3"}, "set by the launcher"),
        ({"Partition": "x"}, "not a long option"),
        ({"comment": "a\n#SBATCH --x"}, "not a long option"),
        ({"memory_mb": "much"}, "a number"),
    ],
)
def test_options_that_sbatch_cannot_have_are_refused(options, said):
    with pytest.raises(LaunchError, match=said):
        script(**options)


@pytest.fixture
def answering(tmp_path, monkeypatch):
    """An sbatch that prints what the test writes to a file, and keeps the script."""
    tool = tmp_path / "bin/sbatch"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncat > {tmp_path}/script\n. {tmp_path}/answer\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize("answer", ["echo 42", "echo '42;cluster'"])
def test_a_submitted_job_is_one_of_slurm(answering, answer):
    (answering / "answer").write_text(answer)
    run = RunDirectory.create(answering / "runs", "a", RunSpec())
    job = jobs.start([run], 1, Placement("cpu"), project=answering, scheduler="sbatch", options={"partition": "x"})
    assert job.handle == "slurm://sbatch/42"
    assert (job._on_slurm, job._job_id) == (True, "42")
    assert jobs.job_of(job.handle)._job_id == "42", "any process can ask for it"
    assert "--partition=x" in (answering / "script").read_text()
    assert (run.path / "torchx").is_dir()


@pytest.mark.parametrize("answer", ["echo 'sbatch: error: invalid partition' >&2; exit 1", "echo nonsense"])
def test_a_refusal_is_told_in_sbatchs_own_words(answering, answer):
    (answering / "answer").write_text(answer)
    with pytest.raises(LaunchError, match=r"invalid partition|nonsense"):
        sbatch.submit(script())


def test_without_sbatch_the_command_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="no sbatch on this machine"):
        sbatch.submit(script())


def test_nothing_of_it_loads_torchx():
    program = (
        "import sys; sys.modules['torchx'] = None\n"
        "from pathlib import Path\n"
        "from workbench.launch import jobs, slurm\n"
        "from workbench.launch.devices import Placement\n"
        "print(jobs.describe(['a'], [Path('/r')], 2, Placement('cpu'), project=Path('/p'), scheduler='sbatch'))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=project_root(), capture_output=True, text=True)
    assert done.stdout.startswith("sbatch --parsable <<'SBATCH'\n#!/bin/bash\n"), done.stderr
