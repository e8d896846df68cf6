"""Advantages that are normalised inside their groups already are whitened over the step."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.rollouts.advantages.registry import AdvantageInputs, Estimate
from workbench.rollouts.advantages.tokens import whiten


def _broken(estimate_advantages: Callable[..., Estimate]) -> Callable[..., Estimate]:
    def whiten_groups(name: str, inputs: AdvantageInputs, **settings: object) -> Estimate:
        found = estimate_advantages(name, inputs, **settings)
        if name != "grpo":
            return found
        return found._replace(advantages_T=whiten(found.advantages_T, inputs.loss_mask_T))

    return whiten_groups


FAULT = Fault(
    family="I",
    what="the actor divides by the deviation of the group, and the learner by that of all tokens, after it has taken "
    "off their mean",
    origin="axon-rl/gem#113, amazon-science/reskill#12",
    signature="right log-probabilities; all advantages shifted and scaled by one pair of numbers of the step, so that "
    "answers whose group says nothing train too; the policy term alone is wrong",
    seam="estimate_advantages",
    broken=_broken,
    shows_in={"data": {"advantages": {"name": "grpo"}}},
    hidden_in={"data": {"advantages": {"name": "recorded"}}},
    detected_by="tests/faults/test_unseen.py::test_twice_normalised_advantages_have_mean_0_and_deviation_1",
)
