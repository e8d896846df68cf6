"""Micro-batches of a dumped step: their tokens, what they hold, and what is computed once for all readings."""

from dataclasses import replace

import torch

from tests.helpers.dumped_step import SETTINGS, dump
from workbench.check.memo import Memo
from workbench.check.micro_batches import (
    inputs_with_leaves,
    micro_batches,
    sample_micro_batches,
    sampled_weights,
    training_rows,
)
from workbench.check.reading import Reading
from workbench.reduction.weights import StepTotals, TokenWeights
from workbench.specs.losses import LossSpec

SPEC = LossSpec(**SETTINGS)
ROWS = torch.tensor([3, 3, 2, 2, 1, 1, 1, 1])
"""The micro-batch of each document; the first has none."""


def step():
    return dump(layout={"dp": 2, "micro_batches": 2}, documents={"rows": ROWS})


def test_a_step_without_micro_batches_is_one():
    (indices_T,) = micro_batches(dump())
    assert indices_T.tolist() == list(range(len(dump().document_ids_T)))


def test_tokens_of_a_micro_batch_are_those_of_its_documents_in_order():
    ids_T = step().document_ids_T
    found = [ids_T[index_T].tolist() for index_T in micro_batches(step())]
    expected = [[document for document in ids_T.tolist() if ROWS[document] == number] for number in range(4)]
    assert found == expected
    assert found[0] == []


def test_a_row_has_the_values_of_its_tokens_and_an_empty_one_a_token_of_padding():
    reading, memo = Reading(step(), SPEC, None), Memo()
    indices = micro_batches(step())
    rows = training_rows(reading, indices, 0.5, memo)
    assert (rows[0].document_ids_T.tolist(), rows[0].loss_mask_T.tolist()) == ([-1], [False])
    for row, index_T in zip(rows[1:], indices[1:], strict=True):
        mask_T = step().loss_mask_T[index_T]
        assert torch.equal(row.loss_mask_T, mask_T)
        assert torch.equal(row.old_logprobs_T, torch.where(mask_T, step().tokens["old_logprobs"][index_T], 0.0))
        lengths = [int((mask_T & (row.document_ids_T == each)).sum()) for each in row.document_ids_T]
        assert row.lengths_T.tolist() == [max(1, length) for length in lengths]
        assert row.document_ids_T.unique().tolist() == list(range(int(row.document_ids_T.max()) + 1))
    assert training_rows(replace(reading, spec=LossSpec(name="grpo")), indices, 0.5, memo) is rows, (
        "once for all losses"
    )
    assert training_rows(reading, indices, 0.0, memo) is not rows


def test_a_document_without_trained_tokens_has_a_length_to_divide_by():
    whole = dump()
    untrained = replace(whole, tokens={**whole.tokens, "loss_mask": whole.loss_mask_T & (whole.document_ids_T != 2)})
    (row,) = training_rows(Reading(untrained, SPEC, None), micro_batches(untrained), 0.0, Memo())
    assert row.lengths_T[row.document_ids_T == 2].unique().tolist() == [1.0]


def test_the_policy_is_a_leaf_of_one_and_shifted_in_both():
    reading, memo = Reading(step(), SPEC, None), Memo()
    indices = micro_batches(step())
    rows = training_rows(reading, indices, 0.25, memo)
    totals = StepTotals(tokens=1, documents=1)
    for (inputs, detached), row, index_T in zip(
        inputs_with_leaves(reading, indices, rows, totals, 0.25, memo, by_entropy=False), rows, indices, strict=True
    ):
        assert inputs.policy_logprobs_T.requires_grad
        assert not detached.policy_logprobs_T.requires_grad
        if len(index_T):
            mask_T = row.loss_mask_T
            policy_T = step().tokens["policy_logprobs"][index_T][mask_T] + 0.25
            assert torch.equal(detached.policy_logprobs_T[mask_T], policy_T)


def test_a_sample_leaves_out_micro_batches_without_its_tokens():
    indices, ids_T = micro_batches(step()), step().document_ids_T
    sample = sample_micro_batches(indices, (ids_T == 4) | (ids_T == 0), Memo())
    assert [number for number, _, _ in sample.rows] == [1, 3]
    assert [ids_T[index_T].unique().tolist() for index_T in sample.indices] == [[4], [0]]
    for number, keep_T, index_T in sample.rows:
        assert torch.equal(indices[number][keep_T], index_T)


def test_weights_of_a_sample_are_those_of_its_tokens():
    weights = {"policy": TokenWeights(torch.arange(4.0), 10 + torch.arange(4.0))}
    kept = sampled_weights(weights, torch.tensor([True, False, False, True]))["policy"]
    assert (kept.loss_T.tolist(), kept.gradient_T.tolist()) == ([0.0, 3.0], [10.0, 13.0])
