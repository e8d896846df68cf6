"""Exact attention matches attention, and marks non-finite values."""

import math
from types import SimpleNamespace

import pytest
import torch

from workbench.reproducible import attention
from workbench.reproducible.blocks import RowBlocks
from workbench.reproducible.kernels import plain
from workbench.reproducible.modules import Pieces
from workbench.sharding.attention import AttentionShard, sharded_attention
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan
from workbench.sharding.simulated import simulate

DOCUMENTS = torch.tensor([0] * 7 + [1] * 6 + [-1] * 3)


def drawn():
    draw = torch.Generator().manual_seed(3)
    query, key, value, d_out = (torch.randn(1, heads, 16, 8, generator=draw) for heads in (4, 2, 2, 4))
    return query, key, value, d_out


def attended(mesh, pieces, window, spoil=None):
    """Output, and the gradients of query, key and value, in this rank's order, with its places."""
    plan = ShardPlan.make("zigzag", num_tokens=16, cp=mesh["cp"].size)
    blocks = RowBlocks.make(AttentionShard.make(plan, DOCUMENTS, mesh["cp"]), 4)
    places = plan.positions(mesh["cp"].rank)
    *inputs, d_out = (one[:, :, places].clone() for one in drawn())
    if spoil is not None:
        d_out[places.expand(1, 4, -1) == 6] = spoil
    for one in inputs:
        one.requires_grad_()
    out = attention.attend(*inputs, blocks, Pieces(plain, 4, pieces, Axis("tp")), window, 0.3)
    out.backward(d_out)
    return places, [out.detach(), *(one.grad for one in inputs)]


def whole(found):
    order = torch.cat([places for places, _ in found]).argsort()
    return [torch.cat(parts, 2)[:, :, order] for parts in zip(*(tensors for _, tensors in found), strict=True)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("pieces", [1, 2])
def test_it_is_attention_inside_documents_the_same_bits_over_any_ranks(window, pieces):
    result = whole(simulate(lambda mesh: attended(mesh, pieces, window), cp=2))
    *inputs, d_out = drawn()
    for one in inputs:
        one.requires_grad_()
    shard = AttentionShard(
        torch.arange(16)[None, None], torch.unique_consecutive(DOCUMENTS, return_inverse=True)[1], kernel="plain"
    )
    out = sharded_attention(None, *inputs, None, shard=shard, scaling=0.3, sliding_window=window)[0].transpose(1, 2)
    out.backward(d_out)
    for actual, expected in zip(result, [out.detach(), *(one.grad for one in inputs)], strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)
    alone = whole(simulate(lambda mesh: attended(mesh, pieces, window)))
    assert all(torch.equal(actual, expected) for actual, expected in zip(result, alone, strict=True))


@pytest.mark.parametrize("spoil", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("cp", [1, 2])
def test_a_gradient_that_is_not_finite_comes_out_so_and_not_as_a_number(spoil, cp):
    _, _, d_key, d_value = whole(simulate(lambda mesh: attended(mesh, 1, None, spoil), cp=cp))
    assert not d_key.isfinite().any()
    assert not d_value.isfinite().any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_infinite_partial_spoils_its_head_and_no_other(bad):
    blocks = RowBlocks.make(
        AttentionShard.make(ShardPlan.make("contiguous", num_tokens=16, cp=1), DOCUMENTS, Axis("cp")), 4
    )
    spans = blocks.spans(None)
    partials = [(torch.ones(span.seen.shape[1], 2, 8), torch.ones(span.seen.shape[1], 2, 8)) for span in spans]
    partials[2][1][3, 1, 5] = bad
    d_key, d_value = attention._summed(SimpleNamespace(blocks=blocks, spans=spans, kernels=plain), partials, 16)
    assert d_key.isfinite().all()
    assert d_value[:, 0].isfinite().all()
    assert not d_value[:, 1].isfinite().any()
    assert d_key[:, 0, 0].tolist() == [
        float(sum(span.keys.start <= at < span.keys.stop for span in spans)) for at in range(16)
    ]
