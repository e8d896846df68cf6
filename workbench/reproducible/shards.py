"""Sharded parameters: reduction of their exact sums over ranks, and gradients for the optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.policy.model import Policy
from workbench.policy.trunk import decoder_layers
from workbench.reproducible import parts
from workbench.reproducible.exact_sums import Accumulator
from workbench.sharding.collectives import all_sum_, buckets, gather_equal, scatter_sum
from workbench.sharding.data_parallel import is_shard
from workbench.sharding.mesh import Mesh
from workbench.sharding.tensor_parallel import ParameterShard


@dataclass(frozen=True)
class LocalParameter:
    """This rank's part of a parameter, which is replicated over dp x cp, or a DTensor of which this rank has rows."""

    parameter: Any
    shard: ParameterShard

    @property
    def sharded_over(self) -> tuple[str, ...]:
        """Axes whose ranks hold different elements."""
        return ("tp",) * (self.shard.dim is not None) + ("dp_cp",) * self.shard.over_dp_cp

    @property
    def gradient(self) -> Tensor:
        """This rank's elements of the gradient that the optimizer sees."""
        gradient = self.parameter.grad
        return gradient.to_local() if is_shard(gradient) else gradient

    def leave(self, values: Tensor) -> None:
        """Set the gradient to this rank's elements, which have the dtype of the parameter."""
        parameter = self.parameter
        if is_shard(parameter):
            from torch.distributed.tensor import DTensor

            values = DTensor.from_local(
                values,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        parameter.grad = values


def local_parameters(policy: Policy) -> dict[str, LocalParameter]:
    """This rank's part of every parameter of a policy, by name."""
    return {name: LocalParameter(parameter, policy.shards[name]) for name, parameter in policy.model.named_parameters()}


def sum_over_ranks(
    accumulators: Mapping[str, Accumulator],
    parameters: Mapping[str, LocalParameter],
    mesh: Mesh,
    finish: Callable[[Tensor, torch.dtype], Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Reduce integers over ranks and convert them to gradients; of each parameter this rank's elements.

    For a parameter that is replicated over dp x cp, each rank reduces and converts a part, and the converted parts are
    gathered: they take fewer bytes than integers, and no conversion is repeated. Its integers are freed, those of an
    embedding come last: they exist from here on only (`Accumulator.add_at`).

    Collective over dp_cp, dp and cp, and over tp for replicated parameters that act on a rank's own heads.

    ``finish`` converts integers to a gradient of a dtype, element by element. Parameters come in an order that is the
    same on every rank: replicated ones from the last to the first.
    """
    sharded = {
        name: accumulators[name].flush(own_rows(mesh)) for name, one in parameters.items() if one.shard.over_dp_cp
    }
    partial = [name for name, one in parameters.items() if one.shard.gradient_is_partial]
    all_sum_([sharded[name] if name in sharded else accumulators[name].total for name in partial], mesh["tp"])
    yield from ((name, finish(rows, parameters[name].parameter.dtype)) for name, rows in sharded.items())
    replicated = {name: parameters[name].parameter for name in reversed(list(parameters)) if name not in sharded}
    in_parts = {name: bucket for name in replicated if (bucket := accumulators[name].bucket) is not None}
    for bucket in dict.fromkeys(in_parts.values()):
        yield from bucket.gradients(finish, replicated[bucket.names[0]].dtype)
    apart = [name for name in replicated if name not in in_parts]
    for names in buckets(apart, parts.BUCKET, lambda name: (replicated[name].dtype, replicated[name].numel())):
        dtype = replicated[names[0]].dtype
        flat = [accumulators[name].total.view(-1) for name in names]
        integers = torch.cat(flat) if len(flat) > 1 else flat[0]
        del flat
        for name in names:
            accumulators[name].release()
        elements, ranks = len(integers), mesh["dp_cp"].size
        if elements % ranks:
            integers = torch.cat([integers, integers.new_zeros(-elements % ranks)])
        finished = finish(scatter_sum(integers.view(ranks, -1), mesh["dp_cp"]), dtype)
        del integers
        whole = gather_equal(finished, mesh["dp_cp"]).view(-1)[:elements]
        pieces = whole.split([replicated[name].numel() for name in names])
        for name, piece in zip(names, pieces, strict=True):
            yield name, (piece if len(names) == 1 else piece.clone()).view(replicated[name].shape)


def own_rows(mesh: Mesh) -> Callable[[Tensor], Tensor]:
    """Return a reduce-scatter of integers over dp_cp to this rank's rows: equal pieces, the last short or empty."""
    axis = mesh["dp_cp"]

    def summed(total: Tensor) -> Tensor:
        each = -(-len(total) // axis.size)
        padded = torch.cat([total, total.new_zeros(each * axis.size - len(total), *total.shape[1:])])
        rows = max(0, min(each, len(total) - axis.rank * each))
        return scatter_sum(padded.unflatten(0, (axis.size, each)), axis)[:rows]

    return summed


def flush_layers(policy: Policy, accumulators: Mapping[str, Accumulator]) -> Callable[[], None]:
    """Free the unsharded integers of each layer of sharded parameters after its backward; return a function to undo it.

    They are reduced over ranks once the gradient of the layer's input is computed, in the same order on every rank. The
    rest (embedding, last norm, head) is reduced at the end of the step.
    """
    names = {id(parameter): name for name, parameter in policy.model.named_parameters()}
    own, handles = own_rows(policy.mesh), []
    for layer in decoder_layers(policy.model):
        inside = [names[id(parameter)] for parameter in layer.parameters()]
        sums = [accumulators[name] for name in inside if policy.shards[name].over_dp_cp]
        handles.append(layer.register_forward_pre_hook(functools.partial(_flush_after_backward, sums, own)))

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def _flush_after_backward(
    sums: Sequence[Accumulator], own: Callable[[Tensor], Tensor], _: nn.Module, inputs: tuple[Tensor, ...]
) -> None:
    def flush(_: Tensor) -> None:
        for one in sums:
            one.flush(own)

    if sums and inputs[0].requires_grad:
        inputs[0].register_hook(flush)
