"""A recorder as a callback of Lightning's Trainer, with automatic optimization.

    trainer = Trainer(callbacks=[RecorderCallback("records/mine")], ...)
    trainer.fit(module, data)

Source: Lightning 2.6: `Callback.on_train_start`; losses are divided by ``accumulate_grad_batches`` before backward, and
        gradients clipped by torch's function.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from workbench.records.recorder import Recorder


class RecorderCallback(Callback):
    """Callback that records the training of a LightningModule.

    Args:
        folder: of the record; it must not have one yet.
        options: of `wb.Recorder`, such as ``gradients="full"``.
    """

    def __init__(self, folder: Path | str, **options: Any) -> None:
        self.folder, self._options = Path(folder), options
        self.recorder: Recorder | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the record, of the module and its optimizers."""
        context = {
            "dp": trainer.world_size,
            "micro_batches": trainer.accumulate_grad_batches,
            "max_grad_norm": trainer.gradient_clip_val,
        }
        known = {name: value for name, value in context.items() if value is not None}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        options: dict[str, Any] = {"scaler": scaler} | self._options
        options["context"] = known | (options.get("context") or {})
        self.recorder = Recorder(self.folder, pl_module, trainer.optimizers, **options)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the record."""
        if self.recorder is not None:
            self.recorder.close()
