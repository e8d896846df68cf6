"""Nothing is lost or left behind when processes are killed at random.

Six kills in the default suite, two hundred more under the slow marker. Each story launches an experiment again and
again, with one run more each time, and kills one process of it with SIGKILL: the kernel that launched it, whatever that
was started from, the fork server, an agent, a rank. After each: every step that a rank was told is on disk is there,
every run says how it ended or is lost, and no process is left. In the end, one launch without a kill finishes all.
"""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.chaos.harness import VICTIMS, Story


@pytest.fixture
def story(tmp_path, request):
    """A story that leaves no process behind even if it goes wrong."""
    story = Story(tmp_path, *request.param)
    yield story
    story.end()


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("story", [(where, 0) for where in VICTIMS], ids=str, indirect=True)
def test_a_few_random_kills_lose_and_leave_nothing(story):
    story.tell(kills=3)
    assert story.kills == 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("story", [(where, seed) for where in VICTIMS for seed in range(1, 11)], ids=str, indirect=True)
def test_two_hundred_random_kills_lose_and_leave_nothing(story):
    story.tell(kills=10)
    assert story.kills == 10


def test_a_process_that_was_seen_stays_one_of_the_story_when_its_environment_is_gone(tmp_path):
    """As while it ends: it was missed for that long, and its run was `running` with nobody left."""
    story = Story(tmp_path, "processes", 0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert story.processes() == []
        story.own.add((process.pid, psutil.Process(process.pid).create_time()))
        assert [each.pid for each in story.processes()] == [process.pid]
        process.kill()
    assert story.processes() == []
