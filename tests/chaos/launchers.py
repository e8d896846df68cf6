"""Two launchers of one experiment at once, and run directories that are deleted while their runs write there.

Built on the stories of `tests.chaos.harness`: real launchers, agents and ranks.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.harness import LEAVE_S, Story

KINDS = ("two launchers", "deleted while running")


def tell(folder: Path, where: str, seed: int, kind: str) -> None:
    """Tell one such story."""
    with _story(folder, where, seed) as story:
        {"two launchers": _two_launchers, "deleted while running": _deleted}[kind](story)


@contextmanager
def _story(folder: Path, where: str, seed: int) -> Iterator[Story]:
    story = Story(folder, where, seed)
    try:
        yield story
    finally:
        story.end()


def _two_launchers(story: Story) -> None:
    """One of them is refused, or finds the work done; every run is there once, and nobody is left."""
    runs = story.random.randint(1, 2)
    first = story.start(runs)
    time.sleep(story.random.uniform(0.0, 3.0))
    second = story.start(runs)
    codes = [story.exit_code(process) for process in (first, second)]
    story.wait_until_nobody_is_left(LEAVE_S)
    assert 0 in codes, story.story()
    output = (story.folder / "output").read_text()
    assert codes == [0, 0] or "SpecError" in output, f"refused without a reason\n{story.story()}"
    story.check()
    assert sorted(run.name for run in story.runs()) == sorted(f"run{number}" for number in range(runs)), story.story()
    assert {run.status for run in story.runs()} == {"succeeded"}, story.story()


def _deleted(story: Story) -> None:
    """The launcher ends by itself, leaves nobody, and the other runs succeed; launching again completes all."""
    parent = story.start(2)
    assert story.wait_for("rank", parent) is not None, story.story()
    time.sleep(story.random.uniform(0.0, 2.0))
    victim = story.random.choice(sorted(story.folder.glob("runs/run*")))
    if story.random.random() < 0.3:
        shutil.rmtree(victim.parent, ignore_errors=True)  # all of them
    else:
        shutil.rmtree(victim, ignore_errors=True)
    story.told.append(f"{victim.name} deleted")
    story.exit_code(parent)
    story.wait_until_nobody_is_left(LEAVE_S)
    for left in story.folder.glob("runs/run*"):
        if not (left / "config.json").exists():  # what a rank wrote after the deletion
            shutil.rmtree(left)
    story.finish(runs=2)
