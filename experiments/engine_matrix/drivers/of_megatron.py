"""megatron-core's GPT, DDP, schedule, optimizer and clip: ``of_megatron.py FOLDER loss=token|micro_batch``.

With ``optimizer=sharded`` it is the distributed one.

loss=token is ``calculate_per_token_loss``; loss=micro_batch is the default, a mean over micro-batches of their means.
The distributed optimizer is offered for Adam alone; an epsilon far above every gradient, and a learning rate multiplied
by it, make its first step the gradient, to 1e-7.
"""

import tempfile
from pathlib import Path

import torch
from cuda_on_cpu import CudaOnCpu
from megatron.core import parallel_state
from megatron_stack import gpt, run_schedule, start, wrapped

from workbench.engines.case import EPSILON, EngineStep, padded
from workbench.engines.driver import Refused, load_weights, options, rank, serve, snapshot

OPTIONS = options()
SHARDED = OPTIONS.get("optimizer") == "sharded"
HUGE = 1e8


def settings(case):
    clip = {"clip_grad": case.clip if case.clip is not None else 1e9}
    if case.optimizer == "sgd" and not SHARDED:
        return clip | {"optimizer": "sgd", "lr": case.learning_rate, "sgd_momentum": 0.0}
    times, epsilon = (HUGE, HUGE) if case.optimizer == "sgd" else (1.0, EPSILON)
    return clip | {"optimizer": "adam", "lr": times * case.learning_rate, "adam_eps": epsilon}


def built(case):
    model = gpt(tp=1, per_token=OPTIONS["loss"] == "token")
    load_weights(model, case)
    return model, *wrapped(model, sharded=SHARDED, **settings(case))


def resumed(case, ddp, optimizer):
    """A new model and optimizer, from files as Megatron-LM writes them in its format ``torch``."""
    shared = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(shared)
    folder = Path(shared[0])
    if rank() == 0:
        state = {"model": ddp.state_dict_for_save_checkpoint(), "optimizer": optimizer.state_dict()}
        torch.save(state, folder / "model_optim_rng.pt")
    if SHARDED:
        optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    torch.distributed.barrier()
    model, ddp, optimizer = built(case)
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    state = torch.load(folder / "model_optim_rng.pt", weights_only=False)
    ddp.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if SHARDED:
        optimizer.load_parameter_state(str(folder / "distrib_optim.pt"))
    return model, ddp, optimizer


def run(case):
    if case.packed:
        raise Refused("packed sequences need TransformerEngine's attention, which needs a GPU")
    model, ddp, optimizer = built(case)
    before, losses, norms = snapshot(model.named_parameters()), [], []
    width = max(len(text.tokens) for text in case.documents) + case.padding
    for step in range(case.steps):
        rows = [padded(texts, width=width) for texts in case.micro_batches(step, rank())]
        losses.append(run_schedule(ddp, optimizer, [(each["input_ids"], each["labels"]) for each in rows]))
        _, norm, _ = optimizer.step()
        norms.append(float(norm))
        if case.resume_after == step + 1:
            model, ddp, optimizer = resumed(case, ddp, optimizer)
    after = snapshot(model.named_parameters())
    return EngineStep(before, after, tuple(losses), tuple(norms), learning_rate=case.learning_rate)


with CudaOnCpu():
    start(tp=1)
    serve(run)
parallel_state.destroy_model_parallel()
torch.distributed.destroy_process_group()
