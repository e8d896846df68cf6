"""torch's DDP and FSDP2: ``of_torch.py FOLDER engine=ddp|fsdp2 loss=step|mean``."""

import contextlib
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from plain import Decoder, micro_batch_loss, optimizer_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from workbench.engines.case import EngineStep
from workbench.engines.driver import load_weights, options, rank, serve, snapshot

for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
    os.environ.setdefault(name, str(value))
dist.init_process_group("gloo")
MESH = init_device_mesh("cpu", (dist.get_world_size(),))


def wrapped(model):
    if options()["engine"] == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model.mlp, mesh=MESH)
    return fully_shard(model, mesh=MESH)


def take_step(case, model, optimizer, step):
    """One optimizer step; return the norm that torch reports."""
    parts = case.micro_batches(step, rank())
    for number, texts in enumerate(parts):
        last = number == len(parts) - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        with contextlib.nullcontext() if last or isinstance(model, FSDPModule) else model.no_sync():
            (micro_batch_loss(options()["loss"], model, texts, case, step) / len(parts)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip if case.clip is not None else float("inf"))
    optimizer.step()
    optimizer.zero_grad()
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def run(case):
    plain = Decoder()
    load_weights(plain, case)
    before, norms = snapshot(plain.named_parameters()), []
    model = wrapped(plain)
    optimizer = optimizer_of(case, model.parameters())
    for step in range(case.steps):
        norms.append(take_step(case, model, optimizer, step))
        if case.resume_after == step + 1:
            model, optimizer = resumed(case, model, optimizer)
    names = ((name.removeprefix("module."), value) for name, value in model.named_parameters())
    return EngineStep(before, snapshot(names), (), tuple(norms), learning_rate=case.learning_rate)


def resumed(case, model, optimizer):
    """A new model and optimizer, from what torch.distributed.checkpoint saved of these."""
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=shared[0])
    model = Decoder()
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    model = wrapped(model)
    optimizer = optimizer_of(case, model.parameters())
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    checkpoint.load(state, checkpoint_id=shared[0])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return model, optimizer


serve(run)
dist.destroy_process_group()
