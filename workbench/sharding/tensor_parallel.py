"""Tensor parallelism from a plan, on plain tensors.

A `transformers` model says how its layers may be cut (``base_model_tp_plan``): which linear layers by column,
which by row, which parameters stay whole. Here each named module gets its slice; parameter names do not change, so a
gradient can be found under the same name in every layout.

Cut layers form blocks: a module whose children are cut by column and by row (attention, a feed-forward), or the
experts of a mixture. Hidden states go into a block once, however many layers read them there, and every row-cut layer
gives them back; `workbench.sharding.sequence_parallel` has both ways. A whole parameter inside a block acts on what
this rank computes alone, so its gradient is a part.

Letters: V vocabulary | D model dimension | E experts | F features of an expert | t tokens of a cp rank |
k experts of a token.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import ShardingError
from workbench.sharding.collectives import all_gather, gather_scatter
from workbench.sharding.mesh import Axis
from workbench.sharding.sequence_parallel import TOKENS, Stream


@dataclass(frozen=True)
class ParameterShard:
    """How one parameter lies over the tp axis, and over dp x cp.

    Attributes:
        dim: tensor dimension that is cut over tp; None where every rank holds the whole parameter.
        gradient_is_partial: every rank holds the whole parameter but only a part of its gradient (a norm that
            acts on the local heads, or on this rank's tokens): one sum over tp per optimizer step completes it.
        over_dp_cp: what a rank of tp holds is dealt over dp x cp along the first dimension, by
            `workbench.sharding.data_parallel`.
        parts: sizes of the sections along ``dim`` that are cut each by itself (gate and up in one tensor); () for one.
    """

    dim: int | None = None
    gradient_is_partial: bool = False
    over_dp_cp: bool = False
    parts: tuple[int, ...] = ()


def shard_range(size: int, axis: Axis, *, what: str) -> tuple[int, int]:
    """The [start, stop) of this rank when ``size`` things are dealt in ceil-sized pieces; the last may be short.

    Raises:
        ShardingError: a rank would get nothing.
    """
    piece = -(-size // axis.size)
    if piece * (axis.size - 1) >= size:
        raise ShardingError(
            f"{what}: {size} over tp={axis.size}",
            found=f"pieces of {piece} leave a rank empty",
            rule="every tp rank holds at least one",
            fix="use fewer tp ranks",
        )
    return axis.rank * piece, min(size, (axis.rank + 1) * piece)


def check_heads(heads: Mapping[str, int], axis: Axis) -> None:
    """Refuse a tp size that does not divide the heads.

    Raises:
        ShardingError: names each kind of head that does not divide.
    """
    bad = {name: count for name, count in heads.items() if count % axis.size}
    if bad:
        raise ShardingError(
            f"tensor parallelism over tp={axis.size}",
            found=", ".join(f"{count} {name} heads" for name, count in bad.items()),
            rule="tp divides the query heads and the key/value heads",
            fix=f"choose tp among the common divisors of {sorted(set(heads.values()))}",
        )


def apply_tensor_parallel(
    model: nn.Module, plan: Mapping[str, str], axis: Axis, *, sequence_parallel: bool = False
) -> dict[str, ParameterShard]:
    """Cut a whole model into this rank's part, in place.

    Args:
        model: with the same whole weights on every rank.
        plan: name pattern of modules, or of parameters of experts -> style, one of `STYLES`. What it does not name
            stays whole.
        axis: the tensor-parallel axis.
        sequence_parallel: hold 1 / tp of the tokens between blocks. The plan then has to name the embedding, where
            tokens are cut, and whoever reads the last hidden states has to gather them (`Stream.all_of`).

    Returns:
        How every parameter lies, by its name in the model.

    Backward: of a block: `Stream.into` and `Stream.out_of`.

    Raises:
        ShardingError: a style that is not known here, a pattern that matches nothing, sizes that do not divide.
    Source:   Megatron-LM, arXiv 1909.08053, section 3; arXiv 2205.05198, section 4.2.2.
    """
    shards = {name: ParameterShard() for name, _ in model.named_parameters()}
    if axis.size == 1:
        return shards
    stream, (modules, parameters) = Stream(axis, sequence_parallel), _matches(model, plan)
    if sequence_parallel:
        shards = dict.fromkeys(shards, ParameterShard(gradient_is_partial=True))
    for block in _blocks(modules):
        model.get_submodule(block).register_forward_pre_hook(_Into(stream, block), with_kwargs=True)
        inside = [name for name in shards if name.startswith(f"{block}.")]
        shards |= dict.fromkeys(inside, ParameterShard(gradient_is_partial=True))
    for name, style in parameters.items():
        shards[name] = _cut_parameter(model, name, style, axis)
    for name, style in modules.items():
        found = STYLES[style](model.get_submodule(name), name, stream)
        shards |= {f"{name}.{p}": shard for p, shard in found.items() if f"{name}.{p}" in shards}
    return shards


def leave_sums(model: nn.Module, *, to_others: bool) -> None:
    """Say whether the gradient at the input of each block is summed over tp by somebody else, or here, as at first.

    Raises:
        ShardingError: sequence parallelism, which gathers and scatters tokens in the same place.
    """
    ways = [
        hook for module in model.modules() for hook in module._forward_pre_hooks.values() if isinstance(hook, _Into)
    ]
    if to_others and any(way.stream.sharded for way in ways):
        raise ShardingError(
            "sums over tp that are left to others",
            found="sequence parallelism",
            rule="hidden states are whole between blocks",
            fix="leave layout.sequence_parallel out",
        )
    for way in ways:
        way.idle = to_others


def full_gradient(local: Tensor, shard: ParameterShard, axis: Axis) -> Tensor:
    """A parameter's whole gradient (or weight) on every tp rank, outside autograd. Collective over tp."""
    if shard.dim is None or axis.size == 1:
        return local.detach().clone()
    pieces = all_gather(local.transpose(0, shard.dim).contiguous(), axis)
    if shard.parts:
        sections = [piece.split([part // axis.size for part in shard.parts]) for piece in pieces]
        pieces = [section for same in zip(*sections, strict=True) for section in same]
    return torch.cat(pieces).transpose(0, shard.dim).contiguous()


def own_part(whole: Tensor, shard: ParameterShard, axis: Axis) -> Tensor:
    """What this tp rank holds of a whole tensor, the way back from `full_gradient`; a view."""
    if shard.dim is None or axis.size == 1:
        return whole
    sections = whole.split(shard.parts, shard.dim) if shard.parts else (whole,)
    mine = [
        section.narrow(shard.dim, start, stop - start)
        for section in sections
        for start, stop in [shard_range(section.shape[shard.dim], axis, what="parameter")]
    ]
    return mine[0] if len(mine) == 1 else torch.cat(mine, dim=shard.dim)


def _matches(model: nn.Module, plan: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What a plan is about: name -> style, of modules and of single parameters."""
    modules: dict[str, str] = {}
    parameters: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in STYLES and style not in PARAMETER_STYLES:
            raise ShardingError(
                f"tensor-parallel plan: {pattern!r} is {style!r}",
                rule=f"styles known here: {', '.join({**STYLES, **PARAMETER_STYLES})}",
                fix="use a model whose plan keeps to these, or tp=1",
            )
        of_modules = fnmatch.filter([name for name, _ in model.named_modules()], pattern)
        of_parameters = fnmatch.filter([name for name, _ in model.named_parameters()], pattern)
        if of_modules and style in STYLES:
            modules |= dict.fromkeys(of_modules, style)
        elif of_parameters and style in PARAMETER_STYLES:
            parameters |= dict.fromkeys(of_parameters, style)
        else:
            raise ShardingError(
                f"tensor-parallel plan: {pattern!r} is {style!r}",
                found="no module of that name" if style in STYLES else "no parameter of that name",
                rule="a plan names modules and parameters of the model",
                fix="use the plan of this model's own config",
            )
    for name, style in modules.items():
        held = [p for p, _ in model.get_submodule(name).named_parameters(name)] if style == "moe_tp_experts" else []
        if whole := [p for p in held if p not in parameters]:
            raise ShardingError(
                f"tensor-parallel plan: {name!r} is {style!r}",
                found=f"{', '.join(whole)} left whole",
                rule="every parameter of experts is cut, or each rank would add all of it",
                fix="use a model whose plan cuts them, or tp=1",
            )
    return modules, parameters


def _blocks(modules: Mapping[str, str]) -> list[str]:
    """Modules at whose input hidden states are handed to every rank's part.

    The parent of column-cut layers, if a row-cut layer stands beside them and no other cut layer stands deeper; where
    that is not so (feed-forward layers that are children of the decoder layer itself), the column-cut layer alone.
    """
    columns = [name for name, style in modules.items() if style in _COLUMNS]
    with_row = {_parent(name) for name, style in modules.items() if style in _ROWS}
    deep = {_parent(name) for name in modules}
    found = {}
    for name in columns:
        parent = _parent(name)
        whole = parent and parent in with_row and not any(other.startswith(f"{parent}.") for other in deep)
        found[parent if whole else name] = None
    return list(found)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


@dataclass
class _Into:
    """The way into a block, as a hook; idle: whoever computes inside the block sums the gradient himself."""

    stream: Stream
    block: str
    idle: bool = False

    def __call__(self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        if self.idle:
            return inputs, named
        if inputs:
            return (self.stream.into(inputs[0]), *inputs[1:]), named
        if "hidden_states" not in named:
            raise ShardingError(
                f"tensor parallelism of {self.block}",
                found=f"a call with {', '.join(named)}",
                rule="a block gets its hidden states first, or as hidden_states",
                fix="use tp=1 for this model",
            )
        return inputs, named | {"hidden_states": self.stream.into(named["hidden_states"])}


def _cut(module: nn.Module, parameter: str, pieces: list[tuple[int, int]], dim: int) -> None:
    """Keep the given [start, stop) of a parameter, one after another."""
    whole = getattr(module, parameter)
    kept = torch.cat([whole.detach().narrow(dim, start, stop - start) for start, stop in pieces], dim=dim)
    setattr(module, parameter, nn.Parameter(kept, requires_grad=whole.requires_grad))


def _sections(name: str, size: int, count: int, axis: Axis) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """This rank's [start, stop) of each of several equal sections, and what `ParameterShard.parts` says of them."""
    each = size // count
    if each % axis.size:
        raise ShardingError(
            f"tensor parallelism of {name} over tp={axis.size}",
            found=f"{each} features",
            rule="tp divides the features of every cut layer",
            fix="choose a tp that divides them",
        )
    mine = each // axis.size
    starts = [each * section + mine * axis.rank for section in range(count)]
    return [(start, start + mine) for start in starts], (each,) * count if count > 1 else ()


def _cut_parameter(model: nn.Module, name: str, style: str, axis: Axis) -> ParameterShard:
    module, (from_end, count) = model.get_submodule(_parent(name)), PARAMETER_STYLES[style]
    dim = model.get_parameter(name).dim() - from_end
    pieces, parts = _sections(name, model.get_parameter(name).shape[dim], count, axis)
    _cut(module, name.rpartition(".")[2], pieces, dim)
    return ParameterShard(dim, parts=parts)


def _is_transposed(module: Any) -> bool:
    """Whether a linear layer holds its weight as [inputs, outputs] (Conv1D of `transformers`)."""
    return not isinstance(module, nn.Linear) and hasattr(module, "nf")


def _column(module: Any, name: str, stream: Stream, count: int = 1) -> dict[str, ParameterShard]:
    """A slice of the outputs; of each of several equal sections of them."""
    dim = 1 if _is_transposed(module) else 0
    pieces, parts = _sections(name, module.weight.shape[dim], count, stream.axis)
    _cut(module, "weight", pieces, dim)
    if module.bias is not None:
        _cut(module, "bias", pieces, 0)
    if _is_transposed(module):
        module.nf = module.weight.shape[1]
    return {"weight": ParameterShard(dim, parts=parts), "bias": ParameterShard(0, parts=parts)}


def _column_of_three(module: Any, name: str, stream: Stream) -> dict[str, ParameterShard]:
    return _column(module, name, stream, count=3)


def _column_gathered(module: Any, name: str, stream: Stream) -> dict[str, ParameterShard]:
    """A slice of the outputs, gathered: what follows is computed whole on every rank, up to a row that splits it."""
    shards = _column(module, name, stream)
    module.register_forward_hook(lambda _, __, out: gather_scatter(out, stream.axis, dim=-1))
    return shards


def _row(module: Any, name: str, stream: Stream, *, split: bool = False) -> dict[str, ParameterShard]:
    """A slice of the inputs, and the sum of all ranks' outputs; the bias is added once, to the sum."""
    dim = 0 if _is_transposed(module) else 1
    [(start, stop)], _ = _sections(name, module.weight.shape[dim], 1, stream.axis)
    _cut(module, "weight", [(start, stop)], dim)

    def forward(inputs: Tensor) -> Tensor:
        mine = inputs[..., start:stop] if split else inputs
        whole = stream.out_of(mine @ (module.weight if dim == 0 else module.weight.T))
        return whole if module.bias is None else whole + module.bias

    module.forward = forward
    return {"weight": ParameterShard(dim), "bias": ParameterShard(gradient_is_partial=stream.sharded)}


def _row_of_whole(module: Any, name: str, stream: Stream) -> dict[str, ParameterShard]:
    return _row(module, name, stream, split=True)


def _embedding(module: Any, name: str, stream: Stream) -> dict[str, ParameterShard]:
    start, stop = shard_range(module.weight.shape[0], stream.axis, what=f"{name}: vocabulary")
    _cut(module, "weight", [(start, stop)], 0)
    module.padding_idx = None  # an id of the whole vocabulary, meaningless in a slice
    look_up = module.forward

    def forward(tokens: Tensor) -> Tensor:
        mine = (tokens >= start) & (tokens < stop)
        rows = look_up((tokens - start).masked_fill(~mine, 0))
        return stream.out_of(rows.masked_fill(~mine[..., None], 0))

    module.forward = forward
    return {"weight": ParameterShard(0)}


def _positions(module: Any, name: str, stream: Stream) -> dict[str, ParameterShard]:
    """A whole embedding whose output is added to hidden states."""
    module.register_forward_hook(lambda _, __, out: stream.own(out))
    return {"weight": ParameterShard(gradient_is_partial=stream.sharded)}


def _head(module: Any, name: str, stream: Stream) -> dict[str, ParameterShard]:
    """An output head: its slice of the vocabulary only. The head's own code reads the weight, not forward."""
    start, stop = shard_range(module.weight.shape[0], stream.axis, what=f"{name}: vocabulary")
    _cut(module, "weight", [(start, stop)], 0)
    if getattr(module, "bias", None) is not None:
        _cut(module, "bias", [(start, stop)], 0)
    return {"weight": ParameterShard(0), "bias": ParameterShard(0)}


def _replicated(module: Any, name: str, stream: Stream) -> dict[str, ParameterShard]:
    return {name: ParameterShard(gradient_is_partial=True) for name, _ in module.named_parameters(recurse=False)}


def _experts(module: Any, name: str, stream: Stream) -> dict[str, ParameterShard]:
    """Experts of whose features each rank holds a slice.

    Called with hidden states, and for each token the experts that it goes to and their weights. The router stands
    outside: it acts on the tokens that this rank holds, and the gradient of what it says comes back summed.

    Shapes: hidden [t, D], experts and weights [t, k] -> [t, D]; parameters [E, F, D] (or 2F, gate and up), [E, D, F].
    """

    def enter(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return stream.into(value)
        return gather_scatter(value, stream.axis, dim=TOKENS) if stream.sharded else value

    module.register_forward_pre_hook(
        lambda _, inputs, named: (tuple(map(enter, inputs)), {key: enter(value) for key, value in named.items()}),
        with_kwargs=True,
    )
    module.register_forward_hook(lambda _, __, out: stream.out_of(out))
    return {}


STYLES: dict[str, Callable[[Any, str, Stream], dict[str, ParameterShard]]] = {
    "colwise": _column,
    "colwise_of_three": _column_of_three,
    "colwise_gather_output": _column_gathered,
    "rowwise": _row,
    "rowwise_split_input": _row_of_whole,
    "moe_tp_experts": _experts,
    "embedding_rowwise": _embedding,
    "positions": _positions,
    "vocabulary_head": _head,
    "replicated_with_grad_allreduce": _replicated,
}
"""How a module may be cut, by the name that `transformers` has for it, if it has one."""

PARAMETER_STYLES = {"colwise": (2, 1), "packed_colwise": (2, 2), "rowwise": (1, 1)}
"""How one parameter of experts may be cut: which dimension, counted from the end, and in how many sections."""

_COLUMNS = ("colwise", "colwise_of_three", "colwise_gather_output")
_ROWS = ("rowwise", "rowwise_split_input")
