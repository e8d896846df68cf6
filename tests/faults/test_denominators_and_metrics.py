"""Effects of faults of denominators, accumulation, metrics and advantages, in their declared numbers.

Counts are taken from the documents themselves; the sums that some faults leave out are told by other faults.
"""

import math

import pytest
import torch

from tests.helpers.planted_faults import BASE, documents, shown, whole
from workbench.faults import planted
from workbench.specs.run import RunSpec
from workbench.train import step

BATCH = documents(RunSpec.model_validate(BASE))
TRAINED = [BATCH.loss_mask_T[BATCH.document_ids_T == number].tolist() for number in range(BATCH.num_documents)]
T = sum(map(sum, TRAINED))


def near(pair, factor, cosine=1.0):
    """True if the whole gradient is the correct one times a factor."""
    return pair.factor == pytest.approx(factor, rel=1e-10) and pair.cosine == pytest.approx(cosine, abs=1e-12)


# ---- denominators ----


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        ("per_sample_count_floor", sum(max(sum(mask), 1) for mask in TRAINED)),
        ("response_length_in_denominator", sum(len(mask) - mask.index(True) for mask in TRAINED if any(mask))),
    ],
)
def test_a_wrong_count_of_tokens_is_one_factor(name, counted):
    assert counted > T
    pair = shown(name)
    assert near(pair, T / counted)
    assert pair.ratio("loss/total") == pytest.approx(T / counted)
    assert pair.factor_of("norm.weight") == pytest.approx(T / counted)


def test_a_mean_of_means_rotates_the_gradient():
    means, sums = shown("mean_of_micro_batch_means"), shown("micro_batch_denominator")
    assert 0.8 < means.factor < 1.25
    assert 0.7 < means.cosine < 0.95
    torch.testing.assert_close(3 * whole(means.wrong), whole(sums.wrong), rtol=0, atol=1e-12)
    over_ranks = shown("mean_of_micro_batch_means", data={"micro_batches": 1}, layout={"dp": 3})
    torch.testing.assert_close(whole(over_ranks.wrong), whole(means.wrong), rtol=0, atol=1e-12)


def test_rejected_tokens_shrink_the_policy_term():
    pair = shown("rejected_tokens_in_denominator")
    kept = 1 - pair.right.numbers["weight/dropped/sum"] / T
    assert 0.4 < kept < 0.9
    assert near(pair, kept)
    with_penalty = shown("rejected_tokens_in_denominator", loss={"kl": {"coefficient": 0.5}})
    assert with_penalty.ratio("loss/policy") == pytest.approx(kept)
    assert with_penalty.ratio("loss/kl") == pytest.approx(1.0)
    assert with_penalty.cosine < 1 - 1e-6


def test_a_padded_width_is_a_factor_of_each_micro_batch():
    longest = int(BATCH.lengths_N.max())
    one = shown("padded_width_in_denominator", data={"micro_batches": 1}, loss={"denominator_constant": 5.0})
    assert near(one, 5.0 / longest)
    three = shown("padded_width_in_denominator")
    assert three.factor > 1.0 + 1e-6, "C is the greatest length: no width is above it"
    assert three.cosine < 0.999


# ---- micro-batches ----


def test_only_the_last_micro_batch_trains():
    pair = shown("gradients_of_last_micro_batch")
    assert pair.factor < 0.9
    assert pair.cosine < 0.9
    assert pair.ratio("loss/total") == 1.0


def test_averaging_over_micro_batches_is_one_factor():
    assert near(shown("gradient_averaged_over_micro_batches"), 1 / 3)
    assert near(shown("gradient_averaged_over_micro_batches", data={"micro_batches": 2}, layout={"dp": 2}), 1 / 2)


def test_early_micro_batches_are_summed_again():
    two = {"layout": {"dp": 2}, "data": {"micro_batches": 2}}
    again, last = (
        shown(name, **two) for name in ("reduction_repeated_per_micro_batch", "gradients_of_last_micro_batch")
    )
    first = whole(again.right) - whole(last.wrong)
    torch.testing.assert_close(whole(again.wrong), 2 * first + whole(last.wrong), rtol=0, atol=1e-12)
    assert 1 < shown("reduction_repeated_per_micro_batch").factor < 2**2


def test_reported_norms_are_those_of_undivided_gradients():
    pair = shown("gradient_norm_times_micro_batches")
    assert pair.ratio("gradient/norm/global") == pytest.approx(3.0)
    assert {round(norm / pair.right.norms[name], 9) for name, norm in pair.wrong.norms.items()} == {3.0}


def test_advantages_of_others_keep_the_size_and_turn():
    pair = shown("advantages_of_other_documents")
    assert 0.5 < pair.factor < 2
    assert pair.cosine < 0.5
    assert_policy_term_alone(pair)


# ---- metrics ----


def test_metrics_of_the_last_micro_batch_count_fewer_tokens():
    pair = shown("metrics_of_last_micro_batch")
    assert 0 < pair.wrong.numbers["tokens/trained/sum"] < pair.right.numbers["tokens/trained/sum"] == T
    assert not any(key.startswith("loss/") for key in pair.wrong_numbers)


def test_means_of_means_leave_sums_and_extremes_alone():
    pair = shown("mean_of_rank_means")
    assert {"logprob/policy/mean", "kl/old_policy/k3_mean", "clip/policy/fraction"} <= set(pair.wrong_numbers)
    assert not any(key.endswith(("/sum", "/min", "/max", "/std")) for key in pair.wrong_numbers)


def test_a_zero_for_nothing_enters_extremes_alone():
    pair = shown("zero_placeholder_in_extremes")
    assert {key.rpartition("/")[2] for key in pair.wrong_numbers} <= {"min", "max"}
    assert pair.right.numbers["entropy/policy/min"] > 0 == pair.wrong.numbers["entropy/policy/min"]
    assert pair.ratio("entropy/policy/max") == 1.0


def test_the_entropy_of_a_shard_is_smaller_by_log_tp():
    pair = shown("entropy_of_vocabulary_shard")
    assert all(key.startswith("entropy/") for key in pair.wrong_numbers)
    right, wrong = (result.numbers["entropy/policy/mean"] for result in (pair.right, pair.wrong))
    assert right - wrong == pytest.approx(math.log(2), abs=0.15)
    torch.testing.assert_close(pair.wrong.tokens["policy_logprobs"], pair.right.tokens["policy_logprobs"])


def test_counts_are_too_big_by_the_ranks():
    pair = shown("global_counts_per_rank", layout={"dp": 2, "cp": 2})
    assert pair.ratio("tokens/trained/sum") == pair.ratio("documents/trained/sum") == 4.0
    assert pair.ratio("ratio/policy_old/sum") == pytest.approx(4.0)
    assert not any(key.endswith(("mean", "fraction", "min", "max", "std")) for key in pair.wrong_numbers)


def test_a_loss_over_dp_only_lacks_the_other_cp_ranks():
    pair = shown("loss_reported_over_dp_only")
    assert sorted(pair.wrong_numbers) == ["loss/kl", "loss/policy", "loss/total"]
    # A k3 penalty is positive everywhere, so an omission makes it smaller.
    assert 0 < pair.ratio("loss/kl") < 1
    over_dp = shown("loss_reported_over_dp_only", layout={"cp": 1, "dp": 2})
    assert over_dp.wrong_numbers == []


# ---- advantages ----


@pytest.mark.parametrize(
    ("name", "most"), [("whitening_per_rank", 0.95), ("groups_by_position", 0.9), ("masked_rows_in_baseline", 0.9999)]
)
def test_wrong_advantages_turn_the_policy_term_alone(name, most):
    pair = shown(name)
    assert pair.cosine < most
    assert_policy_term_alone(pair)


def test_a_masked_completion_affects_only_its_group():
    spec = RunSpec.model_validate(BASE | {"data": {"advantages": {"name": "grpo"}}})
    with planted(["masked_rows_in_baseline"]):
        wrong = step.compute_advantages(BATCH, spec).advantages_T
    moved = BATCH.document_ids_T[wrong != step.compute_advantages(BATCH, spec).advantages_T].unique()
    masked = torch.tensor([not any(mask) for mask in TRAINED])
    assert 0 < len(moved) < sum(map(any, TRAINED))
    assert set(BATCH.group_ids_N[moved].tolist()) <= set(BATCH.group_ids_N[masked].tolist())


def assert_policy_term_alone(pair):
    """Wrong advantages show in the policy term, and leave the policy's outputs and its penalty unchanged."""
    assert {"loss/policy", "loss/total"} <= set(pair.wrong_numbers)
    assert not any(
        key.startswith(("loss/kl", "kl/", "ratio/", "logprob/", "entropy/", "tokens/")) for key in pair.wrong_numbers
    )
