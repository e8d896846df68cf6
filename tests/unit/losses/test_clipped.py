"""PPO's clip and its bounds for negative advantages, with manual values at every corner and against the oracle."""

import math

import pytest
import torch

from tests.helpers.loss_batches import nasty_documents, packed
from tests.helpers.surrogate_checks import assert_finite_differences, assert_is_the_oracle
from workbench.losses import LossInputs
from workbench.losses.clipped import clip_ratio, clipped_surrogate

BOUNDS = [
    {"clip_low": 0.2, "clip_high": 0.28},
    {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
    {"clip_low": 0.2, "clip_high": 0.2, "delta": 1.5},
    {"clip_low": 0.2, "clip_high": 0.28, "delta": 1.1},  # delta inside the clip range
    {"clip_low": 0.3, "clip_high": 0.1, "delta": 4.0, "dual_clip": 3.0},
    {"clip_low": 0.3, "clip_high": 0.5, "dual_clip": 1.2},  # dual clip inside the clip range
    {"clip_low": 0.2, "clip_high": 0.28, "anchor": "sampler"},
    {"clip_low": 0.2, "clip_high": 0.28, "log_clamp": 1.5},
]


def one(ratio, advantage, **more):
    policy = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    return policy, LossInputs(policy, zero, torch.tensor([advantage], dtype=torch.float64), **more)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 2.0, -2.5, -2.5),  # inside the upper bound of 1.28
        (1.5, 2.0, -2.56, 0.0),  # above it, pushed further up: clipped
        (1.5, -2.0, 3.0, 3.0),  # above it, pushed back down: never clipped
        (0.5, 2.0, -1.0, -1.0),  # below, pushed back up
        (0.5, -2.0, 1.6, 0.0),  # below 0.8, pushed further down: clipped
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_surrogate_at_every_corner(ratio, advantage, value, gradient):
    policy, given = one(ratio, advantage)
    term = clipped_surrogate(given, clip_low=0.2, clip_high=0.28)
    term.values_T.sum().backward()
    assert term.values_T.item() == pytest.approx(value, abs=1e-15)
    assert policy.grad.item() == pytest.approx(gradient, abs=1e-15)
    assert bool(term.clipped_T) == (gradient == 0.0 and advantage != 0)


@pytest.mark.parametrize(
    ("more", "ratio", "value"),
    [
        ({"dual_clip": 3.0}, 2.9, 5.8),
        ({"dual_clip": 3.0}, 5.0, 6.0),
        ({"delta": 1.5}, 1.4, 2.8),
        ({"delta": 1.5}, 5.0, 3.0),
        ({"dual_clip": 3.0, "delta": 2.0}, 5.0, 4.0),
    ],
)
def test_upper_bounds_for_a_negative_advantage(more, ratio, value):
    policy, given = one(ratio, -2.0)
    term = clipped_surrogate(given, clip_low=0.2, clip_high=0.2, **more)
    term.values_T.sum().backward()
    assert term.values_T.item() == pytest.approx(value, abs=1e-14)
    assert bool(term.clipped_T) == (policy.grad.item() == 0.0) == (value != pytest.approx(2 * ratio))


@pytest.mark.parametrize(
    ("advantage", "bound", "cut_above"), [(1.0, 1.28, True), (-1.0, 0.8, False), (-1.0, 3.0, True)]
)
def test_the_cut_is_at_the_bound(advantage, bound, cut_above):
    for ratio in (bound * (1 - 1e-12), bound * (1 + 1e-12)):
        policy, given = one(ratio, advantage)
        term = clipped_surrogate(given, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
        term.values_T.sum().backward()
        assert bool(term.clipped_T) == ((ratio > bound) == cut_above)
        assert policy.grad.item() == pytest.approx(0.0 if bool(term.clipped_T) else -ratio * advantage)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_on_the_bound_the_gradient_stays(advantage):
    policy, given = one(1.0, advantage)
    term = clipped_surrogate(given, clip_low=0.0, clip_high=0.0)
    term.values_T.sum().backward()
    assert not bool(term.clipped_T)
    assert policy.grad.item() == -advantage


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_is_the_oracle(bounds, seed):
    term, inputs = assert_is_the_oracle("ppo", bounds, nasty_documents(seed), seed=seed)
    assert (term.clipped_T & inputs.loss_mask_T).sum() > 5
    assert not term.clipped_T[~inputs.loss_mask_T].any()


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
def test_gradient_is_the_slope_of_the_oracle(bounds):
    assert_finite_differences("ppo", bounds, seed=3)


def test_delta_is_dual_clip_outside_the_clip_range_and_not_inside():
    _, given = packed(nasty_documents(0))
    for bound, same in ((1.5, True), (1.1, False)):
        terms = [
            clipped_surrogate(given, clip_low=0.2, clip_high=0.28, **{name: bound}) for name in ("delta", "dual_clip")
        ]
        counts_T = given.loss_mask_T
        assert torch.equal(*(term.values_T[counts_T] for term in terms)) == same


@pytest.mark.parametrize(("ratio", "advantage", "value"), [(1.0, 2.0, -2.56), (0.9, -2.0, 1.6), (1.1, -2.0, 6.0)])
def test_frozen_decisions_win_and_each_side_keeps_its_bound(ratio, advantage, value):
    policy, given = one(ratio, advantage, frozen_clip_T=torch.tensor([True]))
    term = clipped_surrogate(given, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    term.values_T.sum().backward()
    assert term.values_T.item() == pytest.approx(value, abs=1e-15)
    assert policy.grad.item() == 0.0


def test_frozen_decisions_also_unclip():
    policy, given = one(1.5, 2.0, frozen_clip_T=torch.tensor([False]))
    clipped_surrogate(given, clip_low=0.2, clip_high=0.28).values_T.sum().backward()
    assert policy.grad.item() == pytest.approx(-3.0)


@pytest.mark.parametrize(("policy", "old", "advantage"), [(0.0, -200.0, 2.0), (0.0, -200.0, 0.0)])
def test_a_token_without_gradient_has_none_even_where_exp_overflows(policy, old, advantage):
    leaf = torch.tensor([policy], requires_grad=True)  # float32: exp(200) is infinite
    term = clipped_surrogate(
        LossInputs(leaf, torch.tensor([old]), torch.tensor([advantage])), clip_low=0.2, clip_high=0.28
    )
    term.values_T.sum().backward()
    assert leaf.grad.item() == 0.0
    assert term.values_T.item() == pytest.approx(-1.28 * advantage)
    assert bool(term.clipped_T) == (advantage > 0)


def test_bounds_keep_the_precision_of_the_ratio():
    _, given = one(2.0, 1.0)
    value = clip_ratio(given.log_ratio(), given.advantages_T, clip_low=0.2, clip_high=0.28).values_T
    assert (value.dtype, value.item()) == (torch.float64, -1.28)


def test_beyond_the_log_ratio_clamp_the_value_is_constant_without_gradient():
    for ratio, silent in ((math.e**1.4, False), (math.e**1.6, True)):
        policy, given = one(ratio, -2.0)
        term = clipped_surrogate(given, clip_low=0.2, clip_high=0.28, log_clamp=1.5)
        term.values_T.sum().backward()
        assert term.values_T.item() == pytest.approx(2 * min(ratio, math.e**1.5))
        assert policy.grad.item() == pytest.approx(0.0 if silent else 2 * ratio)
        assert bool(term.silent_T) == silent
        assert not bool(term.clipped_T)


def test_tokens_cut_by_a_bound_of_negative_advantages_are_flagged():
    policy = torch.tensor([2.0, 2.0, 0.3, -0.5], dtype=torch.float64).log1p()
    zero = torch.zeros(4, dtype=torch.float64)
    inputs = LossInputs(policy, zero, torch.tensor([-1.0, 1.0, -1.0, -1.0], dtype=torch.float64))
    term = clipped_surrogate(inputs, dual_clip=2.5)
    assert term.clipped_T.tolist() == [True, True, False, True]
    assert term.extras["dual_clipped"].tolist() == [True, False, False, False]
    assert clipped_surrogate(inputs).extras == {}
