"""`Experiment`: one object from a question to verdicts and a report, over what is on disk."""

from __future__ import annotations

import importlib
import threading
import time

import pytest
import yaml

from tests.helpers.hand_made import make_run
from tests.helpers.stand_in import stand_in
from workbench.compare.comparison import Comparison, Configuration
from workbench.errors import LaunchError, RecordError
from workbench.experiment import Experiment, rebuild_report
from workbench.launch.ablation import load_ablation
from workbench.specs.run import RunSpec

module = importlib.import_module("workbench.experiment")

TEXT = """
question: Same?
base: {steps: 4, loss: {surrogate: {clip_high: 0.28}}}
axes: {precision: [float64, float32]}
reference: a
truth: a-float64
configurations: {a: {}, b: {loss: {surrogate: {clip_low: 0.1}}}}
"""
SETTINGS = {
    "question": "Same?",
    "base": {"precision": "float64"},
    "reference": "a",
    "configurations": {"a": {}, "b": {"layout": {"cp": 2}}},
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ablation.yaml"
    path.write_text(TEXT)
    return path


class Ended:
    """A sweep whose runs have all ended; names stand for the run directories."""

    def __init__(self, planned, experiment_dir):
        self.planned, self.runs, self.experiment_dir = planned, [plan.name for plan in planned], experiment_dir
        self.cancelled, self.done, self.waited = [], True, False

    def follow(self, on_event):
        on_event("ended")

    def cancel(self, *names):
        self.cancelled += names or self.runs

    def wait(self):
        self.waited = True
        return self

    def states(self):
        return dict.fromkeys(self.runs, "succeeded")


@pytest.fixture
def launched(monkeypatch):
    """Nothing runs and nothing is drawn; what would be launched, compared and written is noted."""
    seen = {"notebooks": []}

    def launch(chosen, folder, **options):
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        seen.update(options)
        return Ended(chosen, folder)

    def compare_runs(subjects, **named):
        assert all(subject.run == subject.name for subject in subjects)
        seen.update(named, subjects=[(subject.name, subject.reference) for subject in subjects])
        return Comparison("x", "Same?", [Configuration("a", RunSpec().model_dump(mode="json"))])

    monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(importlib.import_module("workbench.compare.align"), "compare_runs", compare_runs)
    monkeypatch.setattr(importlib.import_module("workbench.report.page"), "write_report", lambda comparison, path: path)
    monkeypatch.setattr(
        importlib.import_module("workbench.report.notebook"), "write_notebook", seen["notebooks"].append
    )
    return seen


class TestInput:
    def test_a_file_a_folder_and_settings_are_the_same(self, file, tmp_path):
        from_file, from_folder = Experiment(file), Experiment(tmp_path)
        from_settings = Experiment(yaml.safe_load(TEXT), folder=tmp_path / "new" / "same")
        assert from_file.spec == from_folder.spec == from_settings.spec
        assert from_file.folder == from_folder.folder == tmp_path
        assert from_settings.name == "same"
        assert load_ablation(from_settings.path) == from_settings.spec

    def test_a_spec_of_one_run_gets_a_folder_of_its_name(self, tmp_path):
        (tmp_path / "mine.yaml").write_text("steps: 2")
        experiment = Experiment(tmp_path / "mine.yaml")
        assert experiment.folder == tmp_path / "mine"
        assert [plan.name for plan in experiment.planned] == ["mine"]
        assert [plan.name for plan in Experiment({"steps": 2}, folder=tmp_path / "new").planned] == ["ablation"]

    def test_changes_are_merged_over_the_base(self, file):
        changes = {"steps": 2, "loss": {"surrogate": {"clip_low": 0.3}}}
        runs = {plan.name: plan.spec for plan in Experiment(file, changes=changes).planned}
        changed = runs["a-float32"]
        assert (changed.steps, changed.loss.surrogate.clip_low, changed.loss.surrogate.clip_high) == (2, 0.3, 0.28)
        assert runs["b-float32"].loss.surrogate.clip_low == 0.1  # a configuration has the last word


class TestLaunch:
    def test_returns_before_anything_is_compared(self, file, launched):
        experiment = Experiment(file)
        assert experiment.launch("processes", force=True, options={"queue": "a"}) is experiment
        assert (launched["where"], launched["force"], launched["fresh"]) == ("processes", True, False)
        assert launched["options"] == {"queue": "a"}
        assert "subjects" not in launched
        assert experiment.wait() == dict.fromkeys(experiment.sweep.runs, "succeeded")
        assert experiment.sweep.waited

    def test_the_whole_is_saved_next_to_the_ablation(self, file, launched):
        experiment = Experiment(file).launch()
        assert experiment.report() == file.parent / "report.html"
        assert (file.parent / "comparison.json").exists()
        assert len(launched["subjects"]) == 4
        assert (launched["question"], launched["experiment"]) == ("Same?", file.parent.name)
        assert not launched["trial"]

    def test_a_part_never_replaces_the_whole(self, file, launched):
        experiment = Experiment(file, only=["b-float64"]).launch()
        assert experiment.report() == file.parent / "runs" / "report.html"
        assert not (file.parent / "comparison.json").exists()
        assert not launched["trial"]  # its runs answer for the experiment's
        assert launched["subjects"] == [("a-float64", ""), ("b-float64", "a-float64")]

    def test_a_variation_never_replaces_the_whole(self, file, launched):
        experiment = Experiment(file, changes={"steps": 2}).launch()
        assert experiment.report() == file.parent / "runs" / "report.html"
        assert launched["trial"]

    def test_a_value_equal_to_the_file_is_no_variation(self, file, launched):
        experiment = Experiment(file, changes={"steps": 4}, only=["a", "b"]).launch()
        assert experiment.results == file.parent
        assert not launched["trial"]

    def test_another_launch_is_compared_again(self, file, launched):
        experiment = Experiment(file).launch()
        first = experiment.compare()
        assert experiment.compare() is first
        assert experiment.launch().compare() is not first

    def test_requests_write_nothing(self, file):
        experiment = Experiment(file, only=["a"])
        [(names, request)] = experiment.requests("slurm").items()
        assert (names, "--nproc-per-node=1" in request) == ("a-float64, a-float32", True)
        assert list(experiment.requests("slurm", per_job=1)) == ["a-float64", "a-float32"]
        assert not (file.parent / "runs").exists()


class TestRun:
    def test_reports_events_and_writes_the_report(self, file, launched):
        events = []
        comparison = Experiment(file).run(where="processes", on_event=events.append)
        assert (events, launched["where"], launched["notebooks"]) == (["ended"], "processes", [])
        assert launched["on_event"] is None
        assert comparison["a"].name == "a"

    def test_here_events_come_while_it_launches_and_not_again(self, file, launched):
        events = []
        Experiment(file).run(where="here", on_event=events.append)
        launched["on_event"]("a step")
        assert events == ["a step"]

    def test_the_notebook_is_executed_on_request(self, file, launched):
        Experiment(file).run(notebook=True)
        assert launched["notebooks"] == [file.parent / "comparison.json"]

    def test_an_interrupt_cancels_running_jobs(self, file, launched, monkeypatch):
        def interrupted(sweep, on_event):
            raise KeyboardInterrupt

        monkeypatch.setattr(Ended, "follow", interrupted)
        experiment = Experiment(file)
        with pytest.raises(KeyboardInterrupt):
            experiment.run()
        assert len(experiment.sweep.cancelled) == 4
        assert experiment.sweep.waited


@pytest.fixture
def on_disk(tmp_path):
    """An experiment that another process launched."""
    experiment = Experiment(SETTINGS, folder=tmp_path / "experiments" / "parity")
    make_run(experiment.folder, "a", at_s=0, **specs(experiment, "a"))
    make_run(experiment.folder, "b", at_s=1, state="running", **specs(experiment, "b"))
    return experiment


def specs(experiment, name):
    [spec] = [plan.spec for plan in experiment.planned if plan.name == name]
    return spec.model_dump()


class TestFromDisk:
    def test_runs_are_those_with_the_same_settings(self, on_disk):
        make_run(on_disk.folder, "b", at_s=2, seed=3)
        assert [run.name for run in on_disk.runs] == ["a", "b"]
        assert on_disk.states() == {"a": "succeeded", "b": "running"}
        assert [status.steps_done for status in on_disk.status()] == [1, 1]

    def test_what_was_not_launched_is_named(self, tmp_path):
        experiment = Experiment(SETTINGS, folder=tmp_path)
        assert experiment.runs == []
        assert experiment.states() == {"a": "not launched", "b": "not launched"}
        assert str(experiment).splitlines() == [
            f"Experiment {tmp_path.name}, 2 runs in {tmp_path}",
            "  Same?",
            "  a  not launched",
            "  b  not launched",
        ]

    def test_waits_for_runs_of_other_processes(self, on_disk, monkeypatch):
        monkeypatch.setattr(module, "time", stand_in(time, sleep=lambda seconds: on_disk.runs[1].set_state("failed")))
        assert on_disk.wait() == {"a": "succeeded", "b": "failed"}

    def test_the_panel_shows_them(self, on_disk):
        panel = on_disk.panel()
        try:
            assert [trial.name for trial in panel.trials] == ["a", "b"]
        finally:
            panel.close()

    def test_a_name_of_no_run_is_refused(self, on_disk):
        with pytest.raises(LaunchError, match="names of runs of this experiment"):
            on_disk.cancel("c")

    def test_cancels_runs_of_other_processes(self, on_disk, monkeypatch):
        cancelled = []
        monkeypatch.setattr(
            importlib.import_module("workbench.launch.cancel"),
            "cancel_runs",
            lambda runs, *, by: cancelled.append(([run.name for run in runs], by)),
        )
        on_disk.cancel("b")
        on_disk.cancel()
        assert cancelled == [(["b"], "experiment parity"), (["a", "b"], "experiment parity")]

    def test_missing_runs_are_refused_with_the_fix(self, tmp_path):
        experiment = Experiment(SETTINGS, folder=tmp_path)
        make_run(tmp_path, "a", **specs(experiment, "a"))
        with pytest.raises(RecordError, match="no run of b with these settings"):
            experiment.compare()

    def test_without_runs_the_saved_comparison_is_read(self, tmp_path):
        experiment = Experiment(SETTINGS, folder=tmp_path)
        with pytest.raises(RecordError, match=r"no saved comparison[\s\S]*launch\(\)"):
            experiment.compare()
        Comparison("x", "Same?", [Configuration("a", RunSpec().model_dump(mode="json"))]).save(
            tmp_path / "comparison.json"
        )
        assert experiment.compare()["a"].name == "a"

    def test_exports(self, on_disk, tmp_path):
        first, second = on_disk.export("tensorboard", folder=tmp_path / "out")
        assert (first.outcome, first.steps, second.outcome) == ("exported", 1, "left out")
        assert len(list((tmp_path / "out" / "workbench" / "parity" / first.id).glob("*tfevents*"))) == 1


def test_a_report_is_rebuilt_from_the_saved_comparison(tmp_path, launched):
    with pytest.raises(RecordError, match="run the ablation again"):
        rebuild_report(tmp_path)
    Comparison("x", "Same?", []).save(tmp_path / "comparison.json")
    assert rebuild_report(tmp_path, notebook=True) == tmp_path / "report.html"
    assert launched["notebooks"] == [tmp_path / "comparison.json"]


@pytest.mark.parametrize("fails", ["", "notebook", "page", "both"])
def test_page_and_notebook_are_made_at_the_same_time(tmp_path, monkeypatch, fails):
    Comparison("x", "Same?", []).save(tmp_path / "comparison.json")
    notebook_began, page_began = threading.Event(), threading.Event()

    def write_notebook(path):
        notebook_began.set()
        assert page_began.wait(60), "the page waits for the notebook"
        if fails in ("notebook", "both"):
            raise RecordError("notebook", found="a cell that failed")

    def write_report(comparison, path):
        page_began.set()
        assert notebook_began.wait(60), "the notebook waits for the page"
        if fails in ("page", "both"):
            raise RecordError("page", found="a full disk")
        path.touch()
        return path

    monkeypatch.setattr(importlib.import_module("workbench.report.page"), "write_report", write_report)
    monkeypatch.setattr(importlib.import_module("workbench.report.notebook"), "write_notebook", write_notebook)
    if fails:
        with pytest.raises(RecordError, match="cell" if fails == "notebook" else "disk"):
            rebuild_report(tmp_path, notebook=True)
    else:
        assert rebuild_report(tmp_path, notebook=True) == tmp_path / "report.html"
    assert (tmp_path / "report.html").exists() is (fails in ("", "notebook"))


def test_two_runs_from_a_question_to_a_verdict(tmp_path, monkeypatch):
    """In this process, on CPU: launched, compared, reported, and found again from disk."""
    settings = {
        "question": "Do two ranks train the same?",
        "base": {"precision": "float64", "data": {"documents_per_step": 4}, "record": {"gradients": "full"}},
        "reference": "one_rank",
        "configurations": {"one_rank": {}, "cp2": {"layout": {"cp": 2, "order": "zigzag"}}},
    }
    experiment = Experiment(settings, folder=tmp_path / "two")
    assert experiment.launch("here").wait() == {"one_rank": "succeeded", "cp2": "succeeded"}
    comparison = experiment.compare()
    assert comparison["cp2"].verdict == "equal"
    assert "Do two ranks train the same?" in experiment.report().read_text()
    again = Experiment(tmp_path / "two")
    assert [run.path for run in again.runs] == [run.path for run in experiment.runs]
    assert again.compare()["cp2"].verdict == "equal"
