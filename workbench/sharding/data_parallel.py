"""Parameters sharded over dp x cp: each rank holds a shard of every weight, its gradient and its optimizer state.

FSDP2 (`torch.distributed.fsdp.fully_shard`) gathers the weights of a unit (a decoder layer, or the root for all other
parameters) when they are needed, and reduce-scatters gradients in backward. It averages by default; here it *sums*,
over dp x cp flattened, as the contract of `workbench.sharding.gradients` requires. Tensor parallelism is applied
first: the shard of a tp rank is sharded again along its first dimension. Both collectives are in flight records, with
the number of local elements.

Several copies, each sharded over neighbours, are hybrid sharding (HSDP): gathers stay among neighbours, and gradients
are summed over the copies after they are scattered, by FSDP2's hook for it, so that flight records have that sum too.

Source: PyTorch FSDP, arXiv 2304.11277 (hybrid sharding: section 3.2.2); FSDP2's interface as in torch 2.11 to 2.13.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.errors import ShardingError
from workbench.sharding import flight, wire
from workbench.sharding.expert_parallel import expert_modules
from workbench.sharding.mesh import Axis, Mesh, alone_on, device_mesh_of
from workbench.sharding.tensor_parallel import ParameterShard

NEEDED = (
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_all_reduce_hook",
    "set_modules_to_forward_prefetch",
)
"""Methods that FSDP2 must have: without the first two it averages."""


@dataclass(frozen=True)
class Casts:
    """The dtypes of gathered parameters and of the gradients' sum, where they differ from that of the shards."""

    compute: torch.dtype
    reduction: torch.dtype


def shard_parameters(
    root: nn.Module,
    units: Sequence[nn.Module],
    shards: Mapping[str, ParameterShard],
    mesh: Mesh,
    casts: Casts | None = None,
    *,
    reshard_after_forward: bool = True,
    reshard_after_backward: bool = True,
    last: nn.Module | None = None,
    apart: Sequence[nn.Module] = (),
    unit_layers: int = 1,
) -> dict[str, ParameterShard]:
    """Shard every parameter over dp x cp, or each copy of it over some neighbours, in place; a no-op on one rank.

    The mesh has the ranks of a copy, `shard`, and those with the same part of each copy, `replica` (hybrid sharding,
    HSDP): gradients are reduce-scattered over the first and then summed over the second, in every backward.

    Two arguments have FSDP2's names. Without ``reshard_after_forward``, parameters of units stay whole from their
    forward to their backward. Without both, all stay whole from their first forward to `reshard_parameters`, as forward
    passes of several micro-batches before the first backward need it (a head reads its weight outside of the root's
    forward).

    Call ``root`` for the forward. Parameters in no unit (embedding, last norm, a tied output head) are gathered when it
    starts and stay whole until the following backward is over, so a head that is read but not called works, and tied
    weights stay tied. ``last`` is a further unit, which stays whole from its call to its backward: an output head that
    is passed before it is read. ``unit_layers`` neighbours among the units are gathered and freed as one: fewer calls
    of the host, and the memory of as many. ``apart`` are further units, which only some forward passes of the root
    call: each is one alone, gathered when it is called. Gradients are reduced in every backward; micro-batches
    accumulate in the shards. Create the optimizer afterwards: it then holds the shards, in their own dtype whatever the
    casts.

    The root holds all parameters, whole, on any device; they move to that of the mesh unit by unit. Units are modules
    inside it whose weights are gathered and freed together. Returns the new sharding of every parameter.

    Layout:   parameters: sharded(first dimension) over shard, in pieces of ceil size; the last may be short or empty;
              replicated over replica.
    Raises:   ShardingError: simulated ranks, or a torch whose FSDP2 cannot sum.
    """
    axis = mesh["dp_cp"]
    if axis.group is None:
        root.to(mesh.device)
        return dict(shards)
    if not isinstance(axis.group, dist.ProcessGroup):
        raise ShardingError(
            "layout.shard_parameters with simulated ranks",
            found="no process group",
            rule="FSDP2 shards over real processes",
            fix="launch the layout, or leave it out",
        )
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if missing := [name for name in NEEDED if not hasattr(FSDPModule, name)]:
        raise ShardingError(
            "layout.shard_parameters",
            found=f"torch {torch.__version__} without {', '.join(missing)}",
            rule="FSDP2 must be able to sum gradients instead of averaging them",
            fix="use torch 2.11 or later, or leave it out",
        )
    policy = MixedPrecisionPolicy(casts.compute, casts.reduction) if casts else MixedPrecisionPolicy()
    several = mesh["ep"].size > 1  # also where a pipeline stage has no experts: `alone_on` is collective over the job
    experts = expert_modules(root) if several else {}
    edp = mesh["edp"] if mesh["edp"].group is not None or not several else alone_on(mesh["edp"])
    over_edp = [(module, edp) for module in experts.values()]
    copies = mesh["replica"].group is not None
    own = mesh["shard" if copies else "dp_cp"]  # flight records name the axis
    of_last = [] if last is None else [(last, own)]
    in_order = [units[start : start + unit_layers] for start in range(0, len(units), unit_layers)]
    together = [*in_order, *([unit] for unit in apart)]
    firsts = [unit[0] for unit in together]  # of modules that are one unit, the first answers for all
    pieces: list[tuple[Any, Axis]] = [*over_edp, *((first, own) for first in firsts), *of_last, (root, own)]
    with_others = dict(zip(firsts, together, strict=True))
    for module, axis in pieces:
        device_mesh = device_mesh_of(axis, mesh.device.type)
        reshards = reshard_after_forward and module is not last
        sharded: Any = module  # Any: versions of torch type its methods differently
        fully_shard(
            list(with_others.get(module, [module])),
            mesh=device_mesh,
            mp_policy=policy,
            reshard_after_forward=None if reshards else False,  # None: True for units, and False for the root
            # The root finds them on another path than the one through their unit.
            ignored_params=set(last.parameters()) if last is not None and module is root else None,
        )
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if not reshard_after_backward:
            sharded.set_reshard_after_backward(False, recurse=False)
        sharded.set_custom_all_gather(_Collective(axis, "gather_parameters", wire.all_gather_into))
        sharded.set_custom_reduce_scatter(_Collective(axis, "scatter_gradients", wire.reduce_scatter_into))
        if copies:
            sharded.set_all_reduce_hook(functools.partial(_sum_copies, axis=mesh["replica"]))
    if hasattr(sharded, "set_reduce_scatter_unused_params"):  # root, the last module
        sharded.set_reduce_scatter_unused_params(True)
    prefetch = _ForwardPrefetch()
    if reshard_after_backward:
        # With units apart, a forward of the root may begin in one of them: what it queued would not be awaited.
        begin = [] if apart else [root]
        one_by_one = [*begin, *(unit[0] for unit in in_order), *([] if last is None else [last])]
        prefetch.queue(one_by_one, apart, with_others, list(experts.values()))
    kept = [module for module, _ in pieces if not reshard_after_forward or module in (root, last)]
    grouped = firsts if unit_layers > 1 else []
    root.register_forward_hook(functools.partial(_reshard_after_error, kept, grouped, prefetch), always_call=True)
    # Weights left gathered by a forward without a backward would be stale after an optimizer step on the shards.
    if reshard_after_backward:

        def reshard(*inputs: object) -> None:
            _check_last_backward(root)
            for module in kept:
                module.reshard()

        root.register_forward_pre_hook(reshard, prepend=True)
    return {name: replace(shard, over_dp_cp=True) for name, shard in shards.items()}


def _check_last_backward(root: Any) -> None:
    """Raise if the last backward did not end: units whose backward an error left out would stay whole, and old."""
    if root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued:
        raise ShardingError(
            "a forward with sharded parameters",
            found="a backward before it that ended with an error",
            rule="FSDP2 shards parameters again when a backward is over",
            fix="load the policy again",
        )


class _ForwardPrefetch:
    """Explicit forward prefetch: each unit's gather is queued when the forward of the one before begins.

    ``pending`` are the units whose gather is queued and whose own forward has not begun.

    Without it a gather is queued when its own unit begins, and hides behind others only if the host is ahead of the
    device by the time that it takes: at 0.6 B it is not.
    """

    def __init__(self) -> None:
        self.pending: list[Any] = []

    def queue(
        self,
        in_order: Sequence[Any],
        apart: Sequence[Any],
        with_others: Mapping[Any, Sequence[nn.Module]],
        experts: Sequence[Any],
    ) -> None:
        """Let each unit queue the gathers of the experts inside it, and of the next unit."""
        following = dict(itertools.pairwise(in_order))
        for unit in (*in_order, *apart, *experts):
            modules = (module for layer in with_others.get(unit, ()) for module in layer.modules())
            others = [module for module in modules if module in experts]
            others += [following[unit]] if unit in following else []
            if others:
                unit.set_modules_to_forward_prefetch(others)
            unit.register_forward_pre_hook(functools.partial(self._begin, others))

    def _begin(self, queued: Sequence[Any], unit: nn.Module, inputs: Any) -> None:
        self.pending = [one for one in self.pending if one is not unit] + list(queued)

    def drop(self) -> None:
        """Await the pending gathers, and free their weights."""
        for unit in self.pending:
            unit.unshard()  # awaits the gather that is queued already
            unit.reshard()
        self.pending = []


def _reshard_after_error(
    kept: Sequence[Any], grouped: Sequence[Any], prefetch: _ForwardPrefetch, root: Any, inputs: Any, output: Any
) -> None:
    """Reshard what a forward of the root that ended with an error left whole, or pending; its forward hook.

    FSDP2 would take units that stay whole after their forward to be in it until the next one, and would use weights
    that were gathered before an optimizer step after it. Of a unit of several modules it would await the forward of
    those that the error left out, before the next begins: torch 2.11 gathers for the first only where none is awaited.
    And it would take the next forward of the root for a part of this one: its gathers would not wait for the optimizer,
    and from torch 2.13 on those of the units that were in their forward would not be queued ahead.
    """
    if output is None:
        prefetch.drop()
        for unit in grouped:
            unit._get_fsdp_state()._modules_to_run_forward.clear()
        for unit in kept:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()
            unit.set_reshard_after_forward(False, recurse=False)
        reshard_parameters(root)  # the unit in whose forward the error was
        if hasattr(root, "reset_iter_state"):  # from torch 2.13 on
            root.reset_iter_state()
        else:
            root._get_fsdp_state()._state_ctx.iter_forward_root = None


def _sum_copies(gradients: Tensor, *, axis: Axis) -> None:
    """Sum this rank's part of the gradients over all copies, in place; FSDP2 calls it after its reduce-scatter."""
    assert axis.group is not None, "there are several copies"
    group = wire.group_name(axis.group)
    with flight.entering("sum_copies", axis.name, axis.ranks, group, gradients.shape, gradients.dtype):
        wire.all_reduce(gradients, axis.group)


def reshard_parameters(root: nn.Module) -> None:
    """Reshard parameters that a forward without a backward left gathered.

    Gathered parameters are not the ones that an optimizer holds: zeroing their gradients does not zero the shards'.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_shard(value: Any) -> bool:
    """True if a parameter or gradient is a rank's shard (a DTensor), not gathered."""
    return hasattr(value, "to_local")


class _Collective:
    """Replaces one of FSDP2's own collectives, under a name in flight records."""

    def __init__(self, axis: Axis, name: str, transfer: Callable[[Tensor, Tensor, dist.ProcessGroup], None]) -> None:
        self.axis, self.name, self.transfer = axis, name, transfer

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        *,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> None:
        axis = self.axis
        if op != dist.ReduceOp.SUM:
            raise ShardingError(
                "gradients of sharded parameters",
                found=f"FSDP2 requests {op}",
                rule="gradients are summed over dp x cp",
                fix="use torch 2.11 to 2.13",
            )
        with flight.entering(
            self.name, axis.name, axis.ranks, wire.group_name(group), input_tensor.shape, input_tensor.dtype
        ):
            self.transfer(output_tensor, input_tensor, group)
