"""A fused head multiplies the gradient of every token with what arrives at the first one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.faults import Fault
from workbench.losses.terms import LossInputs
from workbench.policy.logprobs import TokenLogprobs
from workbench.rollouts.targets import TrainingRow


class _TakeFirst(Function):
    """The identity, whose gradient is that of the first token that counts on every token that does."""

    @staticmethod
    def forward(ctx: Any, logprobs_T: Tensor, loss_mask_T: Tensor) -> Tensor:
        ctx.save_for_backward(loss_mask_T)
        return logprobs_T.clone()

    @staticmethod
    def backward(ctx: Any, cotangents_T: Tensor) -> tuple[Tensor, None]:
        (loss_mask_T,) = ctx.saved_tensors
        if not loss_mask_T.any():
            return cotangents_T, None
        return torch.where(loss_mask_T, cotangents_T[loss_mask_T][0], 0.0), None


def _broken(loss_inputs: Callable[..., LossInputs]) -> Callable[..., LossInputs]:
    def from_such_a_head(row: TrainingRow, said: TokenLogprobs, *more: object) -> LossInputs:
        return loss_inputs(row, said._replace(logprobs_T=_TakeFirst.apply(said.logprobs_T, row.loss_mask_T)), *more)

    return from_such_a_head


FAULT = Fault(
    family="J",
    what="a kernel that was written for a loss of one number reads the first element of the gradient that arrives, "
    "though it is asked for a value a token",
    origin="linkedin/Liger-Kernel#1298 (reduction none)",
    signature="loss and metrics right; every token pulls as the first trained one of its micro-batch does, whatever "
    "its own advantage, weight and clip: cosine far from 1; nothing where all tokens weigh the same (a "
    "likelihood averaged over tokens)",
    seam="loss_inputs",
    broken=_broken,
    hidden_in={"loss": {"name": "sft", "kl": {"coefficient": 0.0}}},
    detected_by="tests/faults/test_unseen.py::test_every_token_pulls_as_the_first",
    changes_metrics=False,
)
