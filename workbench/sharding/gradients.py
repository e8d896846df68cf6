"""Gradients after backward: complete every partial sum once, then compute norms without double counting.

Each rank back-propagated the plain sum over its own tokens, so the gradient of the step is the *sum* over
dp x cp; nothing is averaged. If parameters are sharded over dp x cp (`workbench.sharding.data_parallel`), backward has
already summed over dp x cp, and a rank holds its shard of the sum.

For a model sharded by an external trainer (`given_norms`, `given_gradient`), a parameter may be a plain tensor, whose
gradient is assumed whole on every rank (one rank, DDP), or a DTensor (FSDP2, tensor parallelism by DTensor). Sums run
over the mesh dimensions that a gradient is sharded over; one that is still a partial sum is completed first. A gradient
is ``parameter.grad``, or, if that is None, ``parameter.main_grad``: Megatron's DDP adds every gradient to that buffer
as soon as it is computed, and removes ``grad``. All ranks pass the same parameters.

Source: DTensor's placements as in torch 2.11 to 2.13. Why ``get_total_norm`` does not serve: pytorch/pytorch#180346
        (plain tensors next to DTensors, two meshes) and #170862 (its result is a partial norm).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from workbench.errors import ShardingError
from workbench.sharding.collectives import all_sum, all_sum_, gather_many
from workbench.sharding.data_parallel import is_shard
from workbench.sharding.early_sums import EarlySums
from workbench.sharding.mesh import Mesh, axis_of
from workbench.sharding.pipeline import share_json, share_tensors, sum_of_ends
from workbench.sharding.tensor_parallel import ParameterShard, local_part, whole_over_tp
from workbench.sharding.wire import overlaps


@torch.no_grad()
def sum_gradients(
    model: nn.Module,
    shards: Mapping[str, ParameterShard],
    mesh: Mesh,
    dtype: torch.dtype | None = None,
    in_rank_order: bool = False,
    early: EarlySums | None = None,
) -> None:
    """Complete every gradient in place: sum over dp x cp (of experts, over edp), and over tp where it is partial.

    The gradient of a parameter that both ends of a pipeline have is the sum of theirs.

    A parameter without a gradient on this rank (a row without documents) contributes zeros. Call once per optimizer
    step, after all micro-batches. Gradients are bucketed: one collective for many. ``dtype`` is that of the sum; None:
    that of the gradients. The order of the sum is the backend's, or that of the ranks. ``early`` are sums over dp x cp
    that backward has started (`early_sums`): the same, bit for bit.
    """
    if early is not None:
        early.finish()
    whole: list[Tensor] = []
    experts: list[Tensor] = []
    partial: list[Tensor] = []
    of_ends: list[Tensor] = []
    for name, parameter in _trained(model):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = _local(parameter.grad, shards[name])
        if not shards[name].over_dp_cp and (early is None or parameter not in early):
            (experts if shards[name].over_ep else whole).append(gradient)
        if shards[name].gradient_is_partial:
            partial.append(gradient)
        if shards[name].on_both_ends:
            of_ends.append(gradient)
    # An expert's gradient is that of the tokens of all ep ranks already.
    for gradients, axis in ((whole, mesh["dp_cp"]), (experts, mesh["edp"]), (partial, mesh["tp"])):
        if axis.group is None:
            continue
        summed = [gradient.to(dtype or gradient.dtype) for gradient in gradients]
        if in_rank_order:
            summed = [functools.reduce(Tensor.add, pieces) for pieces in gather_many(summed, axis)]
        else:
            all_sum_(summed, axis)
        for gradient, total in zip(gradients, summed, strict=True):
            if total is not gradient:
                gradient.copy_(total)
    summed = [gradient.to(dtype or gradient.dtype) for gradient in of_ends]
    sum_of_ends(summed, mesh["pp"])
    for gradient, total in zip(of_ends, summed, strict=True):
        gradient.copy_(total)


def early_sums(
    model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh, dtype: torch.dtype | None = None
) -> EarlySums | None:
    """Prepare the sums over dp x cp of `sum_gradients` to start during the last backward; None: they start after it.

    They start early where transfers overlap with compute (NCCL), of parameters that all ranks of dp x cp hold whole. A
    group that backward uses itself (that of cp, or of ep) would see its collectives in another order on a rank that
    trains no token, so these sums wait.
    """
    axis = mesh["dp_cp"]
    if axis.group is None or axis.group in (mesh["cp"].group, mesh["ep"].group) or not overlaps(axis.group):
        return None
    if all(shard.over_dp_cp for shard in shards.values()):
        return None
    whole = [
        parameter for name, parameter in _trained(model) if not shards[name].over_dp_cp and not shards[name].over_ep
    ]
    return EarlySums(whole, axis, dtype) if whole else None


@torch.no_grad()
def gradient_norms(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh) -> dict[str, float]:
    """L2 norm of every parameter's global gradient, each element counted once; of all pipeline stages.

    One collective over tp, and one over the ranks of a copy if parameters are sharded (then all are), or over ep if
    experts are.

    Units:  squares are summed in float64; the global norm is the root of the sum of the squared norms.
    """
    return _norms({name: _gradient(value) for name, value in _trained(model)}, shards, mesh)


@torch.no_grad()
def weight_norms(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh) -> dict[str, float]:
    """L2 norm of every parameter, frozen ones too; collective and counted as in `gradient_norms`."""
    return _norms(dict(model.named_parameters()), shards, mesh)


def _norms(values: Mapping[str, Tensor], shards: Mapping[str, ParameterShard], mesh: Mesh) -> dict[str, float]:
    """Norms of one tensor of each parameter; see `gradient_norms`."""
    names = list(values)
    squares = sums_of_squares([_local(value, shards[name]) for name, value in values.items()])
    if mesh["tp"].rank:  # what every tp rank has counts once
        replicated = torch.tensor([shards[name].dim is None for name in names])
        squares = squares.masked_fill(replicated.to(squares.device), 0.0)
    total = all_sum(squares, mesh["tp"])
    if any(shard.over_dp_cp for shard in shards.values()):
        total = all_sum(total, mesh["shard"])
    elif any(shard.over_ep for shard in shards.values()):
        if mesh["ep"].rank:  # what every ep rank has counts once
            total = total.masked_fill(torch.tensor([not shards[name].over_ep for name in names]).to(total.device), 0.0)
        total = all_sum(total, mesh["ep"])
    norms: dict[str, float] = {}
    for of_rank in share_json(dict(zip(names, total.sqrt().tolist(), strict=True)), mesh):
        for name, norm in of_rank.items():
            norms.setdefault(name, norm)  # of a parameter that both ends have, that of the first, as `full_gradients`
    return norms


@torch.no_grad()
def scale_gradients(model: nn.Module, shards: Mapping[str, ParameterShard], factor: float) -> None:
    """Multiply every gradient, in place, by a factor that is the same on every rank."""
    for name, parameter in _trained(model):
        _local(_gradient(parameter), shards[name]).mul_(factor)


def full_gradients(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh) -> dict[str, Tensor]:
    """Gather every parameter's gradient on every rank. Collective over the axes that parameters are sharded over."""
    local = {name: _gradient(parameter) for name, parameter in _trained(model)}
    return share_tensors(_full(local, shards, mesh), mesh)


def full_weights(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh) -> dict[str, Tensor]:
    """Gather every parameter on every rank. Collective over the axes that parameters are sharded over."""
    return share_tensors(_full(dict(model.named_parameters()), shards, mesh), mesh)


def _full(values: Mapping[str, Tensor], shards: Mapping[str, ParameterShard], mesh: Mesh) -> dict[str, Tensor]:
    """Gather many tensors of parameters in few collectives: of small ones, the launch of each is what takes time."""
    parts = {name: _local(value, shards[name]) for name, value in values.items()}
    over_edp = [name for name in parts if shards[name].over_dp_cp and shards[name].over_ep]
    over_dp_cp = [name for name in parts if shards[name].over_dp_cp and not shards[name].over_ep]
    over_ep = [name for name in parts if shards[name].over_ep]
    for names, axis in ((over_edp, mesh["edp"]), (over_dp_cp, mesh["shard"]), (over_ep, mesh["ep"])):
        for name, pieces in zip(names, gather_many([parts[name] for name in names], axis), strict=True):
            parts[name] = torch.cat(pieces)
    whole = whole_over_tp(list(parts.values()), [shards[name] for name in parts], mesh["tp"])
    return dict(zip(parts, whole, strict=True))


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters with a gradient, by their names; frozen ones, as the base of adapters, have none."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "`sum_gradients` gives every parameter a gradient"
    return parameter.grad


def _local(value: Any, shard: ParameterShard) -> Tensor:
    """This rank's shard of a parameter or its gradient; shares memory. Cheapest without autograd.

    Raises:
        ShardingError: FSDP2 has not resharded it.
    """
    if not shard.over_dp_cp:
        return value.detach()
    if not is_shard(value):
        raise ShardingError(
            "a step with sharded parameters",
            found="parameters that are still gathered when backward is over",
            rule="every backward passes through the hidden states, and ends without an error",
            fix="load the policy again after an error in a backward; to train a head alone, adapt it "
            "(lora.target_modules: [lm_head]) instead of detaching its input",
        )
    return value.to_local().detach()


def local_values(value: Any) -> Tensor:
    """This rank's shard of a parameter, its gradient or a state of its optimizer; shares memory."""
    return (value.to_local() if is_shard(value) else value).detach()


_PIECE = 2**24
"""Elements of a tensor that are in float64 at a time."""


def sums_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each tensor in float64, without a copy of any in float64."""
    if not gradients:  # a pipeline stage without adapters
        return torch.zeros(0, dtype=torch.float64)
    if all(gradient.is_cuda for gradient in gradients):  # converts number by number, one launch for many tensors
        norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float64)
        return torch.stack([norm.to(gradients[0].device) for norm in norms]).square()
    return torch.stack([_sum_of_squares(gradient.reshape(-1)) for gradient in gradients])


def _sum_of_squares(values: Tensor) -> Tensor:
    if values.numel() <= _PIECE:
        return values.double().square().sum()
    return torch.stack([_sum_of_squares(piece) for piece in values.split(_PIECE)]).sum()


def full_tensor(value: Tensor, shard: ParameterShard, mesh: Mesh) -> Tensor:
    """Gather a parameter, its gradient or its optimizer state on every rank; collective as `full_weights`."""
    return _full({"": value}, {"": shard}, mesh)[""]


@torch.no_grad()
def copy_local_part(value: Tensor, whole: Tensor, shard: ParameterShard, mesh: Mesh) -> None:
    """Copy this rank's shard of a whole tensor, in place: the inverse of `full_tensor`. Not collective."""
    part = local_part(whole, shard, mesh["tp"])
    local = _local(value, shard)
    if shard.over_ep:
        part = part.chunk(mesh["ep"].size)[mesh["ep"].rank]
    if shard.over_dp_cp:
        axis = mesh["edp" if shard.over_ep else "shard"]
        pieces = part.chunk(axis.size)
        part = pieces[axis.rank] if axis.rank < len(pieces) else part[:0]
    local.copy_(part)


_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Name parts inserted by torch.compile and activation checkpointing."""


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by their names in the unwrapped model; tied weights are one parameter.

    Example:
        >>> list(trained_parameters(nn.ModuleDict({"_orig_mod": nn.Linear(2, 2, bias=False)})))
        ['weight']
    """
    return plain_names({name: value for name, value in model.named_parameters() if value.requires_grad})


def plain_names(named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Parameters by the names that they have without wrappers."""
    plain = {".".join(part for part in name.split(".") if part not in _WRAPPERS): v for name, v in named.items()}
    while plain and all(name.startswith("module.") for name in plain):
        plain = {name.removeprefix("module."): value for name, value in plain.items()}
    return plain


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The local gradient of a parameter; None if there is none.

    ``grad`` takes precedence: if both exist, the buffer is unused, or this gradient is not in it yet.
    """
    if parameter.grad is not None:
        return parameter.grad
    buffer = getattr(parameter, "main_grad", None)
    return buffer if isinstance(buffer, Tensor) and buffer.shape == parameter.shape else None


def in_buffers(parameters: Mapping[str, nn.Parameter]) -> bool:
    """True if no parameter has a ``grad``, and some have a ``main_grad``."""
    with_gradient = [parameter for parameter in parameters.values() if local_gradient(parameter) is not None]
    return bool(with_gradient) and all(parameter.grad is None for parameter in with_gradient)


@torch.no_grad()
def given_norms(parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """L2 norm of every parameter's global gradient; 0 if there is none. Collective over the sharded dimensions.

    One collective per dimension for all parameters that are sharded over the same dimensions of the same mesh.

    Units: squares are summed in float64.
    """
    buckets: dict[tuple[DeviceMesh, tuple[int, ...]] | None, dict[str, Tensor]] = defaultdict(dict)
    for name, parameter in parameters.items():
        gradient = _completed(parameter)
        buckets[_sharded_over(gradient)][name] = gradient.to_local() if is_shard(gradient) else gradient
    norms: dict[str, float] = {}
    for place, gradients in buckets.items():
        total = sums_of_squares(list(gradients.values()))
        if place is not None:
            mesh, dims = place
            total = total.to(mesh.device_type)
            for dim in dims:
                total = all_sum(total, axis_of(mesh.get_group(dim), _name(mesh, dim)))
        norms |= dict(zip(gradients, total.sqrt().tolist(), strict=True))
    return {name: norms[name] for name in parameters}


@torch.no_grad()
def given_gradient(parameter: nn.Parameter) -> Tensor:
    """A parameter's global gradient on every rank; zeros if there is none. Collective over the sharded dimensions.

    Shares memory with the parameter's gradient if that is not sharded.
    """
    return whole_value(_completed(parameter))


@torch.no_grad()
def whole_value(value: Any) -> Tensor:
    """Return a plain tensor unchanged and a DTensor in full. Collective over its sharded or partial dimensions."""
    return (value.full_tensor() if is_shard(value) else value).detach()


def _completed(parameter: nn.Parameter) -> Any:
    """The gradient of a parameter with partial sums completed; zeros for none."""
    local = local_gradient(parameter)
    gradient: Any = torch.zeros_like(parameter) if local is None else local
    if is_shard(gradient) and any(placement.is_partial() for placement in gradient.placements):
        from torch.distributed.tensor import Replicate

        return gradient.redistribute(
            placements=[Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        )
    return gradient


def _sharded_over(gradient: Any) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh and the dimensions that a gradient is sharded over; None if every rank holds it whole."""
    if not is_shard(gradient):
        return None
    dims = tuple(dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return (gradient.device_mesh, dims) if dims else None


def _name(mesh: DeviceMesh, dim: int) -> str:
    return mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"dimension {dim}"
