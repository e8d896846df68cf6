"""Remaining time of a run, from the ends of its last steps."""

from __future__ import annotations

import pytest

from workbench.records.progress import CONTINUES, RECENT, Pace


def ends(*seconds):
    return [{"time/ended_ns": round(1e9 * second)} for second in seconds]


@pytest.mark.parametrize("records", [[], ends(3), [{"step": 0}, {"step": 1}]])
def test_is_unknown_before_two_steps(records):
    assert Pace(records).seconds_left(4) is None


def test_steps_of_which_every_third_samples_are_all_counted():
    assert Pace(ends(0, 8, 10, 12, 20, 22, 24)).seconds_left(6) == pytest.approx(24.0)


def test_the_pause_before_a_resume_is_no_step():
    first, second = ends(1000, 1006)
    pace = Pace([*ends(0, 2, 4), first | {CONTINUES: "earlier-0badcafe"}])
    assert pace.seconds_left(3) is None
    pace.add([second])
    assert pace.seconds_left(3) == pytest.approx(18.0)


def test_only_the_last_steps_count_and_they_may_come_one_by_one():
    pace = Pace(ends(*range(0, 100, 10)))
    for second in range(91, 91 + RECENT):
        pace.add(ends(second))
    assert pace.seconds_left(5) == pytest.approx(5.0)
