"""A story that hangs says which processes are left, and where each of them is."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from tests.chaos import harness, stacks
from tests.chaos.harness import MARK, Story

HANGS = """
import signal, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def in_another_thread():
    threading.Event().wait()
def waits_for_ever():
    sys.stdout.write("ready"); sys.stdout.flush()
    threading.Event().wait()
threading.Thread(target=in_another_thread, daemon=True).start()
waits_for_ever()
"""


@pytest.fixture
def hanging(tmp_path):
    """A story with one process, which hangs."""
    story = Story(tmp_path, "torchx", 0)
    environment = os.environ | {MARK: story.mark, "PYTHONFAULTHANDLER": "1"}
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", HANGS], env=environment, stdout=subprocess.PIPE, stderr=output
        )
    assert process.stdout is not None
    assert process.stdout.read(5) == b"ready"
    yield story, process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_hanging_process_is_named_with_the_stacks_of_its_threads(hanging, tmp_path):
    story, process = hanging
    text = stacks.last_look(story.processes(), tmp_path)
    assert f"{process.pid}, child of {os.getpid()}, sleeping" in text
    assert "used 0.00 s" in text
    assert "in waits_for_ever" in text
    assert "in in_another_thread" in text
    assert process.wait(timeout=5) == -6
    assert stacks.last_look([], tmp_path).startswith("load of the machine")
    with pytest.raises(psutil.NoSuchProcess):
        psutil.Process(process.pid)


def test_a_story_in_which_nothing_moves_ends_with_the_places(hanging, monkeypatch):
    story, process = hanging
    monkeypatch.setattr(harness, "_LOOK_S", 0.05)
    with pytest.raises(
        AssertionError, match=r"(?s)did not end: .* s after the last movement.*load of the machine.*in waits_for_ever"
    ):
        story.exit_code(process, seconds=0.5)


def test_a_slow_story_goes_on(hanging, monkeypatch):
    story, process = hanging
    monkeypatch.setattr(harness, "_LOOK_S", 0.05)
    movements = iter(range(100))

    def moves() -> int:
        if (number := next(movements)) == 10:  # at an interval of 0.2 s
            process.kill()
        return number

    monkeypatch.setattr(story, "_movement", moves)
    assert story.exit_code(process, seconds=1.0) == -9  # after two seconds, in which something moved
