"""torchtitan's Trainer on a tiny Llama: ``of_torchtitan.py KIND FOLDER [CHANGE=VALUE ...]``; see ``of_trl.py``.

KIND ``trainer``: the Trainer as it is, which needs an accelerator. KIND ``cpu``: its `train_step`, on parts that
torchtitan builds from the same configuration, on a mesh of CPUs: `Trainer.__init__` sets a CUDA device where there is
none.
"""

import hashlib
import sys
from dataclasses import dataclass
from importlib.metadata import version

import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from experiments.engine_matrix.drivers.torchtitan_on_cpu import CpuTrainer, drawn, small_llama  # sets its environment

from torchtitan.components.checkpointer import CheckpointManager  # isort: skip
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer

from workbench.attach.torchtitan import record

assert version("torchtitan") == "0.3.0"
KIND, FOLDER = sys.argv[1:3]
CHANGES = dict(pair.split("=") for pair in sys.argv[3:])
ROWS, STEPS, LENGTH, VOCABULARY = 8, 3, 16, 2048


def rows():
    """Ids and labels of all steps; rows have 5 to 12 trained tokens, so micro-batches differ in theirs."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (ROWS * STEPS, LENGTH + 1), generator=draw)
    labels = ids[:, 1:].clone()
    labels[torch.arange(LENGTH) < 4 + torch.arange(ROWS * STEPS)[:, None] % 8] = -100
    return ids[:, :-1], labels


class Rows(BaseDataLoader):
    """Micro-batches of this rank, so that each step has the same rows on any number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, **_):
        of_rank = torch.arange(ROWS * STEPS).view(STEPS, dp_world_size, -1)[:, dp_rank].flatten()
        ids, labels = rows()
        self.batches = [({"input": ids[one]}, labels[one]) for one in of_rank.split(local_batch_size)]

    def __iter__(self):
        return iter(self.batches)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def configuration():
    chunked = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY))
    return Trainer.Config(
        model_spec=small_llama(),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY) if "whole" in CHANGES else chunked,
        optimizer=default_adamw(lr=1e-3, fused=False, foreach=False),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        dataloader=Rows.Config(),
        training=TrainingConfig(
            local_batch_size=int(CHANGES.get("each", 2)),
            global_batch_size=ROWS,
            seq_len=LENGTH,
            steps=STEPS,
            max_norm=float(CHANGES.get("clip", 0.5)),
            mixed_precision_param="float32",
            disable_cuda_graphs="graphs" not in CHANGES,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=False),
        dump_folder=f"{FOLDER}-trainer",
    )


def planted(trainer):
    """Mistakes in what a micro-batch is divided by, and in what FSDP divides by."""
    original = trainer.forward_backward_step
    if "times" in CHANGES:
        each = trainer.gradient_accumulation_steps
        trainer.forward_backward_step = lambda *, global_valid_tokens, **more: original(
            global_valid_tokens=global_valid_tokens / each, **more
        )
    if "own" in CHANGES:
        each = trainer.gradient_accumulation_steps
        trainer.forward_backward_step = lambda *, labels, global_valid_tokens, **more: original(
            labels=labels, global_valid_tokens=(labels != -100).sum() * each, **more
        )
    if "mean" in CHANGES:
        for module in trainer.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(torch.distributed.get_world_size()))


def by_hand(config):
    """Gradients of the first step by autograd alone, of the mean over all trained tokens."""
    model = config.model_spec.model.build()
    model.init_weights(buffer_device=None)
    weights = drawn()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(weights(name, value.shape))
    ids, labels = (values[:ROWS] for values in rows())
    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    save_file(gradients | {"loss": loss.detach()}, f"{FOLDER}.safetensors")


config = configuration()
trainer = CpuTrainer(config, drawn()) if KIND == "cpu" else config.build()
planted(trainer)
recorder = None if "plain" in CHANGES else record(FOLDER, trainer, gradients="full")
trainer.train()
recorder and recorder.close()
first = torch.distributed.get_rank() == 0
if "by_hand" in CHANGES and first:
    by_hand(config)
state = trainer.model_parts[0].state_dict()
whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in state.values()]
weights = b"".join(value.detach().cpu().numpy().tobytes() for value in whole)
sys.stdout.write(f"weights {hashlib.sha256(weights).hexdigest()}\n" if first else "")
torch.distributed.destroy_process_group()
