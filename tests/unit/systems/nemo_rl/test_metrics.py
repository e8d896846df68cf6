"""NeMo-RL's names where they are not those of a clipped ratio of tokens, and metrics of its other losses."""

import math

import pytest
import torch

from workbench.losses.auxiliary import value_loss
from workbench.losses.build import build_loss, prepare_inputs
from workbench.losses.preference import pair_losses
from workbench.losses.terms import LossInputs, Term
from workbench.metrics.quantities import DocumentSlots
from workbench.reduction.denominators import GivenCounts
from workbench.reduction.partial import Scalar
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import as_named_by, settings_of
from workbench.systems.nemo_rl.metrics import of_pairs, of_the_loss, of_values

ROWS = [[0.3, -0.1, 0.5], [-0.4], [0.2, 0.1]]
"""Log ratios policy / old of three documents."""


def numbers(spec, given=None, mismatch=0.1):
    """The rows under NeMo-RL's names."""
    gaps_T = torch.tensor([d for row in ROWS for d in row], dtype=torch.float64)
    ids_T = torch.tensor([n for n, row in enumerate(ROWS) for _ in row])
    policy_T = torch.full_like(gaps_T, -1.5)
    old_T = policy_T - gaps_T
    inputs = LossInputs(
        policy_T,
        old_T,
        torch.ones_like(gaps_T),
        old_T - mismatch * (1 + ids_T),
        loss_mask_T=torch.ones_like(ids_T, dtype=torch.bool),
        document_ids_T=ids_T,
    )
    slots = DocumentSlots(0, len(ROWS))
    settings = settings_of(spec, slots)._replace(given=given or GivenCounts())
    inputs = prepare_inputs(inputs, spec)
    metrics = as_named_by(
        "nemo_rl",
        inputs,
        inputs.counts_T,
        terms=build_loss(spec)(inputs),
        loss_spec=spec,
        slots=slots,
        settings=settings,
    )
    return {name: value.finish() for name, value in metrics.items()}


def test_without_a_ratio_its_name_stands_for_the_log_probability():
    metrics = numbers(LossSpec(name="reinforce"))
    for name in ("probs_ratio", "probs_ratio_clamped"):
        assert [metrics[name], metrics[f"{name}_min"], metrics[f"{name}_max"]] == pytest.approx([-1.5] * 3)


def test_a_ratio_by_decree_is_1():
    metrics = numbers(LossSpec(name="on_policy", old_policy="current"))
    assert {metrics[name] for name in ("probs_ratio_min", "probs_ratio_clamped_max")} == {1.0}
    assert metrics["token_mult_prob_error"] == pytest.approx(
        sum(math.exp(abs(d + 0.1 * (1 + n))) for n, row in enumerate(ROWS) for d in row) / (6 + 1e-8)
    )


def test_counts_of_the_step_divide_where_they_are_given():
    here, there = numbers(LossSpec()), numbers(LossSpec(), GivenCounts(tokens=60.0))
    assert there["probs_ratio"] == pytest.approx(here["probs_ratio"] / 10)
    assert there["probs_ratio_max"] == here["probs_ratio_max"]


def test_an_epsilon_of_lengths_is_under_the_ratio_of_a_document():
    metrics = numbers(LossSpec(name="gspo", compat={"scaling": {"mean_epsilon": 1.0}}), GivenCounts(tokens=12.0))
    ratios = [math.exp(sum(row) / (len(row) + 1)) for row in ROWS]
    assert metrics["probs_ratio"] == pytest.approx(sum(r * len(row) for r, row in zip(ratios, ROWS, strict=True)) / 12)
    assert metrics["probs_ratio_min"] == pytest.approx(min(ratios))


def test_out_of_bounds_is_a_share_of_tokens_or_of_gated_documents():
    tis = LossSpec(correction={"kind": "tis", "ratio_high": 1.15})
    assert numbers(tis)["is_oob_ratio"] == pytest.approx(3 / 6)
    gate = LossSpec(correction={"kind": "geometric_gate", "gate_low": 0.9, "gate_high": 1.15})
    assert numbers(gate)["is_oob_ratio"] == pytest.approx(2 / 3)
    assert numbers(gate, GivenCounts(documents=8.0))["is_oob_ratio"] == pytest.approx(2 / 8)
    assert "is_oob_ratio" not in numbers(LossSpec())


def test_the_weight_of_a_product_is_one_a_document():
    spec = LossSpec(name="gspo", correction={"kind": "sequence_tis_sum", "ratio_high": 1.5})
    weights = [min(1.5, math.exp(0.1 * (1 + n) * len(row))) for n, row in enumerate(ROWS)]
    assert numbers(spec)["sampling_importance_ratio"] == pytest.approx(sum(weights) / 3)
    assert numbers(spec, GivenCounts(documents=6.0))["sampling_importance_ratio"] == pytest.approx(sum(weights) / 6)


def scalar(value):
    return Scalar(torch.tensor(value, dtype=torch.float64, requires_grad=True), frozenset())


def test_terms_of_the_loss_are_reported_without_their_coefficients():
    empty_T = torch.zeros(0)
    terms = {"policy": Term(empty_T), "kl": Term(empty_T, 0.1), "positive_nll": Term(empty_T, 0.5)}
    scalars = {"policy": scalar(1.0), "kl": scalar(0.02), "positive_nll": scalar(0.3), "total": scalar(1.32)}
    assert of_the_loss(terms, scalars) == pytest.approx({"loss": 1.32, "kl_penalty": 0.2, "positive_nll_loss": 0.6})
    assert of_the_loss({"policy": Term(empty_T)}, {"total": scalar(1.0)}) == {
        "loss": 1.0,
        "kl_penalty": 0.0,
        "positive_nll_loss": 0.0,
    }


@pytest.mark.parametrize("weight", [0.5, 0.0])
def test_pairs_are_weighed_by_their_chosen_and_rejected_rows(weight):
    rewards_N = torch.tensor([2.0, 1.0, -1.0, 1.0], dtype=torch.float64, requires_grad=True)
    chosen_P, rejected_P = torch.tensor([0.5, 0.25], dtype=torch.float64), torch.tensor([0.5, 0.0]).double()
    terms = {
        "preference": Term(pair_losses(rewards_N[::2], rewards_N[1::2])),
        "sft": Term(torch.tensor([-3.0, -4.0], dtype=torch.float64), -weight),
    }
    result = of_pairs(terms, {"total": scalar(7.0)}, rewards_N, chosen_P, rejected_P)
    likelihoods = 0.5 * math.log1p(math.exp(-1)) + 0.25 * math.log1p(math.exp(2))
    assert result == pytest.approx(
        {
            "loss": 7.0,
            "accuracy": 0.5,
            "rewards_chosen_mean": 0.75,
            "rewards_rejected_mean": 0.5,
            "preference_loss": likelihoods,
            "sft_loss": 2.5 if weight else 0.0,
        }
    )


def test_numbers_of_a_critic_are_of_trained_tokens_over_those_of_the_batch():
    values_T, returns_T = torch.tensor([1.0, -2.0, 9.0]), torch.tensor([0.5, 1.0, math.nan])
    mask_T = torch.tensor([True, True, False])
    term = value_loss(values_T, returns_T, mask_T, old_values_T=torch.tensor([0.0, -2.0, 0.0]), clip=0.1)
    assert of_values(term, values_T, returns_T, mask_T, 4.0) == pytest.approx(
        {
            "vf_clipfrac": 0.0,
            "returns_mean": 1.5 / 4,
            "values_mean": -1 / 4,
            "values_min": -2.0,
            "values_max": 1.0,
            "returns_sq_mean": 1.25 / 4,
            "residual_sq_mean": 9.25 / 4,
        }
    )
    clipped = value_loss(values_T, returns_T, mask_T, old_values_T=torch.tensor([2.0, -2.0, 0.0]), clip=0.1)
    assert of_values(clipped, values_T, returns_T, mask_T, None)["vf_clipfrac"] == pytest.approx(1 / 2)
    nothing = of_values(term, values_T, returns_T, torch.zeros(3, dtype=torch.bool), 4.0)
    assert (nothing["values_min"], nothing["values_max"]) == (0.0, 0.0)
