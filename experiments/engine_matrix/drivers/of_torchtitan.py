"""torchtitan's train_step on a small Llama under FSDP2: ``of_torchtitan.py FOLDER loss=chunked|whole``.

torchtitan offers Adam and AdamW. For steps of plain SGD the driver takes an epsilon far above every gradient, and
a learning rate multiplied by it: the first step of AdamW then is the gradient, to 1e-7.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer
from torchtitan_on_cpu import CpuTrainer, drawn, small_llama

from workbench.atomic import read_tensors
from workbench.engines.case import EPSILON, EngineStep, padded
from workbench.engines.driver import Refused, options, rank, serve, snapshot

HUGE = 1e8
CHUNKS = 8
VOCABULARY = 2048
torch.distributed.init_process_group("gloo")


class Documents(BaseDataLoader):
    """The micro-batches of this rank, in order, with their number as state."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        case: object
        width: int

    def __init__(self, config, **_):
        self.case, self.width, self.taken = config.case, config.width, 0

    def __iter__(self):
        parts = [texts for step in range(self.case.steps) for texts in self.case.micro_batches(step, rank())]
        for texts in parts[self.taken :]:
            self.taken += 1
            rows = padded(texts, width=self.width)
            yield {"input": rows["input_ids"][:, :-1]}, rows["labels"][:, 1:]

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def optimizer_of(case):
    sgd = case.optimizer == "sgd"
    settings = {"lr": case.learning_rate * (HUGE if sgd else 1.0), "eps": HUGE if sgd else EPSILON, "weight_decay": 0.0}
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=settings)
    return OptimizersContainer.Config(param_groups=[group], implementation="for-loop")


def configuration(case, folder):
    places = max(len(text.tokens) for text in case.documents) + case.padding - 1
    width = CHUNKS * -(-places // CHUNKS) + 1  # the chunked loss takes whole chunks
    loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    return Trainer.Config(
        model_spec=small_llama(),
        loss=loss if options().get("loss") == "whole" else ChunkedLossWrapper.Config(loss_fn=loss),
        optimizer=optimizer_of(case),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, min_lr_factor=1.0),
        dataloader=Documents.Config(case=case, width=width),
        training=TrainingConfig(
            local_batch_size=case.each,
            global_batch_size=len(case.step(0)),
            seq_len=width - 1,
            steps=case.steps,
            max_norm=case.clip if case.clip is not None else 1e9,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=bool(case.resume_after), interval=case.resume_after or 500),
        dump_folder=folder,
    )


def run(case):
    if case.packed:
        raise Refused("documents of a row are kept apart by FlexAttention, which has no backward on a CPU")
    file = Path(case.weights)
    given = read_tensors(file, requested="initial weights", fix="measure again") if case.weights else {}
    weights = (lambda name, shape: given[name]) if given else drawn()
    shared, logged = [tempfile.mkdtemp()], []
    torch.distributed.broadcast_object_list(shared)

    def log(step, loss, greatest, norm, **_):
        logged.append((float(loss), norm))

    trainer = CpuTrainer(configuration(case, shared[0]), weights, log)
    before = snapshot(trainer.model_parts[0].named_parameters())
    trainer.train(until=case.resume_after)
    if case.resume_after:
        trainer.checkpointer.close()
        trainer = CpuTrainer(configuration(case, shared[0]), lambda name, shape: torch.zeros(shape), log)
        trainer.train()
    trainer.checkpointer.close()
    losses, norms = zip(*logged, strict=True)
    after = snapshot(trainer.model_parts[0].named_parameters())
    return EngineStep(before, after, losses, norms, learning_rate=case.learning_rate)


serve(run)
torch.distributed.destroy_process_group()
