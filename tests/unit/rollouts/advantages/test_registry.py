"""Estimators by name: the definition of each, and the properties that all share."""

from dataclasses import replace

import pytest
import torch

from tests.oracles import advantages as oracle
from workbench.errors import SpecError
from workbench.rollouts.advantages.inputs import AdvantageInputs
from workbench.rollouts.advantages.registry import ESTIMATORS, estimate_advantages
from workbench.rollouts.batch import Extension, RolloutBatch

# Documents 0 1 2 of group 5 (2 and 1 trained tokens; document 2 trains nothing), 3 4 of group 8, padding.
IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, -1])
MASK = torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 1, 0]).bool()
REWARDS, GROUPS = [1.0, 0.25, -50.0, 0.5, 0.0], [5, 5, 5, 8, 8]
LENGTHS, TRAINED = [2, 1, 0, 2, 1], [True, True, False, True, True]


def inputs(**more):
    g = torch.Generator().manual_seed(1)
    noise = torch.rand(2, len(IDS), generator=g, dtype=torch.float64)
    fields = {
        "penalties_T": None,
        "values_T": noise[1],
        "components_NK": torch.tensor([[r, (n % 2) / 3] for n, r in enumerate(REWARDS)], dtype=torch.float64),
        "baselines_N": torch.tensor([0.5, 0.0, 1.0, -0.5, 0.25], dtype=torch.float64),
        "old_logprobs_T": -noise[0] - 0.1,
        "squared_probabilities_T": noise[1],
    }
    if more.pop("penalised", False):
        fields["penalties_T"] = torch.where(MASK, noise[0], float("nan"))
    return AdvantageInputs(
        IDS, MASK, torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(GROUPS), **(fields | more)
    )


def on_tokens(values):
    return [values[int(n)] if m else 0.0 for n, m in zip(IDS, MASK, strict=True)]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {}),
        ("dr_grpo", {"scale": "none"}),
        ("rloo", {"baseline": "leave_one_out", "scale": "none"}),
        ("leave_one_out", {"baseline": "leave_one_out", "scale": "leave_one_out_std", "epsilon": 1e-6}),
        ("opo", {"baseline": "length_weighted", "scale": "none"}),
    ],
)
@pytest.mark.parametrize("masked_in_baseline", [False, True])
def test_group_estimators_by_name(name, settings, masked_in_baseline):
    trained = None if masked_in_baseline else TRAINED
    lengths = LENGTHS
    expected = oracle.group(REWARDS, GROUPS, trained=trained, lengths=lengths, **settings)
    advantages = estimate_advantages(name, inputs(), masked_in_baseline=masked_in_baseline)
    assert advantages.advantages_T.tolist() == pytest.approx(on_tokens(expected), rel=1e-12, abs=1e-14)
    assert advantages.returns_T is None


def test_a_masked_document_in_the_baseline_is_a_choice_that_moves_the_others():
    alone, polluted = (
        estimate_advantages("dr_grpo", inputs(), masked_in_baseline=choice).advantages_T[1].item()
        for choice in (False, True)
    )
    assert alone == pytest.approx(0.375)
    assert polluted == pytest.approx(1.0 + 48.75 / 3)


def test_a_penalty_is_taken_off_the_reward_of_its_document():
    given = inputs(penalised=True)
    shaped = [r - float(given.penalties_T[MASK & (n == IDS)].sum()) for n, r in enumerate(REWARDS)]
    result = estimate_advantages("grpo", given).advantages_T.tolist()
    assert result == pytest.approx(on_tokens(oracle.group(shaped, GROUPS, trained=TRAINED)), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("penalised", [False, True])
def test_reinforce_plus_plus_whitens_returns_over_all_tokens(penalised):
    given = inputs(penalised=penalised)
    returns = []
    for n, reward in enumerate(REWARDS):
        here = [t for t in range(len(IDS)) if MASK[t] and IDS[t] == n]
        rewards = [-float(given.penalties_T[t]) if penalised else 0.0 for t in here]
        if here:
            rewards[-1] += reward
        returns += oracle.returns(rewards, 0.9)
    for form, ddof in (("add", 1), ("floor", 0)):
        expected = iter(oracle.whitened(returns, ddof=ddof, epsilon=1e-8, form=form))
        advantages = estimate_advantages("reinforce_plus_plus", given, discount=0.9, epsilon_form=form, ddof=ddof)
        assert advantages.advantages_T.tolist() == pytest.approx(
            [next(expected) if m else 0.0 for m in MASK], rel=1e-12
        )


def test_reinforce_plus_plus_with_a_group_baseline_centres_first():
    expected = on_tokens(oracle.group(REWARDS, GROUPS, scale="none", trained=TRAINED))
    whitened = iter(
        oracle.whitened([a for a, m in zip(expected, MASK, strict=True) if m], ddof=1, epsilon=1e-8, form="add")
    )
    result = estimate_advantages("reinforce_plus_plus_baseline", inputs()).advantages_T.tolist()
    assert result == pytest.approx([next(whitened) if m else 0.0 for m in MASK], rel=1e-12)


def test_verls_reinforce_plus_plus_baseline():
    """verl 1dda039b: group means off, then the mean and the unbiased deviation of all trained tokens."""
    ids = torch.tensor([0, 1, 1, 2, 3])
    given = AdvantageInputs(
        ids, torch.ones(5).bool(), torch.tensor([1.0, 0.0, 1.0, 1.0]).double(), torch.tensor([0, 0, 1, 1])
    )
    result = estimate_advantages("reinforce_plus_plus_baseline", given).advantages_T
    tokens = torch.tensor([0.5, -0.5, -0.5, 0.0, 0.0], dtype=torch.float64)
    expected = (tokens - tokens.mean()) / (tokens.var() + 1e-8).sqrt()
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)


def test_gpg_by_name():
    expected = on_tokens(oracle.gpg(REWARDS, GROUPS, trained=TRAINED))
    assert estimate_advantages("gpg", inputs()).advantages_T.tolist() == pytest.approx(expected, rel=1e-12)


def test_gdpo_by_name():
    given = inputs(weights_K=torch.tensor([1.0, 2.0]))
    components = given.components_NK.tolist()
    expected = on_tokens(oracle.gdpo(components, GROUPS, [1.0, 2.0], trained=TRAINED))
    assert estimate_advantages("gdpo", given).advantages_T.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_vapo_is_decoupled_and_length_adaptive():
    given = inputs()
    advantages = estimate_advantages("vapo", given, length_adaptive_alpha=0.8)
    for n, length in enumerate(LENGTHS):
        here = MASK & (n == IDS)
        rewards = [0.0] * (length - 1) + [REWARDS[n]] if length else []
        values = given.values_T[here].tolist()
        lambda_ = oracle.adaptive_lambda(0.8, length) if length else 0.0
        assert advantages.advantages_T[here].tolist() == pytest.approx(
            oracle.generalised(rewards, values, 1.0, lambda_)
        )
        assert advantages.returns_T[here].tolist() == pytest.approx([REWARDS[n]] * length)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_gives_finite_numbers_and_exact_zeros_where_nothing_trains(name):
    advantages = estimate_advantages(name, inputs())
    assert advantages.advantages_T.dtype == torch.float64
    assert torch.isfinite(advantages.advantages_T).all()
    assert not advantages.advantages_T[~MASK].any()
    assert advantages.advantages_T[MASK].any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_in_which_nothing_trains_has_no_advantages(name):
    nothing = AdvantageInputs(
        torch.tensor([0, 0, -1]),
        torch.zeros(3).bool(),
        torch.tensor([float("nan")]).double(),
        torch.tensor([0]),
        values_T=torch.zeros(3),
        components_NK=torch.zeros(1, 2),
        baselines_N=torch.zeros(1),
        old_logprobs_T=torch.zeros(3),
        squared_probabilities_T=torch.zeros(3),
    )
    assert estimate_advantages(name, nothing).advantages_T.tolist() == [0.0, 0.0, 0.0]


def test_whitened_gae_by_name():
    plain, whitened = (estimate_advantages("gae", inputs(), whitened=w).advantages_T[MASK] for w in (False, True))
    torch.testing.assert_close(whitened, (plain - plain.mean()) / (plain.var() + 1e-8).sqrt(), rtol=1e-12, atol=1e-14)


def test_a_batch_gives_its_own_fields_and_takes_its_advantages_back():
    documents = [
        {
            "tokens": [1] * 3,
            "loss_mask": [0, 1, 1],
            "advantages": 0.0,
            "old_logprobs": [0.0] * 3,
            "reward": reward,
            "group_id": 4,
        }
        for reward in (1.0, 0.0)
    ]
    batch = RolloutBatch.from_documents(documents)
    result = estimate_advantages("dr_grpo", AdvantageInputs.of(batch.pad_to(8))).advantages_T
    assert result.tolist() == [0.0, 0.5, 0.5, 0.0, -0.5, -0.5, 0.0, 0.0]
    assert replace(batch, advantages_T=result[:6]).advantages_T.tolist() == result[:6].tolist()
    with pytest.raises(SpecError, match="no rewards_N or no group_ids_N"):
        AdvantageInputs.of(replace(batch, group_ids_N=None))


def test_invalid_settings_are_refused():
    with pytest.raises(SpecError, match="one of grpo, dr_grpo"):
        estimate_advantages("ppo", inputs())
    with pytest.raises(SpecError, match="its settings are baseline, singleton"):
        estimate_advantages("dr_grpo", inputs(), epsilon=1.0)
    with pytest.raises(SpecError, match="no values_T"):
        estimate_advantages("gae", inputs(values_T=None))
    with pytest.raises(SpecError, match="no components_NK"):
        estimate_advantages("gdpo", inputs(components_NK=None))
    with pytest.raises(SpecError, match="a component of its own"):
        estimate_advantages("gdpo", inputs(penalised=True))


def test_gpg_rescales_for_groups_without_signal():
    ids_T = torch.arange(6)
    step = AdvantageInputs(
        ids_T,
        torch.tensor([1, 1, 1, 1, 1, 0]).bool(),
        torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 0.0]),
        torch.tensor([5, 5, 5, 8, 8, 8]),
    )
    alpha = 5 / 3  # five completions train, three of them in the group of unequal rewards
    expected = [0.5 * alpha, -0.5 * alpha, 0.0, 0.0, 0.0, 0.0]
    assert estimate_advantages("gpg", step).advantages_T.tolist() == pytest.approx(expected)
    assert estimate_advantages("gpg", step, divisor=2.0).advantages_T[0].item() == pytest.approx(0.25 * alpha)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "gae", "vapo"])
def test_a_baseline_is_refused_where_there_is_none(name):
    with pytest.raises(SpecError, match="has no baseline of a group"):
        estimate_advantages(name, inputs(), masked_in_baseline=True)


def test_token_rewards_are_placed_where_earned_and_sum_to_the_documents():
    earned = torch.tensor([0.5, 1.0, float("nan")], dtype=torch.float64)
    ids, mask = torch.tensor([0, 0, -1]), torch.tensor([True, True, False])
    given = AdvantageInputs.of_token_rewards(ids, mask, earned, torch.tensor([7]))
    assert given.rewards_N.tolist() == [1.5]
    assert given.on_each_token_T.tolist() == [0.5, 1.0, 0.0]
    assert replace(given, penalties_T=torch.tensor([0.25, 0.0, 9.0])).on_each_token_T.tolist() == [0.25, 1.0, 0.0]
    last = replace(given, token_rewards_T=None)
    assert last.on_each_token_T.tolist() == [0.0, 1.5, 0.0]
    advantages = estimate_advantages("gae", replace(given, values_T=torch.zeros(3)), policy_lambda=1.0)
    assert advantages.returns_T.tolist() == [1.5, 1.0, 0.0]


def test_estimators_of_tokens_by_name():
    given = inputs()
    remax = estimate_advantages("remax", given)
    for n, baseline in enumerate(given.baselines_N.tolist()):
        here = MASK & (n == IDS)
        assert remax.advantages_T[here].tolist() == pytest.approx([REWARDS[n] - baseline] * LENGTHS[n])
    plain, weighed = (
        estimate_advantages(
            "optimal_token_baseline", replace(given, correction_weights_T=weights), aligned="trained", zero_tail=False
        ).advantages_T
        for weights in (None, torch.linspace(0.5, 1.5, len(IDS)).double())
    )
    assert not torch.equal(plain, weighed)
    assert estimate_advantages("pass_at_k", given, scale="none").advantages_T[MASK].tolist() == pytest.approx(
        [0.75, 0.75, 0.0, 0.5, 0.5, 0.0]
    )


def test_grpo_whitened_over_tokens():
    grouped = estimate_advantages("grpo", inputs(), epsilon=1e-6).advantages_T[MASK]
    result = estimate_advantages("grpo_whitened", inputs()).advantages_T[MASK]
    torch.testing.assert_close(
        result, (grouped - grouped.mean()) / (grouped.var() + 1e-8).sqrt(), rtol=1e-12, atol=1e-14
    )


def test_a_batch_provides_the_inputs_of_token_baselines():
    documents = [
        {
            "tokens": [1] * 3,
            "loss_mask": [0, 1, 1],
            "advantages": 0.0,
            "old_logprobs": [-0.5] * 3,
            "reward": reward,
            "group_id": 4,
        }
        for reward in (1.0, 0.0)
    ]
    batch = RolloutBatch.from_documents(documents)
    kept = {
        "baselines": Extension(torch.tensor([0.25, 0.5]), "document", "reward", "of the greedy answer"),
        "squared_probabilities": Extension(torch.full((6,), 0.5), "token", "1", "sum of squared probabilities"),
    }
    batch = replace(batch, extensions=kept)
    assert estimate_advantages("remax", AdvantageInputs.of(batch)).advantages_T.tolist() == [
        0.0,
        0.75,
        0.75,
        0.0,
        -0.5,
        -0.5,
    ]
    result = estimate_advantages("optimal_token_baseline", AdvantageInputs.of(batch)).advantages_T
    assert result.tolist() == pytest.approx([0.0, 0.5, 0.5, 0.0, -0.5, -0.5])
