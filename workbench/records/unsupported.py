"""Training that a recorder cannot read, refused by what was seen and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from workbench.errors import RecordError, SpecError
from workbench.sharding.given_parameters import GivenParameters


def refuse_unsupported(model: nn.Module, parameters: Mapping[str, nn.Parameter], given: GivenParameters) -> None:
    """Refuse a model whose gradients cannot be identified, or that trains nothing, with a SpecError."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise SpecError(
            "record a model under FullyShardedDataParallel",
            found="flat shards",
            rule="a gradient is whole, or a DTensor with its placements",
            fix="use FSDP2 (torch.distributed.fsdp.fully_shard)",
        )
    if not given.reads_buffer_shards and any(
        getattr(getattr(module, "ddp_config", None), "use_distributed_optimizer", False) for module in model.modules()
    ):
        raise SpecError(
            "record a model under Megatron's DDP with use_distributed_optimizer",
            found="main_grad is reduced in this rank's shard of the buffer alone",
            rule="a gradient is whole on every rank, or a DTensor with its placements",
            fix="record it by workbench.attach.megatron.record, or set use_distributed_optimizer=False",
        )
    if not parameters:
        raise SpecError(
            "record a model",
            found="no parameter that takes a gradient",
            rule="a record is of gradients",
            fix="pass the model that is trained",
        )


def no_gradient(step: int, names: Sequence[str]) -> RecordError:
    """Error of a step in which none of these parameters has a gradient on any rank."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return RecordError(
        f"record the gradients of step {step}",
        found=f"no gradient in any of {len(names)} trained parameter(s): grad is None and there is no main_grad "
        f"in {shown}",
        rule="a record is of gradients, from parameter.grad or, where that is None, from parameter.main_grad",
        fix="call recorder.take_gradients() after backward and before zero_grad(), with the model that the loss "
        "goes through; under DeepSpeed use workbench.attach.deepspeed.EngineRecorder",
    )


def cleared_buffers(step: int, parameters: int, losses: Sequence[float]) -> RecordError:
    """Error of a step in which all gradients are buffers of zeros, next to losses that are not 0, or none."""
    loss_text = f"losses {', '.join(f'{value:g}' for value in losses[:3])}" if losses else "no loss was noted"
    return RecordError(
        f"record the gradients of step {step}",
        found=f"main_grad is 0 in every element of all {parameters} parameters, no "
        f"parameter has a grad, and {loss_text}",
        rule="cleared buffers cannot be distinguished from gradients of 0",
        fix="call recorder.take_gradients() after the last backward (and finalize_model_grads), "
        "and before zero_grad_buffer() and optimizer.step()",
    )
