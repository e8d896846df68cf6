"""From a spec to named terms."""

import math
from dataclasses import replace

import pytest
import torch

from tests.helpers.loss_batches import nasty_documents, packed
from workbench.errors import SpecError
from workbench.losses import LossInputs, build_loss, ratio_curves
from workbench.losses.build import surrogate_ratio
from workbench.losses.clipped import clipped_surrogate
from workbench.losses.document_sums import DocumentSums
from workbench.losses.kl import kl_term
from workbench.specs.losses import CORRECTIONS, PRESETS, LossSpec


def given(**more):
    return packed(nasty_documents(0, low=0.5, high=2.0), **more)[1]


def test_grpo_is_the_clipped_surrogate_and_the_penalty():
    spec = LossSpec(name="grpo", surrogate={"clip_low": 0.1, "clip_high": 0.3}, kl={"coefficient": 0.05})
    inputs = given()
    terms = build_loss(spec)(inputs)
    assert list(terms) == ["policy", "kl"]
    counts_T = inputs.loss_mask_T
    expected = clipped_surrogate(inputs, clip_low=0.1, clip_high=0.3)
    assert torch.equal(terms["policy"].values_T[counts_T], expected.values_T[counts_T])
    assert torch.equal(terms["kl"].values_T[counts_T], kl_term(inputs, spec.kl).values_T[counts_T])
    assert (terms["policy"].coefficient, terms["kl"].coefficient) == (1.0, 0.05)


def test_terms_with_a_coefficient_of_0_are_absent_and_the_others_have_names():
    size = given().policy_logprobs_T.shape
    spec = LossSpec(
        entropy_coefficient=0.01,
        squared_logit_coefficient=0.02,
        positive_nll_coefficient=0.03,
        kl={"coefficient": 0.04},
    )
    terms = build_loss(spec)(given(entropy_T=torch.ones(size), logsumexp_T=torch.ones(size)))
    assert list(terms) == ["policy", "kl", "entropy", "logit", "positive_nll"]
    assert [term.weight for term in terms.values()] == ["policy", *["penalty"] * 3, "positive_token"]
    assert list(build_loss(LossSpec())(given())) == ["policy"]


def test_a_penalty_in_the_reward_is_no_term():
    assert list(build_loss(LossSpec(kl={"coefficient": 0.1, "placement": "reward"}))(given())) == ["policy"]


def test_the_coefficient_of_the_surrogate_is_the_terms():
    assert build_loss(LossSpec(surrogate={"coefficient": 0.7}))(given())["policy"].coefficient == 0.7


def test_a_correction_multiplies_the_surrogate_and_keeps_its_clip_decisions():
    inputs = given()
    plain = build_loss(LossSpec())(inputs)["policy"]
    corrected = build_loss(LossSpec(correction={"kind": "tis", "ratio_high": 1.5}))(inputs)["policy"]
    weights_T = (inputs.old_logprobs_T - inputs.sampler_logprobs_T).exp().clamp(max=1.5)
    counts_T = inputs.loss_mask_T
    torch.testing.assert_close(corrected.values_T[counts_T], (weights_T * plain.values_T)[counts_T])
    assert torch.equal(corrected.clipped_T, plain.clipped_T)
    assert "applied_weight" in corrected.extras


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"kl": {"coefficient": 0.1}}, "no ref_logprobs"),
        ({"name": "prime_rl"}, "no sampler_logprobs"),
        ({"positive_nll_coefficient": 0.1}, "no rewards"),
        ({"name": "dpo"}, "no ref_logprobs"),
    ],
)
def test_missing_inputs_of_a_loss_are_named(settings, missing):
    zero_T = torch.zeros(2)
    with pytest.raises(SpecError, match=missing):
        build_loss(LossSpec(**settings))(LossInputs(zero_T, zero_T, zero_T))


def test_the_current_policy_as_old_policy_has_ratio_1_also_in_corrections():
    inputs = given()
    spec = LossSpec(old_policy="current", correction={"kind": "tis", "ratio_high": 1.5})
    term = build_loss(spec)(inputs)["policy"]
    counts_T = inputs.loss_mask_T
    weights_T = (inputs.policy_logprobs_T - inputs.sampler_logprobs_T).detach().exp().clamp(max=1.5)
    torch.testing.assert_close(term.values_T[counts_T], (-weights_T * inputs.advantages_T)[counts_T])
    term.values_T[counts_T].sum().backward()
    torch.testing.assert_close(inputs.policy_logprobs_T.grad[counts_T], (-weights_T * inputs.advantages_T)[counts_T])


def test_a_mean_epsilon_is_added_to_the_lengths_under_the_ratio_of_a_document():
    inputs = given()
    surrogate = {"clip_low": 0.9, "clip_high": 9.0}
    result = build_loss(LossSpec(name="gspo", surrogate=surrogate, compat={"scaling": {"mean_epsilon": 1.0}}))(inputs)[
        "policy"
    ]
    counts_T, lengths_T = inputs.loss_mask_T, inputs.document_lengths_T
    sums_T = inputs.document_sums.document(inputs.log_ratio())
    expected_T = -(sums_T / (lengths_T + 1)).exp() * inputs.advantages_T
    torch.testing.assert_close(result.values_T[counts_T], expected_T[counts_T])


@pytest.mark.parametrize("settings", [{"correction": {"kind": "batch_normalized"}}, {"correction": {"kind": "m2po"}}])
def test_the_current_policy_is_refused_before_forward_if_the_old_one_is_needed(settings):
    with pytest.raises(ValueError, match="before the forward pass"):
        LossSpec(old_policy="current", **settings)


# ---- signals of a surrogate ------------------------------------------------------------------------------------


def test_a_surrogate_may_use_rewards_with_a_signal_floor():
    inputs = given()
    rewarded = build_loss(LossSpec(signal="rewards"))(inputs)["policy"]
    same = build_loss(LossSpec())(replace(inputs, advantages_T=inputs.rewards_T))["policy"]
    assert torch.equal(rewarded.values_T, same.values_T)
    floored = build_loss(LossSpec(signal_floor=0.0))(inputs)["policy"]
    silent_T = inputs.counts_T & (inputs.advantages_T <= 0)
    assert silent_T.any()
    assert (floored.values_T[silent_T] == 0).all()
    plain, kept_T = build_loss(LossSpec())(inputs)["policy"], inputs.counts_T & (inputs.advantages_T > 0)
    assert torch.equal(floored.values_T[kept_T], plain.values_T[kept_T])


def test_rewards_that_are_not_there_drive_nothing():
    with pytest.raises(SpecError, match="signal = 'rewards'"):
        build_loss(LossSpec(signal="rewards"))(given(rewards_T=None))


def test_a_ratio_of_documents_may_be_one_of_the_tokens_that_a_correction_keeps():
    zero = torch.zeros(4, dtype=torch.float64)
    policy_T = torch.tensor([0.1, 0.4, -0.2, 0.3], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        policy_T,
        zero,
        torch.tensor([1.0, 5.0, 3.0, 1.0], dtype=torch.float64),
        sampler_logprobs_T=torch.tensor([0.0, -2.0, 0.0, -2.0], dtype=torch.float64),
        document_ids_T=torch.tensor([0, 0, 0, 1]),
        lengths_T=torch.tensor([3.0, 3.0, 3.0, 1.0]),
        sums=DocumentSums(torch.tensor([0, 0, 0, 1]), torch.ones(4, dtype=torch.bool)),
    )
    gate = {"gate": "ratio", "gate_high": 1.5, "ratio": "token"}
    surrogate = {"kind": "gspo", "advantage_level": "document", "clip_low": 0.9, "clip_high": 9.0}
    spec = LossSpec(surrogate=surrogate, correction={**gate, "surrogate_over": "kept"})
    ratio = math.exp((0.1 - 0.2) / 2)
    assert surrogate_ratio(inputs, spec).tolist() == pytest.approx([ratio, 0.0, ratio, 0.0], rel=1e-14)
    values_T = build_loss(spec)(inputs)["policy"].values_T
    assert values_T.tolist() == pytest.approx([-2 * ratio, 0.0, -2 * ratio, 0.0], rel=1e-14)
    values_T.sum().backward()
    assert policy_T.grad.tolist() == pytest.approx([-2 * ratio, 0.0, -2 * ratio, 0.0], rel=1e-14)
    everyone = LossSpec(surrogate=surrogate, correction=gate)
    assert surrogate_ratio(inputs, everyone)[0].item() == pytest.approx(math.exp(0.1), rel=1e-14)


def test_the_ratio_of_a_surrogate_is_that_of_its_level_and_anchor():
    inputs = given()
    counts_T = inputs.counts_T
    for settings, expected_T in (
        (LossSpec(), inputs.log_ratio("old")),
        (LossSpec(surrogate={"anchor": "sampler"}), inputs.log_ratio("sampler")),
        (LossSpec(name="gspo"), inputs.document_mean(inputs.log_ratio("old"))),
    ):
        found_T = surrogate_ratio(inputs, settings)
        torch.testing.assert_close(found_T[counts_T], expected_T.detach().exp()[counts_T])
        assert (found_T[~counts_T] == 0).all()


RATIOS = torch.tensor([1e-3, 0.5, 0.9, 1.0, 1.1, 1.5, 5.0, 1e3], dtype=torch.float64)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "dpo"])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_every_loss_has_a_curve_whose_slope_is_its_coefficient(name, advantage):
    spec = LossSpec(name=name)
    loss_T, coefficient_T = ratio_curves(spec, RATIOS, advantage)
    assert (loss_T.shape, coefficient_T.shape, loss_T.dtype) == (RATIOS.shape, RATIOS.shape, torch.float64)
    assert loss_T.isfinite().all()
    assert coefficient_T.isfinite().all()
    assert coefficient_T[3].item() == pytest.approx({"sft": -1.0, "ref_kl": 0.0}.get(name, -advantage), abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "advantage", "expected"),
    [
        ({"name": "dapo"}, 1.0, [-0.5, -1.0, 0.0]),
        ({"name": "dapo"}, -1.0, [0.0, 1.0, 1.5]),
        ({"name": "dual_clip", "surrogate": {"dual_clip": 1.2}}, -1.0, [0.0, 1.0, 0.0]),
        ({"name": "cispo", "surrogate": {"clip_high": 0.2}}, 1.0, [-0.5, -1.0, -1.2]),
        ({"name": "reinforce"}, 2.0, [-2.0, -2.0, -2.0]),
        ({"name": "gspo"}, 1.0, [-0.5, -1.0, 0.0]),
        ({"name": "dro", "surrogate": {"beta": 0.0}}, 1.0, [-1.0, -1.0, -1.0]),
        ({"surrogate": {"coefficient": 2.0}}, 1.0, [-1.0, -2.0, 0.0]),
        # Reference = start: the k3 penalty pulls back with 1 - 1 / ratio.
        ({"name": "importance_sampling", "kl": {"coefficient": 3.0}}, 1.0, [-0.5 - 3.0, -1.0, -1.5 + 1.0]),
    ],
)
def test_coefficients_match_manual_values(settings, advantage, expected):
    _, coefficient_T = ratio_curves(LossSpec(**settings), torch.tensor([0.5, 1.0, 1.5]), advantage)
    assert coefficient_T.tolist() == pytest.approx(expected, abs=1e-12)


def test_losses_match_manual_values():
    loss_T, _ = ratio_curves(LossSpec(name="dapo"), torch.tensor([0.5, 1.0, 1.5]), 2.0)
    assert loss_T.tolist() == pytest.approx([-1.0, -2.0, -2.56])


def test_a_trust_region_in_probability_needs_the_starting_probability():
    ratios_T = torch.tensor([1.5], dtype=torch.float64)
    likely, rare = (
        ratio_curves(LossSpec(name="dppo_tv"), ratios_T, anchor_probability=p)[1].item() for p in (0.5, 0.01)
    )
    assert likely == 0.0
    assert rare == pytest.approx(-1.5)


def test_terms_that_need_more_than_a_ratio_are_left_out():
    spec = LossSpec(name="dapo", entropy_coefficient=0.1, squared_logit_coefficient=0.1, positive_nll_coefficient=0.1)
    assert torch.equal(ratio_curves(spec, RATIOS)[1], ratio_curves(LossSpec(name="dapo"), RATIOS)[1])


def test_each_point_is_a_micro_batch_of_its_own_where_that_matters():
    spec = LossSpec(name="kl_cov")
    together = ratio_curves(spec, RATIOS)[1]
    alone = torch.cat([ratio_curves(spec, ratio_T, anchor_probability=5e-4)[1] for ratio_T in RATIOS.split(1)])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize(
    ("settings", "ratios", "more", "words"),
    [
        ({"name": "dpo"}, [1.0], {}, "a loss without pairs"),
        ({}, [0.0, 1.0], {}, "ratios above 0"),
        ({}, [3.0], {"anchor_probability": 0.5}, "no probability above 1"),
    ],
)
def test_a_loss_without_a_curve_is_refused(settings, ratios, more, words):
    with pytest.raises(SpecError, match=words):
        ratio_curves(LossSpec(**settings), torch.tensor(ratios), **more)


def test_an_empty_grid():
    assert [one.shape for one in ratio_curves(LossSpec(), torch.zeros(0))] == [(0,), (0,)]


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", ["grpo", "gspo", "clip_cov"])
def test_corrections_have_curves_and_change_nothing_if_sampler_is_old_policy(name, correction):
    spec = LossSpec(name=name, correction={"kind": correction})
    if correction == "opsm":
        assert ratio_curves(spec, RATIOS, 1.0)[1].isfinite().all()  # it looks at the policy itself
        return
    plain = ratio_curves(LossSpec(name=name), RATIOS, -1.5)
    for found_T, plain_T in zip(ratio_curves(spec, RATIOS, -1.5), plain, strict=True):
        torch.testing.assert_close(found_T, plain_T, rtol=1e-12, atol=0)
