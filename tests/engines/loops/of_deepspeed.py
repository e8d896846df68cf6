"""An engine of DeepSpeed on a tiny model: ``of_deepspeed.py STAGE FOLDER [CHANGE=VALUE ...]``.

Prints a hash of the final weights. ``plain=1``: without a recorder. ``by_hand=1``: what one plain rank computes, in
``FOLDER-by-hand``, without DeepSpeed.
"""

import hashlib
import os
import sys
from pathlib import Path

import deepspeed
import torch
from safetensors.torch import save_file
from torch import nn

from workbench.attach.deepspeed import EngineRecorder

assert deepspeed.__version__.split("+")[0] == "0.19.8"
STAGE, FOLDER = int(sys.argv[1]), sys.argv[2]
CHANGES = dict(pair.split("=") for pair in sys.argv[3:])
ROWS = torch.randint(2, 32, (24, 10), generator=torch.Generator().manual_seed(1))
STEPS, STEP_ROWS = 3, 8


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 32))


def loss_of(net, ids):
    return nn.functional.cross_entropy(net(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def optimizer_of(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def by_hand():
    """Losses and gradients before the clip of every step, by autograd alone, and the trained weights."""
    net = model()
    optimizer, seen = optimizer_of(net), {}
    for number, ids in enumerate(ROWS.split(STEP_ROWS)):
        optimizer.zero_grad()
        loss = loss_of(net, ids)
        loss.backward()
        seen |= {f"{number}.{name}": value.grad.clone() for name, value in net.named_parameters()}
        seen[f"{number}.loss"] = loss.detach()
        nn.utils.clip_grad_norm_(net.parameters(), 0.2)
        optimizer.step()
    save_file(seen, f"{FOLDER}-by-hand.safetensors")


def engine_of(net, accumulation):
    config = {
        "train_micro_batch_size_per_gpu": int(CHANGES.get("each", 1)),
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": float(CHANGES.get("clip", 0.2)),
        "zero_optimization": {"stage": STAGE, "stage3_param_persistence_threshold": int(CHANGES.get("persist", 0))},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "bf16" in CHANGES},
    }
    return deepspeed.initialize(model=net, optimizer=optimizer_of(net), config=config)[0]


def trained():
    each, ranks = int(CHANGES.get("each", 1)), int(os.environ.get("WORLD_SIZE", "1"))
    accumulation = STEP_ROWS // (each * ranks)
    engine = engine_of(model(), accumulation)
    if "plain" not in CHANGES:
        recorder = EngineRecorder(FOLDER, engine, gradients="full")
    for ids in ROWS.split(each * ranks):
        loss = loss_of(engine, ids[engine.global_rank * each :][:each])
        if "accumulation" in CHANGES:  # the known mistake: undoes the engine's division
            loss = loss * accumulation
        if "twice" in CHANGES:  # the other one: divides although the engine does
            loss = loss / accumulation
        engine.backward(loss)
        engine.step()
    if "plain" not in CHANGES:
        recorder.close()
    assert engine.step.__func__ is type(engine).step
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: value.detach().float().clone() for name, value in engine.module.named_parameters()}


Path(FOLDER).parent.mkdir(parents=True, exist_ok=True)
if "by_hand" in CHANGES:
    by_hand()
    sys.exit()
if "WORLD_SIZE" not in os.environ:  # one rank, without a launcher
    os.environ["LOCAL_RANK"] = "0"
    torch.distributed.init_process_group("gloo", init_method=f"file://{FOLDER}-store", rank=0, world_size=1)
weights = b"".join(value.numpy().tobytes() for value in trained().values())
if torch.distributed.get_rank() == 0:
    sys.stdout.write(f"weights {hashlib.sha256(weights).hexdigest()}\n")
torch.distributed.destroy_process_group()
