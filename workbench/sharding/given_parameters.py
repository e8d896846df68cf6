"""Parameters of an external trainer, and their gradients: whole tensors, DTensors, or tensor-parallel shards.

`GivenParameters` reads what torch itself knows: a plain tensor, whole on every rank, or a DTensor. `TensorShards` reads
plain tensors that are shards over tp, by a declared plan. An engine that keeps gradients in buffers of its own has a
subclass in `workbench.attach`.

Source: Megatron-LM, arXiv 1909.08053, section 3: column- and row-parallel layers, and whole parameters whose gradient
        is a partial sum.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SpecError
from workbench.sharding.collectives import all_sum
from workbench.sharding.gradients import (
    given_gradient,
    given_norms,
    local_gradient,
    plain_names,
    sums_of_squares,
)
from workbench.sharding.mesh import GivenGroup, axis_of
from workbench.sharding.tensor_parallel import ParameterShard, full_gradient


class GivenParameters:
    """Parameters as torch has them: plain tensors, which every rank holds whole, or DTensors. They are only read."""

    optimizer_has_copies = False
    """True if the optimizer's groups hold other tensors than the model's parameters."""
    reads_buffer_shards = False
    """True if gradients are read whose buffers are reduced in a rank's own shard alone."""

    def weights(self, parameter: nn.Parameter) -> Any:
        """The parameter, or this rank's shard of it (`Part`, or a DTensor). Not collective."""
        return parameter

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """True if this rank has a gradient of a parameter. Not collective."""
        return local_gradient(parameter) is not None

    def norms(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
        """L2 norm of every parameter's global gradient; 0 if there is none. Collective."""
        return given_norms(parameters)

    def whole_gradient(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's global gradient on every rank, in the parameter's whole shape. Collective."""
        return given_gradient(parameter)


@dataclass(frozen=True)
class Part:
    """This rank's shard of a parameter, which is no DTensor.

    Attributes:
        local: its values, in any shape.
        shape: of the whole parameter.
    """

    local: Tensor
    shape: torch.Size

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.local.dtype

    def dim(self) -> int:
        """Number of dimensions of the whole parameter."""
        return len(self.shape)

    def to_local(self) -> Tensor:
        """The values, as of a DTensor."""
        return self.local


class TensorShards(GivenParameters):
    """Plain tensors that are shards over tp, by a plan.

    Args:
        model: whose parameters are sharded.
        plan: name pattern of parameters -> the tensor dimension that is sharded, or a
            `workbench.sharding.tensor_parallel.ParameterShard`: sections that are sharded separately, or a whole
            parameter whose gradient is a partial sum. The first pattern that matches counts; a parameter that none
            matches is whole, and so is its gradient.
        tp: ranks over which they are sharded, as a group, a one-dimensional device mesh or an axis.

    Raises:
        SpecError: a pattern that matches no parameter, or a shard over dp x cp.

    Example:
        >>> from workbench.sharding.mesh import Axis
        >>> TensorShards(nn.Linear(2, 3), {"weight": 0}, Axis("tp")).whole_shape("weight", torch.Size([3, 2]))
        torch.Size([3, 2])
    """

    def __init__(self, model: nn.Module, plan: Mapping[str, int | ParameterShard], tp: GivenGroup) -> None:
        self._tp = axis_of(tp, "tp")
        self._names = {id(value): name for name, value in plain_names(dict(model.named_parameters())).items()}
        self._shards = _matched(list(self._names.values()), plan)

    def weights(self, parameter: nn.Parameter) -> Any:
        """The parameter where it is whole, else `Part`."""
        name = self._names.get(id(parameter), "")
        shape = self.whole_shape(name, parameter.shape)
        return parameter if shape == parameter.shape else Part(parameter.detach(), shape)

    def whole_shape(self, name: str, local: torch.Size) -> torch.Size:
        """Shape of a whole parameter, from that of this rank's shard."""
        dim = self._shards.get(name, ParameterShard()).dim
        return torch.Size(size * (self._tp.size if at == dim else 1) for at, size in enumerate(local))

    @torch.no_grad()
    def norms(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
        """L2 norm of every parameter's global gradient. One collective for all shards, and one a partial sum."""
        squares = self._squares(parameters)
        cut = torch.tensor([self._shard(value).dim is not None for value in parameters.values()], device=squares.device)
        total = torch.where(cut, all_sum(squares.masked_fill(~cut, 0.0), self._tp), squares)
        return dict(zip(parameters, total.sqrt().tolist(), strict=True))

    @torch.no_grad()
    def whole_gradient(self, parameter: nn.Parameter) -> Tensor:
        """The shards of a gradient in order, as the plan states; a partial sum is completed."""
        return full_gradient(self._completed(parameter), self._shard(parameter), self._tp)

    def _squares(self, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        """Sums of squares of this rank's gradients, in float64."""
        return sums_of_squares([self._completed(value) for value in parameters.values()])

    def _shard(self, parameter: nn.Parameter) -> ParameterShard:
        return self._shards.get(self._names.get(id(parameter), ""), ParameterShard())

    def _completed(self, parameter: nn.Parameter) -> Tensor:
        """This rank's gradient, zeros for none; a partial one is summed over tp."""
        local = local_gradient(parameter)
        gradient = torch.zeros_like(parameter) if local is None else local.detach()
        return all_sum(gradient, self._tp) if self._shard(parameter).gradient_is_partial else gradient


def _matched(names: list[str], plan: Mapping[str, int | ParameterShard]) -> dict[str, ParameterShard]:
    """Parameter -> its shard, of those that a pattern matches."""
    shards = {
        pattern: shard if isinstance(shard, ParameterShard) else ParameterShard(dim=shard)
        for pattern, shard in plan.items()
    }
    for pattern, shard in shards.items():
        if not fnmatch.filter(names, pattern):
            raise SpecError(
                f"parameters sharded over tp as {pattern!r}",
                found=f"no parameter of that name; there are {', '.join(names[:5])}",
                rule="a pattern names parameters as a record does, without wrappers",
                fix="correct the pattern, or leave it out",
            )
        if shard.over_dp_cp:
            raise SpecError(
                f"parameters {pattern!r} sharded over dp x cp",
                rule="a plan is of shards over tp",
                fix="leave over_dp_cp out; parameters of FSDP2 are DTensors and need no plan",
            )
    chosen = {name: next((key for key in shards if fnmatch.fnmatchcase(name, key)), None) for name in names}
    return {name: shards[pattern] for name, pattern in chosen.items() if pattern is not None}
