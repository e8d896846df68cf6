import pytest
import torch

from tests.oracles.step import document_logprobs, exact
from workbench.losses.corrections import CORRECTION_WEIGHTS
from workbench.policy.decoder import tiny_qwen3
from workbench.prove.arrangement import one_rank_policy
from workbench.prove.documents import NEAR, SPREAD, draw_documents, silent_documents, to_batch


@pytest.fixture(scope="module")
def documents():
    return draw_documents("7", one_rank_policy())


def test_they_are_hard_on_a_loss_and_the_same_for_the_same_seed(documents):
    lengths = sorted(len(document.tokens) for document in documents)
    assert (lengths[0], lengths[-1]) == (1, 16)
    assert any(not document.trained for document in documents)
    assert any(document.trained == len(document.tokens) - 1 > 0 for document in documents)
    holes = [document for document in documents if "#.#" in str(document)]
    assert holes, "a mask with holes"
    assert not any(document.loss_mask[0] for document in documents), "nothing predicts a first token"
    sizes = [sum(d.group_id == group for d in documents) for group in {d.group_id for d in documents}]
    assert 1 in sizes
    assert 3 in sizes
    assert draw_documents("7", one_rank_policy()) == documents != draw_documents("8", one_rank_policy())


def test_recorded_logprobs_stand_near_the_policys_own(documents):
    told = [{"tokens": list(document.tokens)} for document in documents]
    with torch.no_grad():
        text = document_logprobs(exact(tiny_qwen3(19)), told)
    far = []
    for document, line in zip(documents, text, strict=True):
        gaps = [old - float(own) for old, own in zip(document.old_logprobs[1:], line[1:], strict=True)]
        far += [(document, max(map(abs, gaps)))] if gaps else []
    assert {gap < 10 * NEAR for _, gap in far} == {True, False}, "some are as good as on-policy, some are not"
    assert all(gap < 4 * SPREAD for _, gap in far)
    _, gap_of_longest = max(far, key=lambda each: each[0].trained)
    assert gap_of_longest < 10 * NEAR, "whatever is clipped, the longest document has a gradient"
    same = [max(abs(a - b) for a, b in zip(d.old_logprobs, d.sampler_logprobs, strict=True)) for d in documents]
    assert sum(gap < 10 * NEAR for gap in same) >= 3, "a narrow gate lets some pass"


def test_pairs_are_trained_both_or_neither():
    documents = draw_documents("3", one_rank_policy(), pairs=True)
    for group in {document.group_id for document in documents}:
        one, other = (document for document in documents if document.group_id == group)
        assert bool(one.trained) == bool(other.trained)
        assert one.reward != other.reward


def test_a_batch_has_every_field_that_a_loss_may_read(documents):
    batch = to_batch(documents)
    assert batch.num_trained_tokens == sum(document.trained for document in documents)
    assert batch.sampler_logprobs_T.dtype == batch.old_logprobs_T.dtype == torch.float64
    assert {"rollout_ids", CORRECTION_WEIGHTS, "truncated"} == set(batch.extensions)
    assert batch.rewards_N.tolist() == [document.reward for document in documents]


def test_they_can_be_cut_and_added_to(documents):
    longest = max(documents, key=lambda document: len(document.tokens))
    short = longest.cut(3)
    assert (short.tokens, short.reward) == (longest.tokens[:3], longest.reward)
    assert [len(value) for value in vars(short).values() if isinstance(value, tuple)] == [3] * 7
    added = silent_documents("1", 4, group_id=9)
    assert [document.trained for document in added] == [0] * 4
    assert [document.group_id for document in added] == [9, 9, 10, 10]
