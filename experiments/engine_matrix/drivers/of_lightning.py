"""Lightning's Trainer with automatic optimization: ``of_lightning.py FOLDER loss=step|mean``."""

import os
import tempfile

import lightning
import torch
from plain import Decoder, micro_batch_loss, optimizer_of

from workbench.engines.case import EngineStep
from workbench.engines.driver import load_weights, options, rank, serve, snapshot

RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Module(lightning.LightningModule):
    """A step of the case in each micro-batch; the logged loss is the sum over micro-batches."""

    def __init__(self, case):
        super().__init__()
        self.net, self.case, self.losses, self.norms = Decoder(), case, [], []

    def training_step(self, number):
        count = self.case.accumulation
        step, place = divmod(int(number), count)
        texts = self.case.micro_batches(step, rank())[place]
        return micro_batch_loss(options()["loss"], self.net, texts, self.case, step)

    def configure_optimizers(self):
        return optimizer_of(self.case, self.parameters())


def trainer_of(case, folder, steps):
    return lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp" if RANKS > 1 else "auto",
        max_steps=steps,
        accumulate_grad_batches=case.accumulation,
        gradient_clip_val=case.clip,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def fit(case, module, folder, steps, checkpoint=None):
    loader = torch.utils.data.DataLoader(torch.arange(case.steps * case.accumulation), batch_size=1)
    trainer = trainer_of(case, folder, steps)
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return trainer


def run(case):
    with tempfile.TemporaryDirectory() as folder:
        module = Module(case)
        load_weights(module.net, case)
        before = snapshot(module.net.named_parameters())
        if case.resume_after:
            trainer = fit(case, module, folder, case.resume_after)
            path = f"/{folder}/saved.ckpt"
            trainer.save_checkpoint(path)  # the first rank writes
            shared = [path]
            if RANKS > 1:
                torch.distributed.broadcast_object_list(shared)
            module = Module(case)
            fit(case, module, folder, case.steps, shared[0])
            if RANKS > 1:
                torch.distributed.barrier()
        else:
            fit(case, module, folder, case.steps)
        return EngineStep(before, snapshot(module.net.named_parameters()), learning_rate=case.learning_rate)


serve(run)
