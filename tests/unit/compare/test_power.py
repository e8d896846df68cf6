"""Verdicts on curves of two arms: exact tests and intervals, false accusations, power, and what a verdict could see."""

import itertools
import math
import random
import statistics

import pytest

from workbench.compare.power import (
    compare_arms,
    last_quarter,
    least_seeds,
    seeds_needed,
    seeds_needed_unpaired,
    sign_flips,
    smallest_effect,
)
from workbench.errors import SpecError


def p_by_hand(differences):
    """Every assignment of signs: the share whose sum is as far on the observed side, doubled."""
    whole = sum(differences)
    flips = [
        sum(s * d for s, d in zip(signs, differences, strict=True))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    sides = (sum(f >= whole - 1e-9 for f in flips), sum(f <= whole + 1e-9 for f in flips))
    return min(1.0, 2 * min(sides) / len(flips))


def drawn(seed, count, shift=0.0):
    rng = random.Random(seed)
    return [rng.gauss(shift, 1.0) for _ in range(count)]


def arms(differences, noise=3.0, seed=0):
    """Curves of one step: a large draw that both arms share, and the differences."""
    rng = random.Random(seed)
    first = [rng.gauss(0.0, noise) for _ in differences]
    return [[a] for a in first], [[a + d] for a, d in zip(first, differences, strict=True)]


@pytest.mark.parametrize("differences", [drawn(0, 5), drawn(1, 9, 1.5), [1, 1, 1, 1, 0, 0, 2, 3], [0.1] * 8, [0.0] * 9])
def test_p_values_are_those_of_all_assignments_of_signs(differences):
    assert sign_flips(differences)[2] == pytest.approx(p_by_hand(differences), abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_interval_has_the_shifts_that_are_not_rejected(seed):
    differences = drawn(seed, 9, 0.3)
    low, high, _ = sign_flips(differences)
    for end, inwards in ((low, 1e-6), (high, -1e-6)):
        assert p_by_hand([d - end - inwards for d in differences]) > 0.01
        assert p_by_hand([d - end + inwards for d in differences]) <= 0.01


@pytest.mark.parametrize("draw", [random.Random.normalvariate, lambda rng, m, s: rng.choice((-9.0, -1.0, 1.0, 9.0))])
def test_no_more_than_one_in_a_hundred_is_accused_under_the_null(draw):
    rng = random.Random(1)
    accused = sum(sign_flips([draw(rng, 0.0, 1.0) for _ in range(10)])[2] <= 0.01 for _ in range(2000))
    assert accused <= 20 + 3 * math.sqrt(20), "1 % of 2000, and three standard deviations"
    assert accused, "a test that accuses nobody has no level"


def test_many_seeds_take_random_subsets_with_the_same_verdicts():
    assert sign_flips(drawn(2, 20, 2.0))[2] < 1e-3
    low, high, p = sign_flips(drawn(3, 20))
    assert low < 0 < high
    assert p > 0.01


@pytest.mark.parametrize("seeds", [8, 12, 15])
def test_the_smallest_effect_is_seen_as_often_as_is_said(seeds):
    rng, shift = random.Random(seeds), smallest_effect(seeds)
    draws = 250
    seen = sum(sign_flips([rng.gauss(shift, 1.0) for _ in range(seeds)])[2] <= 0.01 for _ in range(draws))
    assert seen / draws == pytest.approx(0.8, abs=0.08), "three standard deviations of 250 draws are 0.08"


def test_seeds_that_an_effect_needs_invert_the_effect_that_seeds_see():
    for seeds in (9, 12, 14, 30):
        assert seeds_needed(smallest_effect(seeds) + 1e-6) == seeds
        assert seeds_needed(smallest_effect(seeds) - 1e-3) == seeds + 1
    assert [seeds_needed(effect) for effect in (math.inf, 5.0)] == [8, 8]
    assert seeds_needed_unpaired(1.0) == 14, "Guenther 1981: 11.7 + 1.7"


def test_eight_seeds_are_the_fewest_at_one_percent():
    assert (least_seeds(0.01), least_seeds(0.05), least_seeds(0.5)) == (8, 6, 2)
    assert math.isinf(smallest_effect(7))
    few = compare_arms(*arms([1.0] * 7))
    assert (few.verdict, few.low, few.high) == ("vacuous", -math.inf, math.inf)
    assert "needs 8" in str(few)
    assert compare_arms(*arms([1.0] * 8)).verdict == "different"


def test_a_verdict_says_what_it_could_have_seen():
    differences = drawn(4, 12)
    result = compare_arms(*arms(differences))
    assert result.verdict == "not told apart"
    assert result.deviation == pytest.approx(statistics.stdev(differences))
    assert result.smallest_effect == pytest.approx(smallest_effect(12) * result.deviation)
    assert result.seeds_for(result.smallest_effect * 1.001) == 12
    assert result.seeds_for(result.smallest_effect, paired=False) > 100
    assert f"{result.smallest_effect:.2g} with 80%" in str(result)
    assert str(result.seeds_for(result.smallest_effect, paired=False)) in str(result)


def test_shared_draws_cancel_and_unlike_ones_do_not():
    result = compare_arms(*arms(drawn(5, 200), noise=3.0))
    assert result.fewer == pytest.approx((9 + 10) / 1, rel=0.25)
    effect = result.deviation / 4
    assert result.seeds_for(effect, paired=False) / result.seeds_for(effect) == pytest.approx(result.fewer, rel=0.05)


def test_arms_without_a_difference_are_equal_and_see_any_effect():
    result = compare_arms(*arms([0.0] * 8))
    assert (result.verdict, result.p_value, result.smallest_effect) == ("equal", 1.0, 0.0)
    assert result.seeds_for(0.1) == 8
    assert "no pair of runs differs" in str(result)


def test_the_last_quarter_is_summarised_unless_another_summary_is_given():
    first, second = [[0.0, 0.0, 0.0, 0.0]] * 8, [[4.0, 0.0, 0.0, 0.0]] * 8
    assert compare_arms(first, second).verdict == "equal"
    assert compare_arms(first, second, summary=statistics.fmean).difference == 1.0
    assert last_quarter([5.0]) == 5.0


@pytest.mark.parametrize(
    ("first", "second", "settings", "message"),
    [
        ([[1.0]], [[1.0], [2.0]], {}, "1 and 2 runs"),
        ([], [], {}, "0 and 0 runs"),
        ([[1.0], [math.nan]], [[1.0], [2.0]], {}, r"runs \[1\] of the first arm"),
        ([[1.0]], [[1.0]], {"level": 0.0}, "level = 0.0"),
        ([[1.0]], [[1.0]], {"power": 1}, "power = 1"),
    ],
)
def test_arms_that_cannot_be_compared_raise(first, second, settings, message):
    with pytest.raises(SpecError, match=message):
        compare_arms(first, second, **settings)


def test_no_seeds_see_an_effect_of_nothing():
    with pytest.raises(SpecError, match="above 0"):
        seeds_needed(0.0)
