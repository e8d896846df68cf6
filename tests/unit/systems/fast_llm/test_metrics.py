"""Fast-LLM's names, against manual values: sums of document means over the documents of the batch, empty ones too."""

import math

import pytest
import torch

from workbench.losses.terms import LossInputs
from workbench.metrics.quantities import DocumentSlots
from workbench.specs.losses import LossSpec
from workbench.systems.metrics import as_named_by, settings_of

MASK = torch.tensor([True, True, True, False, False])
SLOTS = DocumentSlots(0, 4)


def named(documents=4, **settings):
    spec, zero = LossSpec(**settings), torch.zeros(5, dtype=torch.float64)
    inputs = LossInputs(
        torch.tensor([0.5, -0.1, 0.4, 9.0, 9.0], dtype=torch.float64) - 1,
        zero - 1,
        torch.tensor([2.0, 2.0, -1.0, 9.0, 9.0], dtype=torch.float64),
        entropy_T=zero + 3,
        loss_mask_T=MASK,
        document_ids_T=torch.tensor([0, 0, 1, 1, 2]),
    )
    values = as_named_by(
        "fast_llm",
        inputs,
        MASK,
        loss_spec=spec,
        slots=SLOTS,
        settings=settings_of(spec, SLOTS)._replace(num_documents=documents),
    )
    return {name: value.finish() for name, value in values.items()}


def test_means_of_documents_are_divided_by_all_documents_of_the_batch():
    metrics = named()
    assert metrics["new_logprobs"] == pytest.approx((-0.8 - 0.6) / 4)
    assert (metrics["advantage"], metrics["entropy"]) == (0.25, 1.5)
    assert (metrics["max_advantage"], metrics["min_advantage"], metrics["num_tokens"]) == (2, -1, 3)
    assert metrics["clipped_ratio_fraction"] == pytest.approx((0.5 + 1) / 4)
    assert named(1)["advantage"] == 1


def test_sums_of_ratios_are_of_tokens_or_of_documents_and_never_divided():
    ratios = [math.exp(0.5), math.exp(-0.1), math.exp(0.4)]
    assert named()["ratio_new_old_sum"] == pytest.approx(sum(ratios))
    assert "num_segments" not in named()
    whole = [math.exp(0.2), math.exp(0.4)]
    metrics = named(name="gspo", surrogate={"clip_high": 0.3})
    assert metrics["ratio_new_old_sum"] == pytest.approx(sum(whole))
    assert metrics["ratio_new_old_squared_sum"] == pytest.approx(sum(r * r for r in whole))
    assert metrics["ratio_new_old"] == pytest.approx(sum(whole) / 4)
    assert metrics["kl_new_old"] == pytest.approx((whole[0] - 1 - 0.2 + whole[1] - 1 - 0.4) / 4)
    assert (metrics["clipped_ratio_fraction"], metrics["num_segments"]) == (0.25, 2)
