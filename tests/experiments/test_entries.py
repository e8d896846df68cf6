"""Entries of a benchmark: each in a file of its own, and one that dies takes no other with it."""

from __future__ import annotations

import subprocess
import time

import pytest

from experiments import entries
from experiments.entries import recording_failure, result_of, run_entries
from tests.helpers.stand_in import stand_in
from workbench.atomic import to_json
from workbench.errors import LaunchError

MODULE = "experiments.gpu_layouts.measure"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The entries of every job that was started; w/second takes its job with it."""
    jobs = []

    def run(command, **_):
        named = command[command.index(MODULE) + 4 :]
        assert command[command.index(MODULE) + 1 : command.index(MODULE) + 3] == [str(tmp_path), "7"]
        jobs.append(named)
        for entry in named:
            if entry == "w/second":
                (tmp_path / "failed3").write_text("Traceback\nOutOfMemoryError: too much")
                return subprocess.CompletedProcess(command, 1, "", "elastic says")
            (tmp_path / f"{entry.replace('/', '.')}.json").write_bytes(to_json({"fine": 1}))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(entries, "subprocess", stand_in(subprocess, run=run))
    return jobs


def do(folder, *named, needed="", left_s=60.0):
    run_entries(
        MODULE,
        4,
        named,
        folder,
        7,
        deadline=time.time() + left_s,
        report_progress=lambda line: None,
        needed=lambda: needed,
    )


def test_a_dead_entry_is_named_and_the_others_continue(tmp_path, asked):
    do(tmp_path, "w/first", "w/second", "w/third")
    assert asked == [["w/first", "w/second", "w/third"], ["w/third"]]
    assert result_of(tmp_path, "w/second") == {"left_out": "OutOfMemoryError: too much"}
    assert result_of(tmp_path, "w/third") == {"fine": 1}
    assert result_of(tmp_path, "w/fourth") == {"left_out": "not reached"}


def test_a_failure_that_the_others_depend_on_ends_them_all(tmp_path, asked):
    with pytest.raises(LaunchError, match=r"w/second\n  found: Traceback\nOutOfMemory(.|\n)*one rank makes them"):
        do(tmp_path, "w/second", "w/third", needed="one rank makes them")
    assert asked == [["w/second", "w/third"]]


def test_nothing_is_begun_after_the_deadline(tmp_path, asked):
    do(tmp_path, "w/first", left_s=-1.0)
    assert asked == []
    assert result_of(tmp_path, "w/first") == {"left_out": "not reached"}


def test_a_failing_rank_writes_the_reason_to_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ValueError, match="too few"), recording_failure(tmp_path):
        raise ValueError("too few")
    assert (tmp_path / "failed3").read_text().endswith("ValueError: too few\n")
