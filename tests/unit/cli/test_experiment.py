"""`workbench compare`, `report`, `cancel` and `export`: output and exit codes, from what is on disk."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import psutil
import pytest

from tests.helpers import comparisons, warm
from tests.helpers.hand_made import make_project, make_run
from workbench import experiment
from workbench.cli import experiment as verb
from workbench.cli import main
from workbench.cli.experiment import export_lines
from workbench.compare.comparison import Comparison, Configuration
from workbench.records.certificate import Certificate, write_certificate
from workbench.records.directory import RunDirectory
from workbench.records.provenance import process_alive
from workbench.report.exporters.export import Exported
from workbench.specs.run import RunSpec

SETTINGS = RunSpec().model_dump(mode="json")


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize(
    ("verdict", "code"),
    [("equal", 0), ("within budget", 0), ("different", 1), ("vacuous", 1), ("unsound baseline", 1), ("failed", 1)],
)
def test_exits_1_if_a_configuration_without_a_fault_disagrees(tmp_path, capsys, verdict, code, fault):
    settings = SETTINGS | {"faults": ["missing_cp_factor"] if fault else []}
    two = Configuration(
        "two",
        settings,
        against="one",
        verdict=verdict,
        why="because",
        whole_gradient=[{"relative_l2": 0.009, "distance": 9e-3, "budget": 1e-12}],
        evidence={"summary": "all", "warnings": ["few"]},
    )
    Comparison("x", "Same?", [Configuration("one", SETTINGS), two]).save(tmp_path / "comparison.json")
    assert main(["compare", str(tmp_path)]) == (0 if fault else code)
    changed = "  [faults=['missing_cp_factor']]" if fault else ""
    assert capsys.readouterr().out.splitlines() == [
        "Same?",
        "one  reference",
        f"two  {verdict:<16}  relative error 0.009, 9e+09 times budget{changed}  because",
        "could have seen: all (two)",
        "weak evidence: few (two)",
    ]


def test_a_declared_break_is_shown_next_to_its_difference(tmp_path, capsys):
    settings = RunSpec(loss={"name": "bnpo"}, data={"micro_batches": 2}).model_dump(mode="json")
    base = RunSpec().model_dump(mode="json") | {"loss": RunSpec(loss={"name": "grpo"}).model_dump(mode="json")["loss"]}
    two = Configuration("two", settings, against="one", verdict="different", why="because")
    Comparison("x", "", [Configuration("one", base), two]).save(tmp_path / "comparison.json")
    assert main(["compare", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "bnpo declares that it depends on micro-batches, packing order and data-parallel ranks (two)"
    )


def test_a_damaged_comparison_is_refused(tmp_path, capsys):
    (tmp_path / "comparison.json").write_text("{")
    assert main(["compare", str(tmp_path)]) == 2
    assert "comparison.json" in capsys.readouterr().err


@pytest.fixture
def ran(tmp_path):
    def run(name, said, **settings):
        directory = RunDirectory.create(tmp_path / "runs", name, RunSpec(**settings))
        certificate = Certificate({"logprobs": said})
        write_certificate(directory, 0, certificate)
        directory.append_step({"step": 0, "certificate": certificate.hash})
        return str(directory.path)

    return run


def test_two_runs_are_compared_by_their_certificates(ran, capsys):
    one, two, three = ran("one", "float32 00"), ran("two", "float32 00"), ran("three", "float32 01")
    assert main(["compare", two, one]) == 0
    out = capsys.readouterr().out
    assert out.startswith("settings: the same in both\ntwo against one: the certificate of the step is the reference's")
    assert main(["compare", three, one]) == 1
    assert "\nthree against one: step 0: certificates part at logprobs, alone of 1 tensors\n" in capsys.readouterr().out


def test_settings_in_which_two_runs_differ_are_told(ran, capsys):
    one, other = ran("one", "float32 00"), ran("other", "float32 00", layout={"cp": 2}, seed=3)
    assert main(["compare", other, one]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[:3]]
    assert rows == [["settings", "that", "differ", "reference", "run"], ["layout.cp", "1", "2"], ["seed", "0", "3"]]
    assert main(["compare", other, one, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["settings"], result["equal"]) == ({"layout.cp": [1, 2], "seed": [0, 3]}, True)


def test_runs_without_certificates_are_refused(ran, tmp_path, capsys):
    plain = RunDirectory.create(tmp_path / "runs", "plain", RunSpec())
    assert main(["compare", str(plain.path), ran("one", "float32 00")]) == 2
    assert "no certificates in one of them" in capsys.readouterr().err


def test_writes_the_page_from_the_saved_comparison(tmp_path, capsys, monkeypatch):
    warm.kernels(tmp_path / "jupyter")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    comparison = comparisons.several(2)
    comparison.save(tmp_path / "comparison.json")
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'report.html'}\n"
    assert comparison.configurations[0].name in (tmp_path / "report.html").read_text()


def test_a_missing_comparison_is_refused_with_the_fix(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "run the ablation again" in capsys.readouterr().err


@pytest.fixture
def parity(tmp_path, monkeypatch):
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "experiments" / "parity"


@pytest.mark.parametrize("asked", ["mine", "mine.yaml", "deep"])
def test_compare_and_report_take_the_names_that_status_takes(tmp_path, monkeypatch, capsys, asked):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "folder" / "deep" if asked == "deep" else tmp_path / "mine"
    (tmp_path / "mine.yaml").write_text("steps: 4")
    make_run(place, "one")
    Comparison("mine", "Same?", [Configuration("one", SETTINGS)]).save(place / "comparison.json")
    assert main(["status", asked]) == 0
    assert main(["compare", asked]) == 0
    assert "Same?" in capsys.readouterr().out
    monkeypatch.setattr(experiment, "rebuild_report", lambda folder, notebook: folder.resolve() / "report.html")
    assert main(["report", asked]) == 0
    assert capsys.readouterr().out == f"report: {place / 'report.html'}\n"


@pytest.fixture
def cancelled(monkeypatch):
    """A `cancel_run` that only records its calls, and returns the entries of ``answers``."""
    seen = []

    def cancel_run(run, *, by):
        seen.append((run.name, by, [other.cancel_requested for other in seen_runs]))
        return answers.get(run.name, "cancelled")

    answers: dict[str, str] = {}
    seen_runs: list = []
    monkeypatch.setattr(importlib.import_module("workbench.launch.cancel"), "cancel_run", cancel_run)
    return seen, answers, seen_runs


def test_reports_the_outcome_of_each_run(parity, cancelled, capsys):
    make_run(parity, "a", at_s=0)
    make_run(parity, "b", at_s=1, state="running")
    make_run(parity, "c", at_s=2, state="pending")
    seen, answers, _ = cancelled
    answers["c"] = "succeeded"
    assert main(["cancel", "parity"]) == 0
    lines = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["had ended before: succeeded", "cancelled", "succeeded, before it could be cancelled"]
    assert [(name, by) for name, by, _ in seen] == [("b", "the command line"), ("c", "the command line")]


def test_requests_all_before_waiting_for_any(parity, cancelled):
    """Else the next one that waits would be started in the place of the one that ends."""
    seen, _, runs = cancelled
    runs += [make_run(parity, "b", at_s=1, state="running"), make_run(parity, "c", at_s=2, state="pending")]
    main(["cancel", "parity"])
    assert seen[0] == ("b", "the command line", [True, True])


def test_a_run_that_continues_is_exit_code_1(parity, cancelled, capsys):
    make_run(parity, "b", state="running")
    cancelled[1]["b"] = "running"
    assert main(["cancel", "b"]) == 1
    assert "still running; cancellation was requested and is not complete" in capsys.readouterr().out


def test_an_ended_run_is_left_alone(parity, cancelled, capsys):
    run = make_run(parity, "a", state="failed", error=ValueError("no"))
    assert main(["cancel", "a"]) == 0
    assert capsys.readouterr().out == f"{run.path.name}: had ended before: failed\n"
    assert cancelled[0] == []
    assert not run.cancel_requested


def test_a_run_that_looks_lost_is_cancelled_too(parity, cancelled):
    """It may wait in the queue of a cluster whose launcher has gone."""
    make_run(parity, "gone", state="lost")
    assert main(["cancel", "gone"]) == 0
    assert [name for name, *_ in cancelled[0]] == ["gone"]


def test_nothing_of_that_name(parity, capsys):
    make_run(parity, "a")
    assert main(["cancel", "zebra"]) == 2
    assert "no run or experiment of that name" in capsys.readouterr().err


def test_the_process_of_a_run_without_a_launcher_is_ended(parity, capsys):
    """A real process of this test, which is the run's."""
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(100)"], stdout=subprocess.PIPE
    )
    try:
        sleeper.stdout.readline()
        who = {"pid": sleeper.pid, "create_time": psutil.Process(sleeper.pid).create_time()}
        run = make_run(parity, "b", state="running", fields={"rank0": who})
        assert main(["cancel", "b"]) == 0
        assert not process_alive(**who)
    finally:
        sleeper.kill()
        sleeper.wait()
        sleeper.stdout.close()
    assert capsys.readouterr().out == f"{run.path.name}: cancelled\n"
    assert run.status == "cancelled"


@pytest.fixture
def exported(monkeypatch):
    """An `export_runs` that only records its calls, and returns the entries of ``answers``."""
    seen, answers = {}, []

    def export_runs(runs, **named):
        seen.update(named, runs=[run.name for run in runs])
        return answers or [Exported(run.path.name, "exported", 4, notes=("rounded",)) for run in runs]

    monkeypatch.setattr(verb, "export_runs", export_runs)
    return seen, answers


def test_every_run_of_an_experiment(parity, exported, capsys):
    first, second = make_run(parity, "a", at_s=0), make_run(parity, "b", at_s=1)
    assert main(["export", "parity", "--to", "wandb", "--project", "bench", "--folder", "out"]) == 0
    assert {**exported[0], "folder": str(exported[0]["folder"])} == {
        "runs": ["a", "b"],
        "to": "wandb",
        "project": "bench",
        "folder": "out",
    }
    assert capsys.readouterr().out.splitlines() == [
        f"{first.path.name}: exported, 4 steps",
        f"{second.path.name}: exported, 4 steps",
        "  in 2 runs: rounded",
        "to look at it: wandb sync out/wandb/offline-run-*   (it uploads; until then nothing leaves this machine)",
    ]


def test_one_run_is_exported_next_to_itself(parity, exported, capsys):
    make_run(parity, "a")
    main(["export", "a", "--to", "tensorboard"])
    assert (exported[0]["project"], exported[0]["folder"]) == ("workbench", None)
    assert f"tensorboard --logdir {parity}/runs/exports/tensorboard\n" in capsys.readouterr().out


def test_a_run_that_is_left_out_is_exit_code_1(parity, exported, capsys):
    make_run(parity, "a")
    exported[1].append(Exported("a-1", "left out", why="it is running"))
    assert main(["export", "a", "--to", "mlflow"]) == 1
    assert capsys.readouterr().out == "a-1: left out: it is running\n"


def test_an_existing_export_is_no_failure(parity, exported, capsys):
    make_run(parity, "a")
    exported[1].append(Exported("a-1", "there already"))
    assert main(["export", "a", "--to", "trackio"]) == 0
    assert capsys.readouterr().out.startswith("a-1: there already\nto look at it: TRACKIO_DIR=")


def test_a_message_from_a_tracker_cannot_command_the_terminal():
    assert export_lines([Exported("a-1", "left out", why="\x1b[2J", notes=("\x1b]0;x\x07",))]) == [
        r"a-1: left out: \x1b[2J",
        r"  in 1 run: \x1b]0;x\x07",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "zebra", "--to", "wandb"], "no run or experiment of that name"),
        (["export", "a", "--to", "tensorboard", "--project", "a/b"], "beginning with a letter or digit"),
    ],
)
def test_user_errors_are_reported(parity, capsys, arguments, message):
    make_run(parity, "a")
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
