"""`workbench export`: what became of each run, what the tracker could not take, and how to look at it."""

from __future__ import annotations

import pytest

from tests.helpers.hand_made import make_run
from workbench.cli import export as verb
from workbench.cli import main
from workbench.report.exporters.export import Exported


@pytest.fixture
def parity(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "experiments" / "parity"


@pytest.fixture
def asked(monkeypatch):
    """`export_runs` that only notes what it is asked, and gives what is in ``answers``."""
    seen, answers = {}, []

    def export_runs(runs, **named):
        seen.update(named, runs=[run.name for run in runs])
        return answers or [Exported(run.path.name, "exported", 4, notes=("rounded",)) for run in runs]

    monkeypatch.setattr(verb, "export_runs", export_runs)
    return seen, answers


def test_every_run_of_an_experiment(parity, asked, capsys):
    first, second = make_run(parity, "a", at_s=0), make_run(parity, "b", at_s=1)
    assert main(["export", "parity", "--to", "wandb", "--project", "bench", "--folder", "out"]) == 0
    assert {**asked[0], "folder": str(asked[0]["folder"])} == {
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


def test_one_run_into_the_folder_beside_it(parity, asked, capsys):
    make_run(parity, "a")
    main(["export", "a", "--to", "tensorboard"])
    assert (asked[0]["project"], asked[0]["folder"]) == ("workbench", None)
    assert f"tensorboard --logdir {parity}/runs/exports/tensorboard\n" in capsys.readouterr().out


def test_a_run_that_is_left_out_is_exit_code_1(parity, asked, capsys):
    make_run(parity, "a")
    asked[1].append(Exported("a-1", "left out", why="it is running"))
    assert main(["export", "a", "--to", "mlflow"]) == 1
    assert capsys.readouterr().out == "a-1: left out: it is running\n"


def test_what_is_there_already_is_no_failure(parity, asked, capsys):
    make_run(parity, "a")
    asked[1].append(Exported("a-1", "there already"))
    assert main(["export", "a", "--to", "trackio"]) == 0
    assert capsys.readouterr().out.startswith("a-1: there already\nto look at it: TRACKIO_DIR=")


def test_a_message_from_a_tracker_cannot_command_the_terminal():
    assert verb.lines_of([Exported("a-1", "left out", why="\x1b[2J", notes=("\x1b]0;x\x07",))]) == [
        r"a-1: left out: \x1b[2J",
        r"  in 1 run: \x1b]0;x\x07",
    ]


def test_from_a_notebook(parity, tmp_path):
    """For real, with the tracker that is quickest."""
    make_run(parity, "a")
    [exported] = verb.export("parity", to="tensorboard", folder=tmp_path / "out")
    assert (exported.outcome, exported.steps) == ("exported", 4)
    assert len(list((tmp_path / "out" / "workbench" / "parity" / exported.id).glob("*tfevents*"))) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "zebra", "--to", "wandb"], "no run or experiment of that name"),
        (["export", "a", "--to", "tensorboard", "--project", "a/b"], "beginning with a letter or digit"),
    ],
)
def test_mistakes_are_said_in_words(parity, capsys, arguments, message):
    make_run(parity, "a")
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
