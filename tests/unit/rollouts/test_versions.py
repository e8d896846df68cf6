"""Ages of tokens, and documents that are too old."""

import pytest
import torch

from workbench.errors import SpecError
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.files import load, save
from workbench.rollouts.versions import STALENESS, VERSION, staleness_of, with_versions, without_stale

DOCUMENTS = [
    {"tokens": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "advantages": 1.0, "old_logprobs": [0, 0, -1.0, -1.0]},
    {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "advantages": 1.0, "old_logprobs": [0, -1.0, -1.0]},
    {"tokens": [5, 6], "loss_mask": [0, 0], "advantages": 1.0, "old_logprobs": [0, 0]},
]
VERSIONS = torch.tensor([0, 0, 4, 6, 5, 5, 6, 0, 0])


def batch():
    return with_versions(RolloutBatch.from_documents(DOCUMENTS), VERSIONS, trained=7)


def test_the_age_of_a_token_is_counted_to_the_first_update():
    assert staleness_of(batch(), requested="this").tolist() == [7, 7, 3, 1, 2, 2, 1, 7, 7]


@pytest.mark.parametrize(
    ("most", "kept"),
    [(3, [0, 0, 1, 1, 0, 1, 1, 0, 0]), (2, [0, 0, 0, 0, 0, 1, 1, 0, 0]), (1, [0] * 9), (0, [0] * 9)],
)
def test_a_document_with_an_older_trained_token_is_left_out_whole(most, kept):
    """Ages of prompts, which nobody sampled, do not count."""
    assert without_stale(batch(), most).loss_mask_T.int().tolist() == kept


def test_later_versions_than_the_trained_one_are_refused():
    with pytest.raises(SpecError, match=r"of version 5\n  found: a token of version 6\n"):
        with_versions(RolloutBatch.from_documents(DOCUMENTS), VERSIONS, trained=5)


def test_a_batch_without_versions_has_no_ages():
    with pytest.raises(SpecError, match=r"max_staleness = 2(.|\n)*without the versions"):
        without_stale(RolloutBatch.from_documents(DOCUMENTS), 2)


def test_versions_are_in_rollout_datasets(tmp_path):
    save(batch(), tmp_path / "rollouts", provenance={})
    loaded = load(tmp_path / "rollouts")
    assert loaded.extensions[VERSION].values.tolist() == VERSIONS.tolist()
    assert loaded.extensions[STALENESS].values.dtype == torch.int64
