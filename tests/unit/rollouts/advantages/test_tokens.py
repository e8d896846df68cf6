"""Advantages of tokens against sums written out, and against numbers of other systems."""

import math
import random

import pytest
import torch

from tests.oracles import advantages as oracle
from workbench.errors import ShapeError, SpecError
from workbench.rollouts.advantages.tokens import (
    discounted_returns,
    gae,
    spread_rewards,
    standardize,
    token_rewards,
    whiten,
)

MASKS = [[0, 1, 1, 1], [0], [0, 0, 1], [0, 1, 0, 0, 1, 1, 0, 1], [0, 0, 0], [0] * 4 + [1] * 30]


def problem(seed):
    """(document ids, mask, rewards of documents, penalties, values), with padding behind."""
    rng = random.Random(seed)
    ids = [n for n, mask in enumerate(MASKS) for _ in mask] + [-1, -1]
    mask = [m for one in MASKS for m in one] + [0, 0]
    numbers = [[rng.gauss(0, 1) if m else float("nan") for m in mask] for _ in range(2)]
    return (
        torch.tensor(ids),
        torch.tensor(mask).bool(),
        torch.tensor([rng.gauss(0, 1) for _ in MASKS]).double(),
        *(torch.tensor(n, dtype=torch.float64) for n in numbers),
    )


def by_document(ids, mask, values):
    return [[float(v) for v, i, m in zip(values, ids, mask, strict=True) if i == n and m] for n in range(len(MASKS))]


def laid(ids, mask, lists):
    queues = [list(one) for one in lists]
    return [queues[int(i)].pop(0) if m else 0.0 for i, m in zip(ids, mask, strict=True)]


def test_the_reward_stands_on_the_last_trained_token_less_its_penalty():
    ids, mask, rewards, penalties, _ = problem(0)
    expected = []
    for reward, one in zip(rewards.tolist(), by_document(ids, mask, penalties), strict=True):
        expected.append([-p + (reward if t == len(one) - 1 else 0.0) for t, p in enumerate(one)])
    assert token_rewards(rewards, ids, mask, penalties).tolist() == pytest.approx(laid(ids, mask, expected))
    assert token_rewards(rewards, ids, mask).sum().item() == pytest.approx(
        sum(rewards[n].item() for n, one in enumerate(MASKS) if any(one))
    )


def test_a_document_without_a_reward_is_refused():
    with pytest.raises(ShapeError, match="0 <= document < 1"):
        token_rewards(torch.ones(1), torch.tensor([0, 1]), torch.tensor([True, True]))


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.0])
def test_returns_are_discounted_sums_over_trained_tokens(discount):
    ids, mask, rewards, penalties, _ = problem(1)
    given = token_rewards(rewards, ids, mask, penalties)
    expected = [oracle.returns(one, discount) for one in by_document(ids, mask, given)]
    result = discounted_returns(given, ids, mask, discount=discount)
    assert result.tolist() == pytest.approx(laid(ids, mask, expected), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"discount": 0.9, "policy_lambda": 0.8},
        {"policy_lambda": 0.0},
        {"policy_lambda": 1.0, "value_lambda": 0.5},
        {"value_lambda": 1.0, "length_adaptive_alpha": 0.05, "discount": 0.99},
    ],
)
def test_gae_is_the_sum_over_all_steps_to_come(settings):
    ids, mask, rewards, penalties, values = problem(2)
    given = token_rewards(rewards, ids, mask, penalties)
    discount, own = settings.get("discount", 1.0), settings.get("policy_lambda", 0.95)
    alpha, critic = settings.get("length_adaptive_alpha"), settings.get("value_lambda")
    advantages, returns = [], []
    for r, v in zip(by_document(ids, mask, given), by_document(ids, mask, values), strict=True):
        mine = own if alpha is None or not r else oracle.adaptive_lambda(alpha, len(r))
        advantages.append(oracle.generalised(r, v, discount, mine))
        theirs = oracle.generalised(r, v, discount, mine if critic is None else critic)
        returns.append([x + y for x, y in zip(v, theirs, strict=True)])
    result = gae(given, values, ids, mask, **settings)
    assert result[0].tolist() == pytest.approx(laid(ids, mask, advantages), rel=1e-11, abs=1e-12)
    assert result[1].tolist() == pytest.approx(laid(ids, mask, returns), rel=1e-11, abs=1e-12)


def test_a_critic_with_lambda_one_gets_the_plain_return():
    ids, mask, rewards, penalties, values = problem(3)
    given = token_rewards(rewards, ids, mask, penalties)
    _, returns = gae(given, values, ids, mask, discount=0.97, policy_lambda=0.3, value_lambda=1.0)
    torch.testing.assert_close(returns, discounted_returns(given, ids, mask, discount=0.97), rtol=1e-12, atol=1e-12)


def test_nemo_rls_decoupled_gae_over_interrupted_masks():
    """NeMo-RL 7ea279ab, lambda 0.95 for the policy and 1 for the critic: two rows, the second without training."""
    values = torch.tensor(
        [
            0.0302734375,
            1.1083984375,
            -1.087890625,
            -0.2041015625,
            -1.0068359375,
            2.134765625,
            -1.22265625,
            0.6787109375,
            -0.125,
            -0.8759765625,
        ],
        dtype=torch.float64,
    )
    mask = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0, 0, 0]).bool()
    ids = torch.tensor([0] * 9 + [1])
    rewards = token_rewards(torch.tensor([0.1435546875, -0.1552734375]).double(), ids, mask)
    advantages, returns = gae(rewards, values, ids, mask, policy_lambda=0.95, value_lambda=1.0)
    assert advantages.tolist() == pytest.approx(
        [0.0, -1.0985203857421877, 0.0, 0.2252416992187498, 1.082080078125, 0.0, 1.3662109375, 0.0, 0.0, 0.0], rel=1e-14
    )
    assert returns[mask].tolist() == pytest.approx([0.1435546875] * 4, rel=1e-14)


@pytest.mark.parametrize(
    "settings",
    [
        {"discount": 1.5},
        {"policy_lambda": -0.1},
        {"value_lambda": 2.0},
        {"length_adaptive_alpha": 0.05},
        {"length_adaptive_alpha": 0.0, "value_lambda": 1.0},
    ],
)
def test_settings_of_gae_that_mean_nothing_are_refused(settings):
    ids, mask, _, _, values = problem(0)
    with pytest.raises(SpecError, match=r"between 0 and 1|alpha is positive"):
        gae(values, values, ids, mask, **settings)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("form", ["add", "floor"])
@pytest.mark.parametrize("epsilon", [1e-8, 0.5, 4.0])
def test_whitening_is_over_trained_tokens_only(ddof, form, epsilon):
    _, mask, _, values, _ = problem(4)
    expected = iter(oracle.whitened([float(v) for v in values[mask]], ddof=ddof, epsilon=epsilon, form=form))
    result = whiten(values, mask, ddof=ddof, epsilon=epsilon, epsilon_form=form)
    assert result.tolist() == pytest.approx([next(expected) if m else 0.0 for m in mask], rel=1e-12)


def test_equal_values_and_too_few_values_whiten_to_exact_zeros():
    mask = torch.tensor([True, True, True, False])
    assert whiten(torch.full((4,), 0.1).double(), mask, epsilon=0.0).tolist() == [0.0] * 4
    assert whiten(torch.tensor([3.0, 1.0]), torch.tensor([True, False])).tolist() == [0.0, 0.0]
    assert whiten(torch.tensor([3.0, 1.0]), torch.tensor([False, False])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("form", "ddof"), [("floor", 0), ("add", 1)])
def test_with_equal_values_other_positions_are_whitened_with_variance_zero(form, ddof):
    values, mask = torch.tensor([0.3, 0.3, 0.3, 1.3], dtype=torch.float64), torch.tensor([1, 1, 1, 0]).bool()
    settings = {"ddof": ddof, "epsilon_form": form, "elsewhere": "whiten"}
    assert whiten(values, mask, epsilon=1e-8, **settings).tolist() == [0.0, 0.0, 0.0, pytest.approx(1e4)]
    assert whiten(values, mask, epsilon=0.0, **settings).tolist() == [0.0] * 4


def test_a_large_offset_cancels_nowhere():
    values = torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    mask = torch.ones(4).bool()
    assert whiten(values + 2.0**30, mask).tolist() == pytest.approx(whiten(values, mask).tolist(), rel=1e-6)


def test_an_unknown_form_is_refused():
    with pytest.raises(SpecError, match="add or floor"):
        whiten(torch.ones(2), torch.ones(2).bool(), epsilon_form="sqrt")


def test_every_token_pays_its_penalty_and_an_untrained_completion_keeps_its_reward():
    ids, mask = torch.tensor([0, 0, 0, 1, 1, -1]), torch.tensor([1, 1, 0, 0, 0, 0]).bool()
    penalties = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], dtype=torch.float64)
    result = token_rewards(torch.tensor([2.0, 7.0]), ids, mask, penalties, elsewhere="as_given")
    assert result.tolist() == pytest.approx([-0.1, 1.8, -0.3, -0.4, 6.5, -0.6])


@pytest.mark.parametrize("critic", [1.0, 0.5])
def test_carried_a_token_that_does_not_count_has_the_next_ones_advantage(critic):
    ids, mask, rewards, penalties, values = problem(2)
    values = values.nan_to_num(3.0)
    given = token_rewards(rewards, ids, mask, penalties)
    settings = {"policy_lambda": 0.9, "value_lambda": critic}
    plain, taught = gae(given, values, ids, mask, **settings)
    advantages, returns = gae(given, values, ids, mask, elsewhere="carry", **settings)
    assert torch.equal(advantages[mask], plain[mask])
    assert torch.equal(returns[mask], taught[mask])
    for t in torch.nonzero(~mask).squeeze(1).tolist():
        later = [s for s in range(t, len(ids)) if ids[s] == ids[t] and mask[s]]
        carried, critics = (plain[later[0]], taught[later[0]] - values[later[0]]) if later and ids[t] >= 0 else (0, 0)
        assert advantages[t].item() == pytest.approx(float(carried))
        assert returns[t].item() == pytest.approx(float(values[t] + critics) if ids[t] >= 0 else 0.0)


def test_a_count_epsilon_applies_to_both_means():
    values, mask = torch.tensor([1.0, 2.0, 4.0, 10.0], dtype=torch.float64), torch.tensor([1, 1, 1, 0]).bool()
    mean = 7 / 3.5
    variance = (1 + 0 + 4) / 3.5 * 3 / 2
    expected = [(v - mean) / (variance + 0.25) ** 0.5 for v in (1, 2, 4, 10)]
    settings = {"epsilon": 0.25, "count_epsilon": 0.5}
    assert whiten(values, mask, **settings).tolist() == pytest.approx([*expected[:3], 0.0])
    assert whiten(values, mask, elsewhere="whiten", **settings).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("elsewhere", ["zero", "whiten"])
def test_a_count_epsilon_shifts_the_mean_of_equal_values(elsewhere):
    values, mask = torch.tensor([3.0, 3.0, 3.0, 5.0], dtype=torch.float64), torch.tensor([1, 1, 1, 0]).bool()
    mean, settings = 9 / 3.5, {"epsilon": 0.25, "count_epsilon": 0.5, "elsewhere": elsewhere}
    root = (3 * (3 - mean) ** 2 / 3.5 * 3 / 2 + 0.25) ** 0.5
    expected = [(3 - mean) / root] * 3 + [0.0 if elsewhere == "zero" else (5 - mean) / root]
    assert whiten(values, mask, **settings).tolist() == pytest.approx(expected)


def test_spread_every_token_carries_the_reward_less_its_own_penalty():
    ids = torch.tensor([0, 0, 1, -1])
    rewards, penalties = torch.tensor([2.0, 3.0]), torch.tensor([0.1, 0.2, 0.3, float("nan")], dtype=torch.float64)
    assert spread_rewards(rewards, ids).tolist() == [2.0, 2.0, 3.0, 0.0]
    assert spread_rewards(rewards, ids, penalties).tolist() == pytest.approx([1.9, 1.8, 2.7, 0.0])


# ---- rectangles ----------------------------------------------------------------------------------------------------


def test_standardize_keeps_the_standardized_0_under_the_mask():
    values, mask = torch.tensor([[1.0, 3.0, math.nan], [5.0, 9.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    result = standardize(values, mask, epsilon=0.5)
    deviation = math.sqrt(((1 - 3) ** 2 + 0 + (5 - 3) ** 2) / 3) + 0.5
    expected = [[-2 / deviation, 0.0, -3 / deviation], [2 / deviation, -3 / deviation, -3 / deviation]]
    assert result.tolist() == [pytest.approx(row, rel=1e-14) for row in expected]
    sample = standardize(values, mask, ddof=1, epsilon=0.0)
    assert sample[0, 0].item() == pytest.approx(-1.0, rel=1e-14)


def test_standardize_along_a_dim_treats_every_row_alone():
    values = torch.tensor([[1.0, 3.0], [10.0, 50.0]])
    assert standardize(values, dims=1, epsilon=0.0).tolist() == [[-1.0, 1.0], [-1.0, 1.0]]
    assert torch.equal(standardize(values, dims=[0, 1]), standardize(values))


def test_standardize_refuses_invalid_options():
    with pytest.raises(ShapeError, match="one flag per value"):
        standardize(torch.zeros(2, 3), torch.ones(2, 2).bool())
    with pytest.raises(SpecError, match="neither is negative"):
        standardize(torch.zeros(2, 3), epsilon=-1.0)
