import pytest
import torch

from workbench.errors import ShardingError
from workbench.sharding.attention import AttentionShard, gathered_attention
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan


def naive(q, k, v, ids, scale):
    out = torch.zeros_like(q)
    share = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        for t in range(q.shape[2]):
            seen = [s for s in range(t + 1) if ids[s] == ids[t]]
            p = torch.softmax(torch.stack([q[0, head, t] @ k[0, head // share, s] * scale for s in seen]), 0)
            out[0, head, t] = sum(w * v[0, head // share, s] for w, s in zip(p, seen, strict=True))
    return out.transpose(1, 2)


def test_documents_do_not_see_each_other_and_padding_has_no_empty_row():
    torch.manual_seed(0)
    ids = torch.tensor([0, 0, 0, 1, 2, 2, -1, -1])
    q, k, v = (torch.randn(1, heads, 8, 4, dtype=torch.float64) for heads in (4, 2, 2))
    shard = AttentionShard.make(ShardPlan.make("contiguous", num_tokens=8, cp=1), ids, Axis("cp"))
    actual, _ = gathered_attention(None, q, k, v, None, shard=shard, scaling=0.3)
    torch.testing.assert_close(actual, naive(q, k, v, ids, 0.3), rtol=0, atol=1e-14)
    assert torch.isfinite(actual).all()


def test_zigzag_shard_masks_by_global_position_not_by_local_row():
    ids = torch.zeros(8, dtype=torch.int64)
    plan = ShardPlan.make("zigzag", num_tokens=8, cp=2)
    shard = AttentionShard.make(plan, ids, Axis("cp", 2, 1))
    # Rank 1 holds 2, 3, 4, 5; keys arrive as 0, 1, 6, 7, 2, 3, 4, 5.
    assert shard.allowed_tT.int().tolist() == [
        [1, 1, 0, 0, 1, 0, 0, 0], [1, 1, 0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1, 1, 0], [1, 1, 0, 0, 1, 1, 1, 1]]


@pytest.mark.parametrize("more", [{"dropout": 0.1}, {"sliding_window": 4}, {"softcap": 50.0}, {"s_aux": torch.ones(1)}])
def test_what_it_does_not_know_is_refused_by_name(more):
    x = torch.zeros(1, 1, 2, 2)
    shard = AttentionShard(Axis("cp"), torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ShardingError, match=next(iter(more))):
        gathered_attention(None, x, x, x, None, shard=shard, **more)
