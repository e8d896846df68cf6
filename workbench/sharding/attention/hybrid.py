"""Hybrid attention: Ulysses among neighbours, a ring over the other ranks.

The heads limit the number of Ulysses ranks, and a ring takes as many steps as it has ranks. With U neighbours on
cp = U * G ranks a ring has G steps, and only U must divide the heads.
"""

from __future__ import annotations

from torch import Tensor

from workbench.sharding.attention import ring
from workbench.sharding.attention.shard import AttentionShard
from workbench.sharding.attention.ulysses import exchange_back, exchange_tokens_for_heads


def attend(
    query: Tensor, key: Tensor, value: Tensor, shard: AttentionShard, window: int | None, scale: float
) -> Tensor:
    """Exchange tokens for heads over the inner axis, and rotate keys and values over the outer axis.

    Shapes:   query [1, Hq, t, d], key and value [1, Hk, t, d] -> [1, Hq, t, d].
    Backward: that of the ring, between the adjoints of the exchanges.
    Raises:   ShardingError: heads that cannot be dealt to the inner ranks.
    Source:   USP, arXiv 2405.07719; LoongTrain's 2D attention, arXiv 2406.18485.
    """
    query, key, value = exchange_tokens_for_heads(query, key, value, shard)
    return exchange_back(ring.attend(query, key, value, shard, window, scale), shard)
