"""A GPT model of megatron-core in its own DDP, with its optimizer and its schedule, on CPUs and gloo.

Everything is built by megatron-core's own functions; `CudaOnCpu` stands for the GPU.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, PLACES = 32, 64
Batch = tuple[torch.Tensor, torch.Tensor]
"""Ids and labels (-100: not trained) of a micro-batch, [rows, columns]; a label is the id at its own place."""


def start(tp: int) -> None:
    """Begin the process group and megatron-core's groups; outside a launcher, of one rank."""
    alone = {"init_method": f"file://{tempfile.mkdtemp()}/store", "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **({} if "WORLD_SIZE" in os.environ else alone))
    initialize_rng_tracker(inference_rng_tracker=True)  # one without generators of CUDA: there is no dropout
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)


def gpt(*, tp: int, per_token: bool, gated: bool = False) -> GPTModel:
    """A model of two layers with rotary positions, the same weights on any number of ranks."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=32,
        tensor_model_parallel_size=tp,
        gated_linear_unit=gated,
        add_bias_linear=not gated,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        calculate_per_token_loss=per_token,
    )
    torch.manual_seed(0)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        PLACES,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def wrapped(model: GPTModel, *, sharded: bool, **settings: Any) -> tuple[DistributedDataParallel, Any]:
    """Megatron's DDP of a model and its optimizer, distributed if ``sharded``; settings of `OptimizerConfig`."""
    settings = {"min_lr": settings["lr"], "weight_decay": 0.0, "use_distributed_optimizer": sharded} | settings
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(use_distributed_optimizer=sharded), model)
    model.config.finalize_model_grads_func = finalize_model_grads
    return ddp, get_megatron_optimizer(OptimizerConfig(**settings), [ddp])


def run_schedule(ddp: DistributedDataParallel, optimizer: Any, batches: Iterable[Batch], times: float = 1.0) -> float:
    """Forward and backward of a step's micro-batches by megatron-core's schedule; return its loss over the dp ranks.

    The loss function returns a sum and a number of tokens: the schedule divides by those of the step under
    ``calculate_per_token_loss``, else by those of the micro-batch.
    """
    parts = list(batches)

    def forward_step(batches: Any, model: Any) -> Any:
        ids, labels = next(batches)
        count = ids.shape[1] - 1
        places = torch.arange(count).expand(len(ids), -1)
        later = torch.ones(1, 1, count, count).triu(1).bool()
        targets = labels[:, 1:]
        losses = model(ids[:, :-1], places, later, labels=targets.clamp(min=0))

        def loss(losses: torch.Tensor) -> Any:
            trained = (targets != -100).float()
            total, tokens = times * (losses * trained).sum(), trained.sum().int()
            return total, tokens, torch.stack([total.detach(), tokens.float()])

        return losses, loss

    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    seen = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(parts),
        model=ddp,
        num_microbatches=len(parts),
        seq_length=parts[0][0].shape[1] - 1,
        micro_batch_size=len(parts[0][0]),
    )
    if ddp.config.calculate_per_token_loss:
        total = torch.stack(seen).sum(0)
    else:
        total = torch.stack([torch.stack([each[0] / each[1], torch.tensor(1.0)]) for each in seen]).sum(0)
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return float(total[0] / total[1])
