"""torchtitan's Trainer on a tiny Llama: ``of_torchtitan.py KIND FOLDER [CHANGE=VALUE ...]``; see ``of_trl.py``.

KIND ``trainer``: the Trainer as it is, which needs an accelerator. KIND ``cpu``: its `train_step`, on parts that
torchtitan builds from the same configuration, on a mesh of CPUs: `Trainer.__init__` sets a CUDA device where there is
none.
"""

import hashlib
import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
    os.environ.setdefault(name, str(value))

from importlib.metadata import version  # noqa: E402

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from workbench.attach.torchtitan import record  # noqa: E402

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
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention has no backward on CPUs
    chunked = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY))
    return Trainer.Config(
        model_spec=spec,
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


class CpuDims(ParallelDims):
    """Parallel dimensions of data alone, on a mesh of CPUs; torchtitan's are of CUDA where there is no accelerator."""

    def build_mesh(self):
        mesh = init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("fsdp",))
        names = ("fsdp", "batch", "loss") if self.world_size > 1 else ("fsdp",)
        self._single_axis_meshes = dict.fromkeys(names, mesh)
        return mesh

    def get_optional_mesh(self, dims, **_):
        if not self._single_axis_meshes:
            self.build_mesh()
        return self._single_axis_meshes.get(dims if isinstance(dims, str) else dims[0])


class OnCpu(Trainer):
    """A trainer whose steps are torchtitan's, on parts that torchtitan builds."""

    def __init__(self, config):
        torch.distributed.init_process_group("gloo")
        self.config, self.device, self.step, self.ntokens_seen = config, torch.device("cpu"), 0, 0
        self.parallel_dims = CpuDims.from_config(config.parallelism, torch.distributed.get_world_size())
        set_spmd_backend(config.parallelism.spmd_backend)
        self.model_config = config.model_spec.model
        self.model_config.update_from_config(config=config)
        with torch.device("meta"):
            model = self.model_config.build()
        shared = {"training": config.training, "parallelism": config.parallelism, "compile_config": config.compile}
        model = config.model_spec.parallelize_fn(
            model, parallel_dims=self.parallel_dims, ac_config=None, dump_folder=config.dump_folder, **shared
        )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no sum of products, which FSDP takes else
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        self.model_parts = [model.train()]
        self.loss_fn = config.loss.build(compile_config=config.compile)
        if isinstance(self.loss_fn, ChunkedLossWrapper):
            self.loss_fn.set_lm_head(model.lm_head)
            model._skip_lm_head = True
        self.optimizers = config.optimizer.build(model_parts=self.model_parts)
        self.lr_schedulers = config.lr_scheduler.build(optimizers=self.optimizers, training_steps=STEPS)
        ranks, each = torch.distributed.get_world_size(), config.training.local_batch_size
        self.gradient_accumulation_steps, self.num_pipeline_parallel_microbatches = ROWS // (each * ranks), 1
        rank = torch.distributed.get_rank()
        self.dataloader = config.dataloader.build(dp_world_size=ranks, dp_rank=rank, local_batch_size=each)
        self.train_context = get_spmd_context(parallel_dims=self.parallel_dims)
        self.fwd_bwd_fn = self._forward_backward_body
        self.checkpointer = SimpleNamespace(maybe_wait_for_staging=lambda: None)
        self.metrics_processor = SimpleNamespace(
            should_log=lambda step: False, ntokens_since_last_log=0, data_loading_times=[]
        )

    def train(self):
        batches = self.batch_generator(self.dataloader)
        while self.should_continue_training():
            self.step += 1
            self.train_step(batches)


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


@torch.no_grad()
def draw_weights(model):
    """The same weights on any number of ranks and on any device."""
    draw = torch.Generator().manual_seed(0)
    for name, value in model.named_parameters():
        whole = 0.1 * torch.randn(value.shape, generator=draw) + (1.0 if "norm" in name else 0.0)
        whole = whole.to(value.device)
        here = distribute_tensor(whole, value.device_mesh, value.placements) if isinstance(value, DTensor) else whole
        value.copy_(here)


def by_hand(config):
    """Gradients of the first step by autograd alone, of the mean over all trained tokens."""
    model = config.model_spec.model.build()
    model.init_weights(buffer_device=None)
    draw_weights(model)
    ids, labels = (values[:ROWS] for values in rows())
    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    save_file(gradients | {"loss": loss.detach()}, f"{FOLDER}.safetensors")


config = configuration()
trainer = OnCpu(config) if KIND == "cpu" else config.build()
draw_weights(trainer.model_parts[0])
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
