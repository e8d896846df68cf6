"""Casts of somebody's function are no rounding, and nothing else of it changes."""

import pytest
import torch

from workbench.losses.terms import Term
from workbench.prove import prove
from workbench.prove.exact import InFloat64

THIRD = torch.tensor([1 / 3], dtype=torch.float64)


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: x.half(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.bfloat16),
        lambda x: x.sum(dtype=torch.float32)[None],
        lambda x: x.type(torch.float32),
        lambda x: torch.tensor([1 / 3]),
        lambda x: torch.full((1,), 1 / 3),
        lambda x: torch.zeros(1) + x,
    ],
)
def test_a_cast_keeps_every_digit(cast):
    with InFloat64():
        found = cast(THIRD)
    assert found.dtype is torch.float64
    assert torch.equal(found, THIRD)


def test_what_is_no_float_stays():
    with InFloat64():
        assert torch.zeros(2, dtype=torch.int64).dtype is torch.int64
        assert torch.arange(3).dtype is torch.int64
        assert (THIRD > 0).long().dtype is torch.int64
    assert THIRD.float().dtype is torch.float32, "outside of it nothing changes"


def casting(batch, outputs, totals):
    """Right, in float32."""
    mask_T = batch.loss_mask_T.float()
    log_ratio_T = (outputs.policy_logprobs_T.float() - batch.old_logprobs_T.float()) * mask_T
    values_T = -log_ratio_T.exp() * batch.advantages_T.float()
    sums_N = torch.zeros(totals.all_documents + 1).index_add(0, batch.document_ids_T + 1, values_T * mask_T)
    return sums_N.sum() / totals.tokens


def casting_tokens(inputs):
    return {"policy": Term(-inputs.log_ratio().float().exp() * inputs.counted_advantages_T.float())}


@pytest.mark.parametrize(("loss", "engine"), [(casting, "sum"), (casting_tokens, None)])
def test_a_loss_that_casts_is_not_refuted(loss, engine):
    proof = prove(loss, engine=engine, invariants=["dp_split", "cp_degree", "padding"], rounds=1, budget_s=60)
    assert proof.ok, proof
