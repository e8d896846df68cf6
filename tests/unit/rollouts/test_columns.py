"""A padded rectangle becomes a row without a token lost, guessed or made up."""

import numpy as np
import pytest
import torch

from workbench.errors import ShapeError
from workbench.rollouts.batch import RolloutBatch

NAN = float("nan")


def make_arrays(**changes):
    """A tool wrote the middle of the first, the second is short, the third trains nothing."""
    arrays = {
        "prompt_ids": [[5, 6], [0, 7], [8, 9]],
        "prompt_mask": [[1, 1], [0, 1], [1, 1]],
        "completion_ids": [[10, 11, 12], [13, 14, 0], [0, 0, 0]],
        "completion_mask": [[1, 1, 1], [1, 1, 0], [0, 0, 0]],
        "loss_mask": [[1, 0, 1], [1, 1, 0], [0, 0, 0]],
        "advantages": [0.5, -0.5, 2.0],
        "old_logprobs": [[-1.0, NAN, -3.0], [-4.0, -5.0, NAN], [NAN, NAN, NAN]],
        "sampler_logprobs": [[-1.5, -9.0, -3.5], [-4.5, -5.5, 0.0], [0.0, 0.0, 0.0]],
        "ref_logprobs": [[-2.0, 0.0, -2.5], [-1.0, -0.5, 0.0], [0.0, 0.0, 0.0]],
        "rewards": [1.0, 0.1, 0.0],
        "group_ids": [3, 3, 8],
    }
    return {name: value for name, value in (arrays | changes).items() if value is not None}


def test_rows_are_unpadded_in_order():
    batch = RolloutBatch.from_padded(**make_arrays(), temperature=0.8)
    assert batch.tokens_T.tolist() == [5, 6, 10, 11, 12, 7, 13, 14, 8, 9]
    assert batch.document_ids_T.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert batch.loss_mask_T.int().tolist() == [0, 0, 1, 0, 1, 0, 1, 1, 0, 0]
    assert batch.advantages_T.tolist() == [0, 0, 0.5, 0.5, 0.5, 0, -0.5, -0.5, 0, 0]
    assert batch.old_logprobs_T.tolist() == [0, 0, -1.0, 0.0, -3.0, 0, -4.0, -5.0, 0, 0]
    assert batch.sampler_logprobs_T.tolist() == [0, 0, -1.5, -9.0, -3.5, 0, -4.5, -5.5, 0, 0]
    assert batch.ref_logprobs_T.tolist() == [0, 0, -2.0, 0.0, -2.5, 0, -1.0, -0.5, 0, 0]
    assert batch.rewards_N.tolist() == pytest.approx([1.0, 0.1, 0.0])
    assert batch.group_ids_N.tolist() == [3, 3, 8]
    assert batch.temperature == 0.8


def test_without_a_loss_mask_the_completion_trains():
    batch = RolloutBatch.from_padded(**make_arrays(loss_mask=None, old_logprobs=np.full((3, 3), -1.0)))
    assert batch.loss_mask_T.int().tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 0, 0]


def test_one_advantage_per_token():
    batch = RolloutBatch.from_padded(**make_arrays(advantages=[[1, 2, 3], [4, 5, 6], [7, 8, 9]]))
    assert batch.advantages_T.tolist() == [0, 0, 1, 2, 3, 0, 4, 5, 0, 0]


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor])
def test_arrays_of_any_kind_give_the_same_row(convert):
    expected = RolloutBatch.from_padded(**make_arrays())
    actual = RolloutBatch.from_padded(**{name: convert(value) for name, value in make_arrays().items()})
    for name, value in expected.token_fields().items():
        assert torch.equal(actual.token_fields()[name].to(value.dtype), value), name


def test_float64_arrays_stay_in_float64():
    exact = [[-1.0 / 3.0, NAN, -3.0], [-0.123456789012345, -5.0, NAN], [NAN, NAN, NAN]]
    batch = RolloutBatch.from_padded(**make_arrays(old_logprobs=np.asarray(exact), rewards=np.asarray([0.1, 0.2, 0.3])))
    assert batch.old_logprobs_T.dtype == batch.rewards_N.dtype == torch.float64
    assert batch.old_logprobs_T[batch.loss_mask_T].tolist() == [-1.0 / 3.0, -3.0, -0.123456789012345, -5.0]
    assert batch.rewards_N.tolist() == [0.1, 0.2, 0.3]
    assert batch.advantages_T.dtype == batch.ref_logprobs_T.dtype == torch.float32


@pytest.mark.parametrize(
    "name", ["prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "old_logprobs"]
)
def test_missing_required_fields_are_refused_by_name(name):
    with pytest.raises(ShapeError, match=f"found: no {name}\n"):
        RolloutBatch.from_padded(**make_arrays() | {name: None})


def test_absent_fields_stay_absent():
    batch = RolloutBatch.from_padded(
        **make_arrays(sampler_logprobs=None, ref_logprobs=None, rewards=None, group_ids=None)
    )
    assert batch.sampler_logprobs_T is None
    assert batch.ref_logprobs_T is None
    assert batch.rewards_N is None
    assert batch.group_ids_N is None


def test_a_hole_in_the_completion_mask_is_refused():
    with pytest.raises(ShapeError) as caught:
        RolloutBatch.from_padded(**make_arrays(completion_mask=[[1, 0, 1], [1, 1, 0], [0, 0, 0]]))
    assert "row 0\n  found: completion_mask is 1 after a 0" in str(caught.value)
    assert "pass the holes as loss_mask" in str(caught.value)
    assert "would drop the token from the context" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_mask": [[1, 0], [0, 1], [1, 1]]}, r"row 0\n  found: prompt_mask is 0 after a 1"),
        (
            {"loss_mask": [[1, 0, 1], [1, 1, 1], [0, 0, 0]]},
            r"row 1\n  found: loss_mask is 1 where completion_mask is 0",
        ),
        (
            {"prompt_mask": [[0, 0], [0, 1], [1, 1]]},
            r"row 0\n  found: the first completion token trains and there is no prompt",
        ),
        ({"prompt_mask": [[1, 1], [0, 1], [0, 0]]}, r"row 2\n  found: the row has no token at all"),
        ({"completion_mask": [[1, 1, 2], [1, 1, 0], [0, 0, 0]]}, r"completion_mask\n  found: from 0.0 to 2.0"),
        ({"loss_mask": [[0.5, 0, 1], [1, 1, 0], [0, 0, 0]]}, "a mask has only 0 and 1"),
        (
            {"old_logprobs": [[-1.0, 0, NAN], [-1, -1, 0], [0, 0, 0]]},
            r"old_logprobs, row 0, completion token 2\n  found: nan; 1 such",
        ),
        (
            {"sampler_logprobs": [[-1.0, 0, 0], [-1, -float("inf"), 0], [0, 0, 0]]},
            "sampler_logprobs, row 1, completion token 1",
        ),
        ({"advantages": [0.5, NAN, 2.0]}, "advantages, row 1, completion token 0"),
        ({"old_logprobs": [[0.4, 0, -1], [-1, -1, 0], [0, 0, 0]]}, "old_logprobs_T is positive"),
        ({"old_logprobs": [[-1.0, 0], [-1, -1], [0, 0]]}, "old_logprobs_BC has C=2, but completion_ids_BC has C=3"),
        ({"advantages": [0.5, 1.0]}, "advantages_B has B=2, but prompt_ids_BP has B=3"),
        ({"advantages": 0.5}, r"advantages_BC has shape \(\)"),
        ({"rewards": [[1.0], [0.0], [0.0]]}, r"rewards_B has shape \(3, 1\)"),
        ({"completion_ids": [[10, 11, 12], [13], [0]]}, r"completion_ids\n  found: expected sequence of length 3"),
        ({"completion_ids": np.ones((3, 3))}, "dtype torch.float64\n  rule: whole numbers"),
        ({"completion_ids": [[-10, 11, 12], [13, 14, 0], [0, 0, 0]]}, "completion_ids, row 0, token 0"),
        ({"group_ids": [0.5, 1, 2]}, "group_ids\n  found: dtype torch.float32"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"rewards": [1.0, NAN, 0.0]}, r"rewards_N is not finite for documents \[1\]"),
        ({"advantages": [1j, 0, 0]}, "advantages\n  found: dtype torch.complex64"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(changes, words):
    with pytest.raises(ShapeError, match=words):
        RolloutBatch.from_padded(**make_arrays(**changes))


def test_padding_may_have_any_value():
    ids = [[10, 11, 12], [13, 14, -100], [-100, -100, -100]]
    assert RolloutBatch.from_padded(**make_arrays(completion_ids=ids)).tokens_T.tolist() == [
        5,
        6,
        10,
        11,
        12,
        7,
        13,
        14,
        8,
        9,
    ]
