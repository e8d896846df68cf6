"""Rollouts against settings and model before a start: longest document, pairs, vocabulary; also without a file."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from workbench.errors import SpecError
from workbench.launch import rollout_checks
from workbench.launch.ablation import load_ablation
from workbench.launch.checks import check_runs
from workbench.launch.rollout_checks import Documents, read_documents
from workbench.launch.rollout_checks import rollout_checks as checks_of
from workbench.rollouts import files
from workbench.specs.run import RunSpec

ROOT = Path(__file__).parents[3]
DATA = ROOT / "data/arithmetic/rollouts"
PAIRS = Documents(np.array([3, 5, 9, 2]), np.array([7, 7, 8, 8]), 18)


def problem(documents=PAIRS, vocabulary=None, **settings):
    """The first error of a spec on some documents; None if there is none."""
    for check in checks_of(RunSpec.model_validate(settings), documents, vocabulary):
        try:
            check()
        except SpecError as error:
            return error.parts
    return None


def test_the_sizes_of_a_dataset_are_read_without_torch():
    documents, batch = read_documents(DATA), files.load(DATA)
    assert documents.lengths_N.tolist() == batch.document_ids_T.unique(return_counts=True)[1].tolist()
    assert documents.groups_N.tolist() == batch.group_ids_N.tolist()
    assert documents.largest_token == int(batch.tokens_T.max())


def test_what_cannot_be_read_is_left_to_its_own_error(tmp_path, monkeypatch):
    assert read_documents(tmp_path) is None
    (tmp_path / "rollouts.safetensors").write_text("damaged")
    assert read_documents(tmp_path) is None
    shutil.copy(DATA / "rollouts.safetensors", tmp_path)
    assert read_documents(tmp_path) is not None
    monkeypatch.setattr(rollout_checks, "MOST_BYTES", 10)
    assert read_documents(tmp_path) is None


@pytest.mark.parametrize(
    ("settings", "longest", "least"),
    [
        ({"data": {"micro_batch_tokens": 8}}, 9, 9),
        ({"data": {"micro_batch_tokens": 9}}, None, None),
        ({"data": {"micro_batch_tokens": 10}, "layout": {"cp": 2, "order": "zigzag"}}, 9, 12),
        ({"data": {"micro_batch_tokens": 12}, "layout": {"cp": 2, "order": "zigzag"}}, None, None),
        ({"data": {"micro_batch_tokens": 10, "keep_groups": True}}, 11, 11),
        ({"data": {"micro_batch_tokens": 8, "documents_per_step": 1}}, None, None),
        ({}, None, None),
    ],
    ids=str,
)
def test_a_row_holds_the_longest_document_or_group(settings, longest, least):
    found = problem(**settings)
    assert (found is None) == (longest is None)
    if found is not None:
        assert f"has {longest} tokens" in found["found"]
        assert f"at least {least} tokens" in found["fix"]


def test_a_loss_on_pairs_needs_pairs():
    assert problem(loss={"name": "dpo"}) is None
    threes = Documents(np.array([3, 3, 3, 3, 3]), np.array([1, 1, 1, 2, 2]), 1)
    assert "groups of 3 documents" in problem(threes, loss={"name": "dpo"})["found"]
    assert problem(threes) is None


def test_tokens_are_of_the_vocabulary():
    assert problem(vocabulary=19) is None
    assert problem(vocabulary=None) is None
    found = problem(vocabulary=18)
    assert (found["found"], "0 to 17" in found["rule"]) == ("token 18, and a vocabulary of 18 tokens", True)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"data": {"micro_batch_tokens": 8}}, "the longest document has"),
        ({"loss": {"name": "dpo"}}, "groups of 6 documents"),
    ],
    ids=str,
)
def test_they_are_part_of_the_checks_of_a_launch(settings, named):
    with pytest.raises(SpecError, match=named):
        check_runs(load_ablation(settings).expand(), ROOT, where="processes")
