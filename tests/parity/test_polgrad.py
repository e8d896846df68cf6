"""Losses against polgrad, an independent reference of policy-gradient losses, on its own seeded batches.

polgrad is by other authors and shares no code with the workbench or its oracles. `assert_conforms` compares loss and
gradient to 1e-9, with garbage where nothing counts; a KL penalty of a reference is left out by it.
"""

from dataclasses import replace

import pytest
import torch
from polgrad import ALGORITHMS, policy_loss
from polgrad.testing import assert_conforms, random_batches

from workbench.specs.losses import LossSpec
from workbench.systems.case import Case, logprobs_only
from workbench.systems.registry import Translation
from workbench.systems.replays import evaluate_as

LENGTH = 16
"""dr_grpo: the constant length, which polgrad leaves to its caller."""
SPECS = {
    "ppo": {"name": "ppo"},
    "grpo": {"name": "grpo", "denominator": "document"},
    "dr_grpo": {"name": "dr_grpo", "denominator_constant": float(LENGTH)},
    "dapo": {"name": "dapo"},
    "gspo": {"name": "gspo", "surrogate": {"clip_low": 3e-4, "clip_high": 4e-4}},
    "gspo_token": {"name": "gspo_token", "surrogate": {"clip_low": 3e-4, "clip_high": 4e-4}},
    "cispo": {"name": "cispo", "surrogate": {"clip_low": None, "clip_high": 0.2}},
    "rloo": {"name": "reinforce", "denominator": "document_sum"},
    "reinforce_pp": {"name": "ppo", "denominator": "document"},
}
TRUNCATED = {"name": "grpo", "denominator": "document", "correction": {"ratio": "token", "ratio_high": 10.0}}


def loss_of(spec):
    """Our loss in polgrad's calling convention."""

    def loss(*, logprobs, old_logprobs, advantages, response_mask, rollout_logprobs=None):
        arrays = {"logprobs": logprobs.detach(), "old_logprobs": old_logprobs, "mask": response_mask.double()}
        arrays["advantages"] = advantages[:, None].expand_as(logprobs).clone()
        if rollout_logprobs is not None:
            arrays["rollout_logprobs"] = rollout_logprobs
        case = Case.of("trl", "policy_loss", "", {}, arrays)
        live = logprobs_only(logprobs.reshape(-1))
        return evaluate_as(case, live, None, Translation(LossSpec.model_validate(spec))).total

    return loss


@pytest.mark.parametrize("name", SPECS)
def test_our_loss_conforms(name):
    reference = ALGORITHMS[name].loss
    reference = replace(reference, norm_len=LENGTH) if name == "dr_grpo" else reference
    report = assert_conforms(loss_of(SPECS[name]), reference, n_cases=6)
    assert report.grad_cosine_min > 1 - 1e-9


def test_a_loss_with_truncated_weights_conforms():
    """Not by `assert_conforms`, whose convention has no log-probabilities of the sampler."""
    reference = replace(ALGORITHMS["grpo_tis"].loss, kl=None)
    for batch in random_batches(4, ((4, 8), (2, 12)), seed=1):
        del batch["ref_logprobs"]
        ours, theirs = (batch["logprobs"].clone().requires_grad_() for _ in range(2))
        loss_of(TRUNCATED)(**{**batch, "logprobs": ours}).backward()
        policy_loss(reference, **{**batch, "logprobs": theirs}).loss.backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_every_algorithm_is_tried():
    assert {*SPECS, "grpo_tis"} == {*ALGORITHMS}


def test_another_denominator_does_not_conform():
    with pytest.raises(AssertionError, match="conformance violation"):
        assert_conforms(loss_of(SPECS["ppo"]), ALGORITHMS["grpo"].loss, n_cases=4)
