"""Rewards to go, ReMax and the optimal token baseline, against the oracle and manual values."""

import itertools
import math
import random

import pytest
import torch

from tests.oracles import advantages as oracle
from workbench.errors import SpecError
from workbench.rollouts.advantages.baselines import optimal_token_baseline, remax_advantages, rewards_to_go

NAN = math.nan
IDS = torch.tensor([0, 0, 0, 0, 1, 1, -1])
MASK = torch.tensor([0, 1, 0, 1, 1, 0, 0]).bool()
REWARDS = torch.tensor([NAN, 1.0, NAN, 0.5, 2.0, 7.0, NAN], dtype=torch.float64)


def test_the_reward_to_go_covers_trained_tokens_of_the_same_document():
    assert rewards_to_go(REWARDS, IDS, MASK).tolist() == [0.0, 1.5, 0.0, 0.5, 2.0, 0.0, 0.0]
    assert rewards_to_go(REWARDS, IDS, MASK, elsewhere="carry").tolist() == [1.5, 1.5, 0.5, 0.5, 2.0, 0.0, 0.0]


def test_remax_subtracts_the_greedy_reward_on_trained_tokens():
    advantages, returns = remax_advantages(REWARDS, torch.tensor([0.25, -1.0]), IDS, MASK)
    assert advantages.tolist() == [0.0, 1.25, 0.0, 0.25, 3.0, 0.0, 0.0]
    assert returns.tolist() == [0.0, 1.5, 0.0, 0.5, 2.0, 0.0, 0.0]
    carried, _ = remax_advantages(REWARDS, torch.tensor([0.25, -1.0]), IDS, MASK, elsewhere="carry")
    assert carried.tolist() == [1.5, 1.25, 0.5, 0.25, 3.0, 0.0, 0.0]


def answers(seed):
    """Seven completions of 0 to 6 tokens of three prompts, the masks interrupted, garbage where nothing trains."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [6, 3, 5, 1, 4, 2, 3]
    ids = torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)])
    mask = torch.tensor([rng.random() < 0.7 for _ in ids]) & (ids != 5)
    columns = torch.rand(4, len(ids), generator=g, dtype=torch.float64)
    rewards, logprobs, squares, weights = columns[0] - 0.5, -columns[1] - 0.1, columns[2], columns[3] + 0.5
    documents = []
    for document, length in enumerate(lengths):
        at = torch.nonzero(ids == document).squeeze(1)
        documents.append(
            [
                (place, *(float(c[at[place]]) for c in (rewards, logprobs, squares, weights)))
                for place in range(length)
                if mask[at[place]]
            ]
        )
    spoiled = [column.masked_fill(~mask, NAN) for column in (rewards, logprobs, squares, weights)]
    return documents, ids, mask, spoiled


@pytest.mark.parametrize("groups", [[4, 4, 9, 2, 9, 4, 9], [4, 9, 9, 2, 9, 4, 9]])
@pytest.mark.parametrize(("aligned", "zero_tail"), list(itertools.product(("position", "trained"), (True, False))))
def test_the_baseline_of_a_step_is_the_one_of_its_group(aligned, zero_tail, groups):
    """Nothing of document 5 trains: it is one of three of its prompt, or one of two."""
    for seed in range(4):
        documents, ids, mask, (rewards, logprobs, squares, weights) = answers(seed)
        result, returns = optimal_token_baseline(
            rewards,
            logprobs,
            squares,
            ids,
            mask,
            torch.tensor(groups),
            weights_T=weights,
            aligned=aligned,
            zero_tail=zero_tail,
        )
        expected = oracle.optimal_baselines(documents, groups, aligned=aligned, zero_tail=zero_tail)
        for document, values in enumerate(expected):
            assert result[mask & (ids == document)].tolist() == pytest.approx(values, rel=1e-12, abs=1e-12)
        assert not result[~mask].any()
        assert torch.equal(returns, rewards_to_go(rewards, ids, mask))


def test_weights_default_to_1_and_only_the_longest_completion_has_a_tail():
    documents, ids, mask, (rewards, logprobs, squares, _) = answers(1)
    plain, _ = optimal_token_baseline(rewards, logprobs, squares, ids, mask, torch.zeros(7).long())
    ones, _ = optimal_token_baseline(
        rewards, logprobs, squares, ids, mask, torch.zeros(7).long(), weights_T=torch.ones(len(ids))
    )
    assert torch.equal(plain, ones)
    full, _ = optimal_token_baseline(
        rewards, logprobs, squares, ids, mask, torch.zeros(7).long(), aligned="trained", zero_tail=False
    )
    tail, to_go = optimal_token_baseline(
        rewards, logprobs, squares, ids, mask, torch.zeros(7).long(), aligned="trained"
    )
    differing = torch.nonzero(full != tail).squeeze(1)
    longest = max(range(7), key=lambda n: len(documents[n]))
    assert ids[differing].unique().tolist() == [longest]
    assert torch.equal(tail[differing], to_go[differing])


def test_invalid_options_are_refused():
    with pytest.raises(SpecError, match="elsewhere is zero or carry"):
        rewards_to_go(REWARDS, IDS, MASK, elsewhere="nowhere")
    with pytest.raises(SpecError, match="aligned is position or trained"):
        optimal_token_baseline(REWARDS, REWARDS, REWARDS, IDS, MASK, torch.zeros(2).long(), aligned="turn")
