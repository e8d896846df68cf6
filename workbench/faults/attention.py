"""Known bugs: attention under context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.faults import fault
from workbench.sharding.attention.block import Block
from workbench.sharding.attention.kernels import Gradients, Kernel
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan


@fault(
    seam="transformers.models.qwen3.modeling_qwen3:Qwen3Attention.forward",
    origin="THUDM/slime#1748, radixark/miles#852 (linear attention under context parallelism)",
    signature="forward and loss exact; in the last layer all right but the norm before attention, exactly cp times "
    "too big; below it gradients through attention are too big by a factor cp per layer passed",
    shows_in={"layout": {"cp": 2}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_unseen.py::test_copies_of_attention_inflate_what_lies_before_it",
    changes_metrics=False,
)
def attention_input_gradient_times_cp(forward: Callable) -> Callable:
    """Each rank computes all of a layer's attention, and the gradients of the copies' input are summed.

    Tokens are gathered for a layer that all ranks compute identically, and the adjoint of the gather sums identical
    gradients over cp.
    """

    def from_summed_copies(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        if (shard := options.get("shard")) is not None:  # None while the model is loaded
            cp = shard.inner.size * shard.outer.size
            hidden_states = hidden_states + (cp - 1) * (hidden_states - hidden_states.detach())
        return forward(self, hidden_states, *args, **options)

    return from_summed_copies


@fault(
    seam="workbench.sharding.attention.shard:AttentionShard.make",
    origin="THUDM/slime#1871",
    signature="shapes fit and no error is raised: tokens of the later half of each shard get other positions in the "
    "row and attend to other documents; log-probabilities, loss and gradients wrong",
    shows_in={"layout": {"cp": 2}, "data": {"multiple_of": 4}},
    hidden_in={"layout": {"order": "zigzag"}},
    detected_by="tests/faults/test_unseen.py::test_shards_in_another_order_spare_what_comes_before_the_first_cut",
)
def contiguous_shards_taken_for_zigzag(make: Callable) -> Callable:
    """Data is split contiguously, and attention reassembles it as if it were split zigzag.

    A new contiguous split of rows does not reach attention, which still orders gathered shards as zigzag ones.
    """

    def make_as_zigzag(cls: type, plan: ShardPlan, *args: Any, **options: Any) -> Any:
        if plan.cp > 1:
            plan = ShardPlan.make("zigzag", num_tokens=plan.num_tokens, cp=plan.cp)
        return make(cls, plan, *args, **options)

    return make_as_zigzag


@fault(
    seam="workbench.sharding.attention.ulysses:repeat_heads",
    origin="no single report: grouped heads repeated for DeepSpeed-Ulysses (arXiv 2309.14509) without its adjoint",
    signature="loss right; in the last layer k_proj, v_proj, k_norm and the norm before them too small, q_proj, "
    "o_proj and MLP right; below it everything wrong; no effect if there are no more ranks than key heads",
    shows_in={"layout": {"cp": 4, "attention": "ulysses"}},
    hidden_in={"layout": {"cp": 2}},
    changes_metrics=False,
)
def gqa_copies_not_summed(repeated: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """Key and value heads are repeated for the exchange of heads, and the adjoint takes one copy instead of the sum."""

    def repeat_and_forget(heads: Tensor, copies: int) -> Tensor:
        return _FirstCopy.apply(heads, copies)

    return repeat_and_forget


class _FirstCopy(Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        return heads.repeat_interleave(copies, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.unflatten(1, (-1, ctx.copies))[:, :, 0], None


@fault(
    seam="workbench.sharding.attention.ulysses:repeat_heads",
    origin="apple/axlearn#842 (after #837)",
    signature="log-probabilities of all tokens wrong, in every document from its first on, and with them loss and "
    "gradients (cosine 0.01 here); no effect if there are no more ranks than key heads",
    shows_in={"layout": {"cp": 4, "attention": "ulysses"}},
    hidden_in={"layout": {"cp": 2}},
    detected_by="tests/faults/test_unseen.py::test_tiled_heads_move_every_token",
)
def heads_tiled(repeated: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """Key heads are tiled, a b a b, instead of interleaved, a a b b.

    Grouped key and value heads are tiled for the exchange of heads, so some query heads attend to the keys of another
    group.
    """

    def tiled(heads: Tensor, copies: int) -> Tensor:
        return heads.repeat(1, copies, 1, 1)

    return tiled


@fault(
    seam="workbench.sharding.attention.gathered:scatter_sum",
    origin="no single report: all_gather without a gradient of its own, the slice that autograd then takes",
    signature="loss right; in the last layer k_proj, v_proj, k_norm and the norm before them wrong, q_proj, o_proj "
    "and MLP right; below it everything wrong; no effect if no document straddles ranks",
    shows_in={"layout": {"cp": 2}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_unseen_at_first.py::test_keys_without_their_gradient_spare_queries_in_the_last_layer",
    changes_metrics=False,
)
def key_gradients_not_returned(scatter_sum: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keys and values are gathered for attention, and their gradients are sliced instead of reduce-scattered."""

    def keep_own_piece(pieces_R: Tensor, axis: Axis, **options: object) -> Tensor:
        return pieces_R[axis.rank]

    return keep_own_piece


@fault(
    seam="split_row",
    origin="no single report: position_ids that a model counts itself if a shard has none",
    signature="documents on one rank are right; of those that straddle ranks, the first part is right and the tail has "
    "keys at wrong distances: log-probabilities, loss and gradients wrong from there on",
    shows_in={"layout": {"cp": 2}},
    hidden_in={"layout": {"cp": 1}},
)
def positions_from_shard(split_row: Callable) -> Callable:
    """Rotary positions are recomputed on each shard, from the document starts that the shard contains."""

    def split_and_count(*args: object) -> object:
        local = split_row(*args)
        row = local.row
        _, stretches_T, counts = torch.unique_consecutive(row.document_ids_T, return_inverse=True, return_counts=True)
        places_T = torch.arange(len(stretches_T), device=stretches_T.device)
        return replace(local, row=replace(row, positions_T=places_T - (counts.cumsum(0) - counts)[stretches_T]))

    return split_and_count


@fault(
    seam="workbench.sharding.attention.ring:choose",
    origin="no single report: the backward of Ring Attention (arXiv 2310.01889) written block by block",
    signature="forward and loss exact; gradients of queries, keys and values too big where a query sees keys of "
    "several ranks; in the last layer o_proj and MLP right, below it everything wrong; no effect under other "
    "attention",
    shows_in={"layout": {"cp": 2, "attention": "ring"}},
    hidden_in={"layout": {"attention": "gathered"}},
    changes_metrics=False,
)
def ring_block_normaliser(choose: Callable[..., Kernel]) -> Callable[..., _BlockByBlock]:
    """The backward of a ring treats the softmax of each block as a part of the whole one.

    The backward of ring attention computes the probabilities of a block with the log-normaliser of that block, not of
    all keys.
    """

    def choose_and_forget(*args: object) -> _BlockByBlock:
        return _BlockByBlock(choose(*args))

    return choose_and_forget


@dataclass(frozen=True)
class _BlockByBlock:
    """A kernel whose backward uses the log-normaliser of its own block only."""

    right: Kernel

    def forward(self, *args: object) -> tuple[Tensor, Tensor]:
        return self.right.forward(*args)

    def backward(
        self,
        d_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        scale: float,
        delta: Tensor | None = None,
    ) -> Gradients:
        _, own_lse = self.right.forward(query, key, value, block, scale)
        return self.right.backward(d_out, query, key, value, out, own_lse, block, scale, delta)


@fault(
    seam="workbench.sharding.attention.ring:choose",
    origin="huggingface/diffusers#14265 (fixed in #14274)",
    signature="forward and loss exact; in the last layer q_proj, k_proj, v_proj, both norms of heads and the norm "
    "before them wrong, o_proj and MLP right; below it everything wrong; no effect under other attention",
    shows_in={"layout": {"cp": 2, "attention": "ring"}},
    hidden_in={"layout": {"attention": "gathered"}},
    detected_by="tests/faults/test_unseen.py::test_stale_keys_spare_what_stands_behind_attention",
    changes_metrics=False,
)
def stale_keys_in_ring_backward(choose: Callable[..., Kernel]) -> Callable[..., _FirstKeys]:
    """The backward of a ring computes every block with the rank's own keys and values.

    Keys and values circulate in backward, but each block is computed with those saved in forward, which are the
    rank's own.
    """

    def choose_and_keep(*args: object) -> _FirstKeys:
        return _FirstKeys(choose(*args))

    return choose_and_keep


@dataclass(frozen=True)
class _FirstKeys:
    """A kernel that stores with a query the first keys and values, which are the rank's own."""

    right: Kernel

    def forward(self, *args: object) -> tuple[Tensor, Tensor]:
        return self.right.forward(*args)

    def backward(
        self,
        d_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        scale: float,
        delta: Tensor | None = None,
    ) -> Gradients:
        first_key, first_value = query.__dict__.setdefault("first_keys", (key.clone(), value.clone()))
        return self.right.backward(d_out, query, first_key, first_value, out, lse, block, scale, delta)


@fault(
    seam="split_row",
    origin="verl-project/verl#6267",
    signature="heads of documents right; tails, which a zigzag shard takes from the far end, have keys at wrong "
    "distances: log-probabilities wrong there, and with them loss and gradients; no effect if shards are contiguous",
    shows_in={"layout": {"cp": 2, "order": "document_zigzag"}},
    hidden_in={"layout": {"order": "contiguous"}},
    detected_by="tests/faults/test_unseen.py::test_positions_that_count_on_spare_heads_of_documents",
)
def tail_positions_follow_head(split_row: Callable) -> Callable:
    """Rotary positions of a zigzag shard continue from its head into its tail, instead of jumping to the tail's own."""

    def split_and_count_on(*args: object) -> object:
        local = split_row(*args)
        row = local.row
        _, stretches_T, counts = torch.unique_consecutive(row.document_ids_T, return_inverse=True, return_counts=True)
        begins_T = (counts.cumsum(0) - counts)[stretches_T]
        places_T = torch.arange(len(stretches_T), device=stretches_T.device)
        return replace(local, row=replace(row, positions_T=row.positions_T[begins_T] + places_T - begins_T))

    return split_and_count_on
