"""`workbench ls`: every run, newest last, also those that cannot be read."""

from __future__ import annotations

import json

import pytest

from tests.helpers.hand_made import SECOND_NS, make_run
from workbench.cli import main
from workbench.cli.ls import Listed, lines_of, list_runs, seconds


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    parity, other = tmp_path / "experiments" / "parity", tmp_path / "experiments" / "other"
    make_run(parity, "cp2", at_s=5, state="failed", done=2, layout={"cp": 2}, rank=1, error=ValueError("an\nodd row"))
    make_run(parity, "one_rank", at_s=0, took_s=75.25)
    make_run(other, "tp2", at_s=3, state="lost", done=1, layout={"tp": 2})
    make_run(parity, "cp4", at_s=9, state="pending", done=0, layout={"cp": 4})
    return tmp_path


def test_every_run_newest_last(project):
    runs = list_runs(project=project)
    assert [(run.experiment, run.name, run.state, run.steps_done, run.steps) for run in runs] == [
        ("parity", "one_rank", "succeeded", 4, 4),
        ("other", "tp2", "lost", 1, 4),
        ("parity", "cp2", "failed", 2, 4),
        ("parity", "cp4", "pending", 0, 4),
    ]
    assert [(run.ranks, run.device, run.backend) for run in runs][2] == (2, "cpu", "processes")
    assert [run.seconds for run in runs] == [75.25, None, 3.0, None]
    assert [run.why for run in runs] == ["", "no process is left that could end it", "rank 1 ValueError: an", ""]


def test_as_a_table(project, capsys):
    assert main(["ls"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["EXPERIMENT", "RUN", "STATE", "STEPS", "WHEN", "TOOK", "WHERE", "WHY"]
    assert rows[0].split()[:4] == ["parity", "one_rank", "succeeded", "4/4"]
    assert "1 min 15 s" in rows[0]
    assert rows[2].endswith("2 x cpu, processes  rank 1 ValueError: an")


def test_of_one_experiment_its_name_is_not_repeated(project, capsys):
    main(["ls", "parity"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "RUN"
    assert len(rows) == 3


def test_older_attempts_are_asked_for(project, capsys):
    again = make_run(project / "experiments" / "parity", "cp2", at_s=7, layout={"cp": 2})
    assert [run.state for run in list_runs("parity", project=project) if run.name == "cp2"] == ["succeeded"]
    main(["ls", "experiments/parity", "--all"])
    out = capsys.readouterr().out
    assert again.path.name in out
    assert f"{again.path.name.removesuffix('-2')} " in out  # two of a name are told apart by their folders


def test_a_run_that_cannot_be_read_is_listed(project, capsys):
    [run] = [run for run in list_runs("parity", project=project) if run.name == "one_rank"]
    (project / "experiments" / "parity" / "runs" / run.folder / "config.json").write_text("{")
    main(["ls", "parity"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "one_rank" in line]
    assert "unreadable" in line
    assert "JSONDecodeError" in line


def test_a_damaged_exit_record_is_said(project):
    [run] = [run for run in list_runs("parity", project=project) if run.name == "cp2"]
    folder = project / "experiments" / "parity" / "runs" / run.folder
    (folder / "ranks" / "rank00001.exit.json").write_text("{")
    [run] = [run for run in list_runs("parity", project=project) if run.name == "cp2"]
    assert (run.state, "JSONDecodeError" in run.why) == ("failed", True)


def test_as_json(project, capsys):
    assert main(["ls", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert [Listed(**run) for run in read] == list_runs(project=project)


def test_no_runs_say_how_to_begin(tmp_path, monkeypatch, capsys):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["ls"]) == 0
    assert "begin with: workbench run" in capsys.readouterr().out


def test_no_such_experiment(project, capsys):
    assert main(["ls", "nothing"]) == 2
    assert "no run or experiment of that name" in capsys.readouterr().err


def test_what_a_terminal_would_obey_is_written_out(project, capsys):
    make_run(
        project / "experiments" / "parity",
        "tp4",
        at_s=20,
        state="failed",
        fields={"name": "tp4\x1b[31m"},
        error=ValueError("\x1b]0;owned\x07"),
    )
    main(["ls"])
    out = capsys.readouterr().out
    assert r"tp4\x1b[31m" in out
    assert r"\x1b]0;owned\x07" in out
    assert "\x1b" not in out


def test_a_line_is_as_long_as_the_terminal():
    run = Listed("e", "n", "n-1", "failed", 1, 2, 10**18, 1.0, 1, "cpu", "here", "because " * 40)
    assert max(map(len, lines_of([run], letters=80))) == 80
    assert max(map(len, lines_of([run]))) > 300


def test_nobody_knows_how_long_a_lost_run_took():
    state = {"started_ns": 5 * SECOND_NS}
    assert seconds(state, "lost") is None
    assert seconds({}, "pending") is None
    assert seconds(state | {"ended_ns": 7 * SECOND_NS}, "failed") == 2.0
    assert seconds(state, "running") > 10**8
