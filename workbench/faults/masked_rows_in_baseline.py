"""Answers in which nothing trains enter the baseline of their group."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.rollouts.advantages.registry import WITHOUT_BASELINE, AdvantageInputs, Estimate


def _broken(estimate_advantages: Callable) -> Callable:
    def estimate_over_all(name: str, inputs: AdvantageInputs, **settings: object) -> Estimate:
        compares = name not in WITHOUT_BASELINE
        return estimate_advantages(name, inputs, **({"masked_in_baseline": True} if compares else {}) | settings)

    return estimate_over_all


FAULT = Fault(
    family="I",
    what="rejected, truncated or filtered answers move mean and deviation of their group though they do not train",
    origin="NVIDIA-NeMo/RL#3467, verl-project/verl#6362 and #6375",
    signature="right log-probabilities, advantages moved in groups that hold a masked answer and right in the others; "
    "the policy term alone is wrong",
    seam="estimate_advantages",
    broken=_broken,
    shows_in={"data": {"advantages": {"name": "grpo"}}},
    hidden_in={"data": {"advantages": {"name": "reinforce_plus_plus"}}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_wrong_advantages_turn_the_policy_term_alone",
)
