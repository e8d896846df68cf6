"""Tensor parallelism from a model's own plan, on plain tensors.

A `transformers` model says how its layers may be cut (``base_model_tp_plan``): which linear layers by column,
which by row, which parameters stay whole. Here each named module gets its slice and the two collectives around
it; parameter names do not change, so a gradient can be found under the same name in every layout.

Letters: V vocabulary | D model dimension.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import ShardingError
from workbench.sharding.collectives import all_gather, identity_sum, sum_identity
from workbench.sharding.mesh import Axis


@dataclass(frozen=True)
class ParameterShard:
    """How one parameter lies over the tp axis.

    Attributes:
        dim: tensor dimension that is cut; None where every rank holds the whole parameter.
        gradient_is_partial: every rank holds the whole parameter but only a part of its gradient (a norm that
            acts on the local heads): one sum over tp per optimizer step completes it.
    """

    dim: int | None = None
    gradient_is_partial: bool = False


def shard_range(size: int, axis: Axis, *, what: str) -> tuple[int, int]:
    """The [start, stop) of this rank when ``size`` things are dealt in ceil-sized pieces; the last may be short.

    Raises:
        ShardingError: a rank would get nothing.
    """
    piece = -(-size // axis.size)
    if piece * (axis.size - 1) >= size:
        raise ShardingError(f"{what}: {size} over tp={axis.size}", found=f"pieces of {piece} leave a rank empty",
                            rule="every tp rank holds at least one", fix="use fewer tp ranks")
    return axis.rank * piece, min(size, (axis.rank + 1) * piece)


def check_heads(heads: Mapping[str, int], axis: Axis) -> None:
    """Refuse a tp size that does not divide the heads.

    Raises:
        ShardingError: names each kind of head that does not divide.
    """
    bad = {name: count for name, count in heads.items() if count % axis.size}
    if bad:
        raise ShardingError(f"tensor parallelism over tp={axis.size}",
                            found=", ".join(f"{count} {name} heads" for name, count in bad.items()),
                            rule="tp divides the query heads and the key/value heads",
                            fix=f"choose tp among the common divisors of {sorted(set(heads.values()))}")


def apply_tensor_parallel(model: nn.Module, plan: Mapping[str, str], axis: Axis) -> dict[str, ParameterShard]:
    """Cut a whole model into this rank's part, in place.

    Args:
        model: with the same whole weights on every rank.
        plan: module name pattern -> style; the styles are colwise, rowwise, embedding_rowwise,
            replicated_with_grad_allreduce. Modules that it does not name stay whole.
        axis: the tensor-parallel axis.

    Returns:
        How every parameter lies, by its name in the model.

    Backward: column: the gradient of the input is summed over tp (`identity_sum`); row: the output is summed
              over tp, its gradient passes (`sum_identity`).

    Raises:
        ShardingError: a style that is not known here, a pattern that matches nothing, sizes that do not divide.
    Source:   Megatron-LM, arXiv 1909.08053, section 3.
    """
    shards = {name: ParameterShard() for name, _ in model.named_parameters()}
    if axis.size == 1:
        return shards
    named = dict(model.named_modules())
    for pattern, style in plan.items():
        matches = [name for name in named if fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            raise ShardingError(f"tensor-parallel plan: {pattern!r}", found="no module of that name",
                                rule="a plan names modules of the model", fix="use the plan of this model's own config")
        for name in matches:
            if style not in _STYLES:
                raise ShardingError(f"tensor-parallel plan: {pattern!r} is {style!r}",
                                    rule=f"styles known here: {', '.join(_STYLES)}",
                                    fix="use a model whose plan keeps to these, or tp=1")
            shards |= {f"{name}.{p}": s for p, s in _STYLES[style](named[name], name, axis).items()
                       if f"{name}.{p}" in shards}
    return shards


def full_gradient(local: Tensor, shard: ParameterShard, axis: Axis) -> Tensor:
    """A parameter's whole gradient (or weight) on every tp rank, outside autograd. Collective over tp."""
    if shard.dim is None or axis.size == 1:
        return local.detach().clone()
    pieces = all_gather(local.transpose(0, shard.dim).contiguous(), axis)
    return torch.cat(pieces).transpose(0, shard.dim).contiguous()


def _cut(module: nn.Module, parameter: str, dim: int, start: int, stop: int) -> None:
    whole = getattr(module, parameter)
    piece = whole.detach().narrow(dim, start, stop - start).clone()
    setattr(module, parameter, nn.Parameter(piece, requires_grad=whole.requires_grad))


def _divided(module: Any, name: str, size: int, axis: Axis) -> tuple[int, int]:
    if size % axis.size:
        raise ShardingError(f"tensor parallelism of {name} over tp={axis.size}", found=f"{size} features",
                            rule="tp divides the features of every cut layer", fix="choose a tp that divides them")
    return shard_range(size, axis, what=name)


def _column(module: Any, name: str, axis: Axis) -> dict[str, ParameterShard]:
    start, stop = _divided(module, name, module.weight.shape[0], axis)
    _cut(module, "weight", 0, start, stop)
    if module.bias is not None:
        _cut(module, "bias", 0, start, stop)
    module.register_forward_pre_hook(lambda _, inputs: (identity_sum(inputs[0], axis), *inputs[1:]))
    return {"weight": ParameterShard(0), "bias": ParameterShard(0)}


def _row(module: Any, name: str, axis: Axis) -> dict[str, ParameterShard]:
    start, stop = _divided(module, name, module.weight.shape[1], axis)
    _cut(module, "weight", 1, start, stop)
    linear = nn.functional.linear

    def forward(inputs: Tensor) -> Tensor:
        whole = sum_identity(linear(inputs, module.weight), axis)
        return whole if module.bias is None else whole + module.bias  # once, after the sum

    module.forward = forward
    return {"weight": ParameterShard(1), "bias": ParameterShard()}


def _embedding(module: Any, name: str, axis: Axis) -> dict[str, ParameterShard]:
    start, stop = shard_range(module.weight.shape[0], axis, what=f"{name}: vocabulary")
    _cut(module, "weight", 0, start, stop)
    module.padding_idx = None  # an id of the whole vocabulary, meaningless in a slice

    def forward(tokens: Tensor) -> Tensor:
        mine = (tokens >= start) & (tokens < stop)
        rows = nn.functional.embedding((tokens - start).masked_fill(~mine, 0), module.weight)
        return sum_identity(rows.masked_fill(~mine[..., None], 0), axis)

    module.forward = forward
    return {"weight": ParameterShard(0)}


def _head(module: Any, name: str, axis: Axis) -> dict[str, ParameterShard]:
    """An output head: its slice of the vocabulary only. The head's own code reads the weight, not forward."""
    start, stop = shard_range(module.weight.shape[0], axis, what=f"{name}: vocabulary")
    _cut(module, "weight", 0, start, stop)
    if getattr(module, "bias", None) is not None:
        _cut(module, "bias", 0, start, stop)
    return {"weight": ParameterShard(0), "bias": ParameterShard(0)}


def _replicated(module: Any, name: str, axis: Axis) -> dict[str, ParameterShard]:
    return {name: ParameterShard(gradient_is_partial=True) for name, _ in module.named_parameters(recurse=False)}


_STYLES = {
    "colwise": _column,
    "rowwise": _row,
    "embedding_rowwise": _embedding,
    "vocabulary_head": _head,
    "replicated_with_grad_allreduce": _replicated,
}
