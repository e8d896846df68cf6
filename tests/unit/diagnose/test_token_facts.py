"""Facts about single tokens of two records."""

import torch

from tests.helpers.hand_records import make_record, put, tokens, values
from workbench.diagnose.evidence import compare_records
from workbench.diagnose.token_facts import TokenFacts, fit


def facts(**suspect):
    return TokenFacts(compare_records(make_record(), make_record(**suspect)))


def test_tokens_that_differ_as_a_share_of_those_that_train():
    moved = facts(tokens=values(policy_logprobs=put([2, 3, 8], -9.0)))
    assert moved.off_tokens("policy_logprobs").nonzero().flatten().tolist() == [2, 3, 8]
    assert moved.share_off("policy_logprobs") == 3 / int(tokens()["trained"].sum())
    assert moved.forward_same is False
    assert moved.old_same is True
    assert moved.off_tokens("ratios") is None


def test_documents_that_only_one_record_has():
    gone = facts(tokens=values(documents=put(slice(12, 18), -1)))
    assert gone.absent == "3 of 11 trained tokens are missing"
    assert gone.added == ""
    assert facts().absent == ""


def test_a_lost_rank_is_told_from_lost_documents():
    there = tokens()["shards"] == 0
    lost = facts(tokens=values(trained=lambda trained: trained & there))
    assert lost.lost_pieces == "context-parallel ranks"
    assert facts(tokens=values(trained=put([2], False))).lost_pieces == ""


def test_a_slope_through_the_origin():
    x = torch.tensor([1.0, 2.0, 3.0])
    slope, left = fit(x, 2 * x)
    assert (slope, left) == (2.0, 0.0)
    assert fit(torch.zeros(3), x) == (0.0, 1.0)
