"""RolloutBatch: contents of a row, refused inputs, and lossless splitting and padding."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from workbench.errors import ShapeError
from workbench.rollouts.batch import PADDING, Extension, RolloutBatch
from workbench.rollouts.packing import pack
from workbench.rollouts.targets import shift_targets

DOCUMENTS = [
    {
        "tokens": [5, 7, 2],
        "loss_mask": [0, 1, 1],
        "advantages": 0.5,
        "old_logprobs": [0, -1.0, -0.3],
        "sampler_logprobs": [0, -1.1, -0.2],
        "ref_logprobs": [0, -2.0, -0.1],
        "reward": 1.0,
        "group_id": 4,
    },
    {
        "tokens": [6],
        "loss_mask": [0],
        "advantages": 0.0,
        "old_logprobs": [0],
        "sampler_logprobs": [0],
        "ref_logprobs": [0],
        "reward": 0.0,
        "group_id": 4,
    },
    {
        "tokens": [8, 9],
        "loss_mask": [0, 1],
        "advantages": [0.0, -0.5],
        "old_logprobs": [0, -2.0],
        "sampler_logprobs": [0, -1.9],
        "ref_logprobs": [0, -1.5],
        "reward": 0.1,
        "group_id": 9,
    },
]


def make_batch() -> RolloutBatch:
    return RolloutBatch.from_documents(DOCUMENTS, temperature=0.7)


def test_documents_lie_end_to_end():
    batch = make_batch()
    assert batch.tokens_T.tolist() == [5, 7, 2, 6, 8, 9]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.document_ids_T.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.loss_mask_T.tolist() == [False, True, True, False, False, True]
    assert batch.advantages_T.tolist() == [0.5, 0.5, 0.5, 0.0, 0.0, -0.5]
    assert batch.old_logprobs_T[4:].tolist() == [0.0, -2.0]
    assert batch.source_T.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.group_ids_N.tolist() == [4, 4, 9]
    assert batch.lengths_N.tolist() == [3, 1, 2]
    assert (batch.num_documents, batch.num_tokens, batch.num_trained_tokens) == (3, 6, 3)
    assert batch.temperature == 0.7


def test_repr_counts():
    first = repr(make_batch()).splitlines()[0]
    assert first == "RolloutBatch(3 documents, 1 to 3 tokens each; 6 tokens, 3 of them trained)"


def test_selected_documents_keep_every_value_and_their_source():
    chosen = make_batch().select([2, 0])
    assert chosen.tokens_T.tolist() == [8, 9, 5, 7, 2]
    assert chosen.document_ids_T.tolist() == [0, 0, 1, 1, 1]
    assert chosen.source_T.tolist() == [4, 5, 0, 1, 2]
    assert chosen.group_ids_N.tolist() == [9, 4]
    assert chosen.rewards_N.tolist() == pytest.approx([0.1, 1.0])
    assert chosen.sampler_logprobs_T.tolist() == pytest.approx([0, -1.9, 0, -1.1, -0.2])
    assert chosen.temperature == 0.7


def test_selecting_nothing_gives_an_empty_row():
    empty = make_batch().select([])
    assert (empty.num_tokens, empty.num_documents, empty.num_trained_tokens) == (0, 0, 0)


def test_a_cut_row_becomes_a_batch_of_its_own():
    own = make_batch().select([2, 0]).pad_to(7).as_source()
    assert own.source_T.tolist() == [0, 1, 2, 3, 4, PADDING, PADDING]
    assert own.tokens_T.tolist() == [8, 9, 5, 7, 2, 0, 0]
    (packed,) = pack(own.select([1]))
    assert packed.source_T.tolist() == [2, 3, 4]


def test_select_takes_padding_off():
    assert make_batch().pad_to(9).select([1, 2]).tokens_T.tolist() == [6, 8, 9]


def test_selecting_a_document_that_is_not_there_is_refused():
    with pytest.raises(ShapeError, match=r"documents \[3\]"):
        make_batch().select([0, 3])


def test_padding_belongs_to_no_document_and_is_harmless():
    row = make_batch().pad_to(8)
    assert row.num_documents == 3
    assert row.num_trained_tokens == 3
    assert row.document_ids_T[6:].tolist() == [PADDING, PADDING]
    assert row.source_T[6:].tolist() == [PADDING, PADDING]
    assert row.loss_mask_T[6:].tolist() == [False, False]
    for name in ("advantages_T", "old_logprobs_T", "sampler_logprobs_T", "ref_logprobs_T"):
        assert getattr(row, name)[6:].tolist() == [0.0, 0.0], name


def test_padding_never_shortens():
    with pytest.raises(ShapeError, match="never shortens"):
        make_batch().pad_to(5)


def test_documents_are_padded_each():
    turns = Extension(torch.arange(6), "token", "turn", "Which turn.", pad=-7)
    row = replace(make_batch(), extensions={"turns": turns}).pad_documents(2)
    assert row.document_ids_T.tolist() == [0, 0, 0, PADDING, 1, PADDING, 2, 2]
    assert row.positions_T.tolist() == [0, 1, 2, 0, 0, 0, 0, 1]
    assert row.extensions["turns"].values.tolist() == [0, 1, 2, -7, 3, -7, 4, 5]
    assert row.num_documents == 3
    assert row.select([2, 0]).source_T.tolist() == [4, 5, 0, 1, 2]


def test_padding_of_documents_that_is_there_already_stays():
    once = make_batch().pad_documents(4)
    assert once.pad_documents(4).document_ids_T.tolist() == once.document_ids_T.tolist()
    assert once.pad_documents(6).document_ids_T.tolist() == [0] * 3 + [-1] * 3 + [1] + [-1] * 5 + [2] * 2 + [-1] * 4
    with pytest.raises(ShapeError, match=r"pad_documents\(0\)"):
        once.pad_documents(0)


def test_extensions_move_with_their_tokens():
    turns = Extension(torch.arange(6), "token", "turn", "Which turn.", pad=-7)
    scale = Extension(torch.tensor([1.0, 2.0, 3.0]), "document", "factor", "Scale.")
    batch = replace(make_batch(), extensions={"turns": turns, "scale": scale})
    row = batch.select([2, 0]).pad_to(6)
    assert row.extensions["turns"].values.tolist() == [4, 5, 0, 1, 2, -7]
    assert row.extensions["scale"].values.tolist() == [3.0, 1.0]
    with pytest.raises(ShapeError, match="extension scale"):
        replace(batch, extensions={"scale": replace(scale, values=torch.zeros(2))})


@pytest.mark.parametrize(
    ("name", "level", "words"),
    [
        ("tokens_T", "token", "extension tokens_T has the name of a field"),
        ("temperature", "token", "extension temperature has the name of a field"),
        ("turns", "docs", "extension turns has level 'docs', not token or document"),
    ],
)
def test_an_extension_needs_a_new_name_and_a_valid_level(name, level, words):
    with pytest.raises(ShapeError, match=words):
        replace(make_batch(), extensions={name: Extension(torch.zeros(6), level, "turn", "Which turn.")})


def test_an_extension_that_is_no_tensor_is_refused():
    with pytest.raises(ShapeError, match="extension turns is a list, not a tensor"):
        replace(make_batch(), extensions={"turns": Extension([0] * 6, "token", "turn", "Which turn.")})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss_mask_T": torch.tensor([1, 1, 1, 0, 0, 1]).bool()}, "true on the first token of a document"),
        ({"positions_T": torch.tensor([0, 1, 2, 3, 4, 5])}, "does not count from 0 in each document"),
        ({"document_ids_T": torch.tensor([1, 1, 1, 0, 2, 2])}, "does not count 0, 1, 2"),
        ({"tokens_T": torch.tensor([5, 7, -1, 6, 8, 9])}, "tokens_T holds -1"),
        ({"tokens_T": torch.zeros(6)}, "dtype torch.float32, not int64"),
        ({"loss_mask_T": torch.zeros(6, dtype=torch.int64)}, "dtype torch.int64, not bool"),
        ({"old_logprobs_T": torch.zeros(5)}, r"shape \(5,\), not \[6\]"),
        ({"rewards_N": torch.zeros(2)}, r"rewards_N has shape \(2,\), not \[3\]"),
        ({"old_logprobs_T": torch.tensor([0, -1, float("-inf"), 0, 0, -1])}, "old_logprobs_T is not finite"),
        ({"advantages_T": torch.full((6,), float("nan"))}, "advantages_T is not finite"),
        ({"ref_logprobs_T": torch.full((6,), 0.5)}, "these are not log-probabilities"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"rewards_N": torch.tensor([1.0, float("nan"), 0.0])}, r"rewards_N is not finite for documents \[1\]"),
        ({"advantages_T": None}, "advantages_T is None, not a tensor"),
        ({"tokens_T": None, "loss_mask_T": [True]}, "tokens_T is None, not a tensor; loss_mask_T is a list"),
        (
            {"document_ids_T": torch.zeros(5, dtype=torch.int64), "source_T": None},
            r"document_ids_T has shape \(5,\), not \[6\]",
        ),
        ({"tokens_T": torch.zeros(2, 3, dtype=torch.int64)}, r"tokens_T has shape \(2, 3\), not \[6\]"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused(change, words):
    with pytest.raises(ShapeError, match=words):
        replace(make_batch(), **change)


def test_unknown_document_id_is_refused():
    batch = replace(make_batch(), group_ids_N=None, rewards_N=None)
    with pytest.raises(ShapeError, match="document_ids_T holds -2"):
        replace(batch, document_ids_T=torch.tensor([0, 0, 0, -2, 1, 1]))


def test_trained_padding_is_refused():
    row = make_batch().pad_to(8)
    mask = row.loss_mask_T.clone()
    mask[7] = True
    with pytest.raises(ShapeError, match="true on padding"):
        replace(row, loss_mask_T=mask)


def test_values_that_do_not_train_may_be_anything():
    old = make_batch().old_logprobs_T.clone()
    old[0], old[3] = float("nan"), 0.5  # neither counts: no number, and no log-probability
    assert replace(make_batch(), old_logprobs_T=old).num_trained_tokens == 3


def without(key):
    return {name: value for name, value in DOCUMENTS[0].items() if name != key}


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ([], "at least one document"),
        ([DOCUMENTS[0], without("reward")], "document 1 has other keys"),
        ([DOCUMENTS[0] | {"loss_masks": []}], "document 0 has other keys"),
        ([without("old_logprobs")], "no old_logprobs"),
        ([DOCUMENTS[0] | {"old_logprobs": None}], "no old_logprobs"),
        ([DOCUMENTS[0], DOCUMENTS[1] | {"tokens": None}], "document 1 has other keys"),
        ([DOCUMENTS[0] | {"old_logprobs": [-1.0]}], r"document 0, old_logprobs\n  found: shape \[1\] for 3 tokens"),
        ([DOCUMENTS[0] | {"reward": [1.0, 2.0]}], r"document 0, reward\n  found: shape \[2\] for 3 tokens"),
        ([DOCUMENTS[0] | {"tokens": [1.7, 2.2, 3.0]}], "document 0, tokens\n  found: dtype torch.float32"),
        ([DOCUMENTS[0] | {"tokens": 5}], r"document 0, tokens\n  found: shape \[\] for 1 tokens"),
        ([DOCUMENTS[0] | {"tokens": [5, 2**70, 2]}], "document 0, tokens"),
        ([DOCUMENTS[0] | {"group_id": 1.5}], "document 0, group_id\n  found: dtype torch.float32"),
        ([DOCUMENTS[0], DOCUMENTS[1] | {"loss_mask": [0.5]}], "document 1, loss_mask\n  found: from 0.5 to 0.5"),
        ([DOCUMENTS[0] | {"loss_mask": [0, 7, 1]}], "document 0, loss_mask\n  found: from 0.0 to 7.0"),
        ([DOCUMENTS[0] | {"old_logprobs": [0, None, -1.0]}], "document 0, old_logprobs"),
        ([DOCUMENTS[0] | {"old_logprobs": [0, -1j, -1.0]}], "document 0, old_logprobs\n  found: dtype torch.complex64"),
        ([DOCUMENTS[0] | {"reward": float("nan")}], "rewards_N is not finite"),
        ([DOCUMENTS[0], {key: [] for key in DOCUMENTS[0]}], "document 1, tokens\n  found: no token"),
    ],
)
def test_documents_that_do_not_fit_are_refused(documents, words):
    with pytest.raises(ShapeError, match=words):
        RolloutBatch.from_documents(documents)


def test_none_counts_as_absent():
    documents = [document | {"ref_logprobs": None} for document in DOCUMENTS]
    assert RolloutBatch.from_documents(documents).ref_logprobs_T is None


@pytest.mark.parametrize("convert", [np.asarray, lambda values: torch.tensor(values, dtype=torch.float64)])
def test_float64_values_stay_in_float64_through_packing_and_shifting(convert):
    exact = [0.0, -0.123456789012345, -1.0 / 3.0]
    batch = RolloutBatch.from_documents(
        [document | {"old_logprobs": convert(exact[: len(document["tokens"])])} for document in DOCUMENTS]
    )
    assert batch.old_logprobs_T.dtype == torch.float64
    assert batch.old_logprobs_T[:3].tolist() == exact
    assert batch.ref_logprobs_T.dtype == torch.float32
    (row,) = pack(batch, multiple_of=8)
    shifted = shift_targets(row)
    assert shifted.old_logprobs_T.dtype == torch.float64
    assert shifted.old_logprobs_T[:2].tolist() == exact[1:]
