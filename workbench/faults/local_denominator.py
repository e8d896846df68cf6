"""Each rank divides by the tokens it holds instead of the tokens of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.faults import Fault
from workbench.reduction.weights import TokenWeights


def _broken(split_row: Callable) -> Callable:
    def split_then_count_locally(*args: object) -> object:
        local = split_row(*args)
        mask_T = local.row.loss_mask_T
        local_T = torch.where(mask_T, 1.0 / mask_T.sum().clamp_min(1).double(), 0.0).to(local.row.advantages_T.dtype)
        return replace(local, weights={name: TokenWeights(local_T, local_T) for name in local.weights})

    return split_then_count_locally


FAULT = Fault(
    family="A",
    what="the loss of a rank is divided by the rank's own token count",
    origin="NVIDIA-NeMo/RL#266, NVIDIA/Megatron-LM#7513, torchtitan context-parallel GRPO",
    signature="gradient about dp * cp times too big under a sum, and tilted towards ranks that hold few trained "
    "tokens; with equal masks the tilt hides",
    seam="split_row",
    broken=_broken,
    shows_in={"layout": {"dp": 2, "cp": 2, "order": "zigzag"}},
    hidden_in={"layout": {"dp": 1, "cp": 1}},
    detected_by="tests/parity/test_faults.py::test_local_denominator_is_too_big_and_tilted",
)
