"""A run's directory: where it stands, and in full why it failed."""

import pytest

from tests.helpers.trials import HOSTILE, make_run, write_steps
from workbench.errors import LaunchError
from workbench.report.rich.run import as_html


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "exp", steps=4, cp=2)


def test_state_progress_series_and_settings(run):
    run.set_state("running")
    write_steps(run, [0.5, 0.25])
    drawn = as_html(run)
    for said in ("running", "2/4", 'aria-label="loss: 2 values, last 0.250', "layout.cp"):
        assert said in drawn
    assert "traceback" not in drawn


def test_a_failure_is_told_in_full(run):
    try:
        raise LaunchError("split 7 tokens", found="an odd row", rule="even rows", fix="pad")
    except LaunchError as error:
        run.write_exit(1, {"cp": 1}, error, waited_in="all_reduce over cp", stack="the stack")
    run.write_exit(0, {"cp": 0}, ConnectionError("connection reset by peer"))
    run.set_state("failed")
    drawn = as_html(run)
    assert "rank 1, in all_reduce over cp: LaunchError" in drawn
    assert "after it ranks 0" in drawn
    for said in ("found: an odd row", "do: pad", "Traceback (most recent call last)", "the stack"):
        assert said in drawn


def test_messages_are_quoted(run):
    run.write_exit(None, {}, ValueError(HOSTILE), stack=HOSTILE)
    run.set_state("failed")
    drawn = as_html(run)
    assert "<script" not in drawn
    assert "before any rank" in drawn


def test_the_text_twin(run):
    write_steps(run, [0.5])
    assert repr(run) == f"RunDirectory({run.path.name}: pending, 1/4 steps)"
