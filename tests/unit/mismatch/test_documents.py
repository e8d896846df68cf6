import json

import pytest
import torch

from workbench.errors import RecordError
from workbench.mismatch.documents import read_documents
from workbench.rollouts.batch import RolloutBatch

ONE = {"prompt_ids": [5, 6], "completion_ids": [7, 2], "sampler_logprobs": [-1.0, -0.5]}


def test_records_and_lines_are_read_alike(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(ONE | {"trainer_logprobs": [-1.1, -0.4], "loss_mask": [1, 0]}) + "\n")
    [document] = read_documents(path)
    assert (document.prompt, document.completion, document.counted_C.tolist()) == ((5, 6), (7, 2), [True, False])
    assert document.trainer_C.tolist() == [-1.1, -0.4]
    assert read_documents([ONE])[0].trainer_C is None


def test_a_batch_is_split_at_its_first_trained_token():
    batch = RolloutBatch.from_documents(
        [
            {"tokens": [5, 7, 2], "loss_mask": [0, 1, 1], "advantages": 0.5, "old_logprobs": [0, -1, -0.3],
             "sampler_logprobs": [0, -1.2, -0.2]},
        ]
    )  # fmt: skip
    [document] = read_documents(batch)
    assert (document.prompt, document.completion) == ((5,), (7, 2))
    assert torch.allclose(document.sampler_C, torch.tensor([-1.2, -0.2], dtype=torch.float64))
    assert torch.allclose(document.trainer_C, torch.tensor([-1.0, -0.3], dtype=torch.float64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampler_logprobs": None}, "sampler_logprobs"),
        ({"sampler_logprobs": [-1.0]}, "2, one a completion token"),
        ({"sampler_logprobs": [-1.0, 0.5]}, "no finite log-probability"),
        ({"sampler_logprobs": [-1.0, float("nan")]}, "no finite log-probability"),
        ({"prompt_ids": []}, "at least one token"),
        ({"completion_ids": ["a", "b"]}, "vocabulary ids"),
        ({"loss_mask": [1]}, "loss_mask"),
        ({"sampler_routes": [[[0, 1]]]}, "sampler_routes"),
        ({"logprobs": [1]}, "a key that is not read"),
    ],
)
def test_a_record_that_breaks_a_rule_is_refused(change, message):
    with pytest.raises(RecordError, match=message):
        read_documents([ONE | change])


def test_optional_keys_are_in_all_records_or_in_none():
    with pytest.raises(RecordError, match="every record has the same keys"):
        read_documents([ONE, ONE | {"trainer_logprobs": [-1.0, -0.5]}])


def test_a_line_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(ONE) + "\n{\n")
    with pytest.raises(RecordError, match="line 2"):
        read_documents(path)
