"""Lightning's trainer on a tiny model: ``of_lightning.py KIND FOLDER [CHANGE=VALUE ...]``; see ``of_trl.py``."""

import hashlib
import sys

import lightning
import torch
from torch import nn

from workbench.attach.lightning import RecorderCallback

assert lightning.__version__ == "2.6.6"
FOLDER = sys.argv[2]
CHANGES = dict(pair.split("=") for pair in sys.argv[3:])


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 32))

    def training_step(self, ids):
        loss = nn.functional.cross_entropy(self.net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        return loss * self.trainer.accumulate_grad_batches if "accumulation" in CHANGES else loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


each = int(CHANGES.get("each", 2))
rows = torch.randint(2, 32, (24, 10), generator=torch.Generator().manual_seed(1))
trainer = lightning.Trainer(
    accelerator="cpu",
    max_epochs=1,
    accumulate_grad_batches=8 // each,
    gradient_clip_val=float(CHANGES.get("clip", 0.5)),
    callbacks=[] if "plain" in CHANGES else [RecorderCallback(FOLDER, gradients="full")],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Module()
trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=each))
weights = b"".join(value.detach().numpy().tobytes() for value in module.state_dict().values())
sys.stdout.write(f"weights {hashlib.sha256(weights).hexdigest()}\n")
