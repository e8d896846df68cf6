"""A deviation of 0 divides."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.faults import Fault


def _broken(deviation_of_others: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def never_zero(rewards: Tensor, *more: object) -> Tensor:
        return deviation_of_others(rewards, *more).clamp_min(torch.finfo(rewards.dtype).tiny)

    return never_zero


FAULT = Fault(
    family="I",
    what="an answer is compared with the others of its group and divided by their deviation, which is 0 where they "
    "are equal or only one: epsilon is all that is left",
    origin="NVIDIA-NeMo/RL#1519",
    signature="right log-probabilities; advantages of such answers 1 / epsilon times too big, which is a million, and "
    "with them the policy term and the gradient's norm; other answers right",
    seam="workbench.rollouts.advantages.groups:_deviation_of_others",
    broken=_broken,
    shows_in={"data": {"advantages": {"name": "leave_one_out"}}},
    hidden_in={"data": {"advantages": {"name": "rloo"}}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_deviation_of_zero_makes_advantages_of_millions",
)
