"""State of runs: settings that differ, ranks, waits, and runs that cannot be read."""

from __future__ import annotations

import pytest

from tests.helpers.hand_made import SECOND_NS, make_project, make_run
from tests.helpers.waiting_ranks import one_waits
from workbench.errors import ShapeError
from workbench.launch import status
from workbench.launch.status import list_runs, seconds, status_of
from workbench.records.lookup import look_up, runs_of

ABLATION = """
question: Same?
base: {steps: 4}
axes: {precision: [float64, float32]}
reference: one_rank
truth: one_rank-float64
configurations: {first: {layout: {tp: 2}}, one_rank: {}, cp2: {layout: {cp: 2}}}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def parity(project):
    return project / "experiments" / "parity"


@pytest.fixture
def listed(tmp_path, monkeypatch):
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    parity, other = tmp_path / "experiments" / "parity", tmp_path / "experiments" / "other"
    make_run(parity, "cp2", at_s=5, state="failed", done=2, layout={"cp": 2}, rank=1, error=ValueError("an\nodd row"))
    make_run(parity, "one_rank", at_s=0, took_s=75.25)
    make_run(other, "tp2", at_s=3, state="lost", done=1, layout={"tp": 2})
    make_run(parity, "cp4", at_s=9, state="pending", done=0, layout={"cp": 4})
    return tmp_path


def one(name):
    [run] = look_up(name).opened()
    return status_of(run)


def test_every_run_newest_last(listed):
    runs = list_runs(project=listed)
    assert [(run.experiment, run.name, run.state, run.steps_done, run.steps) for run in runs] == [
        ("parity", "one_rank", "succeeded", 4, 4),
        ("other", "tp2", "lost", 1, 4),
        ("parity", "cp2", "failed", 2, 4),
        ("parity", "cp4", "pending", 0, 4),
    ]
    assert [(run.ranks, run.device, run.backend) for run in runs][2] == (2, "cpu", "processes")
    assert [run.seconds for run in runs] == [75.25, None, 3.0, None]
    assert [run.why for run in runs] == ["", "no process is left that could end it", "rank 1 ValueError: an", ""]


def test_a_damaged_exit_record_is_listed(listed):
    [run] = [run for run in list_runs("parity", project=listed) if run.name == "cp2"]
    folder = listed / "experiments" / "parity" / "runs" / run.folder
    (folder / "ranks" / "rank00001.exit.json").write_text("{")
    [run] = [run for run in list_runs("parity", project=listed) if run.name == "cp2"]
    assert (run.state, "JSONDecodeError" in run.why) == ("failed", True)


def test_the_duration_of_a_lost_run_is_unknown():
    state = {"started_ns": 5 * SECOND_NS}
    assert seconds(state, "lost") is None
    assert seconds({}, "pending") is None
    assert seconds(state | {"ended_ns": 7 * SECOND_NS}, "failed") == 2.0
    assert seconds(state, "running") > 10**8


class TestOneRun:
    def test_reports_progress_and_the_last_record(self, parity):
        make_run(parity, "cp2", state="running", done=3, layout={"cp": 2}, fields={"device_note": "no GPU here"})
        result = one("cp2")
        assert (result.state, result.steps_done, result.steps) == ("running", 3, 4)
        assert result.last["loss/total/sum"] == pytest.approx(0.35)
        assert result.step_ms == 41.5  # of 41 and 42: the first took 1000 and is left out
        assert (result.world_size, result.device, result.backend) == (2, "cpu", "processes")
        assert result.device_note == "no GPU here"

    def test_a_damaged_exit_record_is_reported(self, parity):
        run = make_run(parity, "cp2", state="failed")
        (run.path / "ranks" / "rank00000.exit.json").write_text("{")
        assert "rank00000.exit.json" in one("cp2").problem

    def test_without_steps(self, parity):
        make_run(parity, "cp2", state="pending", done=0)
        result = one("cp2")
        assert (result.step_ms, result.last, result.seconds, result.started_ns) == (None, {}, None, None)


class TestSettings:
    def test_are_compared_with_the_first_run(self, parity):
        make_run(parity, "b_first", at_s=0, seed=3)
        make_run(parity, "a_second", at_s=1, seed=4, loss={"surrogate": {"clip_low": 0.1}})
        result = one("a_second")
        assert result.compared_with == "b_first"
        assert result.settings == {"loss.surrogate.clip_low": [0.2, 0.1], "seed": [3, 4]}
        assert (one("b_first").compared_with, one("b_first").settings) == ("", {})

    def test_against_the_reference_where_the_ablation_names_one(self, parity):
        parity.mkdir(parents=True)
        (parity / "ablation.yaml").write_text(ABLATION)
        make_run(parity, "first-float32", at_s=0, layout={"tp": 2})
        make_run(parity, "one_rank-float32", at_s=1)
        make_run(parity, "cp2-float32", at_s=2, layout={"cp": 2})
        assert one("cp2-float32").compared_with == "one_rank-float32"
        assert one("cp2-float32").settings == {"layout.cp": [1, 2]}
        assert one("one_rank-float32").compared_with == ""

    def test_an_ablation_that_cannot_be_read_leaves_the_first(self, parity):
        parity.mkdir(parents=True)
        (parity / "ablation.yaml").write_text("configurations: [")
        make_run(parity, "first", at_s=0)
        make_run(parity, "cp2", at_s=1, layout={"cp": 2})
        assert one("cp2").compared_with == "first"


class TestRanks:
    def test_each_log_has_its_size_last_line_and_outcome(self, parity):
        make_run(
            parity,
            "cp4",
            state="failed",
            layout={"cp": 4},
            rank=1,
            error=ShapeError("split"),
            logs={0: "one\ntwo\n\n", 1: "x" * 40_000 + "\nlast", 2: ""},
        )
        ranks = one("cp4").ranks
        assert [(rank.rank, rank.log_bytes, rank.last_line, rank.ended) for rank in ranks] == [
            (0, 9, "two", ""),
            (1, 40_005, "last", "exception"),
            (2, 0, "", ""),
            (3, None, "", ""),
        ]

    def test_a_succeeded_run_is_reported(self, parity):
        make_run(parity, "a", logs={0: "done\n"})
        assert [rank.ended for rank in one("a").ranks] == ["well"]

    def test_the_collective_that_it_is_in(self, parity, monkeypatch):
        run = make_run(parity, "cp2", state="running", layout={"cp": 2})
        with one_waits(run):
            monkeypatch.setattr(status, "_PATIENCE_S", 0.0)
            result = one("cp2")
        assert result.ranks[0].inside.startswith("all_reduce over cp [#2")
        assert result.ranks[1].inside == ""
        [wait] = result.waiting
        assert (wait.rank, wait.stack) == (1, "")
        assert wait.message.startswith("rank 1 has not come to all_reduce over cp [#2")

    def test_a_short_wait_is_none(self, parity):
        run = make_run(parity, "cp2", state="running", layout={"cp": 2})
        with one_waits(run):
            assert one("cp2").waiting == []

    def test_no_rank_is_waited_for_after_the_end(self, parity, monkeypatch):
        monkeypatch.setattr(status, "_PATIENCE_S", 0.0)
        run = make_run(parity, "cp2", state="cancelled", layout={"cp": 2})
        with one_waits(run):
            assert one("cp2").waiting == []


def test_an_experiment_is_read_once_for_the_states_of_all_its_runs(listed, monkeypatch):
    """Once a run, 1,000 runs took minutes."""
    runs, read = [entry.run for entry in runs_of(listed / "experiments" / "parity") if entry.run], []
    monkeypatch.setattr(status, "runs_of", lambda *where, **how: read.append(where) or runs_of(*where, **how))
    found = status.statuses(runs)
    assert len(runs) > 1
    assert len(read) == 1
    assert found == [status_of(run) for run in runs]
