"""DeepSpeed's engine: ``of_deepspeed.py FOLDER stage=0|1|2|3 loss=step|mean``."""

import os
import tempfile

import deepspeed
import torch
from plain import Decoder, micro_batch_loss, optimizer_of

from workbench.engines.case import EngineStep
from workbench.engines.driver import load_weights, options, rank, serve, snapshot

OPTIONS = options()
for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}.items():
    os.environ.setdefault(name, str(value))
if os.environ["WORLD_SIZE"] == "1":
    store = tempfile.mkdtemp() + "/store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)


def engine_of(case, model):
    config = {
        "train_micro_batch_size_per_gpu": case.each,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip or 0.0,
        "zero_optimization": {"stage": int(OPTIONS["stage"]), "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer_of(case, model.parameters()), config=config)[0]


def whole(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return snapshot(engine.module.named_parameters())


def run(case):
    model = Decoder()
    load_weights(model, case)
    before, norms = snapshot(model.named_parameters()), []
    engine = engine_of(case, model)
    for step in range(case.steps):
        for texts in case.micro_batches(step, rank()):
            engine.backward(micro_batch_loss(OPTIONS["loss"], engine, texts, case, step))
            engine.step()
        size = engine.get_global_grad_norm()
        norms += [float(size)] if size is not None else []
        if case.resume_after == step + 1:
            shared = [tempfile.mkdtemp()]
            torch.distributed.broadcast_object_list(shared)
            engine.save_checkpoint(shared[0], tag="saved")
            engine.destroy()
            torch.distributed.barrier()
            engine = engine_of(case, Decoder())
            engine.load_checkpoint(shared[0], tag="saved")
    after = whole(engine)
    engine.destroy()
    return EngineStep(before, after, (), tuple(norms), learning_rate=case.learning_rate)


serve(run)
torch.distributed.destroy_process_group()
