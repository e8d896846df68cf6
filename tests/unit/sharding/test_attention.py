"""The one attention function that decoders call, whatever the layout."""

import pytest
import torch

from tests.helpers.attention_case import DOCUMENTS, SCALE, T, by_ranks, expected, plan, tensors
from workbench.errors import ShardingError
from workbench.sharding.attention import AttentionShard, sharded_attention
from workbench.sharding.mesh import Axis

IDS = torch.tensor(DOCUMENTS)


@pytest.mark.parametrize("algorithm", ["gathered", "ring", "ulysses", "hybrid"])
def test_documents_do_not_see_each_other_and_padding_has_no_empty_row(algorithm):
    query, key, value, _ = (x[None] for x in tensors(4, 2))
    shard = AttentionShard.make(plan("contiguous", 1), IDS, Axis("cp"), algorithm=algorithm)
    actual, weights = sharded_attention(None, query, key, value, None, shard=shard, scaling=SCALE)
    torch.testing.assert_close(actual[0].transpose(0, 1), expected((4, 2))[0], rtol=0, atol=1e-13)
    assert actual.is_contiguous()
    assert torch.isfinite(actual).all()
    assert weights is None


@pytest.mark.parametrize(("algorithm", "inner"), [("gathered", 1), ("ring", 1), ("ulysses", 1), ("hybrid", 2)])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_lower_precisions_are_off_by_their_rounding_and_no_more(algorithm, inner, dtype, bar):
    by_rank = by_ranks("zigzag", 4, algorithm, (4, 2), inner=inner, dtype=dtype)
    for actual, right in zip(by_rank, expected((4, 2)), strict=True):
        assert actual.dtype == dtype
        assert float((actual.double() - right).norm() / right.norm()) < bar


def test_scores_are_scaled_by_the_head_dimension_by_default():
    query, key, value, _ = (x[None] for x in tensors(4, 2))
    shard = AttentionShard.make(plan("contiguous", 1), IDS, Axis("cp"))
    unsaid, _ = sharded_attention(None, query, key, value, None, shard=shard)
    text, _ = sharded_attention(None, query, key, value, None, shard=shard, scaling=query.shape[-1] ** -0.5)
    assert torch.equal(unsaid, text)


def test_an_unavailable_kernel_is_refused_on_request():
    x = torch.zeros(1, 1, T, 4, dtype=torch.float64)
    shard = AttentionShard.make(plan("contiguous", 1), IDS, Axis("cp"), kernel="flash")
    with pytest.raises(ShardingError, match="attention kernel 'flash'"):
        sharded_attention(None, x, x, x, None, shard=shard)


@pytest.mark.parametrize("more", [{"dropout": 0.1}, {"softcap": 50.0}])
def test_unsupported_options_are_refused_by_name(more):
    x = torch.zeros(1, 1, T, 2)
    shard = AttentionShard.make(plan("contiguous", 1), IDS, Axis("cp"))
    with pytest.raises(ShardingError, match=next(iter(more))):
        sharded_attention(None, x, x, x, None, shard=shard, **more)
