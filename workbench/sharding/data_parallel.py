"""Parameters sharded over dp x cp: a rank keeps a part of every weight, of its gradient and of the optimizer's state.

FSDP2 (`torch.distributed.fsdp.fully_shard`) gathers the weights of a unit (a decoder layer, or all that is in none)
when they are needed, and in backward gives each rank its part of the gradients' sum. It averages unless told
otherwise; here it *sums*, over dp x cp flattened, as the contract of `workbench.sharding.gradients` has it. Tensor
parallelism lies underneath: what a rank of tp holds is cut a second time, along its first dimension.

The two moves are `workbench.sharding.wire`'s and are noted in the flight record under the names ``gather_parameters``
and ``scatter_gradients``, with how many elements the rank brings.

Source: PyTorch FSDP, arXiv 2304.11277; FSDP2's interface as in torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from workbench.errors import ShardingError
from workbench.sharding import flight, wire
from workbench.sharding.mesh import Axis, Mesh
from workbench.sharding.tensor_parallel import ParameterShard

NEEDED = (
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
)
"""What FSDP2 must offer: without the first two it averages."""


def shard_parameters(
    root: nn.Module, units: Sequence[nn.Module], shards: Mapping[str, ParameterShard], mesh: Mesh
) -> dict[str, ParameterShard]:
    """Shard every parameter over dp x cp, in place; nothing where that is one rank.

    Call ``root`` to go forward. What lies in no unit (embedding, last norm, output head) is gathered at its beginning
    and stays whole until the backward that follows is over, so a head that nobody calls can be read in between, and
    tied weights are one. Gradients are reduced in every backward; micro-batches add up in the shards. An optimizer
    made afterwards sees the shards.

    Args:
        root: holds all parameters, whole, on any device; they move to that of the mesh unit by unit.
        units: modules inside it whose weights come and go together.
        shards: how every parameter lies.
        mesh: the axes.

    Returns:
        How every parameter lies now.

    Layout:   parameters: sharded(first dimension) over dp_cp, in pieces of ceil size; the last may be short or empty.

    Raises:
        ShardingError: simulated ranks, or a torch whose FSDP2 cannot sum.
    """
    axis = mesh["dp_cp"]
    if axis.group is None:
        root.to(mesh.device)
        return dict(shards)
    if not isinstance(axis.group, dist.ProcessGroup):
        raise ShardingError(
            "layout.shard_parameters among simulated ranks",
            found="no process group",
            rule="FSDP2 shards over real processes",
            fix="launch the layout, or leave it out",
        )
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if lacking := [name for name in NEEDED if not hasattr(FSDPModule, name)]:
        raise ShardingError(
            "layout.shard_parameters",
            found=f"torch {torch.__version__} without {', '.join(lacking)}",
            rule="FSDP2 must be able to sum gradients instead of averaging them",
            fix="use torch 2.11 or later, or leave it out",
        )
    over = DeviceMesh.from_group(axis.group, mesh.device.type, mesh_dim_names=(axis.name,))
    for module in (*units, root):
        fully_shard(module, mesh=over)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(_GatherParameters(axis))
        module.set_custom_reduce_scatter(_ScatterGradients(axis))
    if hasattr(root, "set_reduce_scatter_unused_params"):
        root.set_reduce_scatter_unused_params(True)
    # Weights that a forward without a backward left whole would not see what an optimizer did to the shards.
    root.register_forward_pre_hook(lambda module, _: module.reshard(), prepend=True)
    return {name: replace(shard, over_dp_cp=True) for name, shard in shards.items()}


def give_back(root: nn.Module) -> None:
    """Let go of what a forward without a backward left whole: its parameters are then the shards again.

    While they are whole, they are others than those that an optimizer has: zeroing their gradients zeroes none of the
    shards'.
    """
    if hasattr(root, "reshard"):
        root.reshard()


def is_shard(value: Any) -> bool:
    """Whether a parameter or gradient is the part of a rank, and not gathered."""
    return hasattr(value, "to_local")


class _Move:
    """A collective that FSDP2 calls in place of its own."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _GatherParameters(_Move):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        axis = self.axis
        with flight.entering(
            "gather_parameters", axis.name, axis.ranks, wire.group_name(group), input_tensor.shape, input_tensor.dtype
        ):
            wire.all_gather_into(output_tensor, input_tensor, group)


class _ScatterGradients(_Move):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        axis = self.axis
        if op != dist.ReduceOp.SUM:
            raise ShardingError(
                "gradients of sharded parameters",
                found=f"FSDP2 asks for {op}",
                rule="gradients are summed over dp x cp",
                fix="use torch 2.11 to 2.13",
            )
        with flight.entering(
            "scatter_gradients", axis.name, axis.ranks, wire.group_name(group), input_tensor.shape, input_tensor.dtype
        ):
            wire.reduce_scatter_into(output_tensor, input_tensor, group)
