"""Arrays of a case as a row: shapes and masks, and nothing of what stands where nothing counts."""

import numpy as np
import pytest
import torch

from workbench.errors import ShapeError, SpecError
from workbench.reduction.evaluate import CORRECTION_WEIGHTS
from workbench.systems.case import Case, logprobs_only


def case(**inputs):
    return Case.of("verl", "policy_loss", "f", {"a": 1}, inputs)


MASK = np.array([[1.0, 1, 0], [0, 0, 0]])
LOGPROBS = np.array([[-1.0, -2, np.nan], [np.inf, -5, -6]])


def test_rows_of_a_rectangle_are_documents_and_garbage_is_left_behind():
    row = case(logprobs=LOGPROBS, old_logprobs=LOGPROBS, mask=MASK, advantages=np.array([2.0, np.nan])).row()
    assert row.document_ids_T.tolist() == [0, 0, 0, 1, 1, 1]
    assert row.loss_mask_T.tolist() == [True, True, False, False, False, False]
    assert row.old_logprobs_T.tolist() == [-1, -2, 0, 0, 0, 0]
    assert row.advantages_T.tolist() == [2, 2, 0, 0, 0, 0]
    assert row.lengths_T.tolist() == [2, 2, 2, 1, 1, 1]
    assert row.sampler_logprobs_T is None
    assert row.old_logprobs_T.dtype == torch.float64


@pytest.mark.parametrize(
    "form",
    [
        lambda values: values.tolist(),
        lambda values: values[::-1].copy()[::-1],
        torch.as_tensor,
        lambda values: np.broadcast_to(values, values.shape),
    ],
    ids=["lists", "backwards", "tensors", "read-only"],
)
def test_values_come_in_any_form_with_every_digit(form):
    values, index = np.array([0.1, -1 / 3, 0.7]), np.array([0, 0, 1])
    found = case(logprobs=form(values), document_index=form(index))
    assert found["logprobs"].tolist() == values.tolist()
    assert found["document_index"].dtype == torch.int64


def test_packed_rows_have_an_index():
    found = case(logprobs=np.zeros(3), document_index=np.array([0, 0, 2], dtype=np.int32), mask=np.array([0, 1, 1]))
    assert found.row().document_ids_T.tolist() == [0, 0, 2]
    assert found.row().lengths_T.tolist() == [1, 1, 1]
    assert case(logprobs=np.zeros(3)).row().document_ids_T.tolist() == [0, 0, 0]


def test_a_sample_mask_and_a_negative_target_take_tokens_out():
    found = case(targets=np.array([[3, -1, 5], [1, 2, 3]], dtype=np.int32), sample_mask=np.array([1.0, 0.0]))
    assert found.loss_mask_T.tolist() == [True, False, True, False, False, False]
    assert found.targets_T.tolist() == [3, 0, 5, 1, 2, 3]
    assert found.row().targets_T.tolist() == [3, 0, 5, 1, 2, 3]


def test_lengths_that_came_with_the_batch_win():
    found = case(targets=np.array([1, 2]), label_counts=np.array([7, 0]))
    assert found.row().lengths_T.tolist() == [7, 1]


def test_ready_made_weights_and_further_fields():
    found = case(logprobs=LOGPROBS, mask=MASK, is_weights=np.array([[0.5], [2.0]]), rewards=np.array([1.0, 3.0]))
    row = found.row(old_logprobs_T=torch.full((6,), -9.0))
    assert row.extensions[CORRECTION_WEIGHTS].tolist() == [0.5, 0.5, 0, 0, 0, 0]
    assert row.rewards_T.tolist() == [1, 1, 1, 3, 3, 3]
    assert row.old_logprobs_T.tolist() == [-9.0] * 6


def test_values_go_back_into_the_shape_they_came_in():
    found = case(logprobs=LOGPROBS)
    assert found.shaped(torch.arange(6.0, requires_grad=True)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not found.shaped(torch.arange(6.0, requires_grad=True)).requires_grad


def test_what_is_missing_or_does_not_fit_is_said():
    with pytest.raises(SpecError, match="input 'advantages'"):
        case(logprobs=LOGPROBS)["advantages"]
    with pytest.raises(SpecError, match="the shape of its tokens"):
        _ = case(rewards=np.zeros(2)).shape
    with pytest.raises(ShapeError, match="one value per token or one per row"):
        case(logprobs=LOGPROBS, advantages=np.zeros(4)).row()


def test_a_silent_head_says_log_probabilities_only():
    said = logprobs_only(torch.zeros(2))
    assert (said.entropy_T, said.logsumexp_T) == (None, None)
    assert logprobs_only(torch.zeros(2), torch.ones(2)).entropy_T.tolist() == [1, 1]
