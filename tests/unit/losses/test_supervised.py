"""Imitation: SFT against the oracle, and the likelihood of rewarded answers with the weights of the whole step."""

import pytest
import torch

from tests.helpers.loss_batches import nasty_documents, packed, random_weights, weighted_total
from tests.helpers.surrogate_checks import assert_finite_differences, assert_is_the_oracle
from tests.oracles.surrogates import counted
from tests.oracles.surrogates import positive_nll as oracle
from workbench.errors import SpecError
from workbench.losses import LossInputs
from workbench.losses.supervised import positive_nll


def test_sft_is_the_oracle_and_its_gradient_the_slope():
    assert_is_the_oracle("sft", {}, nasty_documents(0))
    assert_finite_differences("sft", {}, seed=0)


@pytest.mark.parametrize("rewards", [(0, 1), (-1, 0), (0.5, 2.0)])
def test_positive_nll_is_the_mean_over_rewarded_tokens_however_the_step_is_cut(rewards):
    documents = [document | {"reward": float(rewards[d % 2])} for d, document in enumerate(nasty_documents(0))]
    tokens = sum(len(counted(document)) for document in documents if document["reward"] > 0)
    total, slopes = 0.0, []
    for part in (documents[:3], documents[3:]):  # two micro-batches, one divisor
        policy_T, inputs = packed(part)
        term = positive_nll(inputs, coefficient=0.1)
        assert (term.coefficient, term.weight) == (0.1, "positive_token")
        each = [[1 / max(tokens, 1)] * len(document["mask"]) for document in part]
        share = weighted_total(term, inputs, each)
        share.backward()
        total += share.item()
        slopes.append(policy_T.grad)
    assert total == pytest.approx(oracle(documents), rel=1e-13)
    slopes_T = torch.cat(slopes)
    assert int((slopes_T != 0).sum()) == tokens
    assert slopes_T.sum().item() == pytest.approx(-1.0 if tokens else 0.0)


def test_documents_without_a_positive_reward_have_no_value_and_no_gradient():
    documents = [document | {"reward": 0.0} for document in nasty_documents(0)]
    policy_T, inputs = packed(documents)
    term = positive_nll(inputs, coefficient=1.0)
    weighted_total(term, inputs, random_weights(documents, 0)).backward()
    assert not term.values_T.any()
    assert not policy_T.grad.any()


def test_without_rewards_it_is_refused_and_not_silently_absent():
    zero_T = torch.zeros(2)
    with pytest.raises(SpecError, match="no rewards"):
        positive_nll(LossInputs(zero_T, zero_T, zero_T), coefficient=0.1)
