"""Several draws of one configuration: who belongs together, and what their mean and spread are."""

import math
from dataclasses import replace

import pytest

from workbench.compare.comparison import Comparison, Configuration
from workbench.compare.seeds import Spread, seed_groups
from workbench.runs.spec import RunSpec


def configuration(name, *, losses=(1.0, 2.0), **settings):
    return Configuration(name, RunSpec(**settings).model_dump(mode="json"),
                         steps=[{"step": step, "loss/total/sum": loss} for step, loss in enumerate(losses)])


def comparison(*configurations):
    return Comparison("x", "?", list(configurations))


def test_what_differs_only_in_a_seed_belongs_together():
    found = seed_groups(comparison(
        configuration("a-0", seed=0), configuration("a-1", seed=1), configuration("b-0", seed=0, layout={"cp": 2}),
        configuration("a-2", seed=2), configuration("b-1", seed=1, layout={"cp": 2}), configuration("c", steps=3)))
    assert [(group.name, [c.name for c in group.members], group.seeds) for group in found] == [
        ("a", ["a-0", "a-1", "a-2"], ["0", "1", "2"]), ("b", ["b-0", "b-1"], ["0", "1"])]


def test_weights_of_the_model_are_a_draw_too_and_clip_decisions_of_the_same_draw_do_not_count():
    [group] = seed_groups(comparison(
        configuration("f32-0", model={"seed": 0}, frozen_clip="f64-0"),
        configuration("f32-1", model={"seed": 1}, frozen_clip="f64-1")))
    assert (group.name, group.seeds) == ("f32", ["0", "1"])


def test_the_same_settings_twice_are_no_seeds():
    assert seed_groups(comparison(configuration("a"), configuration("b"))) == []


def test_mean_and_deviation_are_taken_by_step_over_those_that_recorded_it():
    [group] = seed_groups(comparison(configuration("a-0", losses=(1.0, 5.0)),
                                     configuration("a-1", seed=1, losses=(4.0,))))
    by_step = group.by_step("loss/total/sum")
    assert by_step[0] == Spread(2, 2.5, pytest.approx(math.sqrt(4.5)), 1.0, 4.0)
    assert (by_step[1].count, by_step[1].mean, math.isnan(by_step[1].deviation)) == (1, 5.0, True)


def test_what_is_not_a_number_is_no_draw():
    assert Spread.of([1.0, float("nan"), None, 3.0, float("inf")]) == Spread(2, 2.0, pytest.approx(math.sqrt(2)), 1, 3)
    assert Spread.of([None]).count == 0


def test_a_name_shared_by_nothing_is_the_first(tmp_path):
    first, second = configuration("left", seed=0), configuration("right", seed=1)
    assert seed_groups(comparison(first, second))[0].name == "left"
    assert seed_groups(comparison(replace(first, name="a-x-1"), replace(second, name="a-x-2")))[0].name == "a-x"
