"""Context-parallel attention: local queries, all-gathered keys and values, masks from global positions.

Each rank keeps the queries of its own tokens and gathers everybody's keys and values. What a query may see is
decided from *global* positions and document ids, so every token order is right: a shard never guesses where
documents begin, and never uses a top-left causal mask on a subset of rows.

Letters: T packed tokens | t tokens of this rank | d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workbench.errors import ShardingError
from workbench.sharding.collectives import gather_scatter
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan


@dataclass(frozen=True)
class AttentionShard:
    """What attention needs to know about the row and this rank's part of it.

    Attributes:
        axis: the context-parallel axis.
        allowed_tT: [t, T] bool; query (this rank's order) may see key (rank-major order).
    """

    axis: Axis
    allowed_tT: Tensor

    @classmethod
    def make(cls, plan: ShardPlan, document_ids_T: Tensor, axis: Axis) -> AttentionShard:
        """Decide who sees whom: same document, and not later in the row.

        Args:
            plan: which rank holds which token.
            document_ids_T: [T] of the whole row, in its own order. Padding has an id of its own, so that a
                padded query sees padding and no row of the mask is empty.
            axis: the context-parallel axis.
        """
        keys = plan.permutation_T.to(document_ids_T.device)
        queries = plan.positions(axis.rank).to(document_ids_T.device)
        same = document_ids_T[queries][:, None] == document_ids_T[keys][None, :]
        return cls(axis, same & (queries[:, None] >= keys[None, :]))


def gathered_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                       *, shard: AttentionShard, scaling: float | None = None, dropout: float = 0.0,
                       sliding_window: int | None = None, **_: Any) -> tuple[Tensor, None]:
    """Attention of this rank's queries over the keys and values of all ranks of the cp axis.

    Has the signature of a `transformers` attention function.

    Shapes:   query [1, Hq, t, d], key and value [1, Hk, t, d] -> [1, t, Hq, d]; Hk divides Hq.
    Layout:   cp: sharded(T) in and out; tp: sharded(heads) in and out.
    Backward: keys and values: reduce-scatter sum over cp; queries: local.
    Raises:   ShardingError: dropout, a sliding window or a ready-made mask, none of which this knows.
    Source:   all-gather form of context parallelism, Llama 3 report, arXiv 2407.21783.
    """
    unknown = {"dropout": dropout or None, "sliding_window": sliding_window, "attention_mask": attention_mask}
    unknown |= {name: _.get(name) for name in ("s_aux", "softcap")}
    asked = [name for name, setting in unknown.items() if setting is not None]
    if asked:
        raise ShardingError(f"context-parallel attention with {', '.join(asked)}",
                            rule="causal attention inside each document, nothing else",
                            fix="use a model without it, or train without it (model.eval() has no dropout)")
    key = gather_scatter(key, shard.axis, dim=2)
    value = gather_scatter(value, shard.axis, dim=2)
    repeats = query.shape[1] // key.shape[1]
    # Explicit repetition: its adjoint is the sum over the query heads that share a key head.
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    mixed = scaled_dot_product_attention(query, key, value, attn_mask=shard.allowed_tT, scale=scaling)
    return mixed.transpose(1, 2).contiguous(), None
