"""Factors of every gradient and denominators of the loss are named by their sizes."""

import pytest
import torch

from tests.helpers.hand_records import (
    gradients,
    make_record,
    mixed,
    norms_alone,
    tokens,
)
from workbench.diagnose.diagnosis import diagnose_records


def first_of(trusted, suspect):
    return diagnose_records(trusted, suspect).causes[0].name


def named(trusted, suspect):
    return [cause.name for cause in diagnose_records(trusted, suspect).causes]


@pytest.mark.parametrize("kind", ["documents", "shards"])
def test_means_of_parts_are_recognised_by_the_loss(kind):
    laid = tokens()
    losses = laid["losses"][laid["trained"]]
    labels = laid[kind][laid["trained"]]
    wrong = torch.stack([losses[labels == label].mean() for label in labels.unique()]).mean()
    right = make_record(loss=float(losses.mean()), metrics={})
    diagnosis = diagnose_records(right, make_record(loss=float(wrong), metrics={}, changes=mixed([""])))
    assert diagnosis.causes[0].name == f"mean_per_{kind}"


def test_factors_are_named_from_norms_alone():
    diagnosis = diagnose_records(norms_alone(make_record()), norms_alone(make_record(scale=1 / 15)))
    assert diagnosis.causes[0].name == "over_dp_micro_batches"


def test_a_power_of_two_rounds_nothing():
    def twice(noise):
        return make_record(
            {"precision": "bfloat16"},
            changes={name: 2 * each + noise * gradients(7)[name] for name, each in gradients().items()},
        )

    right = make_record({"precision": "bfloat16"})
    assert first_of(right, twice(0.0)) == "times_cp"
    diagnosis = diagnose_records(right, twice(0.01))
    assert diagnosis.causes[0].name == "term_without_gradient"
    assert "rounds nothing" in diagnosis["times_cp"].evidence[0]


@pytest.mark.parametrize("count", [149, 142])
def test_a_loss_that_follows_the_gradient_names_its_factor_better(count):
    rounded = {name: 130 / count * each + 0.005 * gradients(7)[name] for name, each in gradients().items()}
    right, wrong = (
        make_record({"precision": "bfloat16"}, **more)
        for more in ({}, {"changes": rounded, "loss": 0.25 * 130 / count})
    )
    diagnosis = diagnose_records(right, wrong)
    assert diagnosis.causes[0].name == "other_count"
    assert f"{count} and not 130 trained tokens" in diagnosis.causes[0].evidence[0]


def test_a_doubled_token_count_stays_a_suspect_with_two_ranks():
    diagnosis = diagnose_records(make_record(), make_record(scale=0.5, loss=0.125))
    assert [cause.name for cause in diagnosis.causes[:2]] == ["over_cp", "other_count"]
    alone = diagnose_records(make_record(), make_record(scale=0.5))
    assert "other_count" not in [cause.name for cause in alone.causes]


@pytest.mark.parametrize(("times", "name"), [(3.0, "times_dp"), (2.997, "uneven_weights")])
def test_a_loss_that_is_nearly_a_number_is_of_parts_that_weigh_unevenly(times, name):
    bf16 = {"precision": "bfloat16"}
    near = {name: 3 * each + 0.01 * gradients(7)[name] for name, each in gradients().items()}
    assert first_of(make_record(bf16), make_record(bf16, changes=near, loss=0.25 * times)) == name


@pytest.mark.parametrize(
    ("gradient", "name"), [({"changes": mixed([""])}, "uneven_weights"), ({"scale": 1.1}, "other_count")]
)
def test_a_mean_over_tokens_in_place_of_documents_weighs_long_ones_more(gradient, name):
    there = tokens()
    losses, documents = (there[key][there["trained"]] for key in ("losses", "documents"))
    by_document = torch.stack([losses[documents == one].mean() for one in documents.unique()]).mean()
    right, wrong = (
        make_record(loss=float(loss), metrics={}, **more)
        for loss, more in ((by_document, {}), (losses.mean(), gradient))
    )
    assert first_of(right, wrong) == name


def test_other_weights_in_the_gradient_alone():
    turned = {name: each + 0.22 * gradients(9)[name] for name, each in gradients().items()}
    diagnosis = diagnose_records(make_record(), make_record(changes=turned))
    assert [cause.name for cause in diagnosis.causes] == ["term_without_gradient", "uneven_weights", "ranks_lost"]
    assert diagnosis["ranks_lost"].score < 0.5, "it is longer than the whole"


@pytest.mark.parametrize(("length", "told"), [(0.3, False), (0.7, True), (1.5, True), (3.0, False)])
def test_other_weights_do_not_change_the_length_of_a_gradient_by_much(length, told):
    turned = {name: length * (each + 0.22 * gradients(9)[name]) for name, each in gradients().items()}
    assert ("uneven_weights" in named(make_record(), make_record(changes=turned))) == told


@pytest.mark.parametrize("follows", [True, False])
def test_a_ratio_of_small_numbers_is_a_count_where_the_loss_follows_it(follows):
    wrong = make_record(scale=1.2, loss=0.3 if follows else 0.25, metrics={})
    assert diagnose_records(make_record(metrics={}), wrong)["other_count"].score == pytest.approx(
        0.85 if follows else 0.45 * 0.45 / 0.7  # without inputs of the loss, it is only possible
    )
