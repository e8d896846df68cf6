"""Records under the names of several trainers give one batch; what is missing, unknown or text is refused by name."""

import numpy as np
import pandas
import pytest
import torch

import workbench as wb
from tests.unit.rollouts.test_importers import RECORDS, TRL, assert_same, expected_batch
from workbench.errors import RecordError, ShapeError, SpecError
from workbench.rollouts.importers import load_rollouts
from workbench.rollouts.records import NAMES, read_records

SMALL = {"prompt_tokens": [5], "completion_tokens": [6, 7], "old_logprobs": [-1.0, -2.0]}
TRL_RECORD = {
    "prompt_ids": torch.tensor([5]),
    "completion_ids": np.array([6, 7]),
    "old_per_token_logps": torch.tensor([-1.0, -2.0]),
    "advantages": np.float32(0.5),
    "tool_mask": (1, 0),
    "rewards": 1,
    "group_ids": np.int64(3),
}


def test_a_table_dicts_and_padded_tensors_are_one_batch():
    expected = expected_batch()
    assert_same(load_rollouts(pandas.DataFrame(RECORDS), temperature=0.9), expected)
    assert_same(load_rollouts(iter(RECORDS), temperature=0.9), expected)
    own = {NAMES.get(name, name): value for name, value in TRL.items()} | {"loss_mask": [[1, 0, 1], [1, 1, 0]]}
    assert_same(load_rollouts({n: torch.tensor(v) for n, v in own.items()}, temperature=0.9), expected)


def test_a_dataset_comes_back_as_it_was_saved(tmp_path):
    folder = wb.load_rollouts(RECORDS, temperature=0.9).save(str(tmp_path / "mine"), provenance={"by": "me"})
    assert_same(wb.load_rollouts(folder), expected_batch())
    with pytest.raises(RecordError, match="not overwritten by accident"):
        expected_batch().save(folder)
    expected_batch().save(folder, overwrite=True)


def test_names_of_a_trainer_and_values_of_numpy_and_torch_are_taken():
    batch = load_rollouts([TRL_RECORD])
    assert batch.tokens_T.tolist() == [5, 6, 7]
    assert batch.loss_mask_T.tolist() == [False, True, False]
    assert batch.advantages_T.tolist() == [0, 0.5, 0.5]
    assert (batch.rewards_N.tolist(), batch.group_ids_N.tolist()) == ([1.0], [3])


@pytest.mark.parametrize("form", ["records", "padded"])
def test_advantages_may_be_left_to_the_run(form):
    if form == "records":
        batch = load_rollouts([{k: v for k, v in each.items() if k != "advantage"} for each in RECORDS])
    else:
        batch = load_rollouts(TRL | {"advantages": None})
    assert not batch.advantages_T.any()
    assert batch.rewards_N.tolist() == [1.0, 0.25]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "record 0: advantage\n  found: missing, and so is reward\n(?s:.)*data.advantages"),
        ({"reward": 1.0}, "record 0: advantage\n  found: reward without group_id\n"),
        (
            {"advantage": 1.0, "old_logprob": [0.0]},
            "found: unknown(?s:.)*for 'old_logprob', did you mean 'old_logprobs'",
        ),
        ({"advantage": 1.0, "completion": "4"}, r"completion\n  found: text(?s:.)*add_special_tokens=False"),
        ({"advantage": 1.0, "prompt_ids": [5]}, "prompt_ids, prompt_tokens\n  found: both"),
        ({"advantage": 1.0, "ref_per_token_logps": [0.3, -1.0]}, "token 0: ref_per_token_logps\n  found: 0.3"),
    ],
)
def test_a_record_that_cannot_be_used_is_refused_by_name(changes, words):
    with pytest.raises(RecordError, match=words):
        load_rollouts([SMALL | changes])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"advantages": None, "rewards": None}, "no advantages, and no rewards"),
        ({"advantages": None, "group_ids": None}, "no advantages, and rewards without group_ids"),
        ({"old_logprobs": TRL["old_per_token_logps"]}, "both old_per_token_logps and old_logprobs"),
        ({"prompt_mask": None}, "no prompt_mask(?s:.)*pass a list of dicts"),
        ({"advantagess": 1}, "did you mean 'advantages'"),
    ],
)
def test_padded_arrays_that_cannot_be_used_are_refused_by_name(changes, words):
    with pytest.raises(ShapeError, match=words):
        load_rollouts(TRL | changes)


def test_keys_that_no_loss_needs_are_named():
    record = SMALL | {"advantage": 1.0, "finish_reason": "stop"}
    assert load_rollouts([record], ignore=["finish_reason"]).num_documents == 1
    with pytest.raises(RecordError, match=r"pass ignore=\['finish_reason'\]"):
        load_rollouts([record])


def test_arguments_that_would_not_be_used_are_refused(tmp_path):
    folder = expected_batch().save(tmp_path / "mine")
    with pytest.raises(SpecError, match="with temperature, ignore"):
        load_rollouts(folder, temperature=0.5, ignore=["x"])
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(SpecError, match=r"suffix '\.csv'"):
        load_rollouts(tmp_path / "a.csv")


def test_missing_cells_of_a_table_are_absent():
    table = pandas.DataFrame([SMALL | {"advantage": 1.0, "reward": None}, SMALL | {"advantage": 1.0, "reward": 2.0}])
    with pytest.raises(RecordError, match="row 1: reward\n  found: present here or in row 0"):
        load_rollouts(table)


def test_no_record_is_refused():
    with pytest.raises(RecordError, match="read rollouts from nothing\n  found: no record"):
        read_records("nothing", [])
