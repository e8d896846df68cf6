"""A loss over a grid of ratios."""

import pytest
import torch

from workbench.errors import SpecError
from workbench.losses import ratio_curves
from workbench.specs.losses import CORRECTIONS, PRESETS, LossSpec

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
def test_coefficients_by_hand(settings, advantage, expected):
    _, coefficient_T = ratio_curves(LossSpec(**settings), torch.tensor([0.5, 1.0, 1.5]), advantage)
    assert coefficient_T.tolist() == pytest.approx(expected, abs=1e-12)


def test_losses_by_hand():
    loss_T, _ = ratio_curves(LossSpec(name="dapo"), torch.tensor([0.5, 1.0, 1.5]), 2.0)
    assert loss_T.tolist() == pytest.approx([-1.0, -2.0, -2.56])


def test_a_trust_region_in_probability_needs_to_know_where_the_token_starts():
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
def test_what_has_no_curve_is_refused(settings, ratios, more, words):
    with pytest.raises(SpecError, match=words):
        ratio_curves(LossSpec(**settings), torch.tensor(ratios), **more)


def test_an_empty_grid():
    assert [one.shape for one in ratio_curves(LossSpec(), torch.zeros(0))] == [(0,), (0,)]


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", ["grpo", "gspo", "clip_cov"])
def test_every_correction_has_a_curve_and_changes_nothing_where_sampler_and_old_policy_agree(name, correction):
    spec = LossSpec(name=name, correction={"kind": correction})
    if correction == "opsm":
        assert ratio_curves(spec, RATIOS, 1.0)[1].isfinite().all()  # it looks at the policy itself
        return
    plain = ratio_curves(LossSpec(name=name), RATIOS, -1.5)
    for found_T, plain_T in zip(ratio_curves(spec, RATIOS, -1.5), plain, strict=True):
        torch.testing.assert_close(found_T, plain_T, rtol=1e-12, atol=0)
