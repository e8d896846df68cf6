"""megatron-core's GPT, DDP, schedule and optimizer: ``of_megatron_schedule.py KIND FOLDER [CHANGE=VALUE ...]``.

KIND ``train`` prints a hash of the final weights. ``plain=1``: without a recorder; ``by_hand=1``: gradients by autograd
alone, too. KIND ``refused`` prints what the recorder finds in what it refuses.
"""

import hashlib
import sys
from pathlib import Path

import torch
from megatron.core import package_info, parallel_state
from safetensors.torch import save_file
from torch import nn

from experiments.engine_matrix.drivers.cuda_on_cpu import CudaOnCpu
from experiments.engine_matrix.drivers.megatron_stack import gpt, run_schedule, start, wrapped
from workbench.attach.megatron import record
from workbench.errors import SpecError

assert package_info.__version__ == "0.16.1"
KIND, FOLDER = sys.argv[1:3]
CHANGES = dict(pair.split("=") for pair in sys.argv[3:])
TP, EACH = int(CHANGES.get("tp", 1)), int(CHANGES.get("each", 2))
CLIP, SHARDED = float(CHANGES.get("clip", 0.2)), "sharded" in CHANGES
PER_TOKEN = "means" not in CHANGES  # without: the schedule's mean over micro-batches of their means
ROWS, STEPS, LENGTH = 8, 3, 11


def rows():
    """Ids and labels of all steps; rows have 3 to 8 trained tokens, so micro-batches differ in theirs."""
    ids = torch.randint(2, 32, (ROWS * STEPS, LENGTH), generator=torch.Generator().manual_seed(1))
    untrained = torch.arange(LENGTH) < 3 + torch.arange(ROWS * STEPS)[:, None] * 5 % 6
    return ids, ids.masked_fill(untrained, -100)


def trained():
    model = gpt(tp=TP, per_token=PER_TOKEN, gated="gated" in CHANGES)
    ddp, optimizer = wrapped(model, sharded=SHARDED, optimizer="adam", lr=1e-2, adam_eps=1e-4, clip_grad=CLIP)
    recorder = None if "plain" in CHANGES else record(FOLDER, ddp, optimizer, gradients="full")
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    for ids, labels in zip(*(values.split(ROWS) for values in rows()), strict=True):
        parts = list(zip(ids.split(EACH), labels.split(EACH), strict=True))[rank::ranks]
        run_schedule(ddp, optimizer, parts, times=len(parts) if "times" in CHANGES else 1.0)
        optimizer.step()
    recorder and recorder.close()
    return model


def by_hand():
    """Losses and gradients before the clip of every step by autograd alone, of the mean over the step's tokens."""
    model, seen = gpt(tp=1, per_token=True, gated="gated" in CHANGES), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, eps=1e-4)
    later = torch.ones(1, 1, LENGTH - 1, LENGTH - 1).triu(1).bool()
    for number, (ids, labels) in enumerate(zip(*(values.split(ROWS) for values in rows()), strict=True)):
        places = torch.arange(LENGTH - 1).expand(len(ids), -1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids[:, :-1], places, later).flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        seen |= {f"{number}.{name}": value.grad.clone() for name, value in model.named_parameters()}
        seen[f"{number}.loss"] = loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    save_file(seen, f"{FOLDER}-by-hand.safetensors")


def refused():
    """What cannot be recorded: a model without Megatron's DDP, and losses per token that nothing divides."""
    model = gpt(tp=1, per_token=True)
    ddp, optimizer = wrapped(model, sharded=False, optimizer="adam", lr=1e-2, clip_grad=CLIP)
    for given in (model, ddp):
        model.config.finalize_model_grads_func = None
        try:
            record(FOLDER, given, optimizer)
        except SpecError as error:
            sys.stdout.write(f"refused: {error.parts['found']}\n")
    return model


Path(FOLDER).parent.mkdir(parents=True, exist_ok=True)
with CudaOnCpu():
    start(TP)
    model = trained() if KIND == "train" else refused()
    if "by_hand" in CHANGES:
        by_hand()
weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
of_ranks = [None] * torch.distributed.get_world_size()
torch.distributed.all_gather_object(of_ranks, hashlib.sha256(weights).hexdigest())
if torch.distributed.get_rank() == 0:
    sys.stdout.write(f"weights {'-'.join(of_ranks)}\n")
torch.distributed.destroy_process_group()
