"""The table of a step's documents, and each divisor against manual values; `test_weights` uses the oracle."""

from dataclasses import replace

import pytest
import torch

from workbench.reduction.denominators import ALWAYS, DENOMINATORS, StepDocuments, positive_token
from workbench.rollouts.batch import Extension, RolloutBatch
from workbench.rollouts.packing import pack
from workbench.rollouts.targets import shift_targets
from workbench.specs.losses import LossSpec

# Documents of 4, 3, 3 and 6 tokens, with 3, 2, 0 and 1 that count; two rows; two prompts; three rollouts.
STEP = {
    "rows_N": [0, 0, 1, 1],
    "tokens_N": [4, 3, 3, 6],
    "counted_N": [3, 2, 0, 1],
    "rewards_N": [1, 0, 1, 0.5],
    "group_ids_N": [9, 4, 4, 9],
    "rollout_ids_N": [0, 1, 2, 1],
}
BY_HAND = {
    "token": ([6, 6, 6, 6], [6, 6, 6, 6]),
    "document": ([9, 6, 0, 3], [12, 8, 0, 4]),
    "document_sum": ([3, 3, 3, 3], [4, 4, 4, 4]),
    "constant": ([30, 30, 30, 30], [40, 40, 40, 40]),
    "prompt_group": ([8, 4, 4, 8], [8, 4, 4, 8]),
    "rollout": ([6, 6, 0, 6], [9, 9, 0, 9]),
    "group_length": ([5, 3, 3, 5], [5, 3, 3, 5]),
    "raw": ([1, 1, 1, 1], [1, 1, 1, 1]),
    "local_token": ([10, 10, 2, 2], [10, 10, 2, 2]),
}
"""name -> divisors when trained documents are counted, and when all are."""


def table(**changes):
    given = {name: torch.tensor(v) for name, v in (STEP | changes).items()}
    return StepDocuments(
        **given | {"tokens_N": given["tokens_N"].double(), "counted_N": given["counted_N"].double()}, num_rows=2
    )


def with_empty(step):
    return StepDocuments(**step.__dict__ | {"with_empty": True})


@pytest.mark.parametrize("name", DENOMINATORS)
def test_divisors_match_manual_values(name):
    spec = LossSpec(denominator=name, denominator_constant=10.0 if name == "constant" else None)
    trained, everyone = BY_HAND[name]
    assert DENOMINATORS[name](table(), spec).tolist() == trained
    assert DENOMINATORS[name](with_empty(table()), spec).tolist() == everyone


def test_the_mean_length_of_a_group_counts_documents_that_count():
    mixed = table(group_ids_N=[9, 4, 9, 9])
    assert DENOMINATORS["group_length"](mixed, LossSpec()).tolist() == [5, 3, 5, 5]
    everyone = DENOMINATORS["group_length"](with_empty(mixed), LossSpec()).tolist()
    assert everyone == pytest.approx([13 / 3, 3, 13 / 3, 13 / 3])


def test_tokens_of_rewarded_documents_alone():
    assert positive_token(table(), LossSpec()).tolist() == [4, torch.inf, 4, 4]


def test_denominators_of_any_spec_need_no_field():
    bare = table()
    bare = StepDocuments(**bare.__dict__ | {"rewards_N": None, "group_ids_N": None, "rollout_ids_N": None})
    for denominator in ALWAYS.values():
        assert len(denominator(bare, LossSpec())) == 4


def test_the_table_is_read_off_rows():
    batch = RolloutBatch.from_documents(
        [
            {"tokens": [1] * len(m), "loss_mask": m, "advantages": 1.0, "old_logprobs": [-1.0] * len(m), "group_id": g}
            for m, g in (([0, 1, 1, 1], 9), ([0, 1, 1], 4), ([0, 0], 5))
        ]
    )
    rows = [shift_targets(row) for row in pack(batch, rows=4, multiple_of=3)]
    step = StepDocuments.of(rows, [row.loss_mask_T for row in rows])
    assert step.rows_N.tolist() == [0, 1, 2]
    assert step.tokens_N.tolist() == [4, 3, 2]
    assert step.counted_N.tolist() == [3, 2, 0]
    assert step.group_ids_N.tolist() == [9, 4, 5]
    assert (step.rewards_N, step.rollout_ids_N, step.num_rows, step.num_documents) == (None, None, 4, 2)
    assert [step.in_row(row) for row in range(4)] == [slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 0)]
    fewer = StepDocuments.of(rows, [row.loss_mask_T & (row.group_ids_T == 4) for row in rows])
    assert (fewer.counted_N.tolist(), fewer.num_documents) == ([0, 2, 0], 1)


def test_tokens_of_a_group_that_came_with_the_rollouts_win():
    recorded = torch.tensor([4.5, 7.0, 7.0, 4.5])
    step = replace(table(), group_tokens_N=recorded)
    assert DENOMINATORS["group_length"](step, LossSpec()).tolist() == recorded.tolist()


def test_a_recorded_number_of_a_document_is_read_past_its_padding():
    batch = RolloutBatch.from_documents(
        [
            {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "advantages": 1.0, "old_logprobs": [-1.0] * 3},
            {"tokens": [1], "loss_mask": [0], "advantages": 1.0, "old_logprobs": [-1.0]},
        ]
    )
    recorded = {
        "group_tokens": Extension(torch.tensor([5.5, 5.5, 5.5, 2.0]), "token", "tokens", "Of the group."),
        "truncated": Extension(torch.tensor([1, 1, 1, 0]), "token", "flag", "Cut off."),
    }
    (row,) = (shift_targets(row) for row in pack(replace(batch, extensions=recorded), rows=1, multiple_of=4))
    step = StepDocuments.of([row], [row.loss_mask_T])
    assert step.group_tokens_N[0].item() == 5.5  # the document's last token predicts nothing: padding stands there
    assert step.truncated_N[0].item()
