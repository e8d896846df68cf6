"""Causes named from what flowed through two models, without a note."""

import dataclasses

import pytest

import workbench as wb
from tests.helpers.hand_outputs import LENGTHS, before, calls, record, row

POLICY = {"loss": "grpo"}
POSITIVE = ((0.5, 0.5), (0.5, 0.5))


def named(right, wrong):
    return [(cause.name, round(cause.score, 2)) for cause in wb.diagnose(right, wrong).causes]


def other(rows, *, loss=0.6, norms=(1.3, 2.4, 3.9), **more):
    return record(rows, loss=loss, norms=norms, **more)


def times(factor, weights=None):
    of = {} if weights is None else {"weights": weights}
    return calls(lambda call, at, n, w: {"weights": [w * factor(call, at, n)] * n}, **of)


def test_a_temperature():
    assert named(
        record(calls(), context={"temperature": 0.7}), other(calls(), slope=0.7, context={"temperature": 0.7})
    )[0] == ("temperature", 0.95)


@pytest.mark.parametrize(
    ("cause", "factor"),
    [
        ("mean_per_rows", lambda call, at, n: 12 / sum(LENGTHS[call])),
        ("mean_per_documents", lambda call, at, n: 6 / n),
    ],
)
def test_denominators_of_parts(cause, factor):
    context = {"micro_batches": 2}
    assert named(record(calls(), context=context), other(times(factor), context=context))[0] == (cause, 0.93)


def test_a_sum_of_ratios_in_place_of_their_mean():
    right = record(calls(), context=POLICY)
    assert named(right, other(times(lambda call, at, n: n / 4), loss=0.5, context=POLICY))[0][0] == "ratio"


def test_a_mask_that_moved():
    moved = calls(lambda call, at, n, w: {"weights": [w] * n, "places": list(range(1, n + 1)), "targets": [9] * n})
    assert named(record(calls()), other(moved))[0] == ("other_mask", 0.9)


def test_targets_at_the_same_places():
    shifted = calls(lambda call, at, n, w: {"weights": [w] * n, "targets": [9] * n})
    assert named(record(calls()), other(shifted))[0] == ("other_targets", 0.93)


def test_rows_and_calls_that_are_lost():
    right = calls(weights=POSITIVE)
    causes = dict(named(record(right), other([right[0], []])))
    assert causes["ranks_lost"] == 0.6
    assert causes["other_data"] == 0.4
    own_count = [
        [row([24 / 10 * 0.5] * n, targets=[100 * at + k for k in range(n)]) for at, n in enumerate((4, 6))],
        [],
    ]
    assert named(record(right), other(own_count))[0] == ("other_data", 0.6)


def test_weights_that_turn_are_advantages_and_one_factor_of_a_baseline_is():
    right = record(calls(), context=POLICY)
    turned = times(lambda call, at, n: -1.5 if at else 0.4)
    assert named(right, other(turned, context=POLICY))[0][0] == "advantages"
    scaled = other(times(lambda call, at, n: 0.75), loss=0.375, norms=(0.75, 1.5, 2.25), context=POLICY)
    found = wb.diagnose(right, scaled).causes[0]
    assert found.name == "advantages"
    assert "baseline over 4" in found.evidence[0]


def test_the_same_factor_of_a_likelihood_is_a_count():
    right = record(calls(weights=POSITIVE))
    scaled = other(times(lambda call, at, n: 0.85, POSITIVE), loss=0.425, norms=(0.85, 1.7, 2.55))
    assert named(right, scaled)[0][0] == "other_count"


def test_a_penalty_gives_each_prediction_a_weight_of_its_own():
    context = POLICY | {"kl": 0.1}
    uneven = calls(lambda call, at, n, w: {"weights": [w * (1 + 0.05 * k * k) for k in range(n)]})
    causes = named(record(calls(), context=context), other(uneven, context=context))
    assert [name for name, _ in causes[:3]] == ["one_term", "old_logprobs", "ref_logprobs"]
    assert causes[0][1] < 0.5


def test_ratios_that_stay_one_are_old_logprobs():
    ratios = calls(lambda call, at, n, w: {"weights": [w * (1 + 0.1 * k) for k in range(n)]})
    right, wrong = before(record(ratios, context=POLICY), other(calls(), context=POLICY))
    assert named(right, wrong)[0] == ("old_logprobs", 0.7)


def test_values_right_and_derivatives_wrong():
    wrong = calls(lambda call, at, n, w: {"weights": [-w * (1 + k) for k in range(n)]})
    causes = named(*before(record(calls(), context=POLICY), other(wrong, loss=0.5, context=POLICY)))
    assert causes[0] == ("term_without_gradient", 0.7)
    wrong = calls(lambda call, at, n, w: {"weights": [w * (1 + k) for k in range(n)]}, weights=POSITIVE)
    causes = named(record(calls(weights=POSITIVE)), other(wrong, loss=0.5))
    assert causes[0] == ("term_without_gradient", 0.7)


def test_a_loss_has_one_value_at_ratios_of_one():
    """What no value tells apart is told with less than one half."""
    wrong = calls(lambda call, at, n, w: {"weights": [-w * (1 + k) for k in range(n)]})
    causes = named(record(calls(), context=POLICY), other(wrong, loss=0.5, context=POLICY))
    assert [name for name, _ in causes[:3]] == ["ratio", "term_without_gradient", "one_term"]
    assert causes[0][1] < 0.5


def test_logits_that_differ_from_the_same_inputs_and_after_an_update():
    apart = calls(lambda call, at, n, w: {"weights": [w] * n, "logprob": -3.1, "entropy": 2.6})
    first = named(record(calls()), other(apart))
    assert first[0][0] == "model_settings"
    assert "lower_precision" in dict(first[:3])
    assert named(*before(record(calls()), other(apart)))[0] == ("update", 0.9)


def test_a_term_beside_predictions_that_weigh_as_they_should():
    assert named(record(calls()), other(calls()))[0] == ("one_term", 0.6)
    critic = [30.0, 1.0, 2.0, 3.0], [30.0, 1.0, -2.0, 5.0]
    right, wrong = record(calls(), values=critic[0]), other(calls(), values=critic[1])
    assert named(right, wrong)[0] == ("one_term", 0.6)


def test_gradients_that_are_lost_behind_right_predictions_are_told_without_confidence():
    causes = named(record(calls()), other(calls(), loss=0.5))
    assert {"ranks_lost", "gradient_clipping", "lower_precision"} <= set(dict(causes))
    assert causes[0][1] < 0.5
    assert 0 < dict(causes)["term_without_gradient"] < 0.2, "spoken against"


def test_a_preference_is_known_by_its_pairs():
    pairs = ((0.2, -0.2), (-0.4, 0.4))
    right = record(calls(weights=pairs))
    assert named(right, other(times(lambda call, at, n: 1.5 if call else 0.8, pairs)))[0][0] in (
        "mean_per_rows",
        "ref_logprobs",
    )
    uneven = times(lambda call, at, n: (0.8, 1.5, 0.7, 1.1)[2 * call + at], pairs)
    assert named(right, other(uneven))[0][0] == "ref_logprobs"


def test_distributions_of_a_teacher():
    right = record(calls(), likelihoods=0.0, context={"loss": "distillation"})
    uneven = calls(lambda call, at, n, w: {"weights": [w * (1 + 0.1 * k) for k in range(n)]})
    causes = named(right, other(uneven, likelihoods=0.0, context={"loss": "distillation"}))
    assert [name for name, _ in causes[:2]] == ["ref_logprobs", "other_loss"]


@pytest.mark.parametrize(
    ("factor", "cause"),
    [(lambda call, at, n: 12 / sum(LENGTHS[call]), "mean_per_rows"), (lambda call, at, n: 6 / n, "mean_per_documents")],
)
def test_factors_of_rows_are_read_off_gradients_of_any_loss(factor, cause):
    context = {"loss": "distillation", "micro_batches": 2}
    right = record(calls(), likelihoods=0.0, context=context)
    assert named(right, other(times(factor), likelihoods=0.0, context=context))[0] == (cause, 0.93)


def test_other_predictions_of_whole_distributions_are_a_mask():
    right = record(calls(), likelihoods=0.0, context={"loss": "distillation"})
    fewer = calls(lambda call, at, n, w: {"weights": [w] * (n - 2), "targets": list(range(n - 2))})
    assert named(right, other(fewer, likelihoods=0.0, context={"loss": "distillation"}))[0][0] == "other_mask"


def test_a_term_of_whole_distributions_beside_a_likelihood_is_a_term():
    right = record(calls(weights=POSITIVE))
    uneven = calls(lambda call, at, n, w: {"weights": [w * (1 + 0.1 * k) for k in range(n)]}, weights=POSITIVE)
    assert named(right, other(uneven, likelihoods=0.1))[0][0] == "one_term"


def test_means_of_calls_that_are_added_are_not_divided_by_their_number():
    context = {"micro_batches": 2}
    added = times(lambda call, at, n: 24 / sum(LENGTHS[call]))
    causes = named(record(calls(), context=context), other(added, context=context))
    assert [name for name, _ in causes[:2]] == ["mean_per_rows", "times_micro_batches"]
    averaged = dict(named(record(calls(), context=context), other(times(lambda call, at, n: 12 / sum(LENGTHS[call])))))
    assert "times_micro_batches" not in averaged


def test_rows_that_weigh_by_their_length_are_divided_together():
    right = record(calls(), context=POLICY)
    causes = named(right, other(times(lambda call, at, n: n / 4), context=POLICY))
    assert causes[0] == ("uneven_weights", 0.48)


PAIRS = ((0.5, -0.5), (0.3, -0.3))
PREFERENCE = {"loss": "dpo"}


def test_rows_of_a_preference_that_weigh_by_their_length_are_another_loss():
    right = record(calls(weights=PAIRS), context=PREFERENCE)
    by_length = other(times(lambda call, at, n: n / 4, PAIRS), loss=0.5, context=PREFERENCE)
    assert named(right, by_length)[0] == ("other_loss", 0.85)


def test_one_side_of_a_preference_without_a_gradient_is_detached():
    right = calls(weights=PAIRS)
    chosen = [[rows[0]] for rows in right]
    causes = named(record(right, context=PREFERENCE), other(chosen, loss=0.5, context=PREFERENCE))
    assert causes[0] == ("term_without_gradient", 0.7)


@pytest.mark.parametrize(("factor", "cause"), [(0.45, "other_loss"), (-1.0, "other_data")])
def test_one_factor_at_margins_of_zero_is_a_strength_or_a_side(factor, cause):
    right = record(calls(weights=PAIRS), context=PREFERENCE)
    size = abs(factor)
    scaled = other(
        times(lambda call, at, n: factor, PAIRS),
        loss=0.5 if size != 1 else 0.7,
        norms=(size, 2 * size, 3 * size),
        context=PREFERENCE,
    )
    assert dict(named(right, scaled)[:2])[cause] == 0.45


def test_predictions_that_pull_the_other_way_are_no_other_update():
    turned = record(times(lambda call, at, n: -1.0, PAIRS), context=PREFERENCE, number=-1)
    right, wrong = before(
        record(calls(weights=PAIRS), context=PREFERENCE), other(calls(weights=PAIRS), context=PREFERENCE)
    )
    wrong = dataclasses.replace(wrong, steps=(turned.steps[0], *wrong.steps[1:]))
    assert named(right, wrong)[0][0] == "other_loss"


def test_norms_that_agree_do_not_prove_a_gradient_whose_predictions_turn():
    right = record(calls(), context=POLICY)
    turned = record(times(lambda call, at, n: -1.0), loss=-0.5, context=POLICY)
    assert dict(named(right, turned)).get("loss_alone", 0.0) < 0.5


@pytest.mark.parametrize("term", ["bonus", "normaliser"])
def test_a_slope_next_to_an_entropy_is_no_temperature(term):
    right, wrong = record(calls(), context=POLICY), other(calls(), slope=0.9, context=POLICY)
    seen = wrong.steps[0].observed["outputs"]
    seen |= {"bonus": 0.05} if term == "bonus" else {"slopes": [0.8, 1.0]}
    assert "temperature" not in dict(named(right, wrong))


def test_a_squared_normaliser_next_to_right_weights_is_a_term():
    right, wrong = record(calls(weights=POSITIVE)), other(calls(weights=POSITIVE))
    right.steps[0].observed["outputs"]["normaliser"] = 1e-4
    assert named(right, wrong)[0] == ("one_term", 0.93)


def test_other_outputs_are_no_difference_where_no_number_differs():
    assert named(record(calls()), record(times(lambda call, at, n: 2.0)))[0][0] == "no_difference"


def outputs_of(each, **more):
    step = each.steps[0]
    seen = {"outputs": step.observed["outputs"] | more}
    return dataclasses.replace(each, steps=(dataclasses.replace(step, observed=seen),))


def test_an_entropy_next_to_right_weights_is_a_term():
    right, wrong = record(calls(), context=POLICY), other(calls(), context=POLICY)
    assert named(outputs_of(right, bonus=-0.02), outputs_of(wrong, bonus=0.02))[0] == ("one_term", 0.93)
    assert named(outputs_of(right, bonus=-0.02), outputs_of(wrong, bonus=-0.02))[0] != ("one_term", 0.93)


def test_targets_one_too_far_are_no_mask():
    """Both lose the last place of every row; where the ids of the input are known, targets are found among them."""
    right = calls()
    short = calls(
        lambda call, at, n, w: {"weights": [w] * (n - 1), "targets": [100 * (2 * call + at) + k for k in range(n - 1)]}
    )
    shifted = outputs_of(other(short), after=[20, 0, 2, 20])
    assert named(outputs_of(record(right), after=[24, 0, 24, 1]), shifted)[0] == ("other_targets", 0.93)
    masked = outputs_of(other(short), after=[20, 0, 20, 2])
    assert named(outputs_of(record(right), after=[24, 0, 24, 1]), masked)[0] == ("other_mask", 0.9)
    assert named(record(right), other(short))[0] == ("other_mask", 0.45)


def test_denominators_by_documents():
    """Of a mean over documents, those of a call or a rank count, not their predictions."""
    sizes = ((4, 6), (5,))
    rows = [[row([0.5] * n) for n in call] for call in sizes]
    wrong = [[row([0.5 * 3 / len(call)] * n) for n in call] for call in sizes]
    context = {"micro_batches": 2}
    assert named(record(rows, context=context), other(wrong, context=context))[0] == ("mean_per_rows", 0.93)


def with_clear(rows, numbers):
    return [
        [[*one, clear] for one, clear in zip(call, of, strict=True)] for call, of in zip(rows, numbers, strict=True)
    ]


def test_an_entropy_over_other_predictions_is_a_term():
    """More predictions have a gradient, and as many as before pull by a token's likelihood."""
    more = calls(lambda call, at, n, w: {"weights": [w] * n + [0.0] * 2, "targets": list(range(n + 2))})
    right = record(with_clear(calls(), LENGTHS), context=POLICY)
    assert named(right, other(with_clear(more, LENGTHS), context=POLICY))[0] == ("one_term", 0.7)
    all_clear = [[n + 2 for n in call] for call in LENGTHS]
    assert named(right, other(with_clear(more, all_clear), context=POLICY))[0][0] != "one_term"


def test_unclear_targets_are_no_other_targets():
    off = calls(lambda call, at, n, w: {"weights": [w * 1.2**n] * n, "targets": [9] * n})
    right = record(with_clear(calls(), LENGTHS), context=POLICY)
    fewer = [[n - 1 for n in call] for call in LENGTHS]
    assert named(right, other(with_clear(off, LENGTHS), context=POLICY))[0] == ("other_targets", 0.93)
    assert named(right, other(with_clear(off, fewer), context=POLICY))[0][0] != "other_targets"
