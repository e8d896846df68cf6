"""Attention whose tokens lie on several ranks: one function for all layouts.

What a query may see is decided from places in the row and documents (`block`), by whom keys and values are fetched from
the layout (`gathered`, `ring`, `ulysses`, `hybrid`), and what computes it on a rank from the device (`kernels`).

Letters: t tokens of this rank | d head dimension.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from workbench.errors import ShardingError
from workbench.sharding.attention import gathered, hybrid, ring, ulysses
from workbench.sharding.attention.shard import AttentionShard as AttentionShard

_ATTEND = {"gathered": gathered.attend, "ring": ring.attend, "ulysses": ulysses.attend, "hybrid": hybrid.attend}


def sharded_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    shard: AttentionShard,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document, of this rank's queries over the tokens of all ranks of the cp axis.

    Has the signature of a `transformers` attention function.

    Args:
        module: the layer that asks; not looked at.
        query: [1, Hq, t, d].
        key: [1, Hk, t, d]; Hk divides Hq.
        value: as key.
        attention_mask: refused.
        shard: which tokens these are, and how ranks come to each other's.
        scaling: of the scores; None: d ** -0.5.
        dropout: refused.
        sliding_window: tokens that a query sees at most, itself included; None: its whole document.
        more: what else `transformers` hands on; attention sinks and soft caps are refused.

    Shapes:   -> [1, t, Hq, d].
    Layout:   cp: sharded(T) in and out; tp: sharded(heads) in and out.
    Backward: of the algorithm; each says what is summed over ranks.
    Raises:   ShardingError: dropout, sinks, a soft cap or a ready-made mask; heads or a kernel that cannot be used.
    """
    unknown = {"dropout": dropout or None, "attention_mask": attention_mask}
    unknown |= {name: more.get(name) for name in ("s_aux", "softcap")}
    asked = [name for name, setting in unknown.items() if setting is not None]
    if asked:
        raise ShardingError(
            f"context-parallel attention with {', '.join(asked)}",
            rule="causal attention inside each document, in a sliding window or not, nothing else",
            fix="use a model without it, or train without it (model.eval() has no dropout)",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = shard.attend or _ATTEND[shard.algorithm]
    mixed = attend(query, key, value, shard, sliding_window, scale)
    return mixed.transpose(1, 2).contiguous(), None
