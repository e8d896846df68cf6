"""A run directory whose job was started again: what it keeps, and when it stays ended."""

from __future__ import annotations

import pytest

from workbench.records.directory import RunDirectory
from workbench.records.failures import EXIT_CODES, WAITING
from workbench.records.progress import CONTINUES, StepTail
from workbench.records.requeued import REQUEUED, STOPPED_AFTER, reopen
from workbench.specs.run import RunSpec


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path, "run", RunSpec(steps=9), handle="slurm://torchx/1", backend="slurm")
    run.set_state("running")
    for step in range(5):
        run.append_step({"step": step})
    return run


def checkpoint(run, steps):
    (run.path / "checkpoints" / f"step{steps:04d}").mkdir(parents=True)


def steps(run):
    return [record["step"] for record in run.steps()]


def test_steps_after_the_newest_checkpoint_are_taken_again(run):
    checkpoint(run, 3)
    tail = StepTail(run)
    assert len(tail.new()) == tail.count == 5
    assert reopen(run)
    assert steps(run) == [0, 1, 2]
    assert ([record["step"] for record in tail.new()], tail.count) == ([0, 1, 2], 3)
    run.append_step({"step": 3})
    assert (tail.new(), tail.count) == ([{"step": 3}], 4)


def test_without_a_checkpoint_it_begins_again(run):
    assert reopen(run)
    assert steps(run) == []


def test_steps_copied_from_the_run_that_it_continues_are_kept(tmp_path):
    run = RunDirectory.create(tmp_path, "run", RunSpec(steps=9), continues="run-earlier")
    run.set_state("running")
    for step in range(5):
        run.append_step({"step": step} | ({CONTINUES: "run-earlier"} if step == 3 else {}))
    assert reopen(run)
    assert steps(run) == [0, 1, 2]


def test_records_of_the_earlier_end_go(run):
    checkpoint(run, 5)
    run.note(**{STOPPED_AFTER: {"step": 5, "time_ns": 1}})
    run.write_exit(0, {}, ConnectionError("Connection closed by peer"))
    run.write_json(EXIT_CODES, {"0": 1})
    run.write_json(WAITING, {"waiting": []})
    run.set_state("failed")
    assert run.failure()["cause"] == "peer"
    assert reopen(run)
    state = run.state
    assert (state["state"], len(state[REQUEUED])) == ("running", 1)
    assert not {"ended_ns", "rank0", STOPPED_AFTER} & state.keys()
    assert state["handle"] == "slurm://torchx/1"
    assert (run.exits(), steps(run)) == ({}, [0, 1, 2, 3, 4])
    assert not (run.path / WAITING).exists()
    assert not (run.path / EXIT_CODES).exists()
    assert reopen(run)
    assert len(run.state[REQUEUED]) == 2


@pytest.mark.parametrize("end", ["succeeded", "cancelled", "exception"])
def test_a_run_that_ended_by_itself_stays_ended(run, end):
    if end == "exception":
        run.write_exit(0, {}, ValueError("a mistake"))
    run.set_state("failed" if end == "exception" else end)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert not reopen(run)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_run_that_waits_for_its_turn_is_left_as_it_is(tmp_path):
    run = RunDirectory.create(tmp_path, "run", RunSpec())
    assert reopen(run)
    assert (run.state["state"], REQUEUED in run.state) == ("pending", False)
