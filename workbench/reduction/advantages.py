"""Advantages of a whole step, computed before anything is split, so that every baseline sees its group."""

from __future__ import annotations

from dataclasses import replace

from workbench.errors import SpecError
from workbench.losses.kl import kl_in_reward
from workbench.rollouts.advantages.inputs import AdvantageInputs
from workbench.rollouts.advantages.registry import estimate_advantages
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.run import RunSpec


def compute_advantages(batch: RolloutBatch, spec: RunSpec) -> RolloutBatch:
    """Return the documents of a step with the advantages that the spec requests.

    Every document of the step is here, so baselines see their groups, as far as the step holds them.

    Raises:
        SpecError: the batch lacks a field that the estimator, or a KL penalty in the reward, needs.
    """
    estimator, kl = spec.data.advantages, spec.loss.kl
    if estimator.name == "recorded":
        return batch
    in_reward = bool(kl.coefficient) and kl.placement == "reward"
    if in_reward and batch.ref_logprobs_T is None:
        raise SpecError(
            "loss.kl.placement = 'reward'",
            found="no ref_logprobs",
            rule="the penalty compares the old policy with the reference policy",
            fix="record ref_logprobs with the rollouts, or leave the penalty out",
        )
    penalties_T, values = None, batch.extensions.get("values")
    if in_reward:
        penalties_T = kl_in_reward(batch.old_logprobs_T, batch.ref_logprobs_T, batch.loss_mask_T, kl)
    inputs = AdvantageInputs.of(batch, penalties_T=penalties_T, values_T=None if values is None else values.values)
    return replace(batch, advantages_T=estimate_advantages(estimator.name, inputs, **estimator.settings).advantages_T)
