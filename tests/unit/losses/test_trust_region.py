"""Trust regions in probability, against the oracle and manual values."""

import math
from dataclasses import replace

import pytest
import torch

from tests.helpers.loss_batches import nasty_documents
from tests.helpers.surrogate_checks import assert_finite_differences, assert_is_the_oracle
from workbench.errors import SpecError
from workbench.losses import LossInputs
from workbench.losses.build import SURROGATES
from workbench.losses.trust_region import dppo_kl, dppo_tv, dro, ipo, ref_kl, sapo

CASES = [
    ("dppo_tv", {"threshold_low": 0.1, "threshold_high": 0.15, "anchor": "sampler"}),
    ("dppo_tv", {"threshold_low": 0.2, "threshold_high": 0.2, "ratio_cap": 1.5, "anchor": "old"}),
    ("dppo_kl", {"threshold_low": 0.05, "threshold_high": 0.03, "anchor": "sampler"}),
    ("dppo_kl", {"threshold_low": 0.05, "threshold_high": 0.05, "ratio_cap": 2.0, "anchor": "sampler"}),
    ("dppo_tv", {"threshold_low": 0.3, "threshold_high": 0.3, "log_clamp": 0.4, "anchor": "sampler"}),
    ("dppo_kl", {"threshold_low": 0.2, "threshold_high": 0.2, "ratio_cap": 2.0, "log_clamp": 0.4, "anchor": "old"}),
    ("ipo", {"threshold": 0.1, "anchor": "sampler"}),
    ("ref_kl", {"threshold_low": 0.2, "anchor": "sampler"}),
    ("ref_kl", {"threshold_low": 0.05, "anchor": "old"}),
]


@pytest.mark.parametrize(("kind", "parameters"), CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_is_the_oracle(kind, parameters, seed):
    term, inputs = assert_is_the_oracle(kind, parameters, nasty_documents(seed), seed=seed)
    dropped_T = term.clipped_T[inputs.loss_mask_T]
    assert dropped_T.any()
    assert not dropped_T.all()


@pytest.mark.parametrize(("kind", "parameters"), CASES, ids=str)
def test_gradient_is_the_slope_of_the_oracle(kind, parameters):
    assert_finite_differences(kind, parameters, seed=1)


def inputs(p, q, advantage, **more):
    policy_T = torch.tensor([math.log(p)], dtype=torch.float64, requires_grad=True)
    sampler_T = torch.tensor([math.log(q)], dtype=torch.float64)
    return LossInputs(
        policy_T, sampler_T, torch.tensor([advantage], dtype=torch.float64), sampler_logprobs_T=sampler_T, **more
    )


@pytest.mark.parametrize(
    ("p", "q", "advantage", "tv", "either"),
    [
        (0.50, 0.20, 1.0, True, True),  # up, advantage positive, too far
        (0.50, 0.20, -1.0, False, True),  # up, advantage negative: a one-sided trust region lets it return
        (0.20, 0.50, -1.0, True, True),
        (0.20, 0.50, 1.0, False, True),
        (0.02, 0.001, 1.0, False, False),  # a ratio of 20, and nothing has moved
        (0.20, 0.50, 0.0, True, True),  # no advantage counts as a push down
    ],
)
def test_dropped_tokens(p, q, advantage, tv, either):
    assert bool(dppo_tv(inputs(p, q, advantage)).clipped_T) == tv
    assert bool(ipo(inputs(p, q, advantage)).clipped_T) == either


@pytest.mark.parametrize(
    ("kind", "settings"), [("dppo_tv", {"threshold_low": 0.2, "threshold_high": 0.25}), ("ipo", {"threshold": 0.25})]
)
def test_the_cut_is_at_the_threshold(kind, settings):
    for p, dropped in ((0.55 - 1e-12, False), (0.55 + 1e-12, True)):
        assert bool(SURROGATES[kind](inputs(p, 0.3, 1.0), **settings).clipped_T) == dropped
    low = settings.get("threshold_low", 0.25)
    for p, dropped in ((0.5 - low + 1e-12, False), (0.5 - low - 1e-12, True)):
        assert bool(SURROGATES[kind](inputs(p, 0.5, -1.0), **settings).clipped_T) == dropped


@pytest.mark.parametrize(("advantage", "p", "q"), [(1.0, 0.4, 0.2), (-1.0, 0.2, 0.4)])
def test_the_cut_of_the_kl_region_is_at_its_threshold(advantage, p, q):
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    for factor, dropped in ((1 + 1e-9, False), (1 - 1e-9, True)):
        thresholds = {"threshold_low": factor * divergence, "threshold_high": 1.0}
        if advantage > 0:
            thresholds = {"threshold_low": 1.0, "threshold_high": factor * divergence}
        assert bool(dppo_kl(inputs(p, q, advantage), **thresholds).clipped_T) == dropped


def test_kl_region_is_asymmetric_where_the_total_variation_is_not():
    up, down = inputs(0.30, 0.05, 1.0), inputs(0.05, 0.30, -1.0)
    assert bool(dppo_tv(up, threshold_high=0.2).clipped_T)
    assert bool(dppo_tv(down, threshold_low=0.2).clipped_T)
    divergence = [q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) for p, q in ((0.3, 0.05), (0.05, 0.3))]
    between = sum(divergence) / 2
    assert divergence[0] < between < divergence[1]
    assert not bool(dppo_kl(up, threshold_high=between).clipped_T)
    assert bool(dppo_kl(down, threshold_low=between).clipped_T)


@pytest.mark.parametrize("certain", ["policy", "sampler", "both"])
def test_certainty_is_no_division_by_zero(certain):
    p, q = (1.0 if certain != "sampler" else 0.5), (1.0 if certain != "policy" else 0.5)
    given = inputs(p, q, 1.0)
    term = dppo_kl(given)
    term.values_T.sum().backward()
    assert bool(term.clipped_T) == (certain == "policy")
    assert math.isfinite(given.policy_logprobs_T.grad.item())


@pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl", "ipo"])
def test_frozen_decisions_win(kind):
    for frozen in (True, False):
        given = inputs(0.9, 0.1, 1.0, frozen_clip_T=torch.tensor([frozen]))
        SURROGATES[kind](given).values_T.sum().backward()
        assert given.policy_logprobs_T.grad.item() == pytest.approx(0.0 if frozen else -9.0)


def test_the_sampler_is_needed_by_name():
    zero_T = torch.zeros(1)
    with pytest.raises(SpecError, match="no sampler_logprobs"):
        dppo_tv(LossInputs(zero_T, zero_T, zero_T))


@pytest.mark.parametrize(("p", "dropped"), [(0.31, False), (0.29, True), (0.9, False)])
def test_ref_kl_drops_fallen_tokens_only_and_reads_no_advantage(p, dropped):
    ref_T = torch.tensor([math.log(0.4)], dtype=torch.float64)
    terms = [ref_kl(inputs(p, 0.5, advantage, ref_logprobs_T=ref_T)) for advantage in (1.0, -1.0)]
    assert [bool(term.clipped_T) for term in terms] == [dropped, dropped]
    assert terms[0].values_T.item() == terms[1].values_T.item()
    assert terms[0].values_T.item() == pytest.approx(0.0 if dropped else -math.log(0.4 / p) * p / 0.5)


def test_ref_kl_is_silent_where_the_reference_agrees():
    same_T = torch.tensor([math.log(0.4)], dtype=torch.float64)
    assert bool(ref_kl(inputs(0.4, 0.5, 1.0, ref_logprobs_T=same_T)).silent_T)
    assert not bool(ref_kl(inputs(0.41, 0.5, 0.0, ref_logprobs_T=same_T)).silent_T)


SOFT = [
    ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
    ("sapo", {"tau_positive": 3.0, "tau_negative": 0.7}),
    ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05, "log_clamp": 0.5}),
    ("dro", {"beta": 0.3}),
    ("dro", {"beta": 0.0, "anchor": "sampler"}),
]


@pytest.mark.parametrize(("kind", "parameters"), SOFT, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_soft_surrogate_is_the_oracle(kind, parameters, seed):
    # 1 - sigmoid cancels where the sigmoid is almost 1: its derivative keeps absolute, not relative digits.
    assert_is_the_oracle(kind, parameters, nasty_documents(seed), seed=seed, absolute=1e-13)


@pytest.mark.parametrize(("kind", "parameters"), SOFT, ids=str)
def test_gradient_of_a_soft_surrogate_is_the_slope_of_the_oracle(kind, parameters):
    assert_finite_differences(kind, parameters, seed=2)


def test_sapo_takes_the_steepness_of_its_sign_in_full_precision():
    zero_T = torch.zeros(2, dtype=torch.float64)
    policy_T = torch.full((2,), 0.5, dtype=torch.float64)
    values_T = sapo(
        LossInputs(policy_T, zero_T, torch.tensor([1.0, -1.0], dtype=torch.float64)), tau_positive=1.1, tau_negative=1.7
    ).values_T
    expected = [
        -sign * 4 / tau / (1 + torch.exp(-tau * (policy_T[0].exp() - 1))).item() for sign, tau in ((1, 1.1), (-1, 1.7))
    ]
    assert values_T.tolist() == pytest.approx(expected, rel=1e-15)  # 1.1 in float32 is off by 2e-8


def test_sapo_is_flat_and_finite_where_the_ratio_overflows():
    policy_T = torch.zeros(1, requires_grad=True)
    term = sapo(LossInputs(policy_T, torch.full((1,), -200.0), torch.ones(1)))
    term.values_T.sum().backward()
    assert (term.values_T.item(), policy_T.grad.item()) == (-4.0, 0.0)


def test_dro_pulls_back_to_the_anchor_without_an_advantage():
    policy_T = torch.tensor([-1.0, -3.0], requires_grad=True)
    dro(LossInputs(policy_T, torch.tensor([-2.0, -2.0]), torch.zeros(2)), beta=0.5).values_T.sum().backward()
    assert policy_T.grad.tolist() == [0.5, -0.5]


def test_sapo_of_documents_may_average_their_advantages():
    policy_T = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    inputs = LossInputs(
        policy_T,
        policy_T - 0.3,
        torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64),
        document_ids_T=torch.tensor([0, 0, 1]),
    )
    mean = replace(inputs, advantages_T=torch.tensor([0.5, 0.5, -1.0], dtype=torch.float64))
    result = sapo(inputs, level="document", advantage_level="document")
    assert torch.equal(result.values_T, sapo(mean, level="document").values_T)
    assert not torch.equal(result.values_T, sapo(inputs, level="document").values_T)
