"""Effects of faults of layers that predict further tokens, in their declared numbers."""

import pytest
import torch

from tests.helpers.planted_faults import BASE, documents, shown
from workbench.faults import load_fault
from workbench.rollouts.targets import shift_targets, tokens_ahead
from workbench.specs.run import RunSpec

TERM = "loss/prediction_1"
OWN = "prediction.0.eh_proj.weight"


def further_tokens(depth=1):
    """Trained tokens of the step that have a position ``depth + 1`` before them in their document."""
    batch = documents(RunSpec.model_validate(BASE))
    mask, ids = batch.loss_mask_T.tolist(), batch.document_ids_T.tolist()
    return sum(1 for t, trains in enumerate(mask) if trains and t > depth and ids[t] == ids[t - depth - 1])


def assert_the_policy_is_right(pair):
    for key in ("loss/policy", "loss/kl", "entropy/policy/mean"):
        assert pair.wrong.numbers[key] == pair.right.numbers[key], key


def test_shards_weigh_by_counts_of_their_own():
    pair = shown("prediction_counts_of_shards")
    assert_the_policy_is_right(pair)
    assert abs(pair.ratio(TERM) - 1) > 1e-4
    wrong, right = pair.wrong.gradients, pair.right.gradients
    name = next(key for key in wrong if key.endswith(OWN))
    assert 0.5 < float(torch.cosine_similarity(wrong[name].flatten(), right[name].flatten(), dim=0)) < 1 - 1e-6


def test_the_prediction_is_one_over_cp_of_itself():
    pair = shown("prediction_over_cp")
    assert_the_policy_is_right(pair)
    assert pair.ratio(TERM) == pytest.approx(1 / 2, rel=1e-12)
    assert pair.factor_of(OWN) == pytest.approx(1 / 2, rel=1e-12)


def test_a_sum_over_tokens_is_their_number_too_big():
    pair = shown("prediction_not_normalised")
    assert_the_policy_is_right(pair)
    assert pair.ratio(TERM) == pytest.approx(further_tokens(), rel=1e-12)
    assert pair.factor_of(OWN) == pytest.approx(further_tokens(), rel=1e-12)


def test_targets_shifted_again_are_those_of_the_next_depth():
    pair = shown("prediction_targets_shifted_again")
    assert_the_policy_is_right(pair)
    assert pair.factor_of(OWN) != pytest.approx(1, rel=1e-3)
    row = shift_targets(documents(RunSpec.model_validate(BASE)))
    right, _ = tokens_ahead(row, 2)
    wrong, counts = load_fault("prediction_targets_shifted_again").broken(tokens_ahead)(row, 1)
    assert torch.equal(wrong, right[:, [0, 2]])
    assert int(counts.sum()) == further_tokens(2) != further_tokens(1)


def test_rolled_tokens_cross_the_ends_of_documents():
    pair = shown("prediction_across_documents")
    assert_the_policy_is_right(pair)
    assert pair.ratio(TERM) != pytest.approx(1, rel=1e-6)
    row = shift_targets(documents(RunSpec.model_validate(BASE)))
    wrong, _ = load_fault("prediction_across_documents").broken(tokens_ahead)(row, 1)
    ends = torch.nonzero(row.document_ids_T[1:] != row.document_ids_T[:-1])[:, 0]
    assert torch.equal(wrong[ends, 0], row.tokens_T[ends + 1])
    assert (tokens_ahead(row, 1)[0][ends] == -1).all()


def test_the_prediction_takes_the_experts_of_the_first_mixture():
    pair = shown("prediction_replays_first_mixture")
    assert_the_policy_is_right(pair)
    assert abs(pair.ratio(TERM) - 1) > 1e-4
    routers = [name for name in pair.wrong_gradients if ".prediction." in name and "mlp" in name]
    assert len(routers) == 3
