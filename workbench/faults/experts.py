"""Known bugs: experts on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.faults import fault
from workbench.policy.model import Policy
from workbench.sharding.gradients import local_values
from workbench.sharding.mesh import Mesh
from workbench.sharding.tensor_parallel import ParameterShard

Shards = Mapping[str, ParameterShard]
SHARED = {"layout": {"dp": 2, "ep": 2}, "model": {"source": "tiny-qwen3-moe"}}
ALONE = {"layout": {"ep": 1}}


@fault(
    seam="sum_gradients",
    origin="NVIDIA/Megatron-LM#5956, deepspeedai/DeepSpeed#5259",
    signature="gradients of experts exactly ep times too big, all others and the loss right",
    shows_in=SHARED,
    hidden_in=ALONE,
    changes_metrics=False,
)
def expert_gradients_times_ep(sum_gradients: Callable, model: Any, shards: Shards, mesh: Mesh, *more: object) -> None:
    """Gradients of experts, which are sums over the tokens of all ep ranks already, count once for each of them."""
    sum_gradients(model, shards, mesh, *more)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and shards[name].over_ep:
            local_values(parameter.grad).mul_(mesh["ep"].size)


@fault(
    seam="workbench.sharding.expert_parallel:mixed",
    origin="huggingface/transformers#48687",
    signature="loss right; routers get the gradient of the gates of experts on the token's own rank alone, and what "
    "flows back through them into the layers below is as incomplete",
    shows_in=SHARED,
    hidden_in=ALONE,
    changes_metrics=False,
)
def gates_of_other_ranks_detached(
    mixed: Callable, mixture: Any, hidden_tD: Tensor, chosen_tk: Tensor, gates_tk: Tensor
) -> Tensor:
    """Gates are masked to the experts of a rank, and the gradient of the others' is not summed over ep."""
    own_tk = chosen_tk // mixture.experts == mixture.axis.rank
    return mixed(mixture, hidden_tD, chosen_tk, torch.where(own_tk, gates_tk, gates_tk.detach()))


@fault(
    seam="gradient_norms",
    origin="no single report: norms of experts that count another number of ranks, as in NVIDIA/Megatron-LM#6080",
    signature="gradients exact; norms of experts sqrt(dp * cp / ep) times too big, and the global norm by their share",
    shows_in={"layout": {"dp": 2, "cp": 2, "ep": 2}, "model": {"source": "tiny-qwen3-moe"}},
    hidden_in=ALONE,
    changes_gradient=False,
)
def norm_counts_experts_of_replicas(
    gradient_norms: Callable, model: object, shards: Shards, mesh: Mesh
) -> dict[str, float]:
    """Squares of experts are summed over all ranks of dp x cp, of which several have the same experts."""
    copies = mesh["edp"].size
    return {
        name: norm * copies**0.5 if shards[name].over_ep else norm
        for name, norm in gradient_norms(model, shards, mesh).items()
    }


@fault(
    seam="gradient_norms",
    origin="NVIDIA/Megatron-LM#5916 (expert tensor parallelism)",
    signature="gradients exact; norms of experts are those of the slices of the first tp rank, and the global norm is "
    "too small by the others, so that a clip passes more",
    shows_in={"layout": {"dp": 2, "tp": 2, "ep": 2}, "model": {"source": "tiny-qwen3-moe"}},
    hidden_in={"layout": {"tp": 1}},
    detected_by="tests/faults/test_layout_and_policy_faults.py::test_norms_of_slices_are_those_of_the_first_rank",
    changes_gradient=False,
)
def norm_misses_expert_slices(gradient_norms: Callable, model: object, shards: Shards, mesh: Mesh) -> dict[str, float]:
    """Experts that are cut over tp count in the norm as if every tp rank had all of each."""
    as_copies = {name: replace(shard, dim=None) if shard.over_ep else shard for name, shard in shards.items()}
    return gradient_norms(model, as_copies, mesh)


@fault(
    seam="workbench.policy.model:Policy.hidden_states",
    origin="NVIDIA/Megatron-LM#6660 (a buffer that is its own reduction, where ep is all of dp)",
    signature="experts that one rank alone has: micro-batch k of K counts 2^(K-1-k) times, so that they grow with the "
    "number of micro-batches; all other gradients and the loss right",
    shows_in=SHARED | {"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_pipeline_and_experts.py::test_experts_without_replicas_double_with_every_micro_batch",
    changes_metrics=False,
)
def expert_gradients_doubled_per_micro_batch(hidden_states: Callable, policy: Policy, *args: object) -> object:
    """The sum over one rank is the buffer of accumulated gradients itself, which is added to itself."""
    if policy.mesh["edp"].size == 1:
        for name, parameter in policy.model.named_parameters():
            if policy.shards[name].over_ep and parameter.grad is not None:
                local_values(parameter.grad).mul_(2)
    return hidden_states(policy, *args)
