"""Sinks in every exchange of keys and values: output and gradients of the oracle's softmax with one more score."""

import pytest
import torch

from tests.helpers.attention_case import DOCUMENTS, SCALE, STRETCHES, plan, tensors
from tests.helpers.threads import axes, on_threads
from tests.oracles.attention import attention
from workbench.errors import ShardingError
from workbench.sharding.attention import gathered, sharded_attention
from workbench.sharding.attention.shard import AttentionShard
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan

HEADS = 4, 2
SINKS = torch.tensor([0.7, -1.3, 2.4, 0.1], dtype=torch.float64)
CASES = {
    "one_rank": ("contiguous", 1, "gathered", 1, None),
    "gathered": ("zigzag", 2, "gathered", 1, None),
    "ring_in_a_window": ("zigzag", 4, "ring", 1, 5),
    "ulysses": ("striped", 2, "ulysses", 2, None),
    "hybrid": ("document_zigzag", 4, "hybrid", 2, None),
}


def by_ranks(order, cp, algorithm, inner, window, heads=HEADS, sinks_H=SINKS):
    """Output, and gradients of query, key, value and sinks, of all ranks."""
    lay, lines = plan(order, cp), axes(cp, inner)

    def rank(number):
        axis, cp_inner, cp_outer = lines[number]
        shard = AttentionShard.make(
            lay, torch.tensor(DOCUMENTS), axis, algorithm=algorithm, kernel="plain", inner=cp_inner, outer=cp_outer
        )
        *leaves, d_out = (x[None, :, lay.positions(number)].requires_grad_() for x in tensors(*heads))
        sinks = sinks_H.clone().requires_grad_()
        out, _ = sharded_attention(None, *leaves, None, shard=shard, scaling=SCALE, sliding_window=window, s_aux=sinks)
        return (out.detach().transpose(1, 2), *torch.autograd.grad(out, [*leaves, sinks], d_out.transpose(1, 2)))

    *shares, sinks = zip(*on_threads(rank, cp), strict=True)
    whole = [lay.merge(torch.cat([x[0] for x in of], dim=1).movedim(1, 0)).movedim(0, 1) for of in shares]
    return *whole, torch.stack(sinks).sum(0)


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_the_oracle(name):
    window = CASES[name][-1]
    *leaves, d_out = (x.clone().requires_grad_() for x in (*tensors(*HEADS)[:3], SINKS, tensors(*HEADS)[3]))
    query, key, value, sinks = leaves
    out = attention(query, key, value, STRETCHES, scale=SCALE, window=window, sinks=sinks)
    expected = (out.detach(), *torch.autograd.grad(out, leaves, d_out))
    for what, found, right in zip(
        ("output", "query", "key", "value", "sinks"), by_ranks(*CASES[name]), expected, strict=True
    ):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12, msg=lambda text, w=what: f"{w}: {text}")


@pytest.mark.parametrize("name", ["ulysses", "hybrid"])
def test_each_part_of_the_heads_has_its_sinks(name, monkeypatch):
    more = {"heads": (8, 4), "sinks_H": torch.cat([SINKS, -2 * SINKS])}
    whole = by_ranks(*CASES[name], **more)
    monkeypatch.setattr(gathered, "PARTS_FROM_TOKENS", 1)
    for found, right in zip(by_ranks(*CASES[name], **more), whole, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)  # GEMMs of fewer heads: a CPU may round otherwise


def test_sinks_of_other_heads_and_a_mode_without_them_are_refused():
    query = torch.zeros(1, 2, 4, 8)
    lay = ShardPlan.make("contiguous", num_tokens=4, cp=1)
    shard = AttentionShard.make(lay, torch.zeros(4, dtype=torch.int64), Axis("cp"))
    with pytest.raises(ShardingError, match=r"sinks \[4\], and 2 query heads"):
        sharded_attention(None, query, query, query, None, shard=shard, s_aux=SINKS)
    object.__setattr__(shard, "attend", lambda *_: query)
    with pytest.raises(ShardingError, match="with s_aux"):
        sharded_attention(None, query, query, query, None, shard=shard, s_aux=SINKS[:2])
