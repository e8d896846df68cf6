"""How a decoder is cut over tp: the plan that its configuration names, or ours where it names none.

A plan says of each layer how it may be cut (`workbench.sharding.tensor_parallel`). Ours goes by what linear layers are
called, which is nearly one language. Whether a plan is meant for this model is then not believed but measured: the
cut model must say what the whole one said.

Letters: V vocabulary | t tokens.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SpecError
from workbench.policy.precision import cast
from workbench.sharding.attention import AttentionShard
from workbench.sharding.mesh import Axis, Mesh
from workbench.sharding.plan import ShardPlan
from workbench.sharding.sequence_parallel import Stream
from workbench.sharding.tensor_parallel import ParameterShard, apply_tensor_parallel, check_heads

NAMES = {
    "q_proj": "colwise",
    "k_proj": "colwise",
    "v_proj": "colwise",
    "o_proj": "rowwise",
    "out_proj": "rowwise",
    "query_key_value": "colwise",
    "dense": "rowwise",
    "c_attn": "colwise_of_three",
    "c_proj": "rowwise",
    "gate_proj": "colwise",
    "up_proj": "colwise",
    "down_proj": "rowwise",
    "fc1": "colwise",
    "fc2": "rowwise",
    "w1": "colwise",
    "w3": "colwise",
    "w2": "rowwise",
    "c_fc": "colwise",
    "dense_h_to_4h": "colwise",
    "dense_4h_to_h": "rowwise",
}
"""What linear layers of decoders are called, and how a layer of that name is cut."""

_COUNTS = ("num_heads", "num_key_value_heads", "split_size")
"""What a block may keep of its sizes; where our plan cuts it, they become this rank's."""


def tensor_plan(model: Any) -> dict[str, str]:
    """How the layers of a decoder may be cut: name pattern -> style.

    A model's own plan may have lines for layers that this size of it lacks (dense ones, in a mixture of experts); they
    are left out.

    Raises:
        SpecError: it names no plan, and has linear layers whose names say nothing.
    """
    config, prefix = model.config.get_text_config(), model.base_model_prefix
    if own := getattr(config, "base_model_tp_plan", None):
        names = [name for kind in (model.named_modules(), model.named_parameters()) for name, _ in kind]
        return {
            f"{prefix}.{pattern}": style
            for pattern, style in own.items()
            if fnmatch.filter(names, f"{prefix}.{pattern}")
        }
    return plan_by_names(model, f"{prefix}.", config.model_type)


def plan_by_names(model: nn.Module, prefix: str, model_type: str) -> dict[str, str]:
    """How the linear layers under a prefix may be cut, by what they are called: name -> style.

    Raises:
        SpecError: linear layers whose names say nothing.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) or hasattr(module, "nf")]
    inside = [name for name in linear if name.startswith(prefix)]
    if unknown := sorted({name.rpartition(".")[2] for name in inside} - NAMES.keys()):
        raise SpecError(
            f"tensor parallelism of model type {model_type!r}",
            found=f"no plan, and layers called {', '.join(unknown)}",
            rule="its configuration names a plan (base_model_tp_plan), or its linear layers are called as "
            "in `workbench.policy.tensor_plan.NAMES`",
            fix="use tp=1 for this model",
        )
    return {name: NAMES[name.rpartition(".")[2]] for name in inside}


def cut(model: Any, mesh: Mesh, *, sequence_parallel: bool = False) -> dict[str, ParameterShard]:
    """Cut a whole decoder into this rank's part, in place, and move it to the mesh's device. Collective over tp.

    Args:
        model: with the workbench's attention, and the same whole weights on every rank, on the CPU.
        mesh: the axes.
        sequence_parallel: hold 1 / tp of the tokens between blocks; last hidden states come whole all the same.

    Returns:
        How every parameter lies, by name.

    Raises:
        ShardingError: heads or features that tp does not divide, or a style that is not known here.
        SpecError: a model without a plan that we cannot plan, or that cut does not say what it said whole.
    """
    axis = mesh["tp"]
    if axis.size == 1:
        return {name: ParameterShard() for name, _ in model.named_parameters()}
    config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    check_heads(
        {
            "query": config.num_attention_heads,
            "key/value": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        },
        axis,
    )
    plan, tied = tensor_plan(model), head.weight is embedding.weight
    plan |= {name: "positions" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    plan |= {_name_of(model, embedding): "embedding_rowwise", _name_of(model, head): "vocabulary_head"}
    dtype = embedding.weight.dtype
    wide = torch.promote_types(dtype, torch.float32)
    expected_tD = _probe(cast(model, wide), axis)
    shards = apply_tensor_parallel(model, plan, axis, sequence_parallel=sequence_parallel)
    if tied:
        head.weight = embedding.weight
    if not getattr(config, "base_model_tp_plan", None):
        _count_locally(model, plan, axis)
    if sequence_parallel:
        model.base_model.register_forward_hook(_gathering(Stream(axis, sharded=True)))
    _hold(model.to(mesh.device), axis, expected_tD, sequence_parallel=sequence_parallel)
    cast(model, dtype)
    return shards


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _count_locally(model: nn.Module, plan: Mapping[str, str], axis: Axis) -> None:
    for parent in {name.rpartition(".")[0] for name, style in plan.items() if style in ("colwise", "colwise_of_three")}:
        module = model.get_submodule(parent)
        for count in _COUNTS:
            if isinstance(getattr(module, count, None), int):
                setattr(module, count, getattr(module, count) // axis.size)


def _gathering(stream: Stream) -> Any:
    def hook(_: nn.Module, __: Any, out: Any) -> Any:
        out.last_hidden_state = stream.all_of(out.last_hidden_state)
        return out

    return hook


def _probe(model: Any, axis: Axis) -> Tensor:
    """[t, D] last hidden states of a short row, as many tokens as tp divides."""
    count = math.lcm(8, axis.size)
    tokens_T, places_T = torch.arange(count).flip(0) % model.config.get_text_config().vocab_size, torch.arange(count)
    device = next(model.parameters()).device
    plan = ShardPlan.make("contiguous", num_tokens=count, cp=1)
    shard = AttentionShard.make(plan, torch.zeros_like(places_T), Axis("cp"), kernel="plain")
    with torch.no_grad():
        return (
            model.base_model(
                input_ids=tokens_T[None].to(device),
                position_ids=places_T[None].to(device),
                use_cache=False,
                shard=shard,
            )
            .last_hidden_state[0]
            .cpu()
        )


def _hold(model: Any, axis: Axis, expected_tD: Tensor, *, sequence_parallel: bool) -> None:
    """Refuse a model that does not say cut what it said whole; rounding is far below the bar."""
    what = f"tensor parallelism of model type {model.config.get_text_config().model_type!r} over tp={axis.size}"
    what += " with sequence_parallel" if sequence_parallel else ""
    rule = "the cut model's hidden states are the whole model's"
    fix = "leave sequence_parallel out" if sequence_parallel else "use tp=1 for this model"
    try:
        actual_tD = _probe(model, axis)
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise SpecError(
            what, found=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", rule=rule, fix=fix
        ) from error
    far = float((actual_tD - expected_tD).norm() / expected_tD.norm())
    if not far <= 1e-3:
        raise SpecError(what, found=f"hidden states off by {far:.2g} of their norm", rule=rule, fix=fix)
