"""A decoder under torch's attention: the stock logits, and no mask from positions that jump."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from workbench.errors import SpecError
from workbench.policy.attention import TORCH, torch_attention, with_torch_attention
from workbench.policy.decoder import tiny_qwen3

IDS = torch.randint(0, 19, (2, 12), generator=torch.Generator().manual_seed(0))


def logits(model, positions=None):
    with torch.no_grad():
        return model(input_ids=IDS, position_ids=positions, use_cache=False).logits


def test_the_logits_are_the_stock_ones():
    stock = logits(tiny_qwen3(19))
    model = with_torch_attention(tiny_qwen3(19))
    assert model.config._attn_implementation == TORCH
    torch.testing.assert_close(logits(model), stock, rtol=1e-5, atol=1e-5)


class Masks(TorchFunctionMode):
    """The mask of every attention that torch computes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, arguments=(), more=None):
        if function is torch.nn.functional.scaled_dot_product_attention:
            self.seen.append((more or {}).get("attn_mask"))
        return function(*arguments, **(more or {}))


def test_positions_that_jump_make_no_mask():
    """A rank of torch's ring has head and tail; under "sdpa" that looks like two packed documents."""
    jumping = torch.tensor([[0, 1, 2, 3, 4, 5, 18, 19, 20, 21, 22, 23]]).expand(2, 12)
    with Masks() as masks:
        logits(with_torch_attention(tiny_qwen3(19)), jumping)
    assert masks.seen == [None] * 3
    stock = tiny_qwen3(19)
    stock.set_attn_implementation("sdpa")
    with Masks() as masks:
        logits(stock, jumping)
    assert any(mask is not None for mask in masks.seen)


@pytest.mark.parametrize(
    "more", [{"attention_mask": torch.ones(1, 1, 4, 4)}, {"dropout": 0.1}, {"sliding_window": 3}, {"softcap": 30.0}]
)
def test_unsupported_options_are_refused(more):
    part = torch.zeros(1, 2, 4, 8)
    with pytest.raises(SpecError, match=f"torch's attention with {next(iter(more))}"):
        torch_attention(None, part, part, part, **more)
