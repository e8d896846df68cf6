"""A recorder of megatron-core: its DDP, its schedule and its optimizer, with tensor and data parallelism.

    config.finalize_model_grads_func = finalize_model_grads      # as Megatron-LM's training does
    recorder = record("records/mine", model, optimizer)          # of DistributedDataParallel, get_megatron_optimizer

A loop with torch's DDP and optimizer takes the shards alone:

    shards = tensor_shards(model)                                # of parallel_state.initialize_model_parallel
    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
    recorder = wb.Recorder("records/mine", model, optimizer, ranks=ranks, shards=shards)

Source: megatron-core 0.16.1: `set_tensor_model_parallel_attributes` marks a sharded parameter with
        ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``, the number of sections that are sharded
        separately (2 for the gate and the up projection of a gated linear unit); `finalize_model_grads` divides
        gradients by the tokens of all ranks under ``calculate_per_token_loss``; `_ParamAndGradBucketGroup` leaves the
        reduced gradients of rank r in the r-th of the equal shards of each bucket under ``use_distributed_optimizer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from workbench.errors import SpecError
from workbench.records.recorder import Recorder
from workbench.sharding.collectives import all_sum
from workbench.sharding.given_parameters import TensorShards
from workbench.sharding.gradients import local_gradient, plain_names, sums_of_squares
from workbench.sharding.mesh import Axis, GivenGroup, axis_of
from workbench.sharding.tensor_parallel import ParameterShard


def record(folder: Path | str, model: Any, optimizer: Any, **options: Any) -> Recorder:
    """Record every ``optimizer.step()`` until the recorder is closed. Call it on every rank.

    Gradients are those before the clip. Of losses per token (``calculate_per_token_loss``) the recorded loss is divided
    as the gradients are, and the tokens of the step are counted.

    Args:
        folder: of the record; it must not have one yet.
        model: Megatron's `DistributedDataParallel`, or a list of one.
        optimizer: of `get_megatron_optimizer`; it is wrapped where it is.
        options: of `wb.Recorder`, such as ``gradients="full"``.

    Raises:
        RecordError: the folder has a record already.
        SpecError: pipeline stages, expert parallelism, a scaled loss (fp16), several instances of the distributed
            optimizer, or losses per token without ``finalize_model_grads_func``.
    """
    ddp = model[0] if isinstance(model, list | tuple) and len(model) == 1 else model
    each = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    _refuse_unsupported(ddp, each)
    config, bound = ddp.config, each[0].config.clip_grad or None
    ranks = axis_of(parallel_state.get_data_parallel_group(with_context_parallel=True), "ranks")
    context = {
        "dp": parallel_state.get_data_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "max_grad_norm": bound,
        "calculate_per_token_loss": config.calculate_per_token_loss,
        "use_distributed_optimizer": ddp.ddp_config.use_distributed_optimizer,
    }
    given: dict[str, Any] = {"ranks": ranks, "shards": DdpParameters(ddp, ranks)} | options
    given["engine"] = "sum" if config.calculate_per_token_loss else "mean"
    known = {name: value for name, value in context.items() if value is not None}
    given["context"] = known | (options.get("context") or {})
    recorder = Recorder(folder, ddp, [one.optimizer for one in each], manual=True, **given)
    step, finalize = optimizer.step, config.finalize_model_grads_func

    def recorded_step(*given: Any, **named: Any) -> Any:
        recorder.take_gradients(max_norm=bound)
        recorder.step()
        return step(*given, **named)

    def seen_finalize(models: Any, num_tokens: Tensor | None = None, *more: Any, **named: Any) -> Any:
        result = finalize(models, num_tokens, *more, **named)
        if num_tokens is not None and num_tokens > 0:  # by now those of all ranks
            recorder.multiply_losses(1 / float(num_tokens))
            recorder.note(counts={"trained_tokens": float(num_tokens) / ranks.size})
        return result

    optimizer.step = recorded_step
    recorder.at_close(lambda: vars(optimizer).pop("step", None))
    if config.calculate_per_token_loss:
        config.finalize_model_grads_func = seen_finalize
        recorder.at_close(lambda: setattr(config, "finalize_model_grads_func", finalize))
    return recorder


def _refuse_unsupported(ddp: Any, optimizers: list[Any]) -> None:
    settings = getattr(ddp, "ddp_config", None)
    problems = {
        f"{type(ddp).__name__}, which is not Megatron's DDP": settings is None,
        "pipeline stages": parallel_state.get_pipeline_model_parallel_world_size() > 1,
        "expert parallelism": bool(getattr(ddp, "expert_parallel_buffers", None)),
        "a scaled loss (fp16)": any(each.config.fp16 for each in optimizers),
        "instances of the distributed optimizer": getattr(settings, "num_distributed_optimizer_instances", 1) > 1,
        "calculate_per_token_loss without finalize_model_grads_func": settings is not None
        and ddp.config.calculate_per_token_loss
        and ddp.config.finalize_model_grads_func is None,
    }
    if problem := next((name for name, here in problems.items() if here), None):
        raise SpecError(
            "record a model of megatron-core",
            found=problem,
            rule="a rank has whole layers or their shards over tp, and gradients of the loss",
            fix="record with one pipeline stage and expert rank, in bf16 or fp32, after "
            "config.finalize_model_grads_func is set",
        )


def tensor_shards(model: nn.Module, tp: GivenGroup | None = None) -> TensorShards:
    """The shards that a model's parameters are marked with, over a group; None: that of ``parallel_state``."""
    group = parallel_state.get_tensor_model_parallel_group() if tp is None else tp
    return TensorShards(model, marked_shards(model, axis_of(group, "tp").size), group)


def marked_shards(model: nn.Module, size: int) -> dict[str, ParameterShard]:
    """Shards of the marked parameters of a model over ``size`` ranks of tp, by name."""
    named = plain_names(dict(model.named_parameters()))
    return {
        name: _shard(value, size) for name, value in named.items() if getattr(value, "tensor_model_parallel", False)
    }


def _shard(parameter: nn.Parameter, size: int) -> ParameterShard:
    """The shard of a marked parameter, of which this rank has one in ``size`` parts."""
    marks = vars(parameter)
    dim, sections = marks["partition_dim"], marks["partition_stride"]
    whole = parameter.shape[dim] * size
    return ParameterShard(dim=dim, parts=(whole // sections,) * sections if sections > 1 else ())


class DdpParameters(TensorShards):
    """Parameters of Megatron's DDP, whose gradients lie in its buffers.

    Under ``use_distributed_optimizer`` this rank has the reduced gradient of its shard of each bucket alone; norms are
    completed over the ranks, and whole gradients are gathered one by one.

    Args:
        ddp: Megatron's `DistributedDataParallel`.
        ranks: of dp x cp, over which its buffers are sharded.
    """

    reads_buffer_shards = True

    def __init__(self, ddp: Any, ranks: Axis) -> None:
        of_tp = axis_of(parallel_state.get_tensor_model_parallel_group(), "tp")
        super().__init__(ddp, marked_shards(ddp, of_tp.size), of_tp)
        self._ranks = ranks
        self._sharded = bool(ddp.ddp_config.use_distributed_optimizer) and ranks.size > 1
        self.optimizer_has_copies = bool(ddp.ddp_config.use_distributed_optimizer) or ddp.config.bf16
        self._own_of = {
            id(value): self._overlap(begin - buffer.buckets[number].offset, end - begin, buffer.buckets[number])
            for buffer in ddp.buffers
            for value, (begin, end, number) in buffer.param_index_map.items()
        }

    def _squares(self, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        if not self._sharded:
            return super()._squares(parameters)
        return all_sum(sums_of_squares([self._own(value) for value in parameters.values()]), self._ranks)

    def _completed(self, parameter: nn.Parameter) -> Tensor:
        if not self._sharded:
            return super()._completed(parameter)
        first, last = self._own_of[id(parameter)]
        whole = torch.zeros_like(parameter, dtype=torch.float32)
        whole.view(-1)[first:last] = self._own(parameter)
        return all_sum(whole, self._ranks)  # of pieces that do not overlap

    def _own(self, parameter: nn.Parameter) -> Tensor:
        """The elements of a gradient that this rank has reduced."""
        first, last = self._own_of[id(parameter)]
        gradient = local_gradient(parameter)
        return (torch.zeros_like(parameter) if gradient is None else gradient).view(-1)[first:last]

    def _overlap(self, begin: int, length: int, bucket: Any) -> tuple[int, int]:
        """First and last (exclusive) element of a parameter in this rank's shard of its bucket."""
        size = bucket.grad_data.numel() // self._ranks.size
        first = min(max(self._ranks.rank * size - begin, 0), length)
        last = min(max((self._ranks.rank + 1) * size - begin, 0), length)
        return first, last
