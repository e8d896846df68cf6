"""From a spec to named terms."""

import pytest
import torch

from tests.helpers.loss_batches import nasty_documents, packed
from workbench.errors import SpecError
from workbench.losses import LossInputs, LossSpec, make_loss
from workbench.losses.kl import kl_term
from workbench.losses.surrogates.clipped import clipped_surrogate


def given(**more):
    return packed(nasty_documents(0, low=0.5, high=2.0), **more)[1]


def test_grpo_is_the_clipped_surrogate_and_the_penalty():
    spec = LossSpec(name="grpo", surrogate={"clip_low": 0.1, "clip_high": 0.3}, kl={"coefficient": 0.05})
    inputs = given()
    terms = make_loss(spec)(inputs)
    assert list(terms) == ["policy", "kl"]
    counts_T = inputs.loss_mask_T
    expected = clipped_surrogate(inputs, clip_low=0.1, clip_high=0.3)
    assert torch.equal(terms["policy"].values_T[counts_T], expected.values_T[counts_T])
    assert torch.equal(terms["kl"].values_T[counts_T], kl_term(inputs, spec.kl).values_T[counts_T])
    assert (terms["policy"].coefficient, terms["kl"].coefficient) == (1.0, 0.05)


def test_terms_with_a_coefficient_of_0_are_absent_and_the_others_have_names():
    size = given().policy_logprobs_T.shape
    spec = LossSpec(entropy_coefficient=0.01, squared_logit_coefficient=0.02, positive_nll_coefficient=0.03,
                    kl={"coefficient": 0.04})
    terms = make_loss(spec)(given(entropy_T=torch.ones(size), logsumexp_T=torch.ones(size)))
    assert list(terms) == ["policy", "kl", "entropy", "logit", "positive_nll"]
    assert [term.weight for term in terms.values()] == ["policy", *["penalty"] * 3, "positive_token"]
    assert list(make_loss(LossSpec())(given())) == ["policy"]


def test_a_penalty_in_the_reward_is_no_term():
    assert list(make_loss(LossSpec(kl={"coefficient": 0.1, "placement": "reward"}))(given())) == ["policy"]


def test_the_coefficient_of_the_surrogate_is_the_terms():
    assert make_loss(LossSpec(surrogate={"coefficient": 0.7}))(given())["policy"].coefficient == 0.7


def test_a_correction_multiplies_the_surrogate_and_keeps_its_clip_decisions():
    inputs = given()
    plain = make_loss(LossSpec())(inputs)["policy"]
    corrected = make_loss(LossSpec(correction={"kind": "tis", "ratio_high": 1.5}))(inputs)["policy"]
    weights_T = (inputs.old_logprobs_T - inputs.sampler_logprobs_T).exp().clamp(max=1.5)
    counts_T = inputs.loss_mask_T
    torch.testing.assert_close(corrected.values_T[counts_T], (weights_T * plain.values_T)[counts_T])
    assert torch.equal(corrected.clipped_T, plain.clipped_T)
    assert "applied_weight" in corrected.extras


@pytest.mark.parametrize(("settings", "missing"), [
    ({"kl": {"coefficient": 0.1}}, "no ref_logprobs"), ({"name": "prime_rl"}, "no sampler_logprobs"),
    ({"positive_nll_coefficient": 0.1}, "no rewards"), ({"name": "dpo"}, "no ref_logprobs")])
def test_what_a_loss_needs_and_does_not_get_is_named(settings, missing):
    zero_T = torch.zeros(2)
    with pytest.raises(SpecError, match=missing):
        make_loss(LossSpec(**settings))(LossInputs(zero_T, zero_T, zero_T))
