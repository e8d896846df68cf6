"""`workbench cancel`: says of each run what became of it, and ends none that has ended."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.helpers.hand_made import make_run
from workbench.cli import cancel as verb
from workbench.cli import main
from workbench.cli.cancel import cancel
from workbench.records.directory import process_alive


@pytest.fixture
def parity(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "experiments" / "parity"


@pytest.fixture
def asked(monkeypatch):
    """`cancel_run` that only notes what it is asked, and gives what is in ``answers``."""
    seen = []

    def cancel_run(run, *, by):
        seen.append((run.name, by, [other.cancel_requested for other in seen_runs]))
        return answers.get(run.name, "cancelled")

    answers: dict[str, str] = {}
    seen_runs: list = []
    monkeypatch.setattr(verb, "cancel_run", cancel_run)
    return seen, answers, seen_runs


def test_each_run_says_what_became_of_it(parity, asked, capsys):
    make_run(parity, "a", at_s=0)
    make_run(parity, "b", at_s=1, state="running")
    make_run(parity, "c", at_s=2, state="pending")
    seen, answers, _ = asked
    answers["c"] = "succeeded"
    assert main(["cancel", "parity"]) == 0
    lines = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["had ended before: succeeded", "cancelled", "succeeded, before it could be cancelled"]
    assert [(name, by) for name, by, _ in seen] == [("b", "the command line"), ("c", "the command line")]


def test_all_are_asked_before_any_is_waited_for(parity, asked):
    """Else the next one that waits would be started in the place of the one that ends."""
    seen, _, runs = asked
    runs += [make_run(parity, "b", at_s=1, state="running"), make_run(parity, "c", at_s=2, state="pending")]
    cancel("parity", by="test")
    assert seen[0] == ("b", "test", [True, True])


def test_one_that_goes_on_is_exit_code_1(parity, asked, capsys):
    make_run(parity, "b", state="running")
    asked[1]["b"] = "running"
    assert main(["cancel", "b"]) == 1
    assert "still running; cancellation was requested and is not complete" in capsys.readouterr().out


def test_an_ended_run_is_left_alone(parity, asked, capsys):
    run = make_run(parity, "a", state="failed", error=ValueError("no"))
    assert main(["cancel", "a"]) == 0
    assert capsys.readouterr().out == f"{run.path.name}: had ended before: failed\n"
    assert asked[0] == []
    assert not run.cancel_requested


def test_one_that_looks_lost_is_asked_too(parity, asked):
    """It may wait in the queue of a cluster whose launcher has gone."""
    make_run(parity, "gone", state="lost")
    assert cancel("gone") == {next((parity / "runs").iterdir()).name: "cancelled"}
    assert [name for name, *_ in asked[0]] == ["gone"]


def test_nothing_of_that_name(parity, capsys):
    make_run(parity, "a")
    assert main(["cancel", "zebra"]) == 2
    assert "no run or experiment of that name" in capsys.readouterr().err


def test_the_process_of_a_run_without_a_launcher_is_ended(parity, capsys):
    """For real: a process of this test's own, in whose name the run runs."""
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
