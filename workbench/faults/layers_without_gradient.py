"""Activations are to be computed again in backward, and backward never comes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workbench.faults import Fault


def _broken(forward: Callable) -> Callable:
    def without_record(self: Any, *args: object, **how: object) -> object:
        with torch.no_grad():
            return forward(self, *args, **how)

    return without_record


FAULT = Fault(
    family="H",
    what="reentrant checkpointing of layers whose input wants no gradient, behind a frozen embedding: what comes out "
    "wants none either",
    origin="huggingface/transformers#21381 and #23170, mlfoundations/open_clip#573, pytorch/pytorch#7617",
    signature="loss and metrics right; the head and the last norm have their gradient, all decoder layers and the "
    "embedding have 0",
    seam="transformers.models.qwen3.modeling_qwen3:Qwen3DecoderLayer.forward",
    broken=_broken,
    shows_in={"model": {"tied": False}},
    detected_by="tests/faults/test_unseen.py::test_without_layers_the_head_and_the_last_norm_train",
    changes_metrics=False,
)
