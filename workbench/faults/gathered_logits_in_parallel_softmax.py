"""Logits that are whole already go through a softmax that believes them to be one rank's slice."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workbench.faults import Fault
from workbench.sharding.mesh import Axis


def _broken(all_sum: Callable[[Tensor, Axis], Tensor]) -> Callable[[Tensor, Axis], Tensor]:
    def sum_of_copies(sums_3T: Tensor, axis: Axis) -> Tensor:
        whole_3T = all_sum(sums_3T, axis).clone()
        whole_3T[:2] *= axis.size  # of every exp, and of every exp times its logit; the target is found once
        return whole_3T

    return sum_of_copies


FAULT = Fault(
    family="S",
    what="the head gathers its logits, and the vocabulary-parallel loss adds up the normalisers of tp whole copies",
    origin="NVIDIA/Megatron-LM#7452, finding 2",
    signature="every log-probability too low by log tp, entropy and log-normaliser too high by as much; the gradient "
    "takes away 1 / tp of the softmax only: no constant, and it does not add up to 0 over the vocabulary",
    seam="workbench.policy.logprobs.vocabulary_parallel:all_sum",
    broken=_broken,
    shows_in={"layout": {"tp": 2}},
    hidden_in={"layout": {"tp": 1}},
    detected_by="tests/faults/test_unseen.py::test_copies_of_the_vocabulary_cost_every_token_log_tp",
)
