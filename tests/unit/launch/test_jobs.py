"""The torchx seam: the exact request, no signal handler replaced, no query about a job that has ended."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import signal
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from torchx import specs

from tests.helpers import warm
from tests.helpers.audited import audited
from tests.helpers.programs import write_program
from tests.helpers.stand_in import stand_in
from workbench.errors import LaunchError
from workbench.launch import component, jobs
from workbench.launch import options as schedulers
from workbench.launch.devices import Placement
from workbench.records.directory import RunDirectory
from workbench.records.provenance import process_alive, project_root
from workbench.specs.run import RunSpec

CPU, GPUS = Placement("cpu"), Placement("cuda", gpus=("0", "1"))
RUN, PROJECT = Path("/shared/runs/cp2-0a1b2c3d"), Path("/shared/project")
COMMAND = [
    "-m",
    "workbench.launch.agent",
    "--standalone",
    "--nnodes=1",
    "--nproc-per-node=2",
    "--max-restarts=0",
    "-m",
    "workbench.train.worker",
    str(RUN),
    "--project",
    str(PROJECT),
]
WAITING = "tests.helpers.acting_worker"
NEEDED = {"queue": "default", "image": "registry/workbench:1"}


def described(scheduler, placement=GPUS, *, name="cp2_zigzag-float64", run=RUN, resumable=False, **options):
    return jobs.describe(
        [name], [run], 2, placement, project=PROJECT, scheduler=scheduler, options=options, resumable=resumable
    )


@pytest.fixture
def nothing_is_contacted():
    """No socket and no process; any attempt finds nothing, and is recorded."""
    tried = []

    def refuse(event, arguments):
        if event in ("socket.connect", "subprocess.Popen", "os.posix_spawn", "os.system"):
            tried.append((event, arguments))
            raise FileNotFoundError("nothing here")

    with audited(refuse):
        yield
    asked = [arguments[1] for event, arguments in tried if event == "subprocess.Popen"]
    assert [arguments for arguments in asked if arguments != ["sinfo", "--version"]] == []  # torchx after 0.7 does
    assert len(asked) == len(tried)


@pytest.mark.usefixtures("nothing_is_contacted")
class TestDryRun:
    def test_a_local_job_is_a_command_for_a_shell(self, monkeypatch):
        monkeypatch.delenv("PYTHONPATH", raising=False)
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        words = shlex.split(described("local_cwd").replace("\\\n", " "))
        assert words[0] == "env"
        assert words[1:8] == [
            "OMP_NUM_THREADS=1",
            "WORKBENCH_DEVICE=cuda",
            f"PYTHONPATH={project_root()}",
            "CUDA_VISIBLE_DEVICES=0,1",
            "CUDA_DEVICE_ORDER=PCI_BUS_ID",
            "WB_PARENT_PID=$$",
            sys.executable,
        ]
        assert words[8:] == COMMAND

    def test_the_slurm_job_is_an_sbatch_script(self, monkeypatch):
        monkeypatch.delenv("PYTHONPATH", raising=False)
        text = described("slurm", partition="gpu", time="60", comment="for the paper")
        command, *script = text.splitlines()
        assert shlex.split(command)[:-1] == ["sbatch", "--parsable", "--comment=for the paper", f"--chdir={RUN}/torchx"]
        assert script[0] == "#!/bin/bash"
        assert script[-1] == "SBATCH"
        [request] = [line for line in script if line.startswith("#SBATCH")]
        assert set(request.split()[1:]) == {
            "--job-name=cp2_zigzag-float64-0",
            "--no-requeue",
            "--nodes=1",
            "--ntasks=1",
            "--partition=gpu",
            "--time=60",
            "--cpus-per-task=2",
            "--mem=32768",
            "--gpus-per-task=2",
        }
        [step] = [shlex.split(line) for line in script if line.startswith("srun ")]
        assert step[-len(COMMAND) - 1 :] == [sys.executable, *COMMAND]  # its environment need not be activated
        assert "--cpus-per-task=2" in step  # Slurm since 22.05 would give the step one core
        [exported] = [word for word in step if word.startswith("--export=")]
        assert exported == (
            f"--export=ALL,OMP_NUM_THREADS=1,WORKBENCH_DEVICE=cuda,"
            f"PYTHONPATH={project_root()},TORCHX_JOB_ID=slurm://torchx/$SLURM_JOB_ID"
        )

    def test_a_slurm_job_whose_runs_save_checkpoints_may_be_started_again(self):
        text = described("slurm", resumable=True)
        assert "--requeue" in text
        assert "--no-requeue" not in text
        assert "--open-mode=append" in text  # its output after the restart does not replace that before

    def test_a_slurm_job_on_cpu_requests_no_gpu(self):
        text = described("slurm", CPU, memory_mb="500", python="/shared/venv/bin/python")
        assert "gpu" not in text
        assert "--mem=1000" in text.split()
        assert " /shared/venv/bin/python -m workbench.launch.agent " in text
        assert "--mem" not in described("slurm", CPU, memory_mb="0")

    def test_the_kubernetes_job_is_yaml(self, monkeypatch):
        monkeypatch.delenv("PYTHONPATH", raising=False)
        job = yaml.safe_load(described("kubernetes", **NEEDED, mounts="type=volume,src=claim,dst=/shared"))
        assert (job["apiVersion"], job["kind"]) == ("batch.volcano.sh/v1alpha1", "Job")
        assert job["spec"]["queue"] == "default"
        assert job["spec"]["maxRetry"] == 0
        [task] = job["spec"]["tasks"]
        assert task["replicas"] == 1
        [container] = task["template"]["spec"]["containers"]
        assert container["image"] == "registry/workbench:1"
        assert container["command"] == ["python", *COMMAND]
        name = job["metadata"]["name"]
        environment = {each["name"]: each["value"] for each in container["env"]}
        assert environment["TORCHX_JOB_ID"] == f"kubernetes://torchx/{name}"
        assert {key: value for key, value in environment.items() if not key.startswith("TORCHX_")} == {
            "OMP_NUM_THREADS": "1",
            "WORKBENCH_DEVICE": "cuda",
            "PYTHONPATH": str(project_root()),
        }
        assert container["resources"]["limits"] == {"cpu": "2000m", "memory": "32768M", "nvidia.com/gpu": "2"}
        assert {"mountPath": "/shared", "name": "mount-0", "readOnly": False} in container["volumeMounts"]
        assert {"name": "mount-0", "persistentVolumeClaim": {"claimName": "claim"}} in task["template"]["spec"][
            "volumes"
        ]
        assert task["template"]["spec"]["restartPolicy"] == "Never"

    def test_kubernetes_takes_the_pods_of_every_node(self):
        """By the published schemas of Kubernetes; the Volcano job around the pods has none there."""
        validator = pytest.importorskip("kubernetes_validate")
        options = NEEDED | {"mounts": "type=volume,src=claim,dst=/shared"}
        job = yaml.safe_load(described("kubernetes", replace(GPUS, nodes=2), **options))
        tasks = job["spec"]["tasks"]
        assert [task["replicas"] for task in tasks] == [1, 1]
        for node, task in enumerate(tasks):
            pod = {"apiVersion": "v1", "kind": "Pod", **task["template"]}
            validator.validate(pod, validator.latest_version(), strict=True)
            [container] = task["template"]["spec"]["containers"]
            environment = {variable["name"]: variable["value"] for variable in container["env"]}
            assert environment["WB_NODE"] == str(node)
            assert environment["WB_HEAD_IN"] == ("VC_TRAINER_0_HOSTS" if node else "TORCHX_RANK0_HOST")
            assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
            assert "--nnodes=2" in container["command"]

    @pytest.mark.parametrize("scheduler", schedulers.SCHEDULERS)
    def test_the_same_request_has_the_same_result(self, scheduler):
        options = NEEDED if scheduler == "kubernetes" else {}
        first = described(scheduler, **options)
        assert described(scheduler, **options) == first
        assert described(scheduler, run=RUN.with_name("cp2-0a1b2c3d-2"), **options) != first

    @pytest.mark.parametrize("name", ["A_very.long-" + 9 * "run_name_", "x", "2", "__"])
    def test_a_name_on_kubernetes_is_legal_for_job_pod_and_labels(self, name):
        job = yaml.safe_load(described("kubernetes", name=name, **NEEDED))
        labels = job["spec"]["tasks"][0]["template"]["metadata"]["labels"]
        for label in (job["metadata"]["name"], labels["app.kubernetes.io/name"], labels["torchx.pytorch.org/app-name"]):
            assert len(label) + len("-trainer-0-0") <= 63
            assert label.replace("-", "").isalnum()
            assert label == label.lower()
            assert label[0].isalpha()
            assert label[-1].isalnum()

    def test_nothing_is_made(self, tmp_path):
        for scheduler in schedulers.SCHEDULERS:
            described(scheduler, run=tmp_path / "runs" / "x", **(NEEDED if scheduler == "kubernetes" else {}))
        assert list(tmp_path.iterdir()) == []


class TestOptions:
    @pytest.mark.parametrize(
        ("scheduler", "options", "said"),
        [
            ("slurm", {"partion": "gpu"}, "options of slurm: partion"),
            ("slurm", {"job_dir": "/x"}, "options of slurm: job_dir"),
            ("local_cwd", {"partition": "gpu"}, "it takes none"),
            ("kubernetes", {"image": "x"}, "a kubernetes job without queue"),
            ("kubernetes", {}, "a kubernetes job without queue and image"),
            ("kubernetes", {**NEEDED, "mounts": "src=x"}, "option mounts = 'src=x'"),
            ("slurm", {"memory_mb": "much"}, "option memory_mb = 'much'"),
            ("lsf", {}, "one of local_cwd, slurm, kubernetes"),
        ],
    )
    def test_unknown_missing_and_wrong_options_are_named(self, scheduler, options, said):
        with pytest.raises(LaunchError) as caught:
            described(scheduler, **options)
        assert said in str(caught.value)

    def test_every_option_has_a_help_text(self):
        assert schedulers.options_of("local_cwd") == {}
        slurm = schedulers.options_of("slurm")
        assert {"partition", "time", "comment", "constraint", "mail-user", "mail-type", "python", "memory_mb"} <= set(
            slurm
        )
        kubernetes = schedulers.options_of("kubernetes")
        assert {name for name, meaning in kubernetes.items() if meaning.endswith("(needed)")} == {"queue", "image"}
        assert all({**slurm, **kubernetes}.values())

    def test_a_comma_would_be_lost_in_slurm(self, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", "/shared/a,b")
        with pytest.raises(LaunchError, match=r"PYTHONPATH=.*/shared/a,b"):
            described("slurm")

    def test_a_missing_kubernetes_package_is_reported(self, monkeypatch):
        without = stand_in(importlib.util, find_spec=lambda name: None)
        monkeypatch.setattr(schedulers, "importlib", stand_in(importlib, util=without))
        with pytest.raises(LaunchError, match="pip install kubernetes"):
            described("kubernetes", **NEEDED)


# ---- on this machine -----------------------------------------------------------------------------------


def request(*command):
    role = specs.Role(
        name="trainer",
        image="",
        entrypoint=command[0],
        args=list(command[1:]),
        num_replicas=1,
        resource=specs.Resource(cpu=1, gpu=0, memMB=64),
    )
    return specs.AppDef(name="job", roles=[role])


def local(tmp_path, *command):
    app = request(*command)
    plan = schedulers.runner().dryrun(app, "local_cwd", cfg={"log_dir": str(tmp_path)})
    return jobs._start_local(component.Request("local_cwd", app, plan))


def wait(job, timeout_s=120.0):
    until = time.monotonic() + timeout_s
    while job.poll() == "running":
        assert time.monotonic() < until
        time.sleep(0.02)
    return job.poll()


class TestLocalJob:
    def test_signal_handlers_stay_as_they_were(self, tmp_path):
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        schedulers.runner.cache_clear()
        local(tmp_path, "true").cancel()
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before

    @pytest.mark.parametrize(("command", "expected"), [("true", "succeeded"), ("false", "failed")])
    def test_reports_its_end(self, tmp_path, command, expected):
        assert wait(local(tmp_path, command)) == expected

    def test_an_ended_job_is_never_signalled_again(self, tmp_path):
        job = local(tmp_path, "true")
        wait(job)
        signalled = []
        with audited(lambda event, arguments: signalled.append(arguments) if event in ("os.kill", "os.killpg") else 0):
            assert job.poll() == "succeeded"
            job.cancel()
            schedulers.runner().close()  # a scheduler does this when it is deleted
        assert signalled == []

    def test_cancel_stops_the_process_that_it_names(self, tmp_path):
        job = local(tmp_path, sys.executable, "-c", "import time; time.sleep(60)")
        assert job.poll() == "running"
        assert process_alive(**job.agent)
        job.cancel()
        assert job.poll() == "cancelled"
        assert not process_alive(**job.agent)

    # torchx leaves its log files open when a job does not start
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_a_failed_start_is_reported(self, tmp_path):
        with pytest.raises(LaunchError, match="start job job"):
            local(tmp_path, "/no/such/program")

    def test_the_output_of_the_agent_can_be_read(self, tmp_path):
        wait(local(tmp_path, sys.executable, "-c", "import sys; sys.exit('no port for me')"))
        assert "no port for me" in component.agent_output(tmp_path)

    def test_another_process_cannot_find_it_again(self):
        with pytest.raises(LaunchError, match="end the processes that the run's state names"):
            jobs.job_of("local_cwd://torchx/cp2-abc")


# ---- on a cluster that we play -------------------------------------------------------------------------

SLURM = {  # requests of torchx to Slurm, and responses of Slurm 23; a job is a local process in its own session
    "sbatch": """
        import os, pathlib, re, subprocess, sys
        home, arguments = pathlib.Path({home!r}), sys.argv[1:]
        options = [a for a in arguments if a.startswith("--")]
        script = [a for a in arguments if not a.startswith("--")]
        text = pathlib.Path(script[0]).read_text() if script else sys.stdin.read()
        if "--partition=nowhere" in text:
            sys.exit("sbatch: error: invalid partition specified: nowhere")
        if "--test-only" in options:
            sys.exit(0)
        number = str(1000 + len(list(home.glob("*.sh"))))
        (home / (number + ".sh")).write_text(text)
        (home / (number + ".name")).write_text(re.search(r"--job-name=(\\S+)", text)[1])
        [folder] = [o.partition("=")[2] for o in options if o.startswith("--chdir=")]
        run = f"bash {{home}}/{{number}}.sh; echo $? > {{home}}/{{number}}.code"
        log = open(os.path.join(folder, "slurm-" + number + ".out"), "w")
        job = subprocess.Popen(["sh", "-c", run], cwd=folder, start_new_session=True, stdout=log, stderr=log,
                               stdin=subprocess.DEVNULL, env=os.environ | {{"SLURM_JOB_ID": number}})
        (home / (number + ".pid")).write_text(str(job.pid))
        print(number)
        """,
    "srun": """
        import os, sys
        words = sys.argv[1:]
        while words[0].startswith("--"):
            name, _, value = words.pop(0).partition("=")
            if name == "--export":
                os.environ.update(pair.split("=", 1) for pair in value.split(",")[1:])
            if name in ("--output", "--error"):
                os.dup2(os.open(value, os.O_WRONLY | os.O_CREAT, 0o644), 1 if name == "--output" else 2)
        os.execvp(words[0], words)
        """,
    "scontrol": """
        import pathlib, sys
        home, number = pathlib.Path({home!r}), sys.argv[-1]
        if (home / "silent").exists():
            sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
        if not (home / (number + ".name")).exists() or (home / (number + ".forgotten")).exists():
            sys.exit("slurm_load_jobs error: Invalid job id specified")
        code = home / (number + ".code")
        state = "RUNNING" if not code.exists() else "COMPLETED" if code.read_text().strip() == "0" else "FAILED"
        state = "CANCELLED" if (home / (number + ".cancelled")).exists() else state
        said = home / (number + ".said")
        state, reason = said.read_text().split() if said.exists() else (state, "None")
        name = (home / (number + ".name")).read_text()
        print(f"JobId={{number}} JobName={{name}} JobState={{state}} Reason={{reason}} ExitCode=0:0 "
              "RunTime=00:01:05 TimeLimit=00:01:00 NodeList=node1")
        """,
    "sacct": """
        import pathlib, sys
        home, number = pathlib.Path({home!r}), sys.argv[sys.argv.index("-j") + 1]
        if not (home / (number + ".accounted")).exists():
            sys.exit("Slurm accounting storage is disabled")
        print("COMPLETED|None|0:0|00:01:05|00:02:00|node1")
        """,
    "scancel": """
        import os, pathlib, signal, sys
        home, number = pathlib.Path({home!r}), sys.argv[1]
        (home / (number + ".cancelled")).touch()
        os.killpg(int((home / (number + ".pid")).read_text()), signal.SIGTERM)
        """,
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A Slurm of one node; whatever a job left is killed at the end, by the session that it was started in."""
    home, tools = tmp_path / "slurm", tmp_path / "bin"
    home.mkdir()
    tools.mkdir()
    for name, source in SLURM.items():
        write_program(tools / name, textwrap.dedent(source).format(home=str(home)), "-S")
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(jobs, "POLL_INTERVAL_S", 0.2)  # each poll starts a program
    yield home
    for file in home.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(file.read_text()), signal.SIGKILL)


@pytest.fixture
def run(tmp_path):
    """Its steps take no time with tests.helpers.fake_worker, and a minute with tests.helpers.acting_worker."""
    return RunDirectory.create(tmp_path / "runs", "cp2", RunSpec(steps=3, layout={"cp": 2}, faults=["wait"]))


def submit(run, worker="tests.helpers.fake_worker", ranks=2, **options):
    return jobs.start(
        [run],
        ranks,
        CPU,
        project=run.path,
        worker=worker,
        scheduler="slurm",
        options={"python": warm.python(), **options},
    )


class TestSlurm:
    def test_a_run_goes_from_submission_to_end(self, slurm, run):
        job = submit(run)
        assert job.handle == "slurm://torchx/1000"
        assert job.poll() == "running"
        assert wait(job, 60) == "succeeded"
        assert run.state["state"] == "succeeded"
        assert [record["ranks/all/sum"] for record in run.steps()] == [2.0, 2.0, 2.0]
        assert "job exited with code 0" in (run.path / "torchx" / "slurm-1000.out").read_text()
        assert jobs.job_of(job.handle).poll() == "succeeded"  # as another process requests

    def test_the_shown_request_is_the_submitted_one(self, slurm, run):
        shown = jobs.describe(
            ["cp2"],
            [run.path],
            2,
            CPU,
            project=run.path,
            worker="json.tool",
            scheduler="slurm",
            options={"python": "true"},
        )
        submit(run, "json.tool", python="true")
        script = [line for line in shown.splitlines()[1:-1] if not line.startswith("# Run with")]
        submitted = (slurm / "1000.sh").read_text().splitlines()
        assert [line for line in submitted if not line.startswith("# Run with")] == script
        assert len(script) > 20

    def test_another_process_cancels_it_and_nothing_is_left(self, slurm, run):
        job = submit(run, WAITING, ranks=1, python=sys.executable)  # a fork would be the child of another process
        session = int((slurm / "1000.pid").read_text())
        other = jobs.job_of(job.handle)
        until = time.monotonic() + 120
        while len(family := psutil.Process(session).children(recursive=True)) < 3:  # script, agent and rank
            assert time.monotonic() < until
            time.sleep(0.1)
        assert other.poll() == "running"
        other.cancel()
        assert other.poll() == "cancelled"
        assert wait(job) == "cancelled"
        assert [
            process for process in psutil.wait_procs(family, timeout=120)[1] if process.status() != psutil.STATUS_ZOMBIE
        ] == []

    def test_a_job_that_ends_badly_failed(self, slurm, run):
        job = submit(run, "no.such.worker")
        assert wait(job, 60) == "failed"
        assert "no" in component.agent_output(run.path / "torchx")

    def test_a_rejection_quotes_the_scheduler(self, slurm, run):
        with pytest.raises(LaunchError) as caught:
            submit(run, partition="nowhere")
        assert "submit run cp2 to slurm" in str(caught.value)
        assert "sbatch: error: invalid partition specified: nowhere" in str(caught.value)
        assert "file system that the cluster's nodes see" in str(caught.value)

    def test_a_machine_without_slurm_is_refused(self, run, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(LaunchError, match="no sbatch on this machine"):
            submit(run)

    def test_a_job_that_dies_early_has_failed_without_accounting(self, slurm, run):
        job = submit(run, "no.such.worker")
        assert wait(job, 60) == "failed"
        assert job.reason.startswith("FAILED")

    def test_the_reason_of_a_waiting_job_is_stored(self, slurm, run):
        job = submit(run, WAITING)
        (slurm / "1000.said").write_text("PENDING Resources")
        assert job.poll() == "running"
        assert job.reason == "PENDING (Resources)"

    @pytest.mark.parametrize(("state", "by_scheduler"), [("TIMEOUT", True), ("NODE_FAIL", True), ("FAILED", False)])
    def test_the_scheduler_s_part_in_an_end_is_known(self, slurm, run, state, by_scheduler):
        job = submit(run, WAITING)
        (slurm / "1000.said").write_text(f"{state} None")
        assert wait(job, 5) == "failed"
        assert job.ended_by_scheduler == by_scheduler

    def test_a_job_that_the_controller_has_forgotten_is_found_in_the_accounting(self, slurm, run):
        job = submit(run, WAITING)
        (slurm / "1000.forgotten").touch()
        (slurm / "1000.accounted").touch()
        assert wait(job, 5) == "succeeded"

    def test_a_silent_controller_has_not_ended_a_job(self, slurm, run, monkeypatch):
        monkeypatch.setattr(jobs, "UNKNOWN_FOR_S", 0.0)
        job = submit(run, WAITING)
        (slurm / "silent").touch()
        assert job.poll() == "running"
        assert "Unable to contact slurm controller" in job.trouble
        run.set_state("succeeded")
        assert wait(job, 5) == "succeeded", "the run directory has the outcome"

    def test_a_cancelled_job_is_cancelled(self, slurm, run):
        submit(run, WAITING)
        job = jobs.job_of("slurm://torchx/1000")
        job.cancel()
        assert (slurm / "1000.cancelled").exists()

    def test_the_cluster_is_polled_at_intervals(self, slurm, run, monkeypatch):
        monkeypatch.setattr(jobs, "POLL_INTERVAL_S", 60.0)
        job = submit(run, WAITING)
        ask, asked = job._ask, []
        monkeypatch.setattr(job, "_ask", lambda: asked.append(ask()))
        assert [job.poll() for _ in range(5)] == ["running"] * 5
        assert asked == [None]

    def test_an_unknown_job_fails_after_a_grace_period(self, slurm, monkeypatch):
        job = jobs.job_of("slurm://torchx/77")
        assert job.poll() == "running"  # accounting may be late
        monkeypatch.setattr(jobs, "UNKNOWN_FOR_S", 0.0)
        assert wait(job, 2) == "failed"
