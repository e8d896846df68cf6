"""Tests are independent of the tests that ran before them and leave no state behind."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

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


def test_pipes_of_torchs_compilers_are_shared_and_no_others(monkeypatch):
    """The pool, which a first compilation on a GPU starts, keeps both ends of two pipes open."""

    def opens(opened):
        pipes = [[os.fdopen(n, how) for n, how in zip(os.pipe(), ("rb", "wb"), strict=True)] for _ in range(3)]
        opened.extend(end for pipe in pipes for end in pipe)
        pool = SimpleNamespace(read_pipe=pipes[0][0], write_pipe=pipes[1][1])
        module = SimpleNamespace(_pool_set=[pool, ThreadPoolExecutor(1)])
        monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", module)

    opened = []
    with pytest.raises(pytest.fail.Exception, match="left open") as failed, nothing_left_open(0):
        opens(opened)
    named = {int(number) for number in re.findall(r"file (\d+), pipe", str(failed.value))}
    assert named == {end.fileno() for end in opened[4:]}
    for end in opened:
        end.close()


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
