"""Tests are independent of the tests that ran before them and leave no state behind."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy
import psutil
import pytest
import torch

from tests.conftest import seed_torch
from tests.helpers.left_open import children_of, nothing_left_open, open_files

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]


def test_a_file_left_open_is_named(tmp_path):
    with pytest.raises(pytest.fail.Exception, match=r"left open: file \d+, .*/forgotten$"), nothing_left_open(0):
        file = (tmp_path / "forgotten").open("w")
    file.close()


def test_a_process_left_running_is_named():
    with (
        pytest.raises(pytest.fail.Exception, match=r"left open: process \d+, .*time\.sleep\(300\)$"),
        nothing_left_open(0),
    ):
        process = subprocess.Popen(SLEEPS)
    process.kill()
    process.wait()


def test_an_unreaped_dead_process_is_named():
    with (
        pytest.raises(pytest.fail.Exception, match=r"process \d+, ended, and nobody waited for it"),
        nothing_left_open(0),
    ):
        process = _ended()
    process.wait()


def test_a_file_closed_in_time_is_not_reported(tmp_path):
    before = open_files(), children_of()
    with nothing_left_open(0):  # or it would fail
        (tmp_path / "kept").write_text("x")
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    assert (open_files(), children_of()) == before


@pytest.mark.parametrize("time", [1, 2])
def test_random_numbers_do_not_depend_on_earlier_tests(time):
    """Those of `tests/conftest.py`, and not those of pytest-randomly's seed."""
    assert random.random() == random.Random(0).random()
    assert numpy.random.random() == numpy.random.RandomState(0).random()  # noqa: NPY002
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))


def test_seeding_a_test_formats_no_stack():
    """`torch.manual_seed` keeps the newest for each kind of device that this machine lacks."""
    tracker = torch.cuda._lazy_seed_tracker
    before = tracker.manual_seed_all_cb
    seed_torch(torch)
    assert tracker.manual_seed_all_cb is before


def _ended():
    process = subprocess.Popen(SLEEPS)
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    return process
