"""Context-parallel attention: one function for all layouts.

`shard` derives masks from positions and documents, `gathered`, `ring` and `ulysses` exchange keys and values between
ranks, and `kernels` compute a block on one rank, by device.

Letters: t tokens of this rank | d head dimension.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from workbench.errors import ShardingError
from workbench.sharding.attention import gathered, ring, ulysses
from workbench.sharding.attention.shard import AttentionShard as AttentionShard
from workbench.sharding.attention.sinks import check_sinks

_ATTEND = {"gathered": gathered.attend, "ring": ring.attend, "ulysses": ulysses.attend, "hybrid": ulysses.attend}


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
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document, of this rank's queries over the tokens of all ranks of the cp axis.

    Has the signature of a `transformers` attention function. Scores are scaled by d ** -0.5 unless ``scaling`` is
    given; a query sees at most ``sliding_window`` tokens, itself included, or its whole document. ``s_aux`` are sinks:
    one more score of every query of a head, whose probability goes nowhere.

    Shapes:   query [1, Hq, t, d], key and value [1, Hk, t, d], Hk divides Hq, s_aux [Hq] -> [1, t, Hq, d].
    Layout:   cp: sharded(T) in and out; tp: sharded(heads) in and out.
    Backward: of the algorithm; each documents its sums over ranks.
    Raises:   ShardingError: dropout, a soft cap or a ready-made mask; sinks of other heads, or in a mode without them;
              heads or a kernel that cannot be used.
    """
    unsupported = {"dropout": dropout or None, "attention_mask": attention_mask}
    unsupported |= {"softcap": more.get("softcap"), "s_aux": s_aux if shard.attend is not None else None}
    requested = [name for name, setting in unsupported.items() if setting is not None]
    if requested:
        raise ShardingError(
            f"context-parallel attention with {', '.join(requested)}",
            rule="causal attention inside each document, with or without a sliding window and sinks, nothing else; "
            "in the reproducible mode without sinks",
            fix="use a model without it, or train without it (model.eval() has no dropout)",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if s_aux is None:
        attend = shard.attend or _ATTEND[shard.algorithm]
        out = attend(query, key, value, shard, sliding_window, scale)
    else:
        check_sinks(s_aux, query)
        out = _ATTEND[shard.algorithm](query, key, value, shard, sliding_window, scale, s_aux)
    return out.transpose(1, 2).contiguous(), None
