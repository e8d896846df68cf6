"""Tensor parallelism from a plan, on plain tensors.

A `transformers` model declares which of its layers are sharded by column, which by row (``base_model_tp_plan``). Here
each named module gets its slice; parameter names do not change, so a gradient has the same name in every layout.

Sharded layers form blocks: a module with column-parallel and row-parallel children (attention, a feed-forward), or
the experts of a mixture. Hidden states enter a block once, however many layers read them there, and every row-parallel
layer returns them; `workbench.sharding.sequence_parallel` has both collectives. A whole parameter inside a block acts
on this rank's part of the computation only, so its gradient is partial.

Letters: V vocabulary | D model dimension | E experts | F features of an expert | t tokens of a cp rank |
k experts of a token.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import ShardingError
from workbench.sharding import divisibility
from workbench.sharding.collectives import gather_many, gather_scatter
from workbench.sharding.divisibility import check_features, check_pieces
from workbench.sharding.mesh import Axis
from workbench.sharding.sequence_parallel import TOKENS, Stream


@dataclass(frozen=True)
class ParameterShard:
    """Sharding of one parameter over the tp axis, and over dp x cp.

    Attributes:
        dim: tensor dimension that is sharded over tp; None if every rank holds the whole parameter.
        gradient_is_partial: every rank holds the whole parameter but only a part of its gradient (a norm that
            acts on the local heads, or on this rank's tokens): one sum over tp per optimizer step completes it.
        over_dp_cp: the tp shard is sharded again over dp x cp (experts: over edp) along the first dimension, by
            `workbench.sharding.data_parallel`.
        over_ep: the first dimension is sharded over ep, by `workbench.sharding.expert_parallel`.
        on_both_ends: the first and the last pipeline rank have it (an embedding that is also the head); its gradient is
            the sum of theirs.
        parts: sizes of the sections along ``dim`` that are sharded separately (gate and up in one tensor); () for one.
    """

    dim: int | None = None
    gradient_is_partial: bool = False
    over_dp_cp: bool = False
    over_ep: bool = False
    on_both_ends: bool = False
    parts: tuple[int, ...] = ()


def shard_range(size: int, axis: Axis, *, what: str) -> tuple[int, int]:
    """The [start, stop) of this rank when ``size`` items are dealt in ceil-sized pieces; the last may be short.

    Raises:
        ShardingError: a rank would be empty.
    """
    piece = check_pieces(what, size, axis.size)
    return axis.rank * piece, min(size, (axis.rank + 1) * piece)


def check_heads(heads: Mapping[str, int], axis: Axis) -> None:
    """Raise if tp does not divide the heads, and name each kind of head that does not divide."""
    divisibility.check_heads(heads, axis.size)


def apply_tensor_parallel(
    model: nn.Module, plan: Mapping[str, str], axis: Axis, *, sequence_parallel: bool = False
) -> dict[str, ParameterShard]:
    """Reduce a model, of the same whole weights on every rank, to this rank's shard, in place.

    The plan has a name pattern of modules, or of parameters of experts, -> style, one of `STYLES`; others stay whole.
    With ``sequence_parallel``, ranks hold 1 / tp of the tokens between blocks: the plan must name the embedding, where
    tokens are sharded, and readers of the last hidden states must gather them (`Stream.all_tokens`).

    Returns:
        The sharding of every parameter, by its name in the model.

    Backward: of a block: `Stream.into` and `Stream.out_of`.
    Raises:   ShardingError: an unknown style, a pattern that matches nothing, sizes that do not divide.
    Source:   Megatron-LM, arXiv 1909.08053, section 3; arXiv 2205.05198, section 4.2.2.
    """
    shards = {name: ParameterShard() for name, _ in model.named_parameters()}
    if axis.size == 1:
        return shards
    stream, (modules, parameters) = Stream(axis, sequence_parallel), _matches(model, plan)
    if sequence_parallel:
        shards = dict.fromkeys(shards, ParameterShard(gradient_is_partial=True))
    for block in _blocks(modules):
        model.get_submodule(block).register_forward_pre_hook(_InputHook(stream, block), with_kwargs=True)
        inside = [name for name in shards if name.startswith(f"{block}.")]
        shards |= dict.fromkeys(inside, ParameterShard(gradient_is_partial=True))
    for name, style in parameters.items():
        shards[name] = _cut_parameter(model, name, style, axis)
    for name, style in modules.items():
        module_shards = STYLES[style](model.get_submodule(name), name, stream)
        shards |= {f"{name}.{p}": shard for p, shard in module_shards.items() if f"{name}.{p}" in shards}
    return shards


def defer_input_sums(model: nn.Module, *, deferred: bool) -> None:
    """Leave the tp sum of the gradient at the input of each block to the caller, or do it here (the default).

    Raises:
        ShardingError: sequence parallelism, which gathers and scatters tokens at the same point.
    """
    hooks = [h for module in model.modules() for h in module._forward_pre_hooks.values() if isinstance(h, _InputHook)]
    if deferred and any(hook.stream.sharded for hook in hooks):
        raise ShardingError(
            "sums over tp that are left to the caller",
            found="sequence parallelism",
            rule="hidden states are whole between blocks",
            fix="leave layout.sequence_parallel out",
        )
    for hook in hooks:
        hook.idle = deferred


def full_gradient(local: Tensor, shard: ParameterShard, axis: Axis) -> Tensor:
    """Gather a parameter's gradient (or weight) on every tp rank, outside autograd. Collective over tp."""
    return whole_over_tp([local], [shard], axis)[0]


def whole_over_tp(locals: Sequence[Tensor], shards: Sequence[ParameterShard], axis: Axis) -> list[Tensor]:
    """Gather gradients (or weights) as `full_gradient` does, in few collectives."""
    split = [axis.size > 1 and shard.dim is not None for shard in shards]
    parts = [
        part.transpose(0, shard.dim or 0).contiguous()
        for part, shard, cut in zip(locals, shards, split, strict=True)
        if cut
    ]
    gathered = gather_many(parts, axis)
    return [
        _joined(next(gathered), shard, axis) if cut else part.detach().clone()
        for part, shard, cut in zip(locals, shards, split, strict=True)
    ]


def _joined(pieces: Sequence[Tensor], shard: ParameterShard, axis: Axis) -> Tensor:
    if shard.parts:
        sections = [piece.split([part // axis.size for part in shard.parts]) for piece in pieces]
        pieces = [section for of_ranks in zip(*sections, strict=True) for section in of_ranks]
    return torch.cat(list(pieces)).transpose(0, shard.dim or 0).contiguous()


def local_part(whole: Tensor, shard: ParameterShard, axis: Axis) -> Tensor:
    """This tp rank's shard of a whole tensor, the inverse of `full_gradient`; a view."""
    if shard.dim is None or axis.size == 1:
        return whole
    sections = whole.split(shard.parts, shard.dim) if shard.parts else (whole,)
    slices = [
        section.narrow(shard.dim, start, stop - start)
        for section in sections
        for start, stop in [shard_range(section.shape[shard.dim], axis, what="parameter")]
    ]
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim=shard.dim)


def _matches(model: nn.Module, plan: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Resolve a plan to name -> style, of modules and of single parameters."""
    modules: dict[str, str] = {}
    parameters: dict[str, str] = {}
    all_modules = [name for name, _ in model.named_modules()]
    all_parameters = [name for name, _ in model.named_parameters()]
    for pattern, style in plan.items():
        if style not in STYLES and style not in PARAMETER_STYLES:
            raise ShardingError(
                f"tensor-parallel plan: {pattern!r} is {style!r}",
                rule=f"styles known here: {', '.join({**STYLES, **PARAMETER_STYLES})}",
                fix="use a model whose plan uses only these, or tp=1",
            )
        module_names = fnmatch.filter(all_modules, pattern)
        parameter_names = fnmatch.filter(all_parameters, pattern)
        if module_names and style in STYLES:
            modules |= dict.fromkeys(module_names, style)
        elif parameter_names and style in PARAMETER_STYLES:
            parameters |= dict.fromkeys(parameter_names, style)
        else:
            raise ShardingError(
                f"tensor-parallel plan: {pattern!r} is {style!r}",
                found="no module of that name" if style in STYLES else "no parameter of that name",
                rule="a plan names modules and parameters of the model",
                fix="use the plan of this model's own config",
            )
    for name, style in modules.items():
        experts = [p for p, _ in model.get_submodule(name).named_parameters(name)] if style == "moe_tp_experts" else []
        if whole := [p for p in experts if p not in parameters]:
            raise ShardingError(
                f"tensor-parallel plan: {name!r} is {style!r}",
                found=f"{', '.join(whole)} left whole",
                rule="every parameter of experts is sharded, or each rank would add all of it",
                fix="use a model whose plan shards them, or tp=1",
            )
    return modules, parameters


def _blocks(modules: Mapping[str, str]) -> list[str]:
    """Modules at whose input replicated hidden states enter the ranks' parts.

    The parent of column-parallel layers, if it has a row-parallel child too and no sharded layer is nested deeper;
    otherwise (feed-forward layers that are children of the decoder layer itself) the column-parallel layer alone.
    """
    columns = [name for name, style in modules.items() if style in _COLUMNS]
    with_row = {_parent(name) for name, style in modules.items() if style in _ROWS}
    deep = {_parent(name) for name in modules}
    blocks: dict[str, None] = {}  # in order, each once
    for name in columns:
        parent = _parent(name)
        whole = parent and parent in with_row and not any(other.startswith(f"{parent}.") for other in deep)
        blocks[parent if whole else name] = None
    return list(blocks)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


@dataclass
class _InputHook:
    """Forward pre-hook at the input of a block; idle: the code inside the block sums the gradient itself."""

    stream: Stream
    block: str
    idle: bool = False

    def __call__(self, _: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self.idle:
            return inputs, kwargs
        if inputs:
            return (self.stream.into(inputs[0]), *inputs[1:]), kwargs
        if "hidden_states" not in kwargs:
            raise ShardingError(
                f"tensor parallelism of {self.block}",
                found=f"a call with {', '.join(kwargs)}",
                rule="a block takes its hidden states first, or as hidden_states",
                fix="use tp=1 for this model",
            )
        return inputs, kwargs | {"hidden_states": self.stream.into(kwargs["hidden_states"])}


def _cut(module: nn.Module, parameter: str, pieces: list[tuple[int, int]], dim: int) -> None:
    """Replace a parameter by the given [start, stop) slices of it, concatenated."""
    whole = getattr(module, parameter)
    local = torch.cat([whole.detach().narrow(dim, start, stop - start) for start, stop in pieces], dim=dim)
    setattr(module, parameter, nn.Parameter(local, requires_grad=whole.requires_grad))


def _sections(name: str, size: int, count: int, axis: Axis) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """This rank's [start, stop) of each of several equal sections, and the value of `ParameterShard.parts`."""
    each = size // count
    check_features(name, each, axis.size)
    local_size = each // axis.size
    starts = [each * section + local_size * axis.rank for section in range(count)]
    return [(start, start + local_size) for start in starts], (each,) * count if count > 1 else ()


def _cut_parameter(model: nn.Module, name: str, style: str, axis: Axis) -> ParameterShard:
    module, (from_end, count) = model.get_submodule(_parent(name)), PARAMETER_STYLES[style]
    dim = model.get_parameter(name).dim() - from_end
    pieces, parts = _sections(name, model.get_parameter(name).shape[dim], count, axis)
    _cut(module, name.rpartition(".")[2], pieces, dim)
    return ParameterShard(dim, parts=parts)


def _is_transposed(module: Any) -> bool:
    """True if a linear layer holds its weight as [inputs, outputs] (Conv1D of `transformers`)."""
    return not isinstance(module, nn.Linear) and hasattr(module, "nf")


def _column(module: Any, name: str, stream: Stream, count: int = 1) -> dict[str, ParameterShard]:
    """Shard the outputs, or each of several equal sections of them."""
    dim = 1 if _is_transposed(module) else 0
    pieces, parts = _sections(name, module.weight.shape[dim], count, stream.axis)
    _cut(module, "weight", pieces, dim)
    if module.bias is not None:
        _cut(module, "bias", pieces, 0)
    if _is_transposed(module):
        module.nf = module.weight.shape[1]
    return {"weight": ParameterShard(dim, parts=parts), "bias": ParameterShard(0, parts=parts)}


def _column_gathered(module: Any, name: str, stream: Stream) -> dict[str, ParameterShard]:
    """Shard the outputs and gather them: the following layers are replicated, up to a row layer that splits again."""
    shards = _column(module, name, stream)
    module.register_forward_hook(lambda _, __, out: gather_scatter(out, stream.axis, dim=-1))
    return shards


GEMM = "gemm"
"""Attribute of a linear layer: a product of inputs [..., I] and its transposed weight [I, O], in place of matmul."""
ADDED = "added"
"""Attribute of a row-parallel layer: a function of its inputs [..., I / tp], added to its product before the sum."""


def _row(module: Any, name: str, stream: Stream, *, split: bool = False) -> dict[str, ParameterShard]:
    """Shard the inputs and sum the ranks' outputs; the bias is added once, to the sum."""
    dim = 0 if _is_transposed(module) else 1
    [(start, stop)], _ = _sections(name, module.weight.shape[dim], 1, stream.axis)
    _cut(module, "weight", [(start, stop)], dim)

    def forward(inputs: Tensor) -> Tensor:
        local = inputs[..., start:stop] if split else inputs
        gemm, weight = vars(module).get(GEMM, torch.matmul), module.weight
        partial = gemm(local, weight if dim == 0 else weight.T)
        if (added := vars(module).get(ADDED)) is not None:
            partial = partial + added(local)
        whole = stream.out_of(partial)
        return whole if module.bias is None else whole + module.bias

    module.forward = forward
    return {"weight": ParameterShard(dim), "bias": ParameterShard(gradient_is_partial=stream.sharded)}


def _cut_vocabulary(module: Any, name: str, stream: Stream) -> tuple[int, int]:
    rows = shard_range(module.weight.shape[0], stream.axis, what=f"{name}: vocabulary")
    _cut(module, "weight", [rows], 0)
    return rows


def _embedding(module: Any, name: str, stream: Stream) -> dict[str, ParameterShard]:
    start, stop = _cut_vocabulary(module, name, stream)
    module.padding_idx = None  # indexes the whole vocabulary, meaningless in a slice
    look_up = module.forward

    def forward(tokens: Tensor) -> Tensor:
        in_slice = (tokens >= start) & (tokens < stop)
        rows = look_up((tokens - start).masked_fill(~in_slice, 0))
        return stream.out_of(rows.masked_fill(~in_slice[..., None], 0))

    module.forward = forward
    return {"weight": ParameterShard(0)}


def _positions(module: Any, name: str, stream: Stream) -> dict[str, ParameterShard]:
    """Keep an embedding whole whose output is added to hidden states."""
    module.register_forward_hook(lambda _, __, out: stream.local_tokens(out))
    return {"weight": ParameterShard(gradient_is_partial=stream.sharded)}


def _head(module: Any, name: str, stream: Stream) -> dict[str, ParameterShard]:
    """Shard an output head over the vocabulary. The head's code reads the weight and does not call forward."""
    rows = _cut_vocabulary(module, name, stream)
    if getattr(module, "bias", None) is not None:
        _cut(module, "bias", [rows], 0)
    return {"weight": ParameterShard(0), "bias": ParameterShard(0)}


def _replicated(module: Any, name: str, stream: Stream) -> dict[str, ParameterShard]:
    return {name: ParameterShard(gradient_is_partial=True) for name, _ in module.named_parameters(recurse=False)}


def _experts(module: Any, name: str, stream: Stream) -> dict[str, ParameterShard]:
    """Wrap experts whose features are sharded over tp.

    Called with hidden states and, for each token, its experts and their weights. The router is outside: it acts on
    this rank's tokens, and the gradient of its output arrives summed.

    Shapes: hidden [t, D], experts and weights [t, k] -> [t, D]; parameters [E, F, D] (or 2F, gate and up), [E, D, F].
    """

    def enter(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return stream.into(value)
        return gather_scatter(value, stream.axis, dim=TOKENS) if stream.sharded else value

    module.register_forward_pre_hook(
        lambda _, inputs, kwargs: (tuple(map(enter, inputs)), {key: enter(value) for key, value in kwargs.items()}),
        with_kwargs=True,
    )
    module.register_forward_hook(lambda _, __, out: stream.out_of(out))
    return {}


STYLES: dict[str, Callable[[Any, str, Stream], dict[str, ParameterShard]]] = {
    "colwise": _column,
    "colwise_of_three": functools.partial(_column, count=3),
    "colwise_gather_output": _column_gathered,
    "rowwise": _row,
    "rowwise_split_input": functools.partial(_row, split=True),
    "moe_tp_experts": _experts,
    "embedding_rowwise": _embedding,
    "positions": _positions,
    "vocabulary_head": _head,
    "replicated_with_grad_allreduce": _replicated,
}
"""Sharding style of a module -> function, under the name in `transformers` if it has one."""

PARAMETER_STYLES = {"colwise": (2, 1), "packed_colwise": (2, 2), "rowwise": (1, 1)}
"""Sharding style of one parameter of experts -> dimension, counted from the end, and number of sections."""

_COLUMNS = ("colwise", "colwise_of_three", "colwise_gather_output")
_ROWS = ("rowwise", "rowwise_split_input")
