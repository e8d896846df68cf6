"""torchtitan's Trainer on a mesh of CPUs, and a small Llama.

`Trainer.__init__` sets a CUDA device where there is no accelerator. `CpuTrainer` therefore builds model, FSDP2, loss,
optimizers, schedules and checkpoints by torchtitan's own functions; `train_step` and what it calls are the Trainer's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
    os.environ.setdefault(name, str(value))

from torchtitan.components.loss import ChunkedLossWrapper  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class CpuDims(ParallelDims):
    """Parallel dimensions of data alone, on a mesh of CPUs; torchtitan's are of CUDA where there is no accelerator."""

    def build_mesh(self) -> Any:
        """Build the mesh."""
        mesh = init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("fsdp",))
        names = ("fsdp", "batch", "loss") if self.world_size > 1 else ("fsdp",)
        self._single_axis_meshes = dict.fromkeys(names, mesh)
        return mesh

    def get_optional_mesh(self, dims: Any, **_: Any) -> Any:
        """Return the mesh of a dimension, None for one that is not used."""
        if not self._single_axis_meshes:
            self.build_mesh()
        return self._single_axis_meshes.get(dims if isinstance(dims, str) else dims[0])


class CpuTrainer(Trainer):
    """A trainer whose steps are torchtitan's, on parts that torchtitan builds.

    Args:
        config: of `Trainer`.
        weights: whole initial weights by name.
        log: called with step, loss, greatest loss of a rank and gradient norm of each step, as torchtitan logs them.
    """

    def __init__(
        self, config: Any, weights: Callable[[str, torch.Size], torch.Tensor], log: Callable[..., None] | None = None
    ) -> None:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        self.config, self.device, self.step, self.ntokens_seen = config, torch.device("cpu"), 0, 0
        self.parallel_dims = CpuDims.from_config(config.parallelism, ranks)
        set_spmd_backend(config.parallelism.spmd_backend)
        self.model_config = config.model_spec.model
        self.model_config.update_from_config(config=config)
        self.model_parts = [self._model(weights)]
        self.loss_fn = config.loss.build(compile_config=config.compile)
        if isinstance(self.loss_fn, ChunkedLossWrapper):
            self.loss_fn.set_lm_head(self.model_parts[0].lm_head)
            self.model_parts[0]._skip_lm_head = True
        self.optimizers = config.optimizer.build(model_parts=self.model_parts)
        self.lr_schedulers = config.lr_scheduler.build(optimizers=self.optimizers, training_steps=config.training.steps)
        each, rows = config.training.local_batch_size, config.training.global_batch_size
        self.gradient_accumulation_steps, self.num_pipeline_parallel_microbatches = rows // (each * ranks), 1
        self.dataloader = config.dataloader.build(dp_world_size=ranks, dp_rank=rank, local_batch_size=each)
        self.train_context = get_spmd_context(parallel_dims=self.parallel_dims)
        self.fwd_bwd_fn = self._forward_backward_body
        self.checkpointer = config.checkpoint.build(
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=config.dump_folder,
        )
        self.metrics_processor = SimpleNamespace(
            should_log=lambda step: log is not None,
            log=log,
            ntokens_since_last_log=0,
            data_loading_times=[],
            close=lambda: None,
        )

    def _model(self, weights: Callable[[str, torch.Size], torch.Tensor]) -> Any:
        config = self.config
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
            for name, value in model.named_parameters():
                whole = weights(name, value.shape)
                split = isinstance(value, DTensor)
                value.copy_(distribute_tensor(whole, value.device_mesh, value.placements) if split else whole)
        return model.train()

    def train(self, until: int | None = None) -> None:
        """Take the steps from a checkpoint's, if there is one, to the last, or ``until``; save as the Trainer does."""
        steps = self.config.training.steps
        self.checkpointer.load(step=self.config.checkpoint.load_step)
        batches = self.batch_generator(self.dataloader)
        while self.step < min(steps, until or steps):
            self.step += 1
            self.train_step(batches)
            self.checkpointer.save(self.step, last_step=self.step == steps)


def small_llama() -> Any:
    """Specification of a Llama of two layers."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention has no backward on CPUs
    return spec


def drawn() -> Callable[[str, torch.Size], torch.Tensor]:
    """Weights that are the same on any number of ranks and on any device."""
    draw = torch.Generator().manual_seed(0)
    return lambda name, shape: 0.1 * torch.randn(shape, generator=draw) + (1.0 if "norm" in name else 0.0)
