"""Policy gradients without clipping, against the oracle and manual values."""

import math

import pytest
import torch

from tests.helpers.loss_batches import nasty_documents, packed, random_weights, weighted_total
from tests.helpers.surrogate_checks import assert_finite_differences, assert_is_the_oracle
from tests.oracles.surrogates import counted
from tests.oracles.surrogates import positive_nll as oracle
from workbench.errors import SpecError
from workbench.losses import LossInputs
from workbench.losses.direct import cispo, importance_sampling, on_policy, positive_nll, reinforce, sft
from workbench.policy.logprobs.reference import token_logprobs_from_logits

CASES = [
    ("importance_sampling", {}),
    ("importance_sampling", {"anchor": "sampler"}),
    ("reinforce", {}),
    ("gpg", {}),
    ("on_policy", {}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.28, "bounds": "relative"}),
    ("cispo", {"clip_low": None, "clip_high": 4.0, "bounds": "relative", "anchor": "sampler"}),
    ("cispo", {"clip_low": None, "clip_high": 1.3, "bounds": "absolute"}),
    ("cispo", {"clip_low": 0.9, "clip_high": 4.0, "bounds": "relative", "log_clamp": 0.3}),
    ("cispo", {"clip_low": 0.8, "clip_high": 1.3, "bounds": "absolute"}),
    ("cispo", {"clip_low": None, "clip_high": 1.1, "bounds": "absolute", "level": "document"}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.28, "bounds": "relative", "level": "segment"}),
]


@pytest.mark.parametrize(("kind", "parameters"), CASES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_is_the_oracle(kind, parameters, seed):
    term, _ = assert_is_the_oracle(kind, parameters, nasty_documents(seed), seed=seed)
    assert term.clipped_T is None


@pytest.mark.parametrize(("kind", "parameters"), CASES, ids=str)
def test_gradient_is_the_slope_of_the_oracle(kind, parameters):
    assert_finite_differences(kind, parameters, seed=5)


def test_on_policy_has_the_gradient_of_reinforce_and_the_value_of_a_ratio_of_1():
    documents = nasty_documents(1)
    gradients = []
    for surrogate in (on_policy, reinforce):
        policy_T, inputs = packed(documents)
        term = surrogate(inputs)
        weighted_total(term, inputs, random_weights(documents, 1)).backward()
        gradients.append(policy_T.grad)
        if surrogate is on_policy:
            counts_T = inputs.loss_mask_T
            assert torch.equal(term.values_T[counts_T], -inputs.advantages_T[counts_T])
    assert torch.equal(*gradients)


def test_cispo_keeps_a_gradient_where_ppo_has_none_and_reports_truncation():
    policy_T = torch.tensor([0.0, math.log(3.0), math.log(0.1)], dtype=torch.float64, requires_grad=True)
    zero_T = torch.zeros_like(policy_T, requires_grad=False)
    term = cispo(
        LossInputs(policy_T, zero_T, torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)), clip_low=0.2, clip_high=0.28
    )
    term.values_T.sum().backward()
    assert policy_T.grad.tolist() == pytest.approx([-1.0, -1.28, 0.8], abs=1e-15)
    assert term.extras["ratio_truncated"].tolist() == [False, True, True]


@pytest.mark.parametrize("surrogate", [importance_sampling, cispo])
def test_a_zero_advantage_survives_a_ratio_that_overflows(surrogate):
    policy_T = torch.zeros(1, requires_grad=True)
    term = surrogate(LossInputs(policy_T, torch.full((1,), -200.0), torch.zeros(1)))
    term.values_T.sum().backward()
    assert (term.values_T.item(), policy_T.grad.item()) == (0.0, 0.0)


def test_label_smoothing_mixes_the_label_with_the_mean_over_the_vocabulary():
    logits_TV = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    targets_T, zero_T = torch.tensor([0, 6, 3, 2]), torch.zeros(4, dtype=torch.float64)
    output = token_logprobs_from_logits(logits_TV, targets_T, outputs=("logsumexp", "mean_logit"))
    inputs = LossInputs(
        output.logprobs_T,
        zero_T,
        zero_T,
        logsumexp_T=output.logsumexp_T,
        mean_logit_T=output.mean_logit_T,
        loss_mask_T=torch.tensor([True, True, False, True]),
    )
    values_T = sft(inputs, label_smoothing=0.2).values_T
    expected_T = torch.nn.functional.cross_entropy(logits_TV, targets_T, label_smoothing=0.2, reduction="none")
    torch.testing.assert_close(values_T, expected_T * inputs.counts_T, rtol=1e-14, atol=1e-14)
    mine, theirs = (
        torch.autograd.grad(x_T.sum(), logits_TV, retain_graph=True)[0]
        for x_T in (values_T, expected_T * inputs.counts_T)
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-14)
    with pytest.raises(SpecError, match="label_smoothing"):
        sft(LossInputs(zero_T, zero_T, zero_T), label_smoothing=0.2)


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
