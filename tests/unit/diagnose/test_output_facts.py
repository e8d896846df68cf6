"""Facts about two records' outputs: rows are matched, and their weights and places compared."""

import pytest

from tests.helpers.hand_outputs import LENGTHS, calls, record, row
from workbench.diagnose.output_facts import OutputFacts


def facts(right, wrong, **more):
    pair = record(right).steps[0], record(wrong, **more).steps[0]
    return OutputFacts.of(pair, 2e-4, 1e-4)


def times(factor):
    return calls(lambda call, at, n, w: {"weights": [w * factor(call, at, n)] * n})


def test_equal_outputs_have_equal_weights():
    seen = facts(calls(), calls())
    assert (seen.same_targets, seen.forward_same, seen.weights_same, seen.common) == (True, True, True, 1.0)


def test_rows_in_another_order_and_other_calls_are_matched_by_their_targets():
    rows = [each for call in calls() for each in call]
    seen = facts(calls(), [rows[::-1]])
    assert seen.same_targets
    assert seen.weights_same
    assert seen.in_order is None


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("call", lambda call, at, n: 12 / sum(LENGTHS[call])),
        ("row", lambda call, at, n: 6 / n),
        ("length", lambda call, at, n: n / 6),
    ],
)
def test_factors_of_rows_follow_counts(kind, factor):
    seen = facts(calls(), times(factor))
    assert [each for each in ("call", "row", "rank", "length") if seen.follows(kind) and each == kind] == [kind]
    assert not any(seen.follows(each) for each in ("call", "row", "length") if each != kind)


def test_factors_of_ranks_are_one_over_the_predictions_of_their_calls():
    right = [*calls(), [row([0.1] * 3, targets=[1, 2, 3])]]
    counts = [LENGTHS[0][0] + LENGTHS[0][1] + 3, sum(LENGTHS[1])]
    wrong = [*times(lambda call, at, n: 12 / counts[call]), [row([1.2 / counts[0]] * 3, targets=[1, 2, 3])]]
    assert facts(right, wrong).follows("rank")
    assert not facts(right, wrong).follows("call")


def test_one_factor_of_all_rows_is_common():
    seen = facts(calls(), times(lambda call, at, n: 0.75))
    assert seen.common == pytest.approx(0.75)
    assert not seen.factor_of_row


def test_a_weight_that_turns_is_counted():
    assert facts(calls(), times(lambda call, at, n: -1.0 if call else 1.0)).turned == pytest.approx(14 / 24)


def test_weights_within_rows_and_a_shift_of_rows():
    uneven = calls(lambda call, at, n, w: {"weights": [w * (1 + k) for k in range(n)]})
    shifted = calls(lambda call, at, n, w: {"weights": [w * (1 + k) + 0.3 for k in range(n)]})
    assert facts(calls(), uneven).within_rows == 1.0
    assert facts(uneven, shifted).rows_shifted == 1.0
    squared = calls(lambda call, at, n, w: {"weights": [w * (1 + k) ** 2 for k in range(n)]})
    assert facts(uneven, squared).rows_shifted == 0.0


def test_lost_and_added_rows():
    right = calls()
    assert facts(right, [right[0], right[1][:1]]).rows_lost == (1, 0)
    assert facts(right, [right[0], []]).rows_lost == (2, 1)
    assert facts([right[0], right[1][:1]], right).rows_added == 1


def test_places_that_moved_and_one_lost_in_each_row():
    moved = calls(lambda call, at, n, w: {"weights": [w] * n, "places": list(range(1, n + 1))})
    ids = lambda call, at, n: [100 * (2 * call + at) + k for k in range(n)]  # noqa: E731
    ends = calls(lambda call, at, n, w: {"weights": [w] * (n - 1), "targets": ids(call, at, n)[:-1]})
    other = calls(lambda call, at, n, w: {"weights": [w] * (n - 1), "targets": ids(call, at, n)[1:]})
    shuffled = calls(lambda call, at, n, w: {"weights": [w] * (n - 1), "targets": list(range(5, n + 4))})
    moved[0][0][3] = moved[1][1][3] = "0" * 16
    assert facts(calls(), moved).moved
    assert facts(calls(), ends).lost_one_each
    assert facts(calls(), other).lost_one_each
    assert not facts(calls(), shuffled).lost_one_each


def test_other_targets_at_the_same_places_are_a_share_of_the_rows():
    seen = facts(calls(), calls(lambda call, at, n, w: {"weights": [w] * n, "targets": [7] * n}))
    assert seen.other_targets == 1.0
    assert not seen.same_targets


def test_temperatures_come_from_slopes():
    assert facts(calls(), calls(), slope=1 / 0.7).temperatures == pytest.approx((1.0, 0.7))
    assert facts(calls(), calls(), slope=1.01).temperatures is None


def test_logits_that_differ():
    seen = facts(calls(), calls(lambda call, at, n, w: {"weights": [w] * n, "logprob": -3.1}))
    assert seen.forward_same is False
    assert seen.forward_apart == pytest.approx((0.1, 0.1))


def test_a_preference_is_pairs_of_opposite_rows():
    pairs = calls(weights=((0.2, -0.2), (-0.4, 0.4)))
    assert facts(pairs, pairs).opposed
    assert not facts(calls(), calls()).opposed


def test_nothing_is_told_of_samples_of_other_predictions():
    step, other = record(calls()).steps[0], record(calls()).steps[0]
    other.observed["outputs"]["every"] = 2
    assert OutputFacts.of((step, other), 1e-4, 1e-4) is None
