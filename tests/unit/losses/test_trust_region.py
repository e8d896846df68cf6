"""Trust regions in probability, against the oracle and by hand."""

import math

import pytest
import torch

from tests.helpers.loss_batches import nasty_documents
from tests.helpers.surrogate_checks import assert_finite_differences, assert_is_the_oracle
from workbench.errors import SpecError
from workbench.losses import LossInputs
from workbench.losses.surrogates import SURROGATES
from workbench.losses.trust_region import dppo_kl, dppo_tv, ipo, ref_kl

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
        (0.50, 0.20, 1.0, True, True),  # up, wanted up, too far
        (0.50, 0.20, -1.0, False, True),  # up, wanted down: the trust region of one direction lets it return
        (0.20, 0.50, -1.0, True, True),
        (0.20, 0.50, 1.0, False, True),
        (0.02, 0.001, 1.0, False, False),  # a ratio of 20, and nothing has moved
        (0.20, 0.50, 0.0, True, True),  # no advantage counts as a push down
    ],
)
def test_what_is_dropped(p, q, advantage, tv, either):
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
def test_ref_kl_drops_what_fell_and_never_what_rose_and_reads_no_advantage(p, dropped):
    ref_T = torch.tensor([math.log(0.4)], dtype=torch.float64)
    terms = [ref_kl(inputs(p, 0.5, advantage, ref_logprobs_T=ref_T)) for advantage in (1.0, -1.0)]
    assert [bool(term.clipped_T) for term in terms] == [dropped, dropped]
    assert terms[0].values_T.item() == terms[1].values_T.item()
    assert terms[0].values_T.item() == pytest.approx(0.0 if dropped else -math.log(0.4 / p) * p / 0.5)


def test_ref_kl_is_silent_where_the_reference_agrees():
    same_T = torch.tensor([math.log(0.4)], dtype=torch.float64)
    assert bool(ref_kl(inputs(0.4, 0.5, 1.0, ref_logprobs_T=same_T)).silent_T)
    assert not bool(ref_kl(inputs(0.41, 0.5, 0.0, ref_logprobs_T=same_T)).silent_T)
