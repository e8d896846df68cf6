"""`workbench doctor`: every problem has a fix, and no host or user is named."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections import namedtuple

import psutil
import pytest

from tests.helpers.hand_made import make_run
from tests.helpers.programs import write_program
from tests.helpers.stand_in import stand_in
from workbench.cli import doctor, main
from workbench.cli.doctor import Finding, examine, lines_of
from workbench.errors import LaunchError

FACTS = {"met_s": 0.02, "loaded_s": 2.0, "torch": "2.13.0+cpu", "cuda": "", "nccl": "", "gloo": True, "gpus": []}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def met(monkeypatch):
    """Output of the ranks of the rendezvous; no process is started."""
    facts = dict(FACTS)
    monkeypatch.setattr(doctor, "check_rendezvous", lambda: facts)
    return facts


@pytest.fixture
def project(tmp_path):
    for name in ("data", "experiments"):
        (tmp_path / name).mkdir()
    return tmp_path


def about(what, found):
    return next(finding for finding in found if finding.about == what)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A search path with nothing but the test's own programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def put(name, program):
        write_program(folder / name, f"import sys\n{program}")

    return put


class TestAllOfIt:
    def test_is_looked_at(self, met, project):
        result = examine(project)
        assert [finding.about for finding in result][:4] == ["python", "packages", "torch", "rendezvous"]
        assert {
            "triton",
            "cores",
            "memory",
            "GPUs",
            "project",
            "disk",
            "shared memory",
            "limits",
            "browser",
            "widgets",
            "schedulers",
            "extras",
            "runs",
        } <= {finding.about for finding in result}
        assert {finding.verdict for finding in result} <= {"ok", "note", "problem"}
        assert all(finding.fix for finding in result if finding.verdict == "problem")

    def test_names_no_host_and_no_user(self, met, project, monkeypatch):
        monkeypatch.setenv("HOME", str(project))
        text = json.dumps([vars(finding) for finding in examine(project / "experiments")])
        assert os.uname().nodename not in text
        assert str(project) not in text
        assert '"~/experiments' in text

    def test_one_thing_that_cannot_be_looked_at_does_not_hide_the_rest(self, met, project, monkeypatch):
        monkeypatch.setattr(doctor, "psutil", stand_in(psutil, virtual_memory=lambda: 1 / 0))
        result = examine(project)
        broken = about("memory", result)
        assert broken.verdict == "problem"
        assert broken.says == "the check failed: ZeroDivisionError: division by zero"
        assert about("runs", result).verdict == "ok"

    def test_leaves_nothing_behind(self, met, project):
        examine(project)
        assert list((project / "experiments").iterdir()) == []


class TestVerb:
    def test_prints_one_line_per_check_and_the_fix(self, monkeypatch, capsys):
        monkeypatch.setattr(
            doctor,
            "_findings",
            lambda project: iter(
                [Finding("python", "ok", "3.12"), Finding("disk", "note", "full\x1b[2J", "make room")]
            ),
        )
        assert main(["doctor"]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "ok       python         3.12",
            r"note     disk           full\x1b[2J",
            f"{'':24}do: make room",
        ]

    def test_a_problem_is_exit_code_1(self, monkeypatch, capsys):
        result = Finding("disk", "problem", "full", "make room")
        monkeypatch.setattr(doctor, "_findings", lambda project: iter([result]))
        assert main(["doctor", "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["result"] == [
            {"about": "disk", "verdict": "problem", "says": "full", "fix": "make room"}
        ]

    def test_a_line_without_anything_to_do(self):
        assert lines_of(Finding("python", "ok", "3.12")) == ["ok       python         3.12"]


class TestTorch:
    def test_reports_its_build(self, met, project):
        assert about("torch", examine(project)) == Finding("torch", "ok", "2.13.0+cpu (for CPU only, no NCCL, gloo)")
        assert about("rendezvous", examine(project)).says == (
            "2 ranks met through gloo in 20 ms, after 2.0 s of loading torch"
        )

    def test_without_gloo_is_a_problem(self, met, project):
        met["gloo"] = False
        assert about("torch", examine(project)).verdict == "problem"

    def test_ranks_that_do_not_meet_are_a_problem(self, project, monkeypatch):
        def fail():
            raise LaunchError("let 2 ranks meet", found="no end after 60 s", rule="they meet", fix="edit /etc/hosts")

        monkeypatch.setattr(doctor, "check_rendezvous", fail)
        result = examine(project)
        assert about("rendezvous", result) == Finding("rendezvous", "problem", "no end after 60 s", "edit /etc/hosts")
        assert about("torch", result).verdict == "note"

    def test_gpus_that_a_cpu_build_cannot_use_are_noted(self, met, project, path):
        path("nvidia-smi", "print('NVIDIA X')\nprint('NVIDIA X')")
        assert about("CUDA", examine(project)).says == "2 GPUs, and this torch is built for CPU"

    def test_a_cuda_build_that_sees_no_gpu_is_a_problem(self, met, project, path):
        path("nvidia-smi", "print('NVIDIA X')")
        met["cuda"] = "13.0"
        result = about("CUDA", examine(project))
        assert (result.verdict, "the driver may be too old" in result.says) == ("problem", True)

    def test_several_gpus_need_nccl(self, met, project):
        met.update(cuda="13.0", gpus=["NVIDIA X (9.0)"] * 2)
        result = examine(project)
        assert about("CUDA", result).says == "NVIDIA X (9.0), NVIDIA X (9.0)"
        assert about("NCCL", result).verdict == "problem"
        met["nccl"] = "2.27"
        assert not [finding for finding in examine(project) if finding.about == "NCCL"]

    def test_a_missing_one_is_a_problem(self, met, project, monkeypatch):
        versions = doctor._version
        monkeypatch.setattr(doctor, "_version", lambda package: "" if package == "torch" else versions(package))
        assert about("torch", examine(project)).verdict == "problem"


class TestPackages:
    def test_a_missing_one_is_a_problem(self, monkeypatch):
        monkeypatch.setattr(doctor, "NEEDED", ("pydantic", "no-such-package"))
        result = doctor._packages()
        assert (result.verdict, result.says.endswith("no-such-package missing")) == ("problem", True)

    def test_extras_have_an_install_command(self, monkeypatch):
        monkeypatch.setattr(doctor, "_version", lambda package: "1.0" if package == "mlflow-skinny" else "")
        result = doctor._extras()
        assert (result.verdict, "mlflow 1.0" in result.says) == ("ok", True)
        assert result.fix == "if you need them: pip install 'workbench[wandb,trackio,tensorboard,kubernetes,mcp]'"

    def test_a_folder_of_its_name_is_not_a_package(self, tmp_path, monkeypatch):
        (tmp_path / "emptyname").mkdir()
        monkeypatch.syspath_prepend(tmp_path)
        assert doctor._version("emptyname") == ""

    def test_jupyterlab_without_its_part_of_ipywidgets_is_a_problem(self, monkeypatch):
        monkeypatch.setattr(doctor, "_version", lambda package: "" if package == "jupyterlab_widgets" else "1.0")
        assert doctor._widgets().verdict == "problem"
        monkeypatch.undo()
        assert doctor._widgets().verdict == "ok"

    @pytest.mark.parametrize(("version", "verdict"), [((3, 10), "problem"), ((3, 11), "ok"), ((3, 14), "problem")])
    def test_of_python_only_some(self, version, verdict, monkeypatch):
        monkeypatch.setattr(doctor, "sys", stand_in(sys, version_info=(*version, 0)))
        assert doctor._python().verdict == verdict


class TestMachine:
    def test_gpus_are_listed_with_memory_and_processes(self, path):
        path("nvidia-smi", "print('0, NVIDIA X, 10 MiB, 80 GiB' if 'query-gpu' in sys.argv[1] else '77, 5 GiB')")
        first, busy = doctor._gpus()
        assert (first.about, first.says) == ("GPU 0", "NVIDIA X, 10 MiB of 80 GiB used")
        assert (busy.verdict, busy.says) == ("note", "computing: process 77 (5 GiB)")

    @pytest.mark.parametrize("program", ["sys.exit(9)", "print('')"])
    def test_a_silent_driver_means_no_gpu(self, path, program):
        path("nvidia-smi", program)
        assert [finding.says for finding in doctor._gpus()] == ["none: runs take the CPU and gloo"]

    @pytest.mark.parametrize(("free", "verdict"), [(2**28, "problem"), (2**31, "note"), (2**40, "ok")])
    def test_room_on_the_disk(self, project, monkeypatch, free, verdict):
        monkeypatch.setattr(doctor, "shutil", stand_in(shutil, disk_usage=lambda folder: Usage(2**41, 0, free)))
        monkeypatch.setattr(doctor, "_write_speed", lambda folder: (2**28, 1.0))
        assert doctor._disk(project).verdict == verdict

    def test_a_disk_that_is_slow_to_keep_a_record_is_noted(self, project, monkeypatch):
        monkeypatch.setattr(doctor, "shutil", stand_in(shutil, disk_usage=lambda folder: Usage(2**41, 0, 2**40)))
        monkeypatch.setattr(doctor, "_write_speed", lambda folder: (2**28, 250.0))
        result = doctor._disk(project)
        assert (result.verdict, result.says) == ("note", "1.0 TiB free, 256 MiB/s written, 250.0 ms for a record")

    def test_a_folder_that_cannot_be_written_is_a_problem(self, project, monkeypatch):
        def refuse(folder):
            raise PermissionError(13, "Permission denied", str(folder))

        monkeypatch.setattr(doctor, "_write_speed", refuse)
        result = doctor._disk(project)
        assert (result.verdict, result.says) == ("problem", "experiments cannot be written: Permission denied")

    def test_speed_is_measured(self, project):
        speed, flush_ms = doctor._write_speed(project)
        assert speed > 2**20
        assert 0 < flush_ms < 5000

    @pytest.mark.parametrize(
        ("files", "processes", "verdict"),
        [(100, 10**5, "problem"), (512, 10**5, "note"), (4096, 100, "note"), (4096, resource.RLIM_INFINITY, "ok")],
    )
    def test_limits(self, monkeypatch, files, processes, verdict):
        limits = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_NPROC: processes}
        monkeypatch.setattr(doctor, "resource", stand_in(resource, getrlimit=lambda kind: (limits[kind], 10**6)))
        assert doctor._limits().verdict == verdict

    @pytest.mark.parametrize(("free", "verdict"), [(2**26, "note"), (2**30, "ok")])
    def test_shared_memory(self, monkeypatch, free, verdict):
        monkeypatch.setattr(doctor, "shutil", stand_in(shutil, disk_usage=lambda folder: Usage(2**30, 0, free)))
        assert doctor._shared_memory().verdict == verdict

    def test_a_busy_machine_is_noted(self, monkeypatch):
        monkeypatch.setattr(doctor, "os", stand_in(os, getloadavg=lambda: (1000.0, 0, 0)))
        assert doctor._processors().verdict == "note"
        monkeypatch.setattr(doctor, "os", stand_in(os, getloadavg=lambda: (0.0, 0, 0)))
        assert doctor._processors().verdict == "ok"

    def test_little_memory_is_noted(self, monkeypatch):
        Memory = namedtuple("Memory", "total available")
        monkeypatch.setattr(doctor, "psutil", stand_in(psutil, virtual_memory=lambda: Memory(2**34, 2**30)))
        assert doctor._memory() == Finding(
            "memory",
            "note",
            "1.0 GiB of 16.0 GiB free",
            "a rank of the default ablation takes 0.5 GiB; run fewer at a time",
        )

    def test_browsers_and_schedulers_are_detected_by_command(self, path):
        assert doctor._browser().verdict == "note"
        assert doctor._schedulers().says == "this machine"
        for name in ("chromium-browser", "sbatch"):
            path(name, "")
        assert doctor._browser() == Finding("browser", "ok", "chromium-browser")
        assert doctor._schedulers().says == "this machine, Slurm"


class TestProject:
    def test_lost_and_unreadable_runs_are_noted(self, project):
        parity = project / "experiments" / "parity"
        make_run(parity, "a")
        assert doctor._runs(project) == Finding("runs", "ok", "1 under experiments")
        lost = make_run(parity, "b", state="lost")
        broken = make_run(parity, "c")
        (broken.path / "config.json").write_text("{")
        result = doctor._runs(project)
        assert result.says == (
            f"3 under experiments; 1 lost: parity/{lost.path.name}; 1 unreadable: parity/{broken.path.name}"
        )
        assert (result.verdict, result.fix) == ("note", "run the ablation again to finish the missing runs")

    def test_a_place_that_is_no_project_is_noted(self, tmp_path):
        assert doctor._project(tmp_path).says == f"{tmp_path}, without a folder data and experiments"
