"""Facts of steps, rows and clean runs."""

import math

import pytest
import torch

from workbench.records.directory import RunDirectory
from workbench.rollouts.batch import RolloutBatch
from workbench.sensitivity.facts import Observed, observed, step_facts
from workbench.specs.run import RunSpec


def batch(*masks, groups=None, advantages=None):
    documents = []
    for number, mask in enumerate(masks):
        advantage = number + 1.0 if advantages is None else advantages[number]
        zeros = [0.0] * len(mask)
        documents.append(
            {
                "tokens": [3] * len(mask),
                "loss_mask": list(mask),
                "advantages": advantage,
                "old_logprobs": [-1.0 * bit for bit in mask],
                "sampler_logprobs": zeros,
                "group_id": (groups or range(len(masks)))[number],
                "reward": 0.5,
            }
        )
    return RolloutBatch.from_documents(documents)


def facts(rollouts, **settings):
    (step,) = step_facts(rollouts, RunSpec.model_validate({"steps": 3, **settings}))
    return step


def test_masks_are_counted():
    step = facts(batch([0, 1, 0, 1], [0, 1, 1, 0], [0, 0], [0, 1]))
    assert (step.lengths, step.untrained) == ((2, 2, 0, 1), 1)
    assert (step.holes, step.open_ends, step.trained_ends) == (1, 1, 2)


def test_prompts_and_groups():
    step = facts(batch([0, 1], [0, 1, 1], [0, 0], [0, 1], groups=[7, 7, 9, 9]))
    assert (step.prompt_tokens, step.prompt_documents) == ((3, 1), (2, 1))
    assert step.groups_in_place
    assert step.untrained_with_others == 1
    assert facts(batch([0, 1], [0, 1], [0, 0], [0, 0], groups=[7, 7, 9, 9])).untrained_with_others == 0
    assert not facts(batch([0, 1], [0, 1], [0, 1], [0, 1], groups=[7, 9, 7, 9])).groups_in_place
    assert not facts(batch([0, 1], [0, 1], [0, 1], groups=[7, 7, 9])).groups_in_place


def test_advantages_of_untrained_tokens_do_not_count():
    assert facts(batch([0, 1], [0, 1])).varied_advantages
    assert not facts(batch([0, 1], [0, 0], advantages=[1.0, 2.0])).varied_advantages
    assert not facts(batch([0, 1], [0, 1], advantages=[0.0, 0.0])).any_advantage


def test_weights_against_the_sampler():
    step = facts(batch([0, 1, 1]))
    assert abs(step.least_weight - torch.tensor(-1.0).double().exp()) < 1e-12
    assert step.least_weight == step.largest_weight


def test_rows_and_shards():
    rollouts = batch([0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0])
    step = facts(rollouts, layout={"cp": 3})
    (row,) = step.rows
    assert (row.documents, row.trained_documents, row.tokens) == (2, 1, 7)
    assert row.shard_tokens == (4, 3, 0)  # targets are one earlier than their tokens
    assert (row.split_documents, row.torn_documents) == (1, 0)
    (row,) = facts(rollouts, layout={"cp": 2, "order": "zigzag"}).rows
    assert (row.split_documents, row.torn_documents) == (1, 0)
    (row,) = facts(rollouts, layout={"cp": 2, "order": "document_zigzag"}).rows
    assert row.torn_documents == 1


def test_micro_batches_split_groups_and_change_the_order():
    rollouts = batch([0, 1], [0, 1, 1, 1, 1], [0, 1, 1], groups=[1, 1, 2])
    step = facts(rollouts, data={"micro_batches": 2})
    assert [row.documents for row in step.rows] == [1, 2]
    assert not step.in_order
    assert step.split_groups == 1
    assert facts(rollouts).in_order


def test_each_step_has_facts_of_its_own_documents():
    rollouts = batch([0, 1], [0, 0, 0], [0, 1])
    steps = step_facts(rollouts, RunSpec.model_validate({"steps": 3, "data": {"documents_per_step": 1}}))
    assert [step.untrained for step in steps] == [0, 1]  # the third is as the first


def test_what_a_clean_run_has_met(tmp_path):
    run = RunDirectory.create(tmp_path, "clean", RunSpec(steps=2))
    for number, (norm, ratios) in enumerate([(2.0, [0.0, 0.0, 0.0]), (3.0, [0.5, -0.5, 9.0])]):
        run.append_step({"step": number, "loss/total/sum": 1.0, "gradient/norm/global": norm})
        tokens = {
            "trained": torch.tensor([True, True, False]),
            "clipped": torch.tensor([number == 1, number == 1, True]),
            "policy_logprobs": torch.tensor(ratios, dtype=torch.float64),
            "old_logprobs": torch.zeros(3, dtype=torch.float64),
        }
        run.write_tensors(f"step{number:04d}.tokens", tokens)
    below = pytest.approx(math.exp(-0.5))
    assert observed(run) == Observed(2, 1, ratio_below=below, old_distance=0.5, largest_norm=3.0, finite=True)


def test_a_document_is_split_where_its_trained_tokens_reach_and_spread_where_any_token_lies():
    settings = {"layout": {"cp": 2}}
    (row,) = facts(batch([0, 1, 1, 0, 0, 0, 0, 0]), **settings).rows
    assert (row.split_documents, row.spread_documents, row.reached, row.later_documents) == (0, 1, {0}, 0)
    (row,) = facts(batch([0, 1, 0, 0, 0, 0, 0, 1]), **settings).rows
    assert (row.split_documents, row.spread_documents, row.reached) == (1, 1, {0, 1})
    (row,) = facts(batch([0, 0, 0, 0], [0, 0, 1, 1]), **settings).rows
    assert (row.split_documents, row.reached, row.later_documents) == (0, {1}, 1)


def test_advantages_of_a_rank_vary_by_documents_that_it_trains():
    first, second = [0, 1, 1, 1], [0, 1, 1, 1]
    (row,) = facts(batch(first, second), layout={"cp": 2}).rows
    assert row.varied_shards == 0, "a document a rank"
    (row,) = facts(batch(first, second)).rows
    assert row.varied_shards == 1


def rewarded(*rewards, groups):
    documents = [
        {"tokens": [3, 3], "loss_mask": [0, 1], "advantages": 0.0, "old_logprobs": [0.0, -1.0]}
        | {"group_id": group, "reward": reward}
        for group, reward in zip(groups, rewards, strict=True)
    ]
    return RolloutBatch.from_documents(documents)


@pytest.mark.parametrize(("name", "least", "most"), [("rloo", 1.0, 1.0), ("grpo", 1e-6, 1e-3), ("recorded", 0.0, 0.0)])
def test_twice_the_rewards_change_advantages_that_no_deviation_divides(name, least, most):
    step = facts(rewarded(0.0, 1.0, 1.0, 3.0, groups=[0, 0, 1, 1]), data={"advantages": {"name": name}})
    assert least <= step.scaled_advantages <= most


def test_groups_by_position_and_baselines_of_rows_are_other_advantages():
    grpo = {"data": {"advantages": {"name": "grpo"}}}
    mixed, equal = rewarded(0.0, 0.0, 1.0, 1.0, groups=[0, 1, 0, 1]), rewarded(1.0, 1.0, 1.0, 1.0, groups=[0, 1, 0, 1])
    assert facts(mixed, **grpo).regrouped_advantages
    assert not facts(equal, **grpo).regrouped_advantages
    in_rows = {"data": {"advantages": {"name": "grpo"}, "micro_batches": 2}}
    assert facts(rewarded(0.0, 1.0, 1.0, 0.0, groups=[0, 0, 0, 0]), **in_rows).own_baselines
    assert not facts(equal, **in_rows).own_baselines
    assert not facts(mixed, **grpo).own_baselines, "one row"


def test_an_end_is_followed_where_another_document_of_its_row_begins():
    ends, open_end = [0, 1], [0, 1, 0]
    (row,) = facts(batch(ends, open_end, ends, ends)).rows
    assert row.followed_ends == 2, "the last of the row is followed by nothing"
    (row,) = facts(batch([0, 0], ends), layout={"cp": 2, "order": "zigzag"}).rows
    assert row.followed_ends == 0, "nor by padding"
