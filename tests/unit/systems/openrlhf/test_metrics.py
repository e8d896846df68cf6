"""OpenRLHF's names, against manual values."""

import math

import pytest
import torch

from workbench.losses.build import build_loss
from workbench.losses.terms import LossInputs
from workbench.metrics.quantities import DocumentSlots
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import as_named_by
from workbench.systems.openrlhf.metrics import of_pairs

GAPS = [0.5, -0.5, 0.1, 0.5, -0.5, 2.0]
ADVANTAGES = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0]


def numbers(spec):
    gaps_T = torch.tensor(GAPS, dtype=torch.float64)
    old_T = torch.full_like(gaps_T, -3.0)
    inputs = LossInputs(
        old_T + gaps_T,
        old_T,
        torch.tensor(ADVANTAGES, dtype=torch.float64),
        old_T + 0.2,
        document_ids_T=torch.tensor([0, 0, 0, 1, 1, 1]),
    )
    metrics = as_named_by(
        "openrlhf", inputs, inputs.counts_T, terms=build_loss(spec)(inputs), loss_spec=spec, slots=DocumentSlots(0, 2)
    )
    return {name: value.finish() for name, value in metrics.items()}


def test_the_clip_looks_at_the_sign_and_not_at_the_dual_bound():
    for dual in (None, 3.0):
        metrics = numbers(LossSpec(surrogate={"dual_clip": dual}))
        assert metrics == pytest.approx({"clip_ratio": 2 / 6, "ppo_kl": -sum(GAPS) / 6})


def test_a_ratio_of_documents_clips_all_of_their_tokens():
    spec = LossSpec(name="gspo", surrogate={"clip_low": 0.01, "clip_high": 0.01})
    assert numbers(spec)["clip_ratio"] == pytest.approx(3 / 6)


def test_the_samplers_drift_is_reported_with_a_correction():
    assert numbers(LossSpec(correction={"kind": "tis"}))["vllm_kl"] == pytest.approx(0.2)


def test_implied_rewards_are_means_over_pairs_times_beta():
    result = of_pairs(torch.tensor([1.0, 3.0]), torch.tensor([-1.0, math.e]), 0.5)
    assert result == pytest.approx({"chosen_reward_mean": 1.0, "rejected_reward_mean": (math.e - 1) / 4})
