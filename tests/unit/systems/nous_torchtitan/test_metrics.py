"""The fork's numbers of a step, against manual values: means over rows and over tokens, and untrained positions."""

import math
from dataclasses import replace

import pytest
import torch

from workbench.losses.build import build_loss, surrogate_ratio
from workbench.losses.document_sums import DocumentSums
from workbench.losses.terms import LossInputs
from workbench.metrics.quantities import DocumentSlots
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import as_named_by
from workbench.systems.nous_torchtitan.metrics import LEFT_OUT, Step, mean_logit, step_metrics

MASK = torch.tensor([True, True, True, False])
ROWS = torch.tensor([0, 0, 1, 1])


def reals(*values):
    return torch.tensor(values, dtype=torch.float64)


def numbers(spec=None, mask=MASK, sampler=None, advantages=(1, 1, -1, -1), **more):
    spec = spec or LossSpec()
    drawn = None if sampler is None else torch.where(mask, sampler, 1.0)
    inputs = LossInputs(
        reals(-1, -2, -3, -4),
        reals(-1.5, -2, -2.5, -4),
        reals(*advantages),
        drawn,
        reals(-1, -2.5, -3, -9),
        loss_mask_T=torch.ones(4, dtype=torch.bool),
        document_ids_T=ROWS,
        sums=DocumentSums(ROWS, mask),
    )
    return step_metrics(
        Step(
            spec,
            inputs,
            build_loss(spec)(inputs),
            surrogate_ratio(inputs, spec),
            mask,
            ROWS,
            sampler,
            reals(1, 2, 3, 4),
            **more,
        )
    )


def test_means_over_rows_and_over_tokens():
    metrics = numbers()
    assert metrics["loss_metrics/global_logp"] == (-1.5 - 3) / 2
    assert metrics["loss_metrics/global_logits_mean"] == 2
    assert metrics["loss_metrics/global_ratio"] == pytest.approx(((math.exp(0.5) + 1) / 2 + math.exp(-0.5)) / 2)
    assert (metrics["logp_dist/min"], metrics["logp_dist/max"]) == (-3, -1)
    assert metrics["loss_metrics/margin"] == pytest.approx((0 + 0.5 + 0) / 3)
    assert metrics["loss_metrics/pos_ref_logp"] == -1.75
    assert metrics["loss_metrics/neg_ref_logp"] == 0.0  # one token is too few
    assert metrics["loss_metrics/kl_div_est"] == pytest.approx((math.exp(-0.5) - 0.5) / 3)


def test_positions_that_do_not_train_count_where_the_fork_counts_them():
    metrics = numbers()
    assert metrics["loss_metrics/global_advantages"] == 0
    assert (metrics["loss_metrics/global_pos_reward"], metrics["loss_metrics/global_total_neg"]) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("advantages", "many_good", "many_bad"),
    [
        ((1, 1, -1, -1), 1.0, 1.0),
        ((1, -1, -1, 0), 0.0, 1.0),
        ((1, 1, 1, -1), 1.0, 0.0),
        ((1, 1, 1, 1), 1.0, 0.0),
        ((0, 0, 0, 0), 0.0, 1.0),
    ],
)
def test_a_total_reports_if_several_tokens_have_the_sign(advantages, many_good, many_bad):
    metrics = numbers(advantages=advantages)
    assert (metrics["loss_metrics/global_total_pos"], metrics["loss_metrics/global_total_neg"]) == (many_good, many_bad)


def test_the_clip_looks_at_the_sign_and_an_advantage_of_0_is_negative():
    metrics = numbers(LossSpec(surrogate={"clip_low": 0.2, "clip_high": 0.2}))
    assert metrics["loss_metrics/global_clip_ratio"] == pytest.approx(2 / 3)
    assert metrics["loss_metrics/global_clip_ratio_pos"] == pytest.approx(1 / 3)
    on_policy = numbers(on_policy=True)
    assert "loss_metrics/global_clip_ratio" not in on_policy
    assert on_policy["raw_ratio"] == pytest.approx((math.exp(0.5) + 1 + math.exp(-0.5)) / 3)


def test_unlikely_tokens_are_excluded_from_threshold_metrics():
    metrics = numbers(logprob_floor=-1.5)
    assert metrics["logp_dist/threshold_filter_ratio"] == pytest.approx(2 / 3)
    assert metrics["loss_metrics/global_logits_mean"] == 1
    assert math.isnan(metrics["loss_metrics/global_ratio"])  # the second row has none left
    assert metrics["loss_metrics/global_logp"] == -2.25
    assert numbers(logprob_floor=0.0)["logp_dist/mean"] == 0.0


def test_a_row_without_trained_tokens_makes_row_means_undefined():
    metrics = numbers(mask=torch.tensor([True, True, False, False]))
    assert math.isnan(metrics["loss_metrics/global_logp"])
    assert math.isnan(metrics["loss_metrics/global_pos_logp"])
    assert metrics["loss_metrics/global_offp_logp"] == -1.5


def test_weights_of_the_sampler():
    sampler = reals(-2, -2, -2.4, 1)
    token = LossSpec(
        correction={"ratio": "token", "ratio_low": 0.8, "ratio_high": 1.2, "outside": "zero", "unsampled": "drop"}
    )
    metrics = numbers(token, sampler=sampler)
    assert metrics["mismatch/inf_logratio"] == pytest.approx((0.5 + 0 - 0.1 - 5) / 4)
    assert metrics["inflogp_dist/importance_ratio"] == pytest.approx((0 + 1 + math.exp(-0.1)) / 3)
    assert metrics["mismatch/rollout_is_masked_fraction"] == pytest.approx(1 / 3)
    assert metrics["mismatch/rollout_is_seq_masked_fraction"] == 0.5
    for ratio, expected in (("document_sum", (0.5 - 0.1) / 2), ("document_mean", (0.25 - 0.1) / 2)):
        spec = LossSpec(correction={"ratio": ratio, "ratio_high": 1.2, "unsampled": "drop"})
        assert numbers(spec, sampler=sampler)["mismatch/inf_logratio"] == pytest.approx(expected)
    measured = numbers(sampler=sampler)
    assert measured["inflogp_dist/importance_ratio"] == 1
    assert "mismatch/inf_logratio" not in measured


def test_the_mean_logit_is_over_the_vocabulary():
    assert mean_logit(reals(1, 3).reshape(1, 2)).tolist() == [2.0]


def test_a_step_in_any_layout_reports_the_same():
    """If every row trains and no position is excluded by its probability, both are the same numbers."""
    spec = LossSpec(surrogate={"clip_low": 0.2, "clip_high": 0.2})
    inputs = LossInputs(
        reals(-1, -2, -3, -4),
        reals(-1.5, -2, -2.5, -4),
        reals(1, 0, -1, -1),
        reals(-1, -2, -1, -4),
        reals(-1, -2.5, -3, -9),
        loss_mask_T=MASK,
        document_ids_T=ROWS,
    )
    results = {
        name: value.finish()
        for name, value in as_named_by(
            "nous_torchtitan", inputs, MASK, loss_spec=spec, slots=DocumentSlots(0, 2)
        ).items()
    }
    everywhere = replace(inputs, loss_mask_T=torch.ones(4, dtype=torch.bool), sums=DocumentSums(ROWS, MASK))
    expected = step_metrics(
        Step(
            spec,
            everywhere,
            build_loss(spec)(everywhere),
            surrogate_ratio(everywhere, spec),
            MASK,
            ROWS,
            reals(-1, -2, -1, -4),
            reals(1, 2, 3, 4),
        )
    )
    assert results.keys() <= expected.keys()
    assert len(results) == 14
    for name, value in results.items():
        assert value == pytest.approx(expected[name], rel=1e-12), name
    of_a_correction = {"inflogp_dist/importance_ratio"}
    assert expected.keys() <= results.keys() | LEFT_OUT.keys() | of_a_correction


def test_a_row_without_tokens_is_omitted_where_the_fork_reports_nan():
    mask = torch.tensor([True, True, False, False])
    zeros = reals(0, 0, 0, 0)
    inputs = LossInputs(reals(-1, -2, -3, -4), zeros, zeros, loss_mask_T=mask, document_ids_T=ROWS)
    metrics = as_named_by("nous_torchtitan", inputs, mask, slots=DocumentSlots(0, 2))
    assert metrics["loss_metrics/global_logp"].finish() == -1.5
    assert math.isnan(numbers(mask=mask)["loss_metrics/global_logp"])
    assert "NaN" in LEFT_OUT["loss_metrics/global_logp"]


def test_a_kl_that_the_fork_does_not_have_is_omitted():
    logprobs = reals(-1, -2, -3, -4)
    inputs = LossInputs(logprobs, logprobs, logprobs, ref_logprobs_T=logprobs, document_ids_T=ROWS)
    named = {
        estimator: as_named_by("nous_torchtitan", inputs, MASK, loss_spec=LossSpec(kl={"estimator": estimator}))
        for estimator in ("k3", "squared")
    }
    assert named["k3"].keys() - named["squared"].keys() == {"loss_metrics/kl_div_est"}
