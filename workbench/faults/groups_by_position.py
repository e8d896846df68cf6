"""Every so many answers are taken for a group, whatever prompt they answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.faults import Fault
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.run import RunSpec


def _broken(make_advantages: Callable) -> Callable:
    def make_by_position(batch: RolloutBatch, spec: RunSpec) -> RolloutBatch:
        if batch.group_ids_N is None:
            return make_advantages(batch, spec)
        answers = max(batch.num_documents // batch.group_ids_N.unique().numel(), 1)
        by_position_N = torch.arange(batch.num_documents) // answers
        made = make_advantages(replace(batch, group_ids_N=by_position_N), spec)
        return replace(made, group_ids_N=batch.group_ids_N)

    return make_by_position


FAULT = Fault(
    family="I",
    what="rewards are reshaped to prompts x answers, though an answer was dropped or documents came in another order: "
    "groups run across prompts",
    origin="inclusionAI/AReaL#1559 and #1563, NVIDIA-NeMo/RL#2176",
    signature="right log-probabilities, advantages of other signs and sizes; the policy term alone points elsewhere; "
    "nothing where advantages look at no group",
    seam="make_advantages",
    broken=_broken,
    shows_in={"data": {"advantages": {"name": "grpo"}}},
    hidden_in={"data": {"advantages": {"name": "recorded"}}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_wrong_advantages_turn_the_policy_term_alone",
)
