"""Known bugs: attention under context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.faults import fault
from workbench.sharding.attention.kernels import Gradients, Kernel
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan


@fault(
    seam="transformers.models.qwen3.modeling_qwen3:Qwen3Attention.forward",
    origin="THUDM/slime#1748, radixark/miles#852 (linear attention under context parallelism)",
    signature="forward and loss exact; in the last layer all right but the norm before attention, exactly cp times "
    "too big; below it gradients through attention are too big by a factor cp per layer passed",
    needs="cp",
    detected_by="tests/faults/test_unseen.py::test_copies_of_attention_inflate_gradients_below_it",
    changes_metrics=False,
)
def attention_input_gradient_times_cp(
    forward: Callable, self: Any, hidden_states: Tensor, *args: Any, **options: Any
) -> Any:
    """Each rank computes all of a layer's attention, and the gather's adjoint sums identical gradients over cp."""
    if (shard := options.get("shard")) is not None:  # None while the model is loaded
        cp = shard.inner.size * shard.outer.size
        hidden_states = hidden_states + (cp - 1) * (hidden_states - hidden_states.detach())
    return forward(self, hidden_states, *args, **options)


@fault(
    seam="workbench.sharding.attention.shard:AttentionShard.make",
    origin="THUDM/slime#1871",
    signature="shapes fit and no error is raised: tokens of the later half of each shard get other positions in the "
    "row and attend to other documents; log-probabilities, loss and gradients wrong",
    shows_in={"layout": {"cp": 2}, "data": {"multiple_of": 4}},
    hidden_in={"layout": {"order": "zigzag"}},
    detected_by="tests/faults/test_unseen.py::test_shards_in_another_order_do_not_affect_tokens_before_the_first_boundary",
)
def contiguous_shards_taken_for_zigzag(make: Callable, cls: type, plan: ShardPlan, *args: Any, **options: Any) -> Any:
    """A new contiguous split of rows does not reach attention, which still orders gathered shards as zigzag ones."""
    if plan.cp > 1:
        plan = ShardPlan.make("zigzag", num_tokens=plan.num_tokens, cp=plan.cp)
    return make(cls, plan, *args, **options)


@fault(
    seam="workbench.sharding.attention.ulysses:repeat_heads",
    origin="no single report: grouped heads repeated for DeepSpeed-Ulysses (arXiv 2309.14509) without its adjoint",
    signature="loss right; in the last layer k_proj, v_proj, k_norm and the norm before them too small, q_proj, "
    "o_proj and MLP right; below it everything wrong; no effect if there are no more ranks than key heads",
    shows_in={"layout": {"cp": 4, "attention": "ulysses"}},
    hidden_in={"layout": {"cp": 2}},
    changes_metrics=False,
)
def gqa_copies_not_summed(repeated: Callable, heads: Tensor, copies: int) -> Tensor:
    """Key and value heads are repeated for the exchange of heads, and the adjoint takes one copy instead of the sum."""
    return _FirstCopy.apply(heads, copies)


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
def heads_tiled(repeated: Callable, heads: Tensor, copies: int) -> Tensor:
    """Key heads are tiled, a b a b, instead of interleaved, a a b b: queries attend to keys of other groups."""
    return heads.repeat(1, copies, 1, 1)


@fault(
    seam="workbench.sharding.attention.gathered:start_scatter_sum",
    origin="no single report: all_gather without a gradient of its own, the slice that autograd then takes",
    signature="loss right; in the last layer k_proj, v_proj, k_norm and the norm before them wrong, q_proj, o_proj "
    "and MLP right; below it everything wrong; no effect if no document straddles ranks",
    needs="cp",
    detected_by="tests/faults/test_unseen_at_first.py::test_keys_without_their_gradient_spare_queries_in_the_last_layer",
    changes_metrics=False,
)
def key_gradients_not_returned(start_scatter_sum: Callable, pieces_R: Tensor, axis: Axis, **options: object) -> Any:
    """Keys and values are gathered for attention, and their gradients are sliced instead of reduce-scattered."""
    return lambda: pieces_R[axis.rank]


@fault(
    seam="split_row",
    origin="no single report: position_ids that a model counts itself if a shard has none",
    signature="documents on one rank are right; of those that straddle ranks, the first part is right and the tail has "
    "keys at wrong distances: log-probabilities, loss and gradients wrong from there on",
    needs="cp",
)
def positions_from_shard(split_row: Callable, *args: object) -> object:
    """Rotary positions are recomputed on each shard, from the document starts that the shard contains."""
    local = split_row(*args)
    row = local.row
    places_T, begins_T = _stretches(row.document_ids_T)
    return replace(local, row=replace(row, positions_T=places_T - begins_T))


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
def ring_block_normaliser(choose: Callable, *args: object) -> _Miscalled:
    """Backward computes the probabilities of a block with the log-normaliser of that block, not of all keys."""
    return _Miscalled(choose(*args), _own_normaliser)


@dataclass(frozen=True)
class _Miscalled:
    """A kernel whose backward gets other keys and values, or another log-normaliser."""

    right: Kernel
    change: Callable[[Kernel, tuple[Any, ...]], tuple[Tensor, Tensor, Tensor]]

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self.right.forward(*args)

    def backward(self, d_out: Tensor, *args: Any) -> Gradients:
        query, _, _, out, _, *rest = args
        key, value, lse = self.change(self.right, args)
        return self.right.backward(d_out, query, key, value, out, lse, *rest)


def _own_normaliser(right: Kernel, args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, _, _, block, scale = args[:7]
    return key, value, right.forward(query, key, value, block, scale)[1]


def _first_keys(_: Kernel, args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, _, lse = args[:5]
    whole = query if query._base is None else query._base  # later blocks have some of the queries
    first = whole.__dict__.setdefault("first_keys", (key.clone(), value.clone()))  # a rank's own, which come first
    return *(own[:, :, -key.shape[2] :] for own in first), lse  # at the end are those that later ranks see


@fault(
    seam="workbench.sharding.attention.ring:choose",
    origin="huggingface/diffusers#14265 (fixed in #14274)",
    signature="forward and loss exact; in the last layer q_proj, k_proj, v_proj, both norms of heads and the norm "
    "before them wrong, o_proj and MLP right; below it everything wrong; no effect under other attention",
    shows_in={"layout": {"cp": 2, "attention": "ring"}},
    hidden_in={"layout": {"attention": "gathered"}},
    detected_by="tests/faults/test_unseen.py::test_stale_keys_do_not_affect_layers_above_attention",
    changes_metrics=False,
)
def stale_keys_in_ring_backward(choose: Callable, *args: object) -> _Miscalled:
    """Keys and values circulate in backward, but each block is computed with the rank's own, saved in forward."""
    return _Miscalled(choose(*args), _first_keys)


@fault(
    seam="split_row",
    origin="verl-project/verl#6267",
    signature="heads of documents right; tails, which a zigzag shard takes from the far end, have keys at wrong "
    "distances: log-probabilities wrong there, and with them loss and gradients; no effect if shards are contiguous",
    shows_in={"layout": {"cp": 2, "order": "document_zigzag"}},
    hidden_in={"layout": {"order": "contiguous"}},
    detected_by="tests/faults/test_unseen.py::test_positions_that_count_on_spare_heads_of_documents",
)
def tail_positions_follow_head(split_row: Callable, *args: object) -> object:
    """Rotary positions of a zigzag shard continue from its head into its tail, instead of jumping to the tail's own."""
    local = split_row(*args)
    row = local.row
    places_T, begins_T = _stretches(row.document_ids_T)
    return replace(local, row=replace(row, positions_T=row.positions_T[begins_T] + places_T - begins_T))


def _stretches(document_ids_T: Tensor) -> tuple[Tensor, Tensor]:
    """[T] places of the tokens of a shard, and [T] the place where the document's stretch of each begins."""
    _, stretches_T, counts = torch.unique_consecutive(document_ids_T, return_inverse=True, return_counts=True)
    return torch.arange(len(stretches_T), device=stretches_T.device), (counts.cumsum(0) - counts)[stretches_T]
