"""Documents and tokens that two dumps of one batch share."""

import torch

from workbench.check.matching import match_documents
from workbench.dumps.step import StepDump


def step(*documents, masks=None):
    ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor([len(d) for d in documents]))
    mask_T = torch.ones(len(ids), dtype=torch.bool) if masks is None else torch.tensor(masks).bool()
    return StepDump(ids, {"loss_mask": mask_T, "token_ids": torch.tensor([t for d in documents for t in d])})


def test_equal_documents_are_matched_in_order():
    matched = match_documents(step([5, 6], [5, 6], [7]), step([7], [5, 6], [5, 6]))
    assert matched.pairs == ((0, 1), (1, 2), (2, 0))
    assert matched.left_M.tolist() == [0, 1, 2, 3, 4]
    assert matched.right_M.tolist() == [1, 2, 3, 4, 0]
    assert not matched.differences


def test_a_document_cut_off_is_matched_with_the_whole_one_and_reported():
    matched = match_documents(step([5, 6, 7], [8]), step([5, 6], [8]))
    assert matched.pairs == ((0, 0), (1, 1))
    assert matched.left_M.tolist() == [0, 1, 3]
    assert "1 documents of a step are longer than in the other dump, first 0" in matched.differences


def test_tokens_after_the_last_one_of_both_are_left_out():
    matched = match_documents(step([5, 6, 0, 0], masks=[1, 1, 0, 0]), step([5, 6, 0], masks=[1, 1, 0]))
    assert matched.left_M.tolist() == [0, 1]
