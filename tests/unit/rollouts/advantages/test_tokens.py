"""Advantages of tokens against sums written out, and against numbers of other systems."""

import random

import pytest
import torch

from tests.oracles import advantages as oracle
from workbench.errors import ShapeError, SpecError
from workbench.rollouts.advantages.tokens import discounted_returns, gae, token_rewards, whiten

MASKS = [[0, 1, 1, 1], [0], [0, 0, 1], [0, 1, 0, 0, 1, 1, 0, 1], [0, 0, 0], [0] * 4 + [1] * 30]


def problem(seed):
    """(document ids, mask, rewards of documents, penalties, values), with padding behind."""
    rng = random.Random(seed)
    ids = [n for n, mask in enumerate(MASKS) for _ in mask] + [-1, -1]
    mask = [m for one in MASKS for m in one] + [0, 0]
    numbers = [[rng.gauss(0, 1) if m else float("nan") for m in mask] for _ in range(2)]
    return (torch.tensor(ids), torch.tensor(mask).bool(), torch.tensor([rng.gauss(0, 1) for _ in MASKS]).double(),
            *(torch.tensor(n, dtype=torch.float64) for n in numbers))


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
        sum(rewards[n].item() for n, one in enumerate(MASKS) if any(one)))


def test_a_document_without_a_reward_is_refused():
    with pytest.raises(ShapeError, match="0 <= document < 1"):
        token_rewards(torch.ones(1), torch.tensor([0, 1]), torch.tensor([True, True]))


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.0])
def test_returns_are_discounted_sums_over_trained_tokens(discount):
    ids, mask, rewards, penalties, _ = problem(1)
    given = token_rewards(rewards, ids, mask, penalties)
    expected = [oracle.returns(one, discount) for one in by_document(ids, mask, given)]
    found = discounted_returns(given, ids, mask, discount=discount)
    assert found.tolist() == pytest.approx(laid(ids, mask, expected), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("settings", [
    {}, {"discount": 0.9, "policy_lambda": 0.8}, {"policy_lambda": 0.0}, {"policy_lambda": 1.0, "value_lambda": 0.5},
    {"value_lambda": 1.0, "length_adaptive_alpha": 0.05, "discount": 0.99}])
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
    found = gae(given, values, ids, mask, **settings)
    assert found[0].tolist() == pytest.approx(laid(ids, mask, advantages), rel=1e-11, abs=1e-12)
    assert found[1].tolist() == pytest.approx(laid(ids, mask, returns), rel=1e-11, abs=1e-12)


def test_a_critic_with_lambda_one_is_taught_the_plain_return_whatever_the_policys_lambda_is():
    ids, mask, rewards, penalties, values = problem(3)
    given = token_rewards(rewards, ids, mask, penalties)
    _, returns = gae(given, values, ids, mask, discount=0.97, policy_lambda=0.3, value_lambda=1.0)
    torch.testing.assert_close(returns, discounted_returns(given, ids, mask, discount=0.97), rtol=1e-12, atol=1e-12)


def test_nemo_rls_decoupled_gae_over_interrupted_masks():
    """NeMo-RL 7ea279ab, lambda 0.95 for the policy and 1 for the critic: two rows, the second without training."""
    values = torch.tensor([0.0302734375, 1.1083984375, -1.087890625, -0.2041015625, -1.0068359375, 2.134765625,
                           -1.22265625, 0.6787109375, -0.125, -0.8759765625], dtype=torch.float64)
    mask = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0, 0, 0]).bool()
    ids = torch.tensor([0] * 9 + [1])
    rewards = token_rewards(torch.tensor([0.1435546875, -0.1552734375]).double(), ids, mask)
    advantages, returns = gae(rewards, values, ids, mask, policy_lambda=0.95, value_lambda=1.0)
    assert advantages.tolist() == pytest.approx([0.0, -1.0985203857421877, 0.0, 0.2252416992187498, 1.082080078125, 0.0,
                                                 1.3662109375, 0.0, 0.0, 0.0], rel=1e-14)
    assert returns[mask].tolist() == pytest.approx([0.1435546875] * 4, rel=1e-14)


@pytest.mark.parametrize("settings", [{"discount": 1.5}, {"policy_lambda": -0.1}, {"value_lambda": 2.0},
                                      {"length_adaptive_alpha": 0.05}, {"length_adaptive_alpha": 0.0,
                                                                        "value_lambda": 1.0}])
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
    found = whiten(values, mask, ddof=ddof, epsilon=epsilon, epsilon_form=form)
    assert found.tolist() == pytest.approx([next(expected) if m else 0.0 for m in mask], rel=1e-12)


def test_equal_values_and_too_few_values_whiten_to_exact_zeros():
    mask = torch.tensor([True, True, True, False])
    assert whiten(torch.full((4,), 0.1).double(), mask, epsilon=0.0).tolist() == [0.0] * 4
    assert whiten(torch.tensor([3.0, 1.0]), torch.tensor([True, False])).tolist() == [0.0, 0.0]
    assert whiten(torch.tensor([3.0, 1.0]), torch.tensor([False, False])).tolist() == [0.0, 0.0]


def test_a_large_offset_cancels_nowhere():
    values = torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    mask = torch.ones(4).bool()
    assert whiten(values + 2.0**30, mask).tolist() == pytest.approx(whiten(values, mask).tolist(), rel=1e-6)


def test_an_unknown_form_is_refused():
    with pytest.raises(SpecError, match="add or floor"):
        whiten(torch.ones(2), torch.ones(2).bool(), epsilon_form="sqrt")
