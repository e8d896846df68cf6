"""KL penalties against the oracle, their gradient identities, and numbers of other systems."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests.helpers.loss_batches import flat, nasty_documents, packed, random_weights, weighted_total
from tests.oracles.kl import ESTIMATES, penalty
from workbench.errors import SpecError
from workbench.losses.kl import kl_estimate, kl_in_reward, kl_term
from workbench.losses.terms import LossInputs
from workbench.specs.losses import KLSpec

GRADIENTS = ("path", "score", "straight_through")
CLAMPS = ((None, None), (1.0, None), (None, 0.5), (0.7, 0.4))


@pytest.mark.parametrize("estimator", ESTIMATES)
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize(
    ("against", "importance"),
    [("ref", "none"), ("ref", "old"), ("ref", "sampler"), ("sampler", "none"), ("sampler", "sampler"), ("old", "none")],
)
def test_value_and_gradient_are_the_oracles(estimator, gradient, against, importance):
    for (input_clamp, output_clamp), seed in itertools.product(CLAMPS, (0, 1)):
        spec = KLSpec(
            coefficient=0.3,
            estimator=estimator,
            gradient=gradient,
            against=against,
            importance=importance,
            input_clamp=input_clamp,
            output_clamp=output_clamp,
        )
        documents = nasty_documents(seed)
        weights = random_weights(documents, seed)
        policy_T, inputs = packed(documents)
        term = kl_term(inputs, spec)
        assert term.coefficient == 0.3
        weighted_total(term, inputs, weights).backward()
        expected = [
            [
                penalty(
                    d["policy"][t],
                    d[against][t],
                    estimator=estimator,
                    gradient=gradient,
                    anchor=None if importance == "none" else d[importance][t],
                    input_clamp=input_clamp,
                    output_clamp=output_clamp,
                )
                if counts
                else (0.0, 0.0)
                for t, counts in enumerate(d["mask"])
            ]
            for d in documents
        ]
        value_T = flat([[v for v, _ in one] for one in expected])
        slope_T = flat(
            [[g * w for (_, g), w in zip(one, row, strict=True)] for one, row in zip(expected, weights, strict=True)]
        )
        torch.testing.assert_close(term.values_T.detach(), value_T, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(policy_T.grad, slope_T, rtol=1e-12, atol=1e-13)


def test_the_oracles_derivatives_are_those_of_its_values():
    step = 1e-6
    for name, d in itertools.product(ESTIMATES, (-2.0, -0.3, 0.4, 1.5)):
        value, slope = ESTIMATES[name]  # of d = other - policy; the derivative is with respect to policy
        assert slope(d) == pytest.approx((value(d - step) - value(d + step)) / (2 * step), rel=1e-8, abs=1e-9)


# ---- identities --------------------------------------------------------------------------------------------------


def slopes(policy_T, settings, **others):
    """(values, gradient of their sum) of a penalty on a fresh leaf."""
    leaf_T = policy_T.clone().requires_grad_()
    term = kl_term(
        LossInputs(leaf_T, others.pop("old", policy_T), torch.ones_like(policy_T), **others),
        KLSpec(coefficient=1.0, **settings),
    )
    term.values_T.sum().backward()
    return term.values_T.detach(), leaf_T.grad


def some(seed=0, size=50):
    g = torch.Generator().manual_seed(seed)
    policy, ref, old, sampler = -3 * torch.rand(4, size, generator=g, dtype=torch.float64)
    return policy, {"ref_logprobs_T": ref, "old": old, "sampler_logprobs_T": sampler}


@pytest.mark.parametrize("importance", ["none", "old", "sampler"])
def test_weighted_k3_with_a_live_weight_has_the_gradient_of_k2_times_the_weight(importance):
    policy, others = some()
    _, k3 = slopes(policy, {"estimator": "k3", "gradient": "score", "importance": importance}, **dict(others))
    anchor = {"none": policy, "old": others["old"], "sampler": others["sampler_logprobs_T"]}[importance]
    _, k2 = slopes(policy, {"estimator": "k2"}, **dict(others))
    torch.testing.assert_close(k3, (policy - anchor).exp() * k2, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("importance", ["none", "old", "sampler"])
def test_live_weighted_k1_has_the_gradient_u_times_one_minus_d(importance):
    policy, others = some(1)
    _, k1 = slopes(policy, {"estimator": "k1", "gradient": "score", "importance": importance}, **dict(others))
    anchor = {"none": policy, "old": others["old"], "sampler": others["sampler_logprobs_T"]}[importance]
    d = others["ref_logprobs_T"] - policy
    torch.testing.assert_close(k1, (policy - anchor).exp() * (1 - d), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("estimator", ESTIMATES)
def test_straight_through_has_the_value_of_its_estimator_and_the_gradient_of_k2(estimator):
    policy, others = some(2)
    value, slope = slopes(policy, {"estimator": estimator, "gradient": "straight_through"}, **dict(others))
    torch.testing.assert_close(value, slopes(policy, {"estimator": estimator}, **dict(others))[0], rtol=0, atol=1e-15)
    torch.testing.assert_close(slope, slopes(policy, {"estimator": "k2"}, **dict(others))[1], rtol=0, atol=1e-15)


def test_every_kind_of_gradient_has_the_same_value():
    policy, others = some(3)
    for estimator, importance in itertools.product(ESTIMATES, ("none", "old")):
        settings = {"estimator": estimator, "importance": importance, "input_clamp": 1.0, "output_clamp": 0.8}
        values = [slopes(policy, settings | {"gradient": gradient}, **dict(others))[0] for gradient in GRADIENTS]
        for value in values[1:]:
            torch.testing.assert_close(value, values[0], rtol=1e-14, atol=1e-15)


def test_in_expectation_k1_path_is_zero_and_score_is_the_kl_gradient():
    """Exact expectation over a vocabulary: sum_v p_v grad(...)."""
    g = torch.Generator().manual_seed(7)
    logits = torch.randn(9, generator=g, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(9, generator=g, dtype=torch.float64), -1)
    logprobs = torch.log_softmax(logits, -1)
    kl = (logprobs.exp() * (logprobs - ref)).sum()
    (truth,) = torch.autograd.grad(kl, logits, retain_graph=True)

    def expected(settings):
        inputs = LossInputs(logprobs, logprobs.detach(), torch.ones_like(ref), ref_logprobs_T=ref)
        term = kl_term(inputs, KLSpec(coefficient=1.0, **settings))
        return torch.autograd.grad((logprobs.detach().exp() * term.values_T).sum(), logits, retain_graph=True)[0]

    torch.testing.assert_close(expected({"estimator": "k1"}), torch.zeros_like(truth), rtol=0, atol=1e-15)
    for settings in (
        {"estimator": "k2"},
        {"estimator": "k1", "gradient": "score"},
        {"estimator": "k3", "gradient": "score"},
        {"estimator": "k1", "gradient": "straight_through"},
    ):
        torch.testing.assert_close(expected(settings), truth, rtol=1e-12, atol=1e-14)
    assert (expected({"estimator": "k3"}) - truth).abs().max() > 0.01


# ---- safety ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", ["path", "score"])
@pytest.mark.parametrize("clamp", [{"input_clamp": 20.0, "importance": "old"}, {"output_clamp": 10.0}])
def test_a_token_that_a_clamp_cut_off_cannot_make_its_gradient_nan(gradient, clamp):
    policy = torch.tensor([-2000.0, -1.0], requires_grad=True)
    inputs = LossInputs(policy, torch.tensor([-1.0, -1.0]), torch.ones(2), ref_logprobs_T=torch.tensor([-1.0, -2.0]))
    term = kl_term(inputs, KLSpec(coefficient=1.0, gradient=gradient, **clamp))
    term.values_T.sum().backward()
    assert policy.grad[0] == 0.0
    assert policy.grad[1] != 0.0
    assert torch.isfinite(policy.grad).all()
    assert torch.isfinite(term.values_T).all()


def test_the_output_clamp_bounds_a_large_importance_without_nan():
    policy = torch.tensor([-1.0], requires_grad=True)
    inputs = LossInputs(policy, torch.tensor([-1000.0]), torch.ones(1), ref_logprobs_T=torch.tensor([-2.0]))
    term = kl_term(inputs, KLSpec(coefficient=1.0, gradient="score", importance="old", output_clamp=10.0))
    term.values_T.sum().backward()
    assert term.values_T.item() == 10.0
    assert policy.grad.item() == 0.0


def test_missing_policies_and_misplaced_penalties_are_refused():
    zero = torch.zeros(2)
    with pytest.raises(SpecError, match="no ref_logprobs"):
        kl_term(LossInputs(zero, zero, zero), KLSpec(coefficient=0.1))
    with pytest.raises(SpecError, match="no sampler_logprobs"):
        kl_term(LossInputs(zero, zero, zero, ref_logprobs_T=zero), KLSpec(coefficient=0.1, importance="sampler"))
    with pytest.raises(SpecError, match="kl_in_reward"):
        kl_term(LossInputs(zero, zero, zero, ref_logprobs_T=zero), KLSpec(coefficient=0.1, placement="reward"))
    with pytest.raises(SpecError, match="one of k1"):
        kl_estimate(zero, "k4")


# ---- in the reward -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ESTIMATES)
def test_the_penalty_in_the_reward_is_the_oracles_estimate_of_old_against_ref(estimator):
    documents = nasty_documents(8)
    _, inputs = packed(documents)
    for input_clamp, output_clamp in CLAMPS:
        spec = KLSpec(
            coefficient=0.2, estimator=estimator, placement="reward", input_clamp=input_clamp, output_clamp=output_clamp
        )
        result = kl_in_reward(inputs.old_logprobs_T.requires_grad_(), inputs.ref_logprobs_T, inputs.loss_mask_T, spec)
        expected = [
            [
                0.2
                * penalty(
                    d["old"][t], d["ref"][t], estimator=estimator, input_clamp=input_clamp, output_clamp=output_clamp
                )[0]
                if counts
                else 0.0
                for t, counts in enumerate(d["mask"])
            ]
            for d in documents
        ]
        torch.testing.assert_close(result, flat(expected), rtol=1e-12, atol=1e-14)
        assert not result.requires_grad


# ---- numbers of other systems ------------------------------------------------------------------------------------


def test_nemo_rls_k3_with_tight_clamps():
    """NeMo-RL 7ea279ab, calculate_kl(k3, input clamp 0.7, output clamp 0.4): values, gradients under a cotangent."""
    policy = torch.tensor(
        [-0.369140625, -0.5947265625, -0.4951171875, -0.2265625, -0.498046875, -0.2998046875], dtype=torch.float64
    )
    ref = torch.tensor(
        [-0.166015625, -0.80078125, -0.5244140625, -0.65234375, -0.30078125, -0.8515625], dtype=torch.float64
    )
    cotangent = torch.tensor(
        [
            2.000405517620528,
            0.3027029001722198,
            -0.525021947504684,
            -0.2987518081742905,
            -0.14914324514371294,
            -1.1120499742520669,
        ],
        dtype=torch.float64,
    )
    leaf = policy.clone().requires_grad_()
    term = kl_term(
        LossInputs(leaf, policy, policy, ref_logprobs_T=ref), KLSpec(coefficient=1.0, input_clamp=0.7, output_clamp=0.4)
    )
    (term.values_T * cotangent).sum().backward()
    assert term.values_T.tolist() == pytest.approx(
        [
            0.022100611877307497,
            0.019843258503513872,
            0.00042499300726162037,
            0.07904047694797267,
            0.02080192193048913,
            0.12769434412986536,
        ],
        rel=1e-12,
    )
    assert leaf.grad.tolist() == pytest.approx(
        [
            -0.45054255670882526,
            0.05636673960244973,
            -0.01515837171195289,
            -0.10358943291704445,
            0.03252330160974207,
            -0.4715797690822504,
        ],
        rel=1e-12,
    )


def test_nemo_rl_penalty_has_the_score_gradient_and_none_beyond_a_clamp():
    """NeMo-RL 7ea279ab, ClippedPGLossFn(kl 0.05, k3, input clamp 0.5, output clamp 0.1), times its token count.

    Tokens whose surrogate is clipped, so that the penalty is all of the gradient: unclamped, unclamped, clamped.
    """
    policy = torch.tensor([-1.201171875, -0.0751953125, -1.1767578125], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.2060546875, -0.0673828125, -3.8642578125], dtype=torch.float64)
    spec = KLSpec(coefficient=0.05, estimator="k3", gradient="score", input_clamp=0.5, output_clamp=0.1)
    term = kl_term(LossInputs(policy, policy.detach(), ref, ref_logprobs_T=ref), spec)
    (term.coefficient * term.values_T).sum().backward()
    assert policy.grad.tolist() == pytest.approx([0.00024414062493740223, -0.00039062499989984056, 0.0], rel=1e-8)


def test_verls_abs_plus_is_straight_through():
    """verl 1dda039b, kl_penalty "abs+", gradient of the token mean times the tokens."""
    policy = torch.tensor(
        [-2.0810546875, -0.90234375, -0.287109375, -0.052734375], dtype=torch.float64, requires_grad=True
    )
    ref = torch.tensor([-3.818359375, -1.1044921875, -0.3818359375, -0.00390625], dtype=torch.float64)
    term = kl_term(
        LossInputs(policy, policy.detach(), ref, ref_logprobs_T=ref),
        KLSpec(coefficient=1.0, estimator="abs", gradient="straight_through"),
    )
    term.values_T.sum().backward()
    assert term.values_T.tolist() == pytest.approx([1.7373046875, 0.2021484375, 0.0947265625, 0.048828125], rel=1e-14)
    assert policy.grad.tolist() == pytest.approx([1.7373046875, 0.2021484375, 0.0947265625, -0.048828125], rel=1e-14)


def test_prime_rls_penalty_has_no_half_and_looks_at_the_sampler():
    """prime-rl 559b4477: kl_tau (policy - sampler)^2."""
    policy = torch.tensor([-1.0, -0.5], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([-1.5, -0.25], dtype=torch.float64)
    inputs = LossInputs(policy, policy.detach(), sampler, sampler_logprobs_T=sampler)
    term = kl_term(inputs, KLSpec(coefficient=1e-3, estimator="squared", against="sampler"))
    term.values_T.sum().backward()
    assert term.values_T.tolist() == [0.25, 0.0625]
    assert policy.grad.tolist() == [1.0, -0.5]


def test_a_loss_without_a_mask_counts_every_token():
    policy, others = some(4, size=5)
    inputs = LossInputs(policy, others["old"], policy, ref_logprobs_T=others["ref_logprobs_T"])
    spec = KLSpec(coefficient=1.0)
    masked = replace(inputs, loss_mask_T=torch.tensor([True, False, True, True, True]))
    assert (kl_term(inputs, spec).values_T != 0).all()
    assert kl_term(masked, spec).values_T[1] == 0
    assert math.isfinite(float(kl_term(masked, spec).values_T.sum()))


# ---- a ratio of documents ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("importance", ["old", "sampler"])
def test_a_ratio_of_documents_is_the_geometric_mean_and_spreads_its_gradient(gradient, importance):
    spec = KLSpec(coefficient=1.0, gradient=gradient, importance=importance, importance_level="document")
    documents = nasty_documents(2, low=0.3, high=3.0)
    weights = random_weights(documents, 2)
    policy_T, inputs = packed(documents)
    term = kl_term(inputs, spec)
    weighted_total(term, inputs, weights).backward()
    values, slopes = [], []
    for document, own in zip(documents, weights, strict=True):
        at = [t for t, counts in enumerate(document["mask"]) if counts]
        gaps = [document["policy"][t] - document[importance][t] for t in at]
        ratio = math.exp(math.fsum(gaps) / len(gaps)) if at else 1.0
        d = {t: document["ref"][t] - document["policy"][t] for t in at}
        k3 = {t: math.exp(d[t]) - 1 - d[t] for t in at}
        shared = math.fsum(own[t] * ratio * k3[t] for t in at) / max(1, len(at))
        path = {
            "path": lambda t, d=d: 1 - math.exp(d[t]),
            "score": lambda t, d=d: 1 - math.exp(d[t]),
            "straight_through": lambda t, d=d: -d[t],
        }[gradient]
        values.append([ratio * k3[t] if t in k3 else 0.0 for t in range(len(document["mask"]))])
        slopes.append(
            [
                own[t] * ratio * path(t) + (shared if gradient == "score" else 0.0) if t in k3 else 0.0
                for t in range(len(document["mask"]))
            ]
        )
    torch.testing.assert_close(term.values_T.detach(), flat(values), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(policy_T.grad, flat(slopes), rtol=1e-12, atol=1e-13)


def test_a_level_without_a_ratio_is_refused():
    with pytest.raises(ValueError, match="importance_level is about the ratio that importance names"):
        KLSpec(coefficient=1.0, importance_level="document")
