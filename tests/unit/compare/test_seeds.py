"""Several draws of one configuration: their groups, mean and spread."""

import math
from dataclasses import replace

import pytest

from workbench.compare.comparison import Comparison, Configuration
from workbench.compare.seeds import Spread, identical_notes, seed_groups
from workbench.specs.run import RunSpec


def configuration(name, *, losses=(1.0, 2.0), **settings):
    return Configuration(
        name,
        RunSpec(**settings).model_dump(mode="json"),
        steps=[{"step": step, "loss/total/sum": loss} for step, loss in enumerate(losses)],
    )


def comparison(*configurations):
    return Comparison("x", "?", list(configurations))


def test_runs_that_differ_only_in_a_seed_form_a_group():
    result = seed_groups(
        comparison(
            configuration("a-0", seed=0),
            configuration("a-1", seed=1),
            configuration("b-0", seed=0, layout={"cp": 2}),
            configuration("a-2", seed=2),
            configuration("b-1", seed=1, layout={"cp": 2}),
            configuration("c", steps=3),
        )
    )
    assert [(group.name, [c.name for c in group.members], group.seeds) for group in result] == [
        ("a", ["a-0", "a-1", "a-2"], ["0", "1", "2"]),
        ("b", ["b-0", "b-1"], ["0", "1"]),
    ]


def test_model_seeds_count_as_draws_and_frozen_clips_of_one_draw_do_not():
    [group] = seed_groups(
        comparison(
            configuration("f32-0", model={"seed": 0}, frozen_clip="f64-0"),
            configuration("f32-1", model={"seed": 1}, frozen_clip="f64-1"),
        )
    )
    assert (group.name, group.seeds) == ("f32", ["0", "1"])


def test_the_same_settings_twice_are_no_seeds():
    assert seed_groups(comparison(configuration("a"), configuration("b"))) == []


def test_mean_and_deviation_are_taken_by_step_over_those_that_recorded_it():
    [group] = seed_groups(
        comparison(configuration("a-0", losses=(1.0, 5.0)), configuration("a-1", seed=1, losses=(4.0,)))
    )
    by_step = group.by_step("loss/total/sum")
    assert by_step[0] == Spread(2, 2.5, pytest.approx(math.sqrt(4.5)), 1.0, 4.0)
    assert (by_step[1].count, by_step[1].mean, math.isnan(by_step[1].deviation)) == (1, 5.0, True)


def test_a_nan_is_no_draw():
    assert Spread.of([1.0, float("nan"), None, 3.0, float("inf")]) == Spread(2, 2.0, pytest.approx(math.sqrt(2)), 1, 3)
    assert Spread.of([None]).count == 0


def test_a_name_shared_by_nothing_is_the_first(tmp_path):
    first, second = configuration("left", seed=0), configuration("right", seed=1)
    assert seed_groups(comparison(first, second))[0].name == "left"
    assert seed_groups(comparison(replace(first, name="a-x-1"), replace(second, name="a-x-2")))[0].name == "a-x"


def drawn(name, seed, *losses, **costs):
    steps = [
        {"step": step, "loss/total/sum": loss, "time/step_ms": seed * 7.0} | costs for step, loss in enumerate(losses)
    ]
    return replace(configuration(name, model={"seed": seed}), steps=steps)


def test_members_of_which_every_recorded_bit_is_the_same_are_identical():
    [group] = seed_groups(
        comparison(drawn("a-0", 0, 1.0, 2.0), drawn("a-1", 1, 1.0, 2.0), drawn("a-2", 2, 1.0, math.nextafter(2.0, 3.0)))
    )
    assert group.identical == (("a-0", "a-1"),)
    assert not group.all_identical
    assert group.identical_note() == (
        "seeds 0 and 1 gave identical runs: model.seed draws nothing where weights are loaded from a checkpoint"
    )


@pytest.mark.parametrize(
    ("other", "same"), [((1.0, math.nan), True), ((1.0,), False), ((1.0, math.inf), False), ((-1.0, math.nan), False)]
)
def test_nan_equals_itself_and_a_shorter_run_does_not(other, same):
    [group] = seed_groups(comparison(drawn("a-0", 0, 1.0, math.nan), drawn("a-1", 1, *other)))
    assert group.all_identical == same
    assert bool(group.identical_note()) == same


def test_a_zero_with_another_sign_is_another_bit():
    [group] = seed_groups(comparison(drawn("a-0", 0, 0.0), drawn("a-1", 1, -0.0)))
    assert group.identical == ()


def test_runs_that_recorded_nothing_are_not_identical():
    [group] = seed_groups(comparison(drawn("a-0", 0), drawn("a-1", 1)))
    assert group.identical == ()
    assert not group.all_identical


def test_identical_runs_of_several_configurations_share_one_sentence():
    both = comparison(
        *(
            replace(
                drawn(f"{name}-{seed}", seed, 1.0),
                settings=RunSpec(model={"seed": seed}, layout=layout).model_dump(mode="json"),
            )
            for name, layout in (("a", {}), ("b", {"cp": 2}))
            for seed in (0, 1)
        )
    )
    [note] = identical_notes(both)
    assert note.startswith("a, b: seeds 0 and 1 gave identical runs: model.seed")
    assert identical_notes(comparison(drawn("a-0", 0, 1.0), drawn("a-1", 1, 2.0))) == []


@pytest.mark.parametrize("values", [(1.7e308, 1.7e308), (1e300, -1e300), (5e-324, 0.0)])
def test_a_spread_of_extreme_draws_is_finite(values):
    spread = Spread.of(values)
    assert all(map(math.isfinite, (spread.mean, spread.deviation)))
    assert spread.low <= spread.mean <= spread.high
