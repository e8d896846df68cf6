"""Known bugs: low-rank adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from workbench.faults import fault
from workbench.sharding.mesh import Mesh
from workbench.sharding.tensor_parallel import ParameterShard

Shards = Mapping[str, ParameterShard]
LORA = {"r": 2, "lora_alpha": 3, "init_lora_weights": "random"}
"""B is random: where it is 0, so is each adapter, and the gradient of its A."""
ONE = {"layout": {"tp": 1}}


@fault(
    seam="sum_gradients",
    origin="modelscope/mcore-bridge#173; of experts: radixark/miles#2723, ISEEKYAN/Megatron-LM#131",
    signature="loss and forward pass right; A of column-parallel and B of row-parallel layers have their rank's part, "
    "different on every tp rank; the other factor right. At the first step, where B is 0, A of none is wrong",
    shows_in={"layout": {"tp": 2}, "lora": LORA},
    hidden_in=ONE,
    changes_metrics=False,
)
def adapter_factor_not_summed_over_tp(
    sum_gradients: Callable, model: object, shards: Shards, mesh: object, *more: object
) -> None:
    """The factor that is whole on every tp rank keeps the gradient of that rank's part of the layer."""
    left_out = {
        name: replace(shard, gradient_is_partial=False) if ".lora_" in name else shard for name, shard in shards.items()
    }
    sum_gradients(model, left_out, mesh, *more)


@fault(
    seam="workbench.specs.lora:lora_scale",
    origin="Blaizzy/mlx-vlm#841; the root of the rank left out: vllm-project/vllm#6909, NVIDIA/TensorRT-LLM#1668",
    signature="every adapter counts r times: another policy, with other log-probabilities, ratios and gradients; no "
    "effect while B is 0, but for gradients of B, which are r times too big",
    shows_in={"lora": LORA},
    hidden_in={"lora": {"r": 1}},
)
def adapter_scaled_by_alpha(lora_scale: Callable, rank: int, alpha: float | None, **settings: object) -> float:
    """B A is multiplied by lora_alpha, without the division by the rank."""
    return float(lora_scale(1, rank if alpha is None else alpha, **settings))


@fault(
    seam="workbench.policy.lora:_Product.before_sum",
    origin="radixark/miles#3232; of experts: NVIDIA-NeMo/Megatron-Bridge#5634",
    signature="adapters of row-parallel layers count tp times: other log-probabilities, ratios and gradients on every "
    "rank alike; adapters of column-parallel layers right in themselves",
    shows_in={"layout": {"tp": 2}, "lora": LORA},
    hidden_in=ONE,
)
def adapter_counted_by_every_tp_rank(before_sum: Callable, product: Any, inputs: Tensor) -> Tensor:
    """A complete adapter of a row-parallel layer is added on every rank, before the sum over ranks."""
    ranks = product.each.shape[product.each.inputs] // inputs.shape[-1]
    return ranks * before_sum(product, inputs)


@fault(
    seam="workbench.policy.lora:part_of",
    origin="Nerogar/OneTrainer#803, NVIDIA-NeMo/Megatron-Bridge#5396 (experts)",
    signature="each dp x cp rank trains another policy: log-probabilities and ratios of its tokens differ, and summed "
    "gradients are of neither; copies of an adapter stay apart",
    shows_in={"layout": {"dp": 2}, "lora": LORA},
    hidden_in={"layout": {"dp": 1}},
)
def adapter_drawn_on_every_rank(part_of: Callable, whole: Tensor, shard: ParameterShard, mesh: Mesh) -> Tensor:
    """Each rank draws the adapters from a generator of its own."""
    return part_of(whole.roll(mesh["dp_cp"].rank, -1), shard, mesh)
