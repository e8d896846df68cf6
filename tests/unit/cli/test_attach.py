"""`workbench attach`: a line for every change, until all have ended."""

import threading
import time

import pytest

from tests.helpers.trials import make_run
from workbench.cli import main
from workbench.cli.attach import _POLL_S


def test_every_change_is_a_line_and_the_exit_code_tells_how_it_ended(tmp_path, capsys):
    first, second = (make_run(tmp_path / "exp", name) for name in ("one", "two"))

    def go_on():
        time.sleep(2 * _POLL_S)
        for run, state in ((first, "succeeded"), (second, "failed")):
            run.set_state("running")
            run.set_state(state)

    thread = threading.Thread(target=go_on)
    thread.start()
    assert main(["attach", str(tmp_path / "exp")]) == 1
    thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("RUN")
    assert [line.split()[:2] for line in lines[1:]][:2] == [["one", "pending"], ["two", "pending"]]
    assert {tuple(line.split()[:2]) for line in lines[3:]} >= {("one", "succeeded"), ("two", "failed")}
    assert sum(line.startswith("RUN") for line in lines) == 1


def test_an_interrupt_leaves_the_runs(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "exp", "one")

    def interrupted(_seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("workbench.cli.attach.time.sleep", interrupted)
    assert main(["attach", str(tmp_path / "exp")]) == 130
    assert "the runs continue; workbench cancel" in capsys.readouterr().err
    assert not run.cancel_requested


def test_without_runs_it_says_so(tmp_path, capsys):
    assert main(["attach", str(tmp_path)]) == 2
    assert "do:" in capsys.readouterr().err


pytestmark = pytest.mark.timeout(60)
