"""PipelineRL's names, against manual values: sums over documents of token means."""

import math

import pytest
import torch

from workbench.losses.terms import LossInputs
from workbench.metrics.quantities import ClipRule, DocumentSlots
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import as_named_by, settings_of
from workbench.systems.pipelinerl.metrics import clipped_documents, token_weight_numbers

MASK = torch.tensor([True, True, False, True])
IDS = torch.tensor([0, 0, 0, 1])
SLOTS = DocumentSlots(0, 2)


def reals(*values):
    return torch.tensor(values, dtype=torch.float64)


INPUTS = LossInputs(
    reals(-1, -2, 9, -3),
    reals(-1.5, -2, 9, -4),
    reals(1, 1, 9, -2),
    ref_logprobs_T=reals(-1, -2.6, 9, -3.2),
    rewards_T=reals(5, 5, 9, 7),
    loss_mask_T=MASK,
    document_ids_T=IDS,
)


def named(documents=1, **settings):
    spec = LossSpec(**settings)
    values = as_named_by(
        "pipelinerl",
        INPUTS,
        MASK,
        loss_spec=spec,
        slots=SLOTS,
        settings=settings_of(spec, SLOTS)._replace(num_documents=documents),
    )
    return {name: value.finish() for name, value in values.items()}


def test_means_of_documents_are_added_and_extremes_are_of_tokens():
    metrics = named()
    assert metrics["reward"] == 12
    assert (metrics["max_reward"], metrics["min_reward"]) == (7, 5)
    assert (metrics["advantage"], metrics["max_advantage"]) == (-1, 1)
    assert metrics["new_logprobs"] == -1.5 - 3
    assert metrics["mean_abs_log_ratio_new_old"] == 0.25 + 1
    assert metrics["ratio_new_old"] == pytest.approx((math.exp(0.5) + 1) / 2 + math.exp(1))
    assert metrics["ratio_new_old_sum"] == pytest.approx(math.exp(0.5) + 1 + math.exp(1))
    assert metrics["clamp_log_ratio_new_old_indicator"] == 0.5 + 1
    assert metrics["num_output_tokens_sum"] == 3
    assert named(2)["reward"] == 6


def test_the_log_ratio_of_the_kl_is_clamped():
    metrics = named(kl={"coefficient": 0.1, "input_clamp": 0.4})
    assert metrics["max_kl"] == pytest.approx(math.exp(-0.4) - 1 + 0.4, rel=1e-13)
    assert metrics["clamp_log_ratio_ref_new_indicator"] == 0.5
    assert "clamp_log_ratio_ref_new_indicator" not in named()


def test_reinforce_shows_the_ratio_as_it_is_truncated():
    metrics = named(surrogate={"kind": "cispo", "clip_high": 0.2})
    assert metrics["ratio_new_old_sum"] == pytest.approx(1.2 + 1 + 1.2)
    assert metrics["clamp_log_ratio_new_old_indicator"] == 1.5


def test_a_ratio_of_documents_lies_outside_with_all_its_tokens_or_none():
    gspo = {"name": "gspo", "surrogate": {"clip_low": 0.3, "clip_high": 0.3}}
    assert named(**gspo)["clamp_log_ratio_new_old_indicator"] == 1
    ratio = reals(1.2, 1.2, 1.2, 2.7)
    assert clipped_documents(ratio, INPUTS, reals(1, 1, 0, 1), ClipRule(0.7, 1.3)) == 1
    assert clipped_documents(ratio, INPUTS, reals(1, 1, 0, 0), ClipRule(0.7, 1.3)) == 0


def test_numbers_of_weights():
    result = token_weight_numbers(INPUTS, reals(0.5, 0.5, 9, 0.2))
    assert result == {"token_weight": 0.7, "max_token_weight": 0.5, "min_token_weight": 0.2}
    nothing = LossInputs(reals(0), reals(0), reals(0), loss_mask_T=torch.tensor([False]))
    assert token_weight_numbers(nothing, reals(1)) == {}
