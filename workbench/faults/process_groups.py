"""Known bugs: a collective over another group of ranks than that of the tensors.

A trainer that is given its groups, and reads those of a global state in one place. Such groups have as many ranks, so
that every shape fits: what is gathered or kept is then of other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from workbench.faults import fault
from workbench.policy.routers import Noted, Routes
from workbench.policy.tensor_plan import PREDICTION, PREDICTION_LAYER
from workbench.sharding.attention import AttentionShard
from workbench.sharding.collectives import all_gather, gather_scatter
from workbench.sharding.mesh import Axis, Mesh
from workbench.sharding.plan import ShardPlan
from workbench.sharding.sequence_parallel import TOKENS, Stream
from workbench.sharding.tensor_parallel import ParameterShard

SLICES = {"layout": {"cp": 2, "tp": 2, "sequence_parallel": True}}
WHOLE = {"layout": {"sequence_parallel": False}}


@fault(
    seam="workbench.policy.model:Policy.predicted_hidden_states",
    origin="NVIDIA/Megatron-LM#7452, finding 4 (also #6760)",
    signature="loss right; gradients of the layer that predicts further tokens wrong, but for the norm behind it, and "
    "with them those of the decoder below; no effect where activations are not recomputed",
    shows_in={"layout": {"cp": 2, "tp": 2, "checkpointing": True}, "prediction": {"depths": 1, "coefficient": 0.3}},
    hidden_in={"layout": {"checkpointing": False}},
    detected_by="tests/faults/test_process_groups.py::test_activations_recomputed_from_other_ranks",
    changes_metrics=False,
)
def prediction_recomputed_over_other_group(predicted: Callable, policy: Any, *args: Any, **options: Any) -> Any:
    """Activations that are saved in slices are gathered over another group before the prediction is recomputed."""
    for layer in getattr(policy.model.base_model, PREDICTION):
        block = getattr(layer, PREDICTION_LAYER)
        if hasattr(block.forward, "func") and not isinstance(block.forward.args[0], _Recomputed):
            checkpoint, forward = block.forward.func, block.forward.args[0]  # of `policy.trunk.checkpoint_layers`
            block.forward = type(block.forward)(checkpoint, _Recomputed(forward, policy.mesh), **block.forward.keywords)
    return predicted(policy, *args, **options)


@dataclass(eq=False)
class _Recomputed:
    """The forward of a layer; in backward, on an input of which each slice is that of another rank of cp."""

    forward: Callable[..., Any]
    mesh: Mesh

    def __call__(self, hidden: Tensor, *args: Any, **options: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # within a backward
            own = hidden.detach().chunk(self.mesh["tp"].size, dim=-1)[self.mesh["tp"].rank]
            gathered = torch.cat(all_gather(own.contiguous(), self.mesh["cp"]), dim=-1)
            hidden = hidden + (gathered - hidden.detach())  # saves as many tensors for backward as before
        return self.forward(hidden, *args, **options)


@fault(
    seam="workbench.train.routes:StepRoutes.finish",
    origin="NVIDIA/Megatron-LM#7452, finding 5",
    family="K",
    signature="losses of routers and their gradient wrong: padding counts, and tokens are left out; all other terms, "
    "the loads of experts and the policy right; no effect without padding or without sequence parallelism",
    shows_in=SLICES
    | {"model": {"source": "tiny-qwen3-moe"}, "routing": {"balance": 0.5, "z": 0.1}, "data": {"multiple_of": 32}},
    hidden_in=WHOLE,
    detected_by="tests/faults/test_process_groups.py::test_padding_counts_in_the_losses_of_routers",
)
def router_mask_of_other_slice(finish: Callable, step: Any, number: int, routes: Routes) -> list[Tensor]:
    """Under sequence parallelism the padding mask of a mixture is sliced by a rank's place in another group."""
    ranks, right, before = step.routers.share[1], dict(routes.noted), step.counts_LE.clone()
    sliced = _of_cp(routes.counted_t, step.policy.mesh, ranks)
    routes.noted = {mixture: noted._replace(counted_t=sliced) for mixture, noted in right.items()}
    losses = finish(step, number, routes)
    step.counts_LE.copy_(before + _loads(step, right))  # the loads are counted by the right mask
    return losses


def _of_cp(values_t: Tensor, mesh: Mesh, slices: int) -> Tensor:
    """The slice of a rank by its coordinate in cp; all of it if there is one."""
    return values_t.chunk(slices)[mesh["cp"].rank % slices]


def _loads(step: Any, noted: Mapping[int, Noted]) -> Tensor:
    loads_LE = torch.zeros_like(step.counts_LE)
    for mixture, each in noted.items():
        taken = each.taken_tk[each.counted_t].flatten()
        loads_LE[mixture] = torch.bincount(taken, minlength=loads_LE.shape[1])
    return loads_LE


@fault(
    seam="workbench.policy.model:shard_decoder",
    origin="NVIDIA/Megatron-LM#7452, finding 6 (the projections of its cross-attention)",
    signature="every log-probability wrong, from the first token of each document on, and with them loss and "
    "gradients; no effect without sequence parallelism",
    shows_in=SLICES,
    hidden_in=WHOLE,
    detected_by="tests/faults/test_process_groups.py::test_queries_and_keys_of_other_ranks",
)
def projections_gather_other_ranks(
    shard_decoder: Callable, model: Any, mesh: Mesh, **how: Any
) -> dict[str, ParameterShard]:
    """The slices of tokens that queries, keys and values are computed from are gathered over another group."""
    shards = shard_decoder(model, mesh, **how)
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            for hook in module._forward_pre_hooks.values():
                if isinstance(stream := getattr(hook, "stream", None), Stream):
                    hook.stream = _OverOthers(stream.axis, stream.sharded, mesh["cp"])
    return shards


@dataclass(frozen=True)
class _OverOthers(Stream):
    """Hidden states whose slices are gathered over another axis."""

    other: Axis | None = None

    def into(self, hidden: Tensor) -> Tensor:
        if not self.sharded or self.other is None:
            return super().into(hidden)
        return gather_scatter(hidden, self.other, dim=TOKENS)


@fault(
    seam="workbench.policy.model:shard_decoder",
    origin="NVIDIA/Megatron-LM#7452, finding 7 (the embeddings of its LLaVA)",
    signature="some slices of a row's tokens are computed twice in place of others: log-probabilities right up to "
    "there, and wrong in those slices and behind them in their documents; loss and gradients wrong; no effect without "
    "sequence parallelism",
    shows_in=SLICES,
    hidden_in=WHOLE,
    detected_by="tests/faults/test_process_groups.py::test_slices_of_tokens_are_computed_twice",
)
def embeddings_sliced_by_other_group(
    shard_decoder: Callable, model: Any, mesh: Mesh, **how: Any
) -> dict[str, ParameterShard]:
    """Embeddings are scattered for sequence parallelism by a rank's place in another group."""
    shards, axis = shard_decoder(model, mesh, **how), mesh["tp"]

    def sliced(_: nn.Module, __: Any, own: Tensor) -> Tensor:
        return gather_scatter(own, axis, dim=TOKENS).chunk(axis.size, dim=TOKENS)[mesh["cp"].rank % axis.size]

    if how.get("sequence_parallel") and axis.size > 1:
        model.get_input_embeddings().register_forward_hook(sliced)
    return shards


@fault(
    seam="split_row",
    origin="NVIDIA/Megatron-LM#7452, finding 13 (under Megatron-Bridge's context parallelism of evaluations)",
    signature="a run's first micro-batch right; in all others tokens attend to the keys on their own rank alone: of "
    "documents that straddle ranks, what follows the first rank is wrong, and with it loss and gradients",
    shows_in={"layout": {"cp": 2}, "data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}, "steps": 1},
    detected_by="tests/faults/test_process_groups.py::test_attention_returns_to_its_first_group",
    factory=True,
)
def attention_returns_to_built_group(split_row: Callable) -> Callable:
    """Behind the first forward attention takes the group again that the model was built with: one rank alone."""
    rows: dict[tuple[int, ...], int] = {}

    def broken(row: Any, weights: Any, documents: Any, plan: ShardPlan, mesh: Mesh, layout: Any) -> Any:
        local = split_row(row, weights, documents, plan, mesh, layout)
        here = tuple(mesh.coordinates.values())
        rows[here] = rows.get(here, 0) + 1
        if rows[here] == 1 or plan.cp == 1:
            return local
        ids_t = local.row.document_ids_T
        alone = ShardPlan.make("contiguous", num_tokens=len(ids_t), cp=1)
        attention = AttentionShard.make(alone, ids_t, Axis("cp"), kernel=layout.kernel)
        return replace(local, attention=attention)

    return broken
