"""The trainable part of a rollout batch: counts of tokens, documents and advantages, and reasons if there is none."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.vacuous_rollouts import CASES, rollouts
from workbench.losses.build import build_loss
from workbench.losses.terms import LossInputs
from workbench.metrics.trainable import Trainable
from workbench.reduction.evaluate import token_values
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.losses import PRESETS, LossSpec


def batch(*documents):
    """Documents of one prompt token and two completion tokens, with further fields of each."""
    usual = {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "advantages": 0.0, "old_logprobs": [0.0, -1.0, -1.0]}
    return RolloutBatch.from_documents([usual | given for given in documents], temperature=1.0)


def grouped(*rewards, **given):
    """Documents by group, given their rewards."""
    return batch(
        *({"reward": reward, "group_id": group} | given for group, several in enumerate(rewards) for reward in several)
    )


@pytest.mark.parametrize("case", CASES)
def test_every_untrainable_batch_has_a_reason(case):
    assert Trainable.of(rollouts(case)).nothing
    assert Trainable.of(rollouts("advantages of both signs")).nothing == ""


def test_tokens_count_by_mask_and_advantage():
    trainable = Trainable.of(
        batch(
            {"advantages": 1.0},
            {"advantages": [0.0, 0.0, 2.0]},
            {"advantages": [5.0, 0.0, 0.0]},
            {"advantages": 1.0, "loss_mask": [0, 0, 0]},
        )
    )
    assert (trainable.documents, trainable.tokens) == (4, 12)
    assert (trainable.trained_documents, trainable.trained_tokens) == (3, 6)
    assert (trainable.advantage_documents, trainable.advantage_tokens) == (2, 3)
    assert (trainable.nothing, trainable.warnings) == ("", ())


def test_groups_count_by_rewards_that_are_not_their_mean():
    trainable = Trainable.of(grouped([1.0, 0.0, 0.5], [1.0, 1.0], [0.3], [0.1, 0.1, 0.1]))
    assert (trainable.groups, trainable.mixed_groups, trainable.single_groups, trainable.group_documents) == (
        4,
        1,
        1,
        2,
    )
    assert trainable.nothing == ""


def test_a_document_that_does_not_train_has_no_part_in_its_group():
    trainable = Trainable.of(
        batch({"reward": 1.0, "group_id": 0}, {"reward": 0.0, "group_id": 0, "loss_mask": [0, 0, 0]})
    )
    assert (trainable.mixed_groups, trainable.single_groups) == (0, 1)
    assert trainable.nothing == "all recorded advantages are zero, and every group has one document"


@pytest.mark.parametrize(
    ("made", "warnings"),
    [
        (batch({"advantages": 1.0}, {}, {}), ["recorded advantages are zero on all but 1 of 3 (33.3%) documents"]),
        (batch({"advantages": 1.0}, {"advantages": 1.0}, {}), []),
        (
            batch(*[{"advantages": 1.0}] * 2, *[{"advantages": 1.0, "loss_mask": [0, 0, 0]}] * 3),
            [
                "only 2 of 5 (40.0%) documents have a trained token",
                "recorded advantages are zero on all but 2 of 5 (40.0%) documents",
            ],
        ),
        (
            grouped([1.0], [0.0], advantages=1.0),
            ["group estimators give an advantage to only 0 of 2 (0.0%) documents: every group has one document"],
        ),
        (
            grouped([1.0, 1.0], [1.0, 1.0], advantages=1.0),
            ["group estimators give an advantage to only 0 of 4 (0.0%) documents: no group has different rewards"],
        ),
        (
            grouped([1.0, 0.0], [1.0, 1.0], [0.0, 0.0], advantages=1.0),
            ["group estimators give an advantage to only 2 of 6 (33.3%) documents"],
        ),
    ],
)
def test_a_share_below_half_is_a_warning(made, warnings):
    assert list(Trainable.of(made).warnings) == warnings


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (grouped([1.0, 0.0], [0.0, 2.0]), ""),
        (
            batch(
                {"reward": 1.0, "group_id": 0},
                {"reward": 0.0, "group_id": 0},
                {"reward": 0.0, "group_id": 1, "loss_mask": [0, 0, 0]},
            ),
            "",
        ),  # a group without a trained document is not counted
        (grouped([1.0, 0.0], [1.0, 1.0], [1.0, 0.0, 0.5], [1.0]), "3 of 4 groups are not two trained documents"),
        (batch({"advantages": 1.0}), "needs groups with rewards"),
        (grouped([1.0, 0.0], loss_mask=[0, 0, 0]), "no token is trained"),
    ],
)
def test_a_loss_on_pairs_needs_pairs(made, reason):
    result = Trainable.of(made).nothing_for(LossSpec(name="dpo"))
    assert reason in result
    assert bool(result) == bool(reason)


def test_only_losses_without_advantages_do_without_them():
    zero = Trainable.of(batch({}))
    assert zero.nothing_for(LossSpec(name="sft")) == ""
    assert zero.nothing_for(LossSpec(name="grpo")) == zero.nothing != ""
    assert Trainable.of(batch({"advantages": 1.0})).nothing_for(LossSpec(name="grpo")) == ""


@pytest.mark.parametrize("name", [name for name in PRESETS if not LossSpec(name=name).needs_pairs])
def test_losses_that_do_without_advantages_are_those_named(name):
    spec, place_T = LossSpec(name=name), torch.arange(4, dtype=torch.float64)
    inputs = LossInputs(
        -1 - 0.1 * place_T,
        -1.3 - 0.05 * place_T,
        1.5 - place_T,
        ref_logprobs_T=-1.1 - 0.03 * place_T,
        sampler_logprobs_T=-1.2 - 0.07 * place_T,
        entropy_T=1 + place_T,
        rewards_T=1 + place_T,
        document_ids_T=torch.arange(4) // 2,
    )
    loss = build_loss(spec)
    moves = not torch.equal(token_values(loss(inputs)), token_values(loss(replace(inputs, advantages_T=3 - place_T))))
    assert moves == spec.surrogate.reads_advantages
