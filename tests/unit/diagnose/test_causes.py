"""Each cause is first where the mathematics says so, and absent where nothing supports it."""

import pytest
import torch

from tests.helpers.hand_records import (
    ENTROPY,
    METRICS,
    changed,
    gradients,
    make_record,
    mixed,
    norms_alone,
    put,
    tokens,
    values,
)
from workbench.diagnose.diagnosis import CAUSES, diagnose_records
from workbench.diagnose.evidence import compare_records
from workbench.diagnose.facts import Facts

WRONG = {
    "no_difference": {},
    "times_cp": {"scale": 2.0},
    "over_cp": {"scale": 0.5, "loss": 0.125},
    "times_dp": {"scale": 3.0},
    "over_dp": {"scale": 1 / 3},
    "times_tp": {"scale": 7.0},
    "times_micro_batches": {"scale": 5.0},
    "over_micro_batches": {"scale": 0.2},
    "over_cp_dp": {"scale": 1 / 6},
    "times_dp_over_cp": {"scale": 3 / 2},
    "times_cp_over_dp": {"scale": 2 / 3},
    "over_cp_dp_micro_batches": {"scale": 1 / 30},
    "over_documents": {"scale": 1 / 11},
    "over_all_tokens_per_trained_tokens": {"scale": 130 / 170},
    "over_temperature": {"scale": 1.25},
    "unnamed_factor": {"scale": 0.61803},
    "other_count": {"scale": 130 / 149},
    "not_finite": {"loss": float("nan")},
    "loss_alone": {"loss": 0.5},
    "metrics_alone": {"metrics": METRICS | {"ratio/policy_old/mean": 3.0}},
    "norm_alone": {"gradient_norms": {name: 1.5 * float(each.norm()) for name, each in gradients().items()}},
    "targets_at_shard_edges": {"tokens": values(policy_logprobs=put(10, -9.0))},
    "targets_at_document_ends": {"tokens": values(trained=put([6, 12], True))},
    "first_tokens": {"tokens": values(policy_logprobs=put([2, 8, 14], -7.0))},
    "positions_of_shards": {"tokens": values(policy_logprobs=put(11, -2.0))},
    "attention_across_documents": {"context": {"dp": 1}, "tokens": values(policy_logprobs=put(slice(6, 18), -2.0))},
    "old_logprobs": {"tokens": values(old_logprobs=lambda old: old.roll(1))},
    "lower_precision": {"tokens": values(policy_logprobs=lambda p: p.bfloat16().double())},
    "other_targets": {"tokens": values(policy_logprobs=lambda p: p.flip(0))},
    "other_mask": {"tokens": values(trained=put([3, 9, 10, 15], False))},
    "temperature": {"tokens": values(policy_logprobs=lambda p: p + 0.2 * ENTROPY, entropy_nats=lambda h: h - 0.1)},
    "logprobs_scaled": {"tokens": values(policy_logprobs=lambda p: p / 0.8)},
    "normaliser": {"tokens": values(policy_logprobs=lambda p: p - torch.linspace(0.1, 0.9, 18).roll(7))},
    "entropy_alone": {"tokens": values(entropy_nats=lambda h: h / 2)},
    "advantages": {"metrics": METRICS | {"advantage/all/std": 2.0}, "loss": 0.4, "changes": mixed([""])},
    "ratio": {"metrics": METRICS | {"ratio/policy_old/mean": 1.4}, "loss": 0.4, "changes": mixed([""])},
    "one_term": {"metrics": METRICS | {"loss/kl": 0.55}, "loss": 0.75, "changes": mixed([""])},
    "no_gradient": {"scale": 0.0},
    "part_without_gradient": {"changes": changed(["lm_head"], 0)},
    "norms_not_summed": {"changes": changed(["norm"], 0.5)},
    "head_gradient": {"changes": mixed(["lm_head"])},
    "head_rounded": {"changes": changed(["lm_head"], 1.001)},
    "gradient_below_head": {"changes": mixed(["model."])},
    "keys_values_not_summed": {
        "changes": mixed(["embed", ".0.", "1.self_attn.k_proj", "1.self_attn.v_proj", "1.input_layernorm"])
    },
    "layer_input_gradient": {"changes": mixed(["embed", ".0.", "1.input_layernorm"])},
    "some_parameters": {"changes": changed(["0.mlp"], 7)},
    "attention_backward": {
        "changes": mixed(["embed", ".0.", "1.self_attn.q", "1.self_attn.k", "1.self_attn.v", "1.input_layernorm"])
    },
    "ranks_lost": {"changes": {name: 0.2 * each for name, each in mixed([""]).items()}},
    "added_repeatedly": {"changes": {name: 3 * (each + gradients(9)[name]) for name, each in gradients().items()}},
    "term_without_gradient": {"changes": mixed([""])},
}
"""Cause -> what differs in the suspect."""


@pytest.fixture(scope="module")
def trusted():
    return make_record(metrics=METRICS | {"advantage/all/std": 1.0})


def named(trusted, suspect):
    return [cause.name for cause in diagnose_records(trusted, suspect).causes]


def first_of(trusted, suspect):
    return diagnose_records(trusted, suspect).causes[0].name


@pytest.mark.parametrize("name", WRONG)
def test_the_cause_is_first(trusted, name):
    told = {"metrics": METRICS | {"advantage/all/std": 1.0}} | WRONG[name]
    told["metrics"] = {"advantage/all/std": 1.0} | told["metrics"]
    diagnosis = diagnose_records(trusted, make_record(**told))
    assert diagnosis.causes[0].name == name, str(diagnosis)
    assert diagnosis.causes[0].evidence
    assert diagnosis.equal == (name == "no_difference")


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


def test_rounding_is_distinguished_from_a_bug():
    noise = torch.linspace(-1, 1, 18).roll(5) * 0.01
    small = {name: each + 0.01 * gradients(3)[name] for name, each in gradients().items()}
    diagnosis = diagnose_records(
        make_record(),
        make_record(
            {"precision": "float32"},
            loss=0.2501,
            changes=small,
            tokens=values(policy_logprobs=lambda p: p + noise, entropy_nats=lambda h: h + noise.flip(0)),
        ),
    )
    assert diagnosis.causes[0].name == "lower_precision"


def test_causes_are_data_of_distinct_names(trusted):
    names = [cause.name for cause in CAUSES]
    assert len(set(names)) == len(names)
    assert all(cause.description and name.replace("_", "").isalnum() for cause, name in zip(CAUSES, names, strict=True))
    same = Facts(compare_records(trusted, trusted))
    assert [cause.name for cause in CAUSES if cause.judge(same)[0]] == ["no_difference"]


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


def test_a_gradient_in_a_lower_precision():
    rounded = {name: each.bfloat16().double() for name, each in gradients().items()}
    summed = {name: (each + 3).bfloat16().double() - 3 for name, each in gradients().items()}
    near = {name: each * (1 + 0.004 * torch.linspace(-1, 1, 40).roll(9).double()) for name, each in gradients().items()}
    assert first_of(make_record(), make_record(changes=rounded)) == "lower_precision"
    assert first_of(make_record(), make_record(changes=near)) == "lower_precision"
    assert first_of(make_record(), make_record(changes=summed)) == "term_without_gradient"


def test_a_loss_made_of_other_inputs_is_not_reported_wrong():
    old = values(old_logprobs=lambda old: old + torch.linspace(-1, 1, 18) * 0.01)
    diagnosis = diagnose_records(make_record(), make_record(tokens=old, loss=0.3))
    assert [cause.name for cause in diagnosis.causes[:2]] == ["old_logprobs", "loss_alone"]


@pytest.mark.parametrize(
    ("precision", "policy", "name"),
    [("bfloat16", 0.2, "one_term"), ("float64", 0.2, "loss_alone"), ("bfloat16", 0.204, "loss_alone")],
)
def test_rounding_may_hide_a_term_in_the_gradient(precision, policy, name):
    right, wrong = (
        make_record({"precision": precision}, metrics={"loss/policy": first, "loss/kl": second}, loss=first + second)
        for first, second in ((0.2, 0.05), (policy, 0.051))
    )
    assert first_of(right, wrong) == name


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
