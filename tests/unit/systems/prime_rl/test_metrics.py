"""prime-rl's numbers of documents, against manual values."""

import math

import pytest
import torch

from workbench.losses.build import build_loss
from workbench.losses.terms import LossInputs
from workbench.metrics.quantities import DocumentSlots
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import as_named_by
from workbench.systems.prime_rl.metrics import numbers, of_documents

POLICY = [0.9, 0.2, 0.5, 0.1, 0.5]
SAMPLER = [0.5, 0.5, 0.5, 0.5, 0.25]
ADVANTAGES = [1.0, -1.0, 1.0, 0.0, -1.0]
DOCUMENTS = [0, 0, 0, 1, 3]
"""Probabilities, advantages and documents of five tokens; document 2 has none that counts."""


def batch():
    policy_T, sampler_T = (torch.tensor(p, dtype=torch.float64).log() for p in (POLICY, SAMPLER))
    return LossInputs(
        policy_T,
        policy_T,
        torch.tensor(ADVANTAGES, dtype=torch.float64),
        sampler_T,
        torch.tensor([math.log(0.3)] * 5, dtype=torch.float64),
        document_ids_T=torch.tensor(DOCUMENTS),
    )


def k3(t):
    return POLICY[t] / SAMPLER[t] - 1 - math.log(POLICY[t] / SAMPLER[t])


def made(name, *, empty=True):
    spec, inputs = LossSpec(name=name), batch()
    term = build_loss(spec)(inputs)["policy"]
    result = of_documents(inputs, term, spec.surrogate.kind, 4, empty=empty)
    return {key: value_N.tolist() for key, value_N in result.items()}


def single(numerator, denominator):
    return torch.tensor(numerator / denominator, dtype=torch.float32).item()


def test_dropped_and_surviving_tokens_of_each_document():
    result = made("prime_rl")
    assert result["masked_mismatch_kl"] == pytest.approx([(k3(0) + k3(1)) / 2, k3(3), 0.0, 0.0])
    assert result["unmasked_mismatch_kl"] == pytest.approx([k3(2), 0.0, 0.0, k3(4)])
    assert result["is_masked"] == [single(2, 3), 1.0, 0.0, 0.0]
    assert result["is_masked_low"] == result["is_masked_high"] == [single(1, 3), 0.0, 0.0, 0.0]
    assert result["masked_advantage_positive"] == [0.5, 0.0, 0.0, 0.0]
    assert result["masked_advantage_negative"] == [0.5, 0.0, 0.0, 0.0]


def test_documents_in_which_nothing_counts_may_be_left_out():
    assert made("prime_rl", empty=False)["is_masked"] == [single(2, 3), 1.0, 0.0]


def test_symmetric_region_reference_and_imitation_have_their_own_names():
    assert set(made("ipo")) == {"masked_mismatch_kl", "unmasked_mismatch_kl", "is_masked"}
    assert made("ipo")["is_masked"] == [single(2, 3), 1.0, 0.0, 1.0]
    result = made("ref_kl")
    assert result["ref_kl/is_masked"] == [single(1, 3), 1.0, 0.0, 0.0]
    assert result["ref_kl"][1] == pytest.approx(math.log(0.3 / 0.1))
    assert made("sft") == {
        "nll": pytest.approx([-sum(math.log(p) for p in POLICY[:3]) / 3, -math.log(0.1), 0.0, -math.log(0.5)])
    }


def test_logged_values_are_means_over_all_documents():
    spec, inputs = LossSpec(name="prime_rl"), batch()
    metrics = as_named_by(
        "prime_rl", inputs, inputs.counts_T, terms=build_loss(spec)(inputs), loss_spec=spec, slots=DocumentSlots(0, 4)
    )
    assert set(metrics) == {number.name for number in numbers("dppo_tv")}
    assert metrics["masked_mismatch_kl"].finish() == pytest.approx(((k3(0) + k3(1)) / 2 + k3(3)) / 4)
    assert metrics["is_masked"].finish() == pytest.approx((single(2, 3) + 1) / 4)
