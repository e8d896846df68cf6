"""Tensor-parallel plan of a decoder: the one in its configuration, or one derived from layer names.

A plan gives the sharding style of each layer (`workbench.sharding.tensor_parallel`). Ours is derived from the names of
linear layers, which are nearly standard. Every plan is then verified by measurement: the sharded model must give the
hidden states of the unsharded one.

Letters: V vocabulary | t tokens.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SpecError
from workbench.policy.precision import cast
from workbench.sharding.attention import AttentionShard
from workbench.sharding.expert_parallel import apply_expert_parallel
from workbench.sharding.mesh import Axis, Mesh
from workbench.sharding.plan import ShardPlan
from workbench.sharding.sequence_parallel import Stream
from workbench.sharding.tensor_parallel import ParameterShard, apply_tensor_parallel, check_heads

_STYLES = {
    "colwise": "q_proj k_proj v_proj query_key_value gate_proj up_proj fc1 w1 w3 c_fc dense_h_to_4h",
    "colwise_of_three": "c_attn",
    "rowwise": "o_proj out_proj dense c_proj down_proj fc2 w2 dense_4h_to_h",
}
NAMES = {name: style for style, names in _STYLES.items() for name in names.split()}
"""Names of linear layers in decoders, and their sharding styles."""

PREDICTION, PREDICTION_LAYER = "prediction", "mtp_block"
"""Attribute of a decoder that holds the layers of `policy.prediction`, and that of each for its decoder layer."""


def of_prediction(name: str) -> bool:
    """True if a module or parameter is of a layer that predicts further tokens."""
    return PREDICTION in name.split(".")


_COUNTS = ("num_heads", "num_key_value_heads", "split_size")
"""Sizes that a block may cache as attributes; if our plan shards the block, they are divided by tp."""


def tensor_plan(model: Any) -> dict[str, str]:
    """Sharding style of each layer of a decoder: name pattern -> style.

    A model's own plan may have entries for layers that this size of it lacks (dense ones, in a mixture of experts);
    these are dropped.

    Raises:
        SpecError: it has no plan, and linear layers with unknown names.
    """
    config, prefix = model.config.get_text_config(), model.base_model_prefix
    if own_plan := getattr(config, "base_model_tp_plan", None):
        names = [name for kind in (model.named_modules(), model.named_parameters()) for name, _ in kind]
        own_plan = own_plan | {
            pattern.replace("layers.*.", f"{PREDICTION}.*.{PREDICTION_LAYER}.", 1): style
            for pattern, style in own_plan.items()
        }
        return {
            f"{prefix}.{pattern}": style
            for pattern, style in own_plan.items()
            if fnmatch.filter(names, f"{prefix}.{pattern}")
        }
    return plan_by_names(model, f"{prefix}.", config.model_type)


def plan_by_names(model: nn.Module, prefix: str, model_type: str) -> dict[str, str]:
    """Sharding style of each linear layer under a prefix, by its name: name -> style.

    Raises:
        SpecError: linear layers with unknown names.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) or hasattr(module, "nf")]
    inside = [name for name in linear if name.startswith(prefix) and not name.endswith(".eh_proj")]
    if unknown := sorted({name.rpartition(".")[2] for name in inside} - NAMES.keys()):
        raise SpecError(
            f"tensor parallelism of model type {model_type!r}",
            found=f"no plan, and layers named {', '.join(unknown)}",
            rule="its configuration has a plan (base_model_tp_plan), or its linear layers have names in "
            "`workbench.policy.tensor_plan.NAMES`",
            fix="use tp=1 for this model",
        )
    return {name: NAMES[name.rpartition(".")[2]] for name in inside}


def shard_decoder(model: Any, mesh: Mesh, *, sequence_parallel: bool = False) -> dict[str, ParameterShard]:
    """Shard a decoder for this rank, in place, and move it to the mesh's device. Collective over tp.

    Args:
        model: with the workbench's attention, and the same unsharded weights on every rank, on the CPU.
        mesh: the axes.
        sequence_parallel: hold 1 / tp of the tokens between blocks; the last hidden states are gathered.

    Returns:
        Sharding of every parameter, by name.

    Raises:
        ShardingError: heads or features that tp does not divide, or an unknown style.
        SpecError: a model for which no plan is known, or whose sharded hidden states differ from the unsharded ones.
    """
    axis = mesh["tp"]
    if axis.size == 1:
        return {name: ParameterShard() for name, _ in model.named_parameters()}
    config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    heads = config.num_attention_heads
    check_heads({"query": heads, "key/value": getattr(config, "num_key_value_heads", None) or heads}, axis)
    plan, tied = tensor_plan(model), head.weight is embedding.weight
    plan |= {name: "positions" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    plan |= {_name_of(model, embedding): "embedding_rowwise", _name_of(model, head): "vocabulary_head"}
    plan |= {name: "rowwise" for name, _ in model.named_parameters() if name.endswith(".sinks")}  # one for each head
    dtype = embedding.weight.dtype
    expected_tD = probe_hidden_states(cast(model, torch.promote_types(dtype, torch.float32)), axis)
    shards = apply_tensor_parallel(model, plan, axis, sequence_parallel=sequence_parallel)
    if tied:
        head.weight = embedding.weight
    if not getattr(config, "base_model_tp_plan", None):
        _divide_sizes(model, plan, axis)
    if sequence_parallel:
        stream = Stream(axis, sharded=True)

        def gather(_: nn.Module, __: Any, out: Any) -> Any:
            out.last_hidden_state = stream.all_tokens(out.last_hidden_state)
            return out

        model.base_model.register_forward_hook(gather)
    model.to(mesh.device)
    check_sharded(
        f"tensor parallelism of model type {config.model_type!r} over tp={axis.size}"
        + (" with sequence_parallel" if sequence_parallel else ""),
        "hidden states",
        expected_tD,
        lambda: probe_hidden_states(model, axis),
        rule="sharded and unsharded model give the same hidden states",
        fix="leave sequence_parallel out" if sequence_parallel else "use tp=1 for this model",
    )
    cast(model, dtype)
    return shards


def shard_experts(model: Any, mesh: Mesh, shards: Mapping[str, ParameterShard]) -> dict[str, ParameterShard]:
    """Shard the experts of a decoder over ep, in place, after `shard_decoder`. Collective over ep and tp.

    Raises:
        ShardingError: no experts, or a number that ep does not divide.
        SpecError: a model whose hidden states differ then.
    """
    axis = mesh["ep"]
    if axis.size == 1:
        return dict(shards)
    model.to(mesh.device)
    dtype = model.get_input_embeddings().weight.dtype
    expected_tD = probe_hidden_states(cast(model, torch.promote_types(dtype, torch.float32)), mesh["tp"])
    shards = apply_expert_parallel(model, shards, axis)
    check_sharded(
        f"expert parallelism of model type {model.config.get_text_config().model_type!r} over ep={axis.size}",
        "hidden states",
        expected_tD,
        lambda: probe_hidden_states(model, mesh["tp"]),
        rule="a model with experts on several ranks gives the same hidden states",
        fix="leave layout.ep out for this model",
    )
    cast(model, dtype)
    return shards


def _name_of(model: nn.Module, target: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is target)


def _divide_sizes(model: nn.Module, plan: Mapping[str, str], axis: Axis) -> None:
    for parent in {name.rpartition(".")[0] for name, style in plan.items() if style in ("colwise", "colwise_of_three")}:
        module = model.get_submodule(parent)
        for count in _COUNTS:
            if isinstance(getattr(module, count, None), int):
                setattr(module, count, getattr(module, count) // axis.size)


@torch.no_grad()
def probe_hidden_states(model: Any, axis: Axis, forward: Callable[..., Tensor] | None = None) -> Tensor:
    """[t, D] last hidden states of a short row, whose length tp divides; by another forward than the model's, if given.

    Collective over tp.
    """
    count = math.lcm(8, axis.size)
    tokens_T, places_T = torch.arange(count).flip(0) % model.config.get_text_config().vocab_size, torch.arange(count)
    plan = ShardPlan.make("contiguous", num_tokens=count, cp=1)
    shard = AttentionShard.make(plan, torch.zeros_like(places_T), Axis("cp"), kernel="plain")
    tokens_1T, places_1T = (row_T[None].to(next(model.parameters()).device) for row_T in (tokens_T, places_T))
    inputs = {"input_ids": tokens_1T, "position_ids": places_1T, "use_cache": False, "shard": shard}
    hidden_1tD = model.base_model(**inputs).last_hidden_state if forward is None else forward(**inputs)
    return hidden_1tD[0].cpu()


def check_sharded(
    what: str, values: str, expected: Tensor, compute: Callable[[], Tensor], *, rule: str, fix: str
) -> None:
    """Reject a sharded model that does not run, or computes other values (named for the message) than expected."""
    try:
        relative_error = float((compute() - expected).norm() / expected.norm())
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError, IndexError) as error:
        message = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise SpecError(what, found=message, rule=rule, fix=fix) from error
    if not relative_error <= 1e-3:  # far above rounding; the negation also catches NaN
        raise SpecError(what, found=f"{values} off by {relative_error:.2g} of their norm", rule=rule, fix=fix)
