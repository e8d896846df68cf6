"""Targets: the value at a token moves to the position that predicts it, and never over a document's end."""

from dataclasses import replace

import pytest
import torch

from workbench.errors import ShapeError
from workbench.rollouts.batch import PADDING, Extension, RolloutBatch
from workbench.rollouts.targets import shift_targets, tokens_ahead


def make_row() -> RolloutBatch:
    batch = RolloutBatch.from_documents(
        [
            {
                "tokens": [5, 7, 2],
                "loss_mask": [0, 1, 1],
                "advantages": [0, 0.5, 0.25],
                "old_logprobs": [0, -1.0, -0.5],
                "ref_logprobs": [0, -4.0, -3.0],
            },
            {"tokens": [6], "loss_mask": [0], "advantages": 9.0, "old_logprobs": [0], "ref_logprobs": [0]},
            {
                "tokens": [8, 9],
                "loss_mask": [0, 1],
                "advantages": [0, -0.5],
                "old_logprobs": [0, -2.0],
                "ref_logprobs": [0, -1.5],
            },
        ]
    )
    turns = Extension(torch.arange(1, 7), "token", "turn", "Which turn.", pad=-7)
    scale = Extension(torch.ones(3), "document", "factor", "Scale.")
    return replace(batch, extensions={"turns": turns, "scale": scale}).pad_to(8)


def test_inputs_stay_where_they_are():
    row = make_row()
    shifted = shift_targets(row)
    assert shifted.tokens_T.tolist() == row.tokens_T.tolist()
    assert shifted.positions_T.tolist() == row.positions_T.tolist()
    assert shifted.document_ids_T.tolist() == row.document_ids_T.tolist()


def test_each_position_gets_the_next_token_of_its_document():
    shifted = shift_targets(make_row())
    assert shifted.targets_T.tolist() == [7, 2, 0, 0, 9, 0, 0, 0]
    assert shifted.loss_mask_T.tolist() == [True, True, False, False, True, False, False, False]
    assert shifted.advantages_T.tolist() == [0.5, 0.25, 0, 0, -0.5, 0, 0, 0]
    assert shifted.old_logprobs_T.tolist() == [-1.0, -0.5, 0, 0, -2.0, 0, 0, 0]
    assert shifted.ref_logprobs_T.tolist() == [-4.0, -3.0, 0, 0, -1.5, 0, 0, 0]
    assert shifted.source_T.tolist() == [1, 2, PADDING, PADDING, 5, PADDING, PADDING, PADDING]
    assert shifted.sampler_logprobs_T is None


def test_no_trained_token_is_lost_or_added():
    row = make_row()
    assert int(shift_targets(row).loss_mask_T.sum()) == row.num_trained_tokens


def test_untrained_values_are_zero():
    row, nan = make_row(), torch.tensor(float("nan"))
    names = ("advantages_T", "old_logprobs_T", "ref_logprobs_T")
    untrained = {name: torch.where(row.loss_mask_T, getattr(row, name), nan) for name in names}
    mask = row.loss_mask_T.clone()
    mask[1] = False  # a hole: the token is in the middle of a document and does not train
    untrained["old_logprobs_T"][1] = -torch.inf
    shifted = shift_targets(replace(row, loss_mask_T=mask, **untrained))
    for name in names:
        values = getattr(shifted, name)
        assert torch.isfinite(values).all(), name
        assert not values[~shifted.loss_mask_T].any(), name


def test_token_extensions_follow_and_document_extensions_do_not():
    extensions = shift_targets(make_row()).extensions
    assert set(extensions) == {"turns"}
    assert extensions["turns"].tolist() == [2, 3, -7, -7, 6, -7, -7, -7]


def test_an_all_padding_row_trains_nothing():
    shifted = shift_targets(make_row().select([]).pad_to(3))
    assert shifted.loss_mask_T.tolist() == [False] * 3
    assert shifted.targets_T.tolist() == [0, 0, 0]


def test_map_moves_every_tensor_together():
    shifted = shift_targets(make_row())
    reversed_row = shifted.map(lambda value: value.flip(0))
    assert reversed_row.targets_T.tolist() == shifted.targets_T.tolist()[::-1]
    assert reversed_row.source_T.tolist() == shifted.source_T.tolist()[::-1]
    assert reversed_row.extensions["turns"].tolist() == [-7, -7, -7, 6, -7, -7, 3, 2]
    assert reversed_row.sampler_logprobs_T is None


def test_to_changes_real_numbers_only():
    row = shift_targets(make_row()).to(torch.device("cpu"), torch.float64)
    assert row.old_logprobs_T.dtype == torch.float64
    assert row.advantages_T.dtype == torch.float64
    assert row.targets_T.dtype == torch.int64
    assert row.loss_mask_T.dtype == torch.bool


def test_every_token_has_the_trained_length_of_its_document():
    shifted = shift_targets(make_row())
    assert shifted.lengths_T.tolist() == [2, 2, 2, 1, 1, 1, 1, 1]
    half = shifted.map(lambda values: values[::2])
    assert half.lengths_T.tolist() == [2, 2, 1, 1], "a number of the document, not of the shard"


def test_values_of_a_document_lie_on_each_of_its_tokens():
    row = make_row()
    rollouts = Extension(torch.tensor([4, 5, 4]), "document", "rollout index", "Whose sample.")
    row = replace(
        row,
        group_ids_N=torch.tensor([9, 8, 9]),
        rewards_N=torch.tensor([0.5, 1.0, -2.0]),
        extensions={"rollout_ids": rollouts},
    )
    shifted = shift_targets(row)
    assert shifted.group_ids_T.tolist() == [9, 9, 9, 8, 9, 9, PADDING, PADDING]
    assert shifted.rollout_ids_T.tolist() == [4, 4, 4, 5, 4, 4, PADDING, PADDING]
    assert shifted.rewards_T.tolist() == [0.5, 0.5, 0.5, 1.0, -2.0, -2.0, 0, 0]


def test_absent_fields_are_none():
    shifted = shift_targets(make_row())
    assert (shifted.rewards_T, shifted.group_ids_T, shifted.rollout_ids_T) == (None, None, None)


@pytest.mark.parametrize(
    "extension",
    [
        Extension(torch.arange(8), "token", "rollout index", "At another level."),
        Extension(torch.ones(3), "document", "rollout index", "No whole numbers."),
    ],
)
def test_rollout_ids_of_another_kind_are_refused(extension):
    with pytest.raises(ShapeError, match="extension 'rollout_ids'\n  found: level"):
        shift_targets(replace(make_row(), extensions={"rollout_ids": extension}))


def test_model_inputs_stay_at_their_own_token():
    values = torch.tensor([3, -1, 4, -1, 5, 6, -1, -1])
    both = {at: Extension(values, "token", "number", "A number.", pad=-1, at=at) for at in ("input", "target")}
    shifted = shift_targets(replace(make_row(), extensions=both))
    assert shifted.extensions["input"].tolist() == values.tolist()
    assert shifted.extensions["target"].tolist() == [-1, 4, -1, -1, 6, -1, -1, -1]


def test_tokens_ahead_end_with_their_document_at_every_depth():
    tokens_TK, counts_TK = tokens_ahead(shift_targets(make_row()), 2)
    assert tokens_TK.tolist() == [
        [7, 2, PADDING],
        [2, PADDING, PADDING],
        [PADDING] * 3,
        [PADDING] * 3,  # a document of one token
        [9, PADDING, PADDING],
        *[[PADDING] * 3] * 3,
    ]
    assert counts_TK.nonzero().tolist() == [[0, 0]]  # of documents of 3, 1 and 2 tokens, one has a second token ahead


def test_tokens_ahead_count_where_their_own_token_trains():
    batch = RolloutBatch.from_documents(
        [{"tokens": [1, 2, 3, 4, 5], "loss_mask": [0, 1, 0, 1, 1], "advantages": 1.0, "old_logprobs": [0.0] * 5}]
    )
    tokens_TK, counts_TK = tokens_ahead(shift_targets(batch), 2)
    assert tokens_TK[:, 2].tolist() == [4, 5, PADDING, PADDING, PADDING]
    assert counts_TK.tolist() == [[False, True], [True, True], [True, False], [False, False], [False, False]]
