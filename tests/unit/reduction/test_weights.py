import pytest
import torch

from workbench.errors import SpecError
from workbench.reduction.weights import StepTotals, step_weights
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.packing import pack
from workbench.rollouts.targets import shift_targets


def rows(masks, count=1):
    documents = [{"tokens": [1] * len(m), "loss_mask": m, "advantages": 1.0, "old_logprobs": [-1.0] * len(m)}
                 for m in masks]
    return [shift_targets(row) for row in pack(RolloutBatch.from_documents(documents), rows=count, multiple_of=4)]


MASKS = [[0, 1, 1, 1], [0, 0, 1], [0, 0]]


def test_token_denominator_counts_the_whole_step():
    weights, totals = step_weights(rows(MASKS, count=2), "token")
    assert totals == StepTotals(tokens=4, documents=2)
    assert sorted(torch.cat(weights).tolist())[-4:] == [0.25] * 4
    assert float(torch.cat(weights).sum()) == 1.0


def test_document_denominator_weighs_documents_alike():
    weights, _ = step_weights(rows(MASKS), "document")
    # Position t predicts t + 1: the first document's three, then the second's one.
    assert weights[0].tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 0, 0, 1 / 2, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("denominator", ["token", "document"])
def test_a_step_without_trained_tokens_has_weight_zero(denominator):
    weights, totals = step_weights(rows([[0, 0, 0]]), denominator)
    assert totals == StepTotals(0, 0)
    assert weights[0].tolist() == [0.0] * 4


@pytest.mark.parametrize("denominator", ["token", "document"])
def test_weights_are_those_of_the_step_and_not_of_a_row(denominator):
    by_source = []
    for count in (1, 2, 3):
        split = rows(MASKS, count)
        weights, _ = step_weights(split, denominator)
        found = {int(s): float(w) for row, w_T in zip(split, weights, strict=True)
                 for s, w in zip(row.source_T, w_T, strict=True) if w}
        by_source.append(found)
    assert by_source[0] == by_source[1] == by_source[2]


def test_unknown_denominator_is_refused():
    with pytest.raises(SpecError, match="'sequence'"):
        step_weights([], "sequence")
