"""A recorder of torchtitan's Trainer.

    trainer = config.build()
    with record("records/mine", trainer):
        trainer.train()

With CUDA graphs, which torchtitan uses by default on NVIDIA devices, what enters the model is seen only until the graph
is captured; ``training.disable_cuda_graphs`` shows it in every step.

Source: torchtitan 0.3: `Trainer.train_step` accumulates the gradients of all micro-batches, whose losses are sums
        divided by the valid tokens of all ranks, clips and steps; `disable_fsdp_gradient_division` makes FSDP's mean a
        sum; `ChunkedLossWrapper`, the default loss, back-propagates each chunk of a sequence by itself, and then the
        whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.errors import SpecError
from workbench.records.recorder import Recorder
from workbench.sharding.mesh import axis_of

IGNORED = -100
"""Label of a token that is not trained, `torchtitan.components.loss.IGNORE_INDEX`."""


def record(folder: Path | str, trainer: Any, **options: Any) -> Recorder:
    """Record every step that a trainer makes until the recorder is closed. Call it on every rank.

    The loss of a micro-batch is the one that `Trainer.forward_backward_step` returns: of a chunked loss, chunks are
    back-propagated one by one, and the sum of what is back-propagated would count them twice.

    Args:
        folder: of the record; it must not have one yet.
        trainer: torchtitan's `Trainer`, or one derived from it.
        options: of `wb.Recorder`, such as ``gradients="full"``.

    Raises:
        RecordError: the folder has a record already.
        SpecError: the trainer has pipeline stages: no rank has the whole model.
    """
    dims = trainer.parallel_dims
    if dims.pp_enabled:
        raise SpecError(
            "record torchtitan's Trainer",
            found=f"{dims.pp} pipeline stages",
            rule="a record is of a whole model",
            fix="set parallelism.pipeline_parallel_degree=1 while you record",
        )
    given: dict[str, Any] = {"ranks": axis_of(dims.get_optional_mesh("loss"), "ranks"), "engine": "sum"} | options
    given["context"] = _settings(trainer) | (options.get("context") or {})
    recorder = Recorder(folder, trainer.model_parts[0], list(trainer.optimizers), **given)
    original = trainer.forward_backward_step

    def forward_backward_step(*, labels: Tensor, **more: Any) -> Tensor:
        trained = (labels != IGNORED).sum() / dims.cp  # cp ranks are given the same labels, and share their tokens
        loss: Tensor = original(labels=labels, **more)
        recorder.note(loss, counts={"trained_tokens": trained, "all_tokens": labels.numel() / dims.cp})
        return loss

    trainer.forward_backward_step = forward_backward_step
    recorder.at_close(lambda: vars(trainer).pop("forward_backward_step", None))
    return recorder


def _settings(trainer: Any) -> dict[str, Any]:
    """Context of a record, from the trainer's configuration."""
    dims, training = trainer.parallel_dims, trainer.config.training
    return {
        "dp": dims.dp_replicate * dims.dp_shard,
        "cp": dims.cp,
        "tp": dims.tp,
        "micro_batches": trainer.gradient_accumulation_steps,
        "max_grad_norm": training.max_norm,
        "precision": training.mixed_precision_param,
        "seq_len": training.seq_len,
        "loss": type(trainer.loss_fn).__name__,
    }
