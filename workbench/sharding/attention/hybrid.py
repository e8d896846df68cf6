"""Hybrid attention: neighbours trade tokens for heads, and rings go over the rest.

Heads bound how many ranks can trade, and a ring takes as many steps as it has ranks. With U neighbours on cp = U * G
ranks a ring has G steps, and only U need divide the heads.
"""

from __future__ import annotations

from torch import Tensor

from workbench.sharding.attention import ring
from workbench.sharding.attention.shard import AttentionShard
from workbench.sharding.attention.ulysses import trade_back, trade_tokens_for_heads


def attend(
    query: Tensor, key: Tensor, value: Tensor, shard: AttentionShard, window: int | None, scale: float
) -> Tensor:
    """Heads are traded over the inner axis, keys and values go around the outer one.

    Shapes:   query [1, Hq, t, d], key and value [1, Hk, t, d] -> [1, Hq, t, d].
    Backward: of the ring, between the adjoints of the trades.
    Raises:   ShardingError: heads that cannot be dealt to the inner ranks.
    Source:   USP, arXiv 2405.07719; LoongTrain's 2D attention, arXiv 2406.18485.
    """
    query, key, value = trade_tokens_for_heads(query, key, value, shard)
    return trade_back(ring.attend(query, key, value, shard, window, scale), shard)
