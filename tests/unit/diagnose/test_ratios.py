"""Importance ratios of a record, of tokens and of documents."""

import torch

from workbench.diagnose.ratios import log_ratios, over_documents

DOCUMENTS = torch.tensor([0, 0, 0, 1, 1])
TRAINED = torch.tensor([False, True, True, True, True])


def test_sums_and_means_are_over_the_trained_tokens_of_a_document():
    sums, means = over_documents(torch.tensor([9.0, 1.0, 3.0, 2.0, 4.0]).double(), DOCUMENTS, TRAINED)
    assert sums.tolist() == [4, 4, 4, 6, 6]
    assert means.tolist() == [2, 2, 2, 3, 3]


def test_each_kind_of_ratio_has_a_name():
    tokens = {"policy_logprobs": torch.arange(5.0), "old_logprobs": torch.zeros(5), "trained": TRAINED}
    kinds = log_ratios(tokens | {"documents": DOCUMENTS})
    assert list(kinds) == ["ratios", "ratios of documents", "ratios multiplied over documents"]
    assert kinds["ratios"].tolist() == [0, 1, 2, 3, 4]
    assert kinds["ratios multiplied over documents"].tolist() == [3, 3, 3, 7, 7]
    assert list(log_ratios(tokens)) == ["ratios"]
