"""How long a run will take yet, from the ends of its last steps."""

from __future__ import annotations

import pytest

from workbench.runs.progress import RECENT, Pace


def ends(*seconds):
    return [{"time/ended_ns": round(1e9 * second)} for second in seconds]


@pytest.mark.parametrize("records", [[], ends(3), [{"step": 0}, {"step": 1}]])
def test_before_two_steps_have_ended_nobody_knows(records):
    assert Pace(records).seconds_left(4) is None


def test_a_pause_between_two_steps_changes_nothing():
    assert Pace(ends(0, 2, 4, 1004, 1006)).seconds_left(3) == pytest.approx(6.0)


def test_only_the_last_steps_count_and_they_may_come_one_by_one():
    pace = Pace(ends(*range(0, 100, 10)))
    for second in range(91, 91 + RECENT):
        pace.add(ends(second))
    assert pace.seconds_left(5) == pytest.approx(5.0)
