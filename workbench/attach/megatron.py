"""Shards of a megatron-core model over its tensor-parallel group, for a recorder.

    shards = tensor_shards(model)                                # of parallel_state.initialize_model_parallel
    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
    recorder = wb.Recorder("records/mine", model, optimizer, ranks=ranks, shards=shards)

A recorder reads gradients from ``main_grad`` of Megatron's DDP, or from ``grad``.

Source: megatron-core 0.16.1: `set_tensor_model_parallel_attributes` marks a sharded parameter with
        ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``, the number of sections that are sharded
        separately (2 for the gate and the up projection of a gated linear unit).
"""

from __future__ import annotations

from megatron.core import parallel_state
from torch import nn

from workbench.sharding.given_parameters import TensorShards
from workbench.sharding.gradients import plain_names
from workbench.sharding.mesh import GivenGroup, axis_of
from workbench.sharding.tensor_parallel import ParameterShard


def tensor_shards(model: nn.Module, tp: GivenGroup | None = None) -> TensorShards:
    """The shards that a model's parameters are marked with, over a group; None: that of ``parallel_state``."""
    group = parallel_state.get_tensor_model_parallel_group() if tp is None else tp
    marked = {
        name: value
        for name, value in plain_names(dict(model.named_parameters())).items()
        if getattr(value, "tensor_model_parallel", False)
    }
    size = axis_of(group, "tp").size
    return TensorShards(model, {name: _shard(value, size) for name, value in marked.items()}, group)


def _shard(parameter: nn.Parameter, size: int) -> ParameterShard:
    """The shard of a marked parameter, of which this rank has one in ``size`` parts."""
    marks = vars(parameter)
    dim, sections = marks["partition_dim"], marks["partition_stride"]
    whole = parameter.shape[dim] * size
    return ParameterShard(dim=dim, parts=(whole // sections,) * sections if sections > 1 else ())
