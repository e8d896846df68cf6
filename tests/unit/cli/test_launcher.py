"""The process of a detached launcher: it answers with None or an error, and finishes what was requested."""

import pickle
import signal

import pytest

from workbench.cli import launcher
from workbench.errors import LaunchError, SpecError
from workbench.experiment import Experiment
from workbench.launch.detached import launchers

TWO = {"base": {"precision": "float64", "steps": 1}, "reference": "a", "configurations": {"a": {}, "b": {"seed": 1}}}


@pytest.fixture
def asked(tmp_path):
    """Run the launcher in this process; return what it answered."""
    before = signal.getsignal(signal.SIGTERM)

    def ask(experiment=None, *, report=False, **more):
        experiment = experiment or Experiment(TWO, folder=tmp_path / "two")
        request = {
            "ablation": str(experiment.path),
            "only": [],
            "changes": {},
            "project": str(experiment.project),
            "launching": {"where": "here"},
            "report": report,
        }
        pipe = (tmp_path / "answer").open("wb")
        try:
            launcher.main(request | more, pipe)
        finally:
            pipe.close()
        return pickle.loads((tmp_path / "answer").read_bytes())

    yield ask
    signal.signal(signal.SIGTERM, before)


def test_runs_are_compared_only_if_that_was_requested(asked, tmp_path, capsys, monkeypatch):
    folder, doing = tmp_path / "two", []

    def report(experiment):
        doing.extend(each.doing for each in launchers(folder / "runs"))
        return experiment.results / "report.html"

    monkeypatch.setattr(launcher.Experiment, "report", report)
    assert asked() is None
    assert Experiment(folder).states() == {"a": "succeeded", "b": "succeeded"}
    assert doing == []
    assert asked(report=True) is None
    assert doing == ["compares"]
    assert f"report: {folder / 'report.html'}" in capsys.readouterr().out
    assert launchers(folder / "runs") == []
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def test_errors_are_the_answer(asked, tmp_path, monkeypatch):
    with pytest.raises(SystemExit):
        asked(ablation=str(tmp_path / "gone.yaml"))
    assert isinstance(pickle.loads((tmp_path / "answer").read_bytes()), SpecError)

    def breaks(*_args, **_more):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(launcher.Experiment, "launch", breaks)
    with pytest.raises(ZeroDivisionError):
        asked()
    error = pickle.loads((tmp_path / "answer").read_bytes())
    assert isinstance(error, LaunchError)
    assert error.parts["found"] == "ZeroDivisionError: a bug"


def test_an_error_after_the_answer_is_in_its_log(asked, monkeypatch, capsys):
    def fails(_self):
        raise LaunchError("compare", found="nothing")

    monkeypatch.setattr(launcher.Experiment, "report", fails)
    with pytest.raises(SystemExit):
        asked(report=True)
    assert "LaunchError: compare" in capsys.readouterr().err
