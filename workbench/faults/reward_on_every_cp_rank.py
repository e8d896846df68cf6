"""Each context-parallel rank adds the reward at the end of an answer, and the ranks' rewards are summed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.faults import Fault
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.run import RunSpec


def _broken(make_advantages: Callable) -> Callable:
    def reward_everywhere(batch: RolloutBatch, spec: RunSpec) -> RolloutBatch:
        if batch.rewards_N is None:
            return make_advantages(batch, spec)
        made = make_advantages(replace(batch, rewards_N=batch.rewards_N * spec.layout.cp), spec)
        return replace(made, rewards_N=batch.rewards_N)

    return reward_everywhere


FAULT = Fault(
    family="B",
    what="the reward of an answer is put on its last token by every context-parallel rank, not by the one that holds "
    "that token",
    origin="radixark/miles#1720",
    signature="advantages, and with them the policy term, exactly cp times the right ones, the penalty right; nothing "
    "where advantages are divided by a deviation, nor at cp = 1",
    seam="make_advantages",
    broken=_broken,
    shows_in={"layout": {"cp": 2}, "data": {"advantages": {"name": "rloo"}}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_unseen.py::test_a_reward_on_every_rank_multiplies_the_policy_term",
)
