"""The same documents from every source, or an error that names file, line and key."""

import json

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from workbench.errors import RecordError, ShapeError, SpecError
from workbench.rollouts import files
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.importers import load_rollouts
from workbench.rollouts.sampling import Sampling
from workbench.rollouts.support import MASS, SUPPORT

RECORDS = [
    {
        "prompt_tokens": [5, 6],
        "completion_tokens": [10, 11, 12],
        "completion_loss_mask": [1, 0, 1],
        "advantage": 0.5,
        "old_logprobs": [-1.0, None, -3.0],
        "sampler_logprobs": [-1.5, -9.0, -3.5],
        "ref_logprobs": [-2.0, 0.0, -2.5],
        "reward": 1.0,
        "group_id": "prompt-b",
    },
    {
        "prompt_tokens": [7],
        "completion_tokens": [13, 14],
        "completion_loss_mask": [1, 1],
        "advantage": -0.5,
        "old_logprobs": [-4.0, -5.0],
        "sampler_logprobs": [-4.5, -5.5],
        "ref_logprobs": [-1.0, -0.5],
        "reward": 0.25,
        "group_id": "prompt-a",
    },
]
TRL = {
    "prompt_ids": [[5, 6], [0, 7]],
    "prompt_mask": [[1, 1], [0, 1]],
    "completion_ids": [[10, 11, 12], [13, 14, 0]],
    "completion_mask": [[1, 1, 1], [1, 1, 0]],
    "tool_mask": [[1, 0, 1], [1, 1, 1]],
    "advantages": [0.5, -0.5],
    "old_per_token_logps": [[-1.0, 0.0, -3.0], [-4.0, -5.0, 0.0]],
    "sampling_per_token_logps": [[-1.5, -9.0, -3.5], [-4.5, -5.5, 0.0]],
    "ref_per_token_logps": [[-2.0, 0.0, -2.5], [-1.0, -0.5, 0.0]],
    "num_items_in_batch": 5,
    "rewards": [1.0, 0.25],
    "group_ids": [0, 1],
}


def write_jsonl(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def write_parquet(path, records):
    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def write_npz(path, arrays):
    np.savez(
        path,
        **{
            name: array.astype("f4") if (array := np.asarray(value)).dtype == "f8" else array
            for name, value in arrays.items()
        },
    )
    return path


def assert_same(actual: RolloutBatch, expected: RolloutBatch):
    for level in ("token_fields", "document_fields"):
        expected_fields, actual_fields = getattr(expected, level)(), getattr(actual, level)()
        assert set(actual_fields) == set(expected_fields)
        for name, value in expected_fields.items():
            assert torch.equal(actual_fields[name], value), name
    assert actual.temperature == expected.temperature


def expected_batch():
    return RolloutBatch.from_documents(
        [
            {
                "tokens": [5, 6, 10, 11, 12],
                "loss_mask": [0, 0, 1, 0, 1],
                "advantages": [0, 0, 0.5, 0.5, 0.5],
                "old_logprobs": [0, 0, -1.0, 0, -3.0],
                "sampler_logprobs": [0, 0, -1.5, -9.0, -3.5],
                "ref_logprobs": [0, 0, -2.0, 0, -2.5],
                "reward": 1.0,
                "group_id": 0,
            },
            {
                "tokens": [7, 13, 14],
                "loss_mask": [0, 1, 1],
                "advantages": [0, -0.5, -0.5],
                "old_logprobs": [0, -4.0, -5.0],
                "sampler_logprobs": [0, -4.5, -5.5],
                "ref_logprobs": [0, -1.0, -0.5],
                "reward": 0.25,
                "group_id": 1,
            },
        ],
        temperature=0.9,
    )


def test_every_source_gives_the_same_batch(tmp_path):
    expected = expected_batch()
    assert_same(load_rollouts(TRL, temperature=0.9), expected)
    assert_same(load_rollouts(write_npz(tmp_path / "a.npz", TRL), temperature=0.9), expected)
    assert_same(load_rollouts(write_jsonl(tmp_path / "a.jsonl", RECORDS), temperature=0.9), expected)
    assert_same(load_rollouts(write_parquet(tmp_path / "a.parquet", RECORDS), temperature=0.9), expected)


def test_imported_rollouts_survive_a_round_trip_over_disk(tmp_path):
    batch = load_rollouts(write_jsonl(tmp_path / "a.jsonl", RECORDS), temperature=0.9)
    files.save(batch, tmp_path / "recording")
    assert_same(files.load(tmp_path / "recording"), expected_batch())


def test_smallest_record_with_one_advantage_per_token(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [{"prompt_tokens": [5], "completion_tokens": [6, 7], "advantages": [1, -2], "old_logprobs": [-1, -2]}],
    )
    batch = load_rollouts(path)
    assert batch.advantages_T.tolist() == [0.0, 1.0, -2.0]
    assert batch.loss_mask_T.tolist() == [False, True, True]
    assert batch.sampler_logprobs_T is None
    assert batch.group_ids_N is None


def test_blank_lines_are_skipped_and_lines_keep_their_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(RECORDS[0]) + "\n\n" + json.dumps(RECORDS[1] | {"reward": "high"}) + "\n")
    with pytest.raises(RecordError, match=r"a\.jsonl, line 3: reward\n  found: 'high'"):
        load_rollouts(path)


def test_integer_groups_are_unchanged(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [RECORDS[0] | {"group_id": 7}, RECORDS[1] | {"group_id": 3}])
    assert load_rollouts(path).group_ids_N.tolist() == [7, 3]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"old_logprob": [0.0]}, "line 2: old_logprob\n  found: unknown"),
        ({"old_logprobs": None}, "line 2: old_logprobs\n  found: missing"),
        ({"completion_tokens": None}, "line 2: completion_tokens\n  found: missing"),
        ({"advantage": None}, r"line 2: advantages\n  found: present here or in .*line 1, but not in both"),
        ({"advantages": [1.0, 1.0]}, "line 2: advantage, advantages\n  found: both"),
        ({"reward": None}, r"line 2: reward\n  found: present here or in .*line 1, but not in both"),
        ({"old_logprobs": [-1.0]}, "line 2: old_logprobs\n  found: 1 values"),
        ({"old_logprobs": [-1.0, None]}, "line 2, completion token 1: old_logprobs\n  found: None"),
        ({"ref_logprobs": [float("nan"), -1.0]}, "line 2, completion token 0: ref_logprobs\n  found: nan"),
        ({"sampler_logprobs": [-1.0, 0.3]}, "line 2, completion token 1: sampler_logprobs\n  found: 0.3"),
        ({"old_logprobs": "-1.0"}, "line 2: old_logprobs\n  found: '-1.0'"),
        ({"advantage": float("inf")}, "line 2: advantage\n  found: inf"),
        ({"advantage": True}, "line 2: advantage\n  found: True"),
        ({"completion_tokens": [13, 1.5]}, r"line 2: completion_tokens\n  found: 1\.5"),
        ({"prompt_tokens": [-1]}, "line 2: prompt_tokens\n  found: -1"),
        ({"prompt_tokens": []}, "line 2: prompt_tokens\n  found: empty"),
        ({"completion_loss_mask": [1, 2]}, r"line 2: completion_loss_mask\n  found: \[1, 2\]"),
        ({"completion_loss_mask": [1]}, r"line 2: completion_loss_mask\n  found: \[1\]"),
        ({"group_id": 3}, "line 2: group_id\n  found: 3"),
        ({"group_id": 0.5}, "line 2: group_id\n  found: 0.5"),
    ],
)
def test_record_that_breaks_a_rule_is_refused_with_line_and_key(tmp_path, changes, words):
    path = write_jsonl(tmp_path / "a.jsonl", [RECORDS[0], RECORDS[1] | changes])
    with pytest.raises(RecordError, match=words) as caught:
        load_rollouts(path)
    assert str(path) in str(caught.value)


def test_text_after_numbers_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [RECORDS[0] | {"group_id": 3}, RECORDS[1]])
    with pytest.raises(RecordError, match="line 2: group_id\n  found: 'prompt-a'"):
        load_rollouts(path)


def test_a_cut_line_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(RECORDS[0]) + "\n" + json.dumps(RECORDS[1])[:40])
    with pytest.raises(RecordError, match=r"line 2: not JSON"):
        load_rollouts(path)


def test_a_line_that_is_no_object_is_refused(tmp_path):
    with pytest.raises(RecordError, match=r"line 1\n  found: list"):
        load_rollouts(write_jsonl(tmp_path / "a.jsonl", [[1, 2]]))


@pytest.mark.parametrize("key", ["advantages", "rewards", "old_logprobs"])
def test_an_integer_that_no_float_holds_is_refused(key):
    record = {"prompt_ids": [5], "completion_ids": [7], "old_logprobs": [-1], "advantages": 1.0, "rewards": 1.0}
    huge = [-(10**400)] if key == "old_logprobs" else 10**400
    with pytest.raises(RecordError, match="rule: a finite number"):
        load_rollouts([record | {"group_ids": 0, key: huge}])


def test_a_huge_negative_id_is_named_as_it_is():
    padded = {"prompt_ids": [[5]], "prompt_mask": [[1]], "completion_ids": [[-3.5e38]], "completion_mask": [[1]]}
    with pytest.raises(ShapeError, match="found: -inf; 1 negative ids"):
        load_rollouts(padded | {"old_logprobs": [[-1.0]], "advantages": [0.5]})


@pytest.mark.parametrize("name", ["a" * 300, "a" * 300 + ".npz", "x\0.jsonl", "\ud800.parquet"])
def test_a_text_that_can_be_no_path_is_refused(name):
    with pytest.raises(RecordError, match="rule: a path of a file or folder"):
        load_rollouts(name)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".npz"])
def test_missing_and_damaged_files_are_refused_by_name(tmp_path, suffix):
    with pytest.raises(RecordError, match=f"from {tmp_path / 'none'}{suffix}\n  found: FileNotFoundError"):
        load_rollouts(tmp_path / f"none{suffix}")
    (tmp_path / f"bad{suffix}").write_bytes(b"\xff\x00 no table")
    with pytest.raises(RecordError, match=f"read rollouts from {tmp_path / 'bad'}{suffix}"):
        load_rollouts(tmp_path / f"bad{suffix}")


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(RecordError, match="no record"):
        load_rollouts(tmp_path / "a.jsonl")


def test_parquet_errors_name_the_row(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [RECORDS[0], RECORDS[1] | {"old_logprobs": [-1.0]}])
    with pytest.raises(RecordError, match=r"a\.parquet, row 1: old_logprobs"):
        load_rollouts(path)


def test_pickled_arrays_are_never_loaded(tmp_path):
    np.savez(tmp_path / "a.npz", prompt_ids=np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(RecordError, match="allow_pickle=False"):
        load_rollouts(tmp_path / "a.npz")


def test_trl_pads_its_tool_mask_with_ones():
    assert load_rollouts(TRL).loss_mask_T.int().tolist() == [0, 0, 1, 0, 1, 0, 1, 1]


def test_trl_none_counts_as_absent():
    assert load_rollouts(TRL | {"ref_per_token_logps": None}).ref_logprobs_T is None


def test_unknown_trl_key_is_refused_unless_it_is_named():
    arrays = TRL | {"importance_sampling_ratio": torch.ones(2, 3)}
    with pytest.raises(ShapeError, match=r"unknown keys importance_sampling_ratio.*(?s:.)*ignore="):
        load_rollouts(arrays)
    assert_same(load_rollouts(arrays, ignore=["importance_sampling_ratio"], temperature=0.9), expected_batch())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"old_per_token_logps": [[-1.0, 0.0, -3.0], [-4.0, float("nan"), 0.0]]},
            ": old_per_token_logps, row 1, completion token 1\n  found: nan",
        ),
        ({"old_per_token_logps": [[-1.0, 0.0, -3.0], [4.0, -5.0, 0.0]]}, "found: old_per_token_logps is positive"),
        ({"old_per_token_logps": [[-1.0], [-2.0]]}, "disagree\n  found: old_per_token_logps_BC has C=1"),
        ({"sampling_per_token_logps": [[1j, 0, 0], [0, 0, 0]]}, ": sampling_per_token_logps\n  found: dtype"),
        ({"ref_per_token_logps": ["a"]}, ": ref_per_token_logps\n"),
        ({"tool_mask": [[0.5, 0, 1], [1, 1, 1]]}, ": tool_mask\n  found: from 0.0 to 1.0"),
        ({"tool_mask": [[7, 0, 1], [1, 1, 1]]}, ": tool_mask\n  found: from 0.0 to 7.0"),
        ({"completion_ids": [[10.5, 11, 12], [13, 14, 0]]}, ": completion_ids\n  found: dtype torch.float"),
        (
            {"completion_mask": [[1, 0, 1], [1, 1, 0]], "tool_mask": None},
            "row 0\n  found: completion_mask is 1 after a 0(?s:.)*pass the holes as loss_mask",
        ),
        ({"rewards": [1.0, float("nan")]}, r"found: rewards is not finite for documents \[1\]"),
    ],
)
def test_refused_arrays_are_named_as_trl_names_them_and_with_their_file(tmp_path, changes, words):
    arrays = {name: value for name, value in (TRL | changes).items() if value is not None}
    with pytest.raises(ShapeError, match=words) as caught:
        load_rollouts(arrays)
    assert str(caught.value).startswith("load_rollouts")
    assert "old_logprobs" not in str(caught.value)
    if changes.get("ref_per_token_logps"):
        return  # numpy would save strings
    path = tmp_path / "a.npz"
    np.savez(path, **{name: np.asarray(value) for name, value in arrays.items()})
    with pytest.raises(ShapeError, match=words) as caught:
        load_rollouts(path)
    assert str(caught.value).startswith(str(path))


def test_float64_arrays_of_a_file_stay_in_float64(tmp_path):
    np.savez(tmp_path / "a.npz", **{name: np.asarray(value) for name, value in TRL.items()})
    assert load_rollouts(tmp_path / "a.npz").old_logprobs_T.dtype == torch.float64


def test_missing_old_logprobs_are_explained():
    with pytest.raises(
        ShapeError, match=r"no old_logprobs \(TRL's old_per_token_logps\)(?s:.)*policy is the one that sampled"
    ):
        load_rollouts(TRL | {"old_per_token_logps": None})


# ---- truncated supports ----------------------------------------------------------------------------------

TRUNCATED = Sampling(top_p=0.9, sampler_logprobs="truncated")
WITH_SUPPORT = [
    {
        "prompt_ids": [5, 6],
        "completion_ids": [7, 2],
        "old_logprobs": [-1.0, -2.0],
        "sampler_logprobs": [-0.5, 0.0],
        "advantage": 1.0,
        "support_ids": [[7, 9, 3], [2]],
        "support_mass": [0.9, 0.95],
    },
    {
        "prompt_ids": [5],
        "completion_ids": [9, 4],
        "old_logprobs": [-1.0, -1.0],
        "sampler_logprobs": [-1.0, -1.0],
        "advantage": -1.0,
        "support_ids": [None, [4, 8]],
        "support_mass": [1.0, 0.9],
    },
]
TABLE = [[-1] * 3, [-1] * 3, [7, 9, 3], [2, -1, -1], [-1] * 3, [-1] * 3, [4, 8, -1]]
MASSES = [1.0, 1.0, 0.9, 0.95, 1.0, 1.0, 0.9]


def padded():
    """The same documents as padded arrays."""
    return {
        "prompt_ids": [[5, 6], [0, 5]],
        "prompt_mask": [[1, 1], [0, 1]],
        "completion_ids": [[7, 2], [9, 4]],
        "completion_mask": [[1, 1], [1, 1]],
        "old_logprobs": [[-1.0, -2.0], [-1.0, -1.0]],
        "sampler_logprobs": [[-0.5, 0.0], [-1.0, -1.0]],
        "advantages": [1.0, -1.0],
        "support_ids": [[[7, 9, 3], [2, -1, -1]], [[-1, -1, -1], [4, 8, -1]]],
        "support_mass": [[0.9, 0.95], [1.0, 0.9]],
    }


@pytest.mark.parametrize("form", ["records", "jsonl", "arrays", "npz"])
def test_supports_come_with_their_tokens(form, tmp_path):
    source = WITH_SUPPORT if form == "records" else padded()
    if form == "jsonl":
        source = tmp_path / "rollouts.jsonl"
        source.write_text("\n".join(map(json.dumps, WITH_SUPPORT)))
    elif form == "npz":
        source = tmp_path / "rollouts.npz"
        np.savez(source, **{name: np.array(values) for name, values in padded().items()})
    batch = load_rollouts(source, sampling=TRUNCATED)
    assert batch.sampling == TRUNCATED
    assert batch.extensions[SUPPORT].values.tolist() == TABLE
    assert batch.extensions[MASS].values.tolist() == pytest.approx(MASSES, rel=1e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"support_ids": [[7]]}, "1 lists"),
        ({"support_ids": [[7], [-2]]}, "vocabulary ids, whole numbers from 0"),
        ({"support_ids": [[8], [2]]}, "1 of 4 trained tokens outside their own support"),
        ({"support_mass": [0.9]}, "1 values"),
        ({"support_mass": [1.9, 1.0]}, "probabilities"),
        ({"support_ids": None}, "a mass is that of a support"),
    ],
)
def test_supports_that_are_none_are_refused(change, message):
    first, second = WITH_SUPPORT
    with pytest.raises(RecordError, match=message):
        load_rollouts([first | change, second | ({"support_ids": None} if change == {"support_ids": None} else {})])


def test_padded_supports_of_another_shape_are_refused():
    with pytest.raises(ShapeError, match=r"shape \[2, 2\](.|\n)*\[B, C, K\]"):
        load_rollouts(padded() | {"support_ids": [[7, 2], [9, 4]]})


def test_a_rollout_dataset_has_its_own_sampling(tmp_path):
    load_rollouts(WITH_SUPPORT, sampling=TRUNCATED).save(tmp_path / "saved")
    assert load_rollouts(tmp_path / "saved").sampling == TRUNCATED
    with pytest.raises(SpecError, match="with sampling"):
        load_rollouts(tmp_path / "saved", sampling=TRUNCATED)
