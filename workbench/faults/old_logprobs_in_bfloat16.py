"""Recorded log-probabilities travel from the sampler to the trainer in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.faults import Fault
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import TrainingRow


def _broken(shift_targets: Callable[[RolloutBatch], TrainingRow]) -> Callable[[RolloutBatch], TrainingRow]:
    def shift_rounded(row: RolloutBatch) -> TrainingRow:
        return shift_targets(replace(row, old_logprobs_T=row.old_logprobs_T.bfloat16().to(row.old_logprobs_T.dtype)))

    return shift_rounded


FAULT = Fault(
    family="J",
    what="what the sampler says about its tokens, and the ratio is taken against, is stored with eight bits",
    origin="THUDM/slime#245 (rollout_log_probs; again in #892)",
    signature="the policy's own log-probabilities right, old ones off by up to 1 in 256 of themselves to either side, "
    "and with them each ratio, more on unlikely tokens; nothing where the policy is its own old one",
    seam="shift_targets",
    broken=_broken,
    hidden_in={"loss": {"old_policy": "current"}},
    detected_by="tests/faults/test_unseen.py::test_rounded_old_logprobs_are_off_by_their_last_bit",
)
