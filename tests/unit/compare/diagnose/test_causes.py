"""Each cause is first where mathematics says so, and silent where nothing speaks for it."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.hand_records import NAMES, gradients, make_record, norms_alone, tokens
from workbench.compare.diagnose.causes import CAUSES
from workbench.compare.diagnose.diagnosis import diagnose_records
from workbench.compare.diagnose.evidence import compare_records
from workbench.compare.diagnose.facts import Facts
from workbench.compare.diagnose.record import RecordedStep


def changed(names, factor):
    return {name: values * factor for name, values in gradients().items() if any(part in name for part in names)}


def mixed(names):
    other = gradients(9)
    return {name: 0.3 * values + other[name] for name, values in gradients().items() if any(p in name for p in names)}


def values(**by_name):
    return tokens() | {name: function(tokens()[name]) for name, function in by_name.items()}


def put(where, number):
    def function(values_S):
        out = values_S.clone()
        out[where] = number
        return out
    return function


ENTROPY = tokens()["policy_logprobs"] + tokens()["entropy_nats"]
METRICS = {"loss/policy": 0.2, "loss/kl": 0.05, "ratio/policy_old/mean": 1.0}
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
    "norm_alone": {"gradient_norms": dict.fromkeys(NAMES, 9.0)},
    "targets_at_shard_edges": {"tokens": values(policy_logprobs=put(10, -9.0))},
    "targets_at_document_ends": {"tokens": values(trained=put([6, 12], True))},
    "first_tokens": {"tokens": values(policy_logprobs=put([2, 8, 14], -7.0))},
    "positions_of_shards": {"tokens": values(policy_logprobs=put(11, -2.0))},
    "attention_across_documents": {"context": {"dp": 1}, "tokens": values(policy_logprobs=put(slice(6, 18), -2.0))},
    "old_logprobs": {"tokens": values(old_logprobs=lambda old: old.roll(1))},
    "other_mask": {"tokens": values(trained=put([3, 9, 10, 15], False))},
    "temperature": {"tokens": values(policy_logprobs=lambda p: p + 0.2 * ENTROPY,
                                     entropy_nats=lambda h: h - 0.1)},
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
    "keys_values_not_summed": {"changes": mixed(["embed", ".0.", "1.self_attn.k_proj", "1.self_attn.v_proj",
                                                 "1.input_layernorm"])},
    "attention_backward": {"changes": mixed(["embed", ".0.", "1.self_attn.q", "1.self_attn.k", "1.self_attn.v",
                                             "1.input_layernorm"])},
    "ranks_lost": {"changes": {name: 0.2 * each for name, each in mixed([""]).items()}},
    "added_repeatedly": {"changes": {name: 3 * each for name, each in mixed([""]).items()}},
    "term_without_gradient": {"changes": mixed([""])},
}
"""Cause -> what differs in the suspect."""


@pytest.fixture(scope="module")
def trusted():
    return make_record(metrics=METRICS | {"advantage/all/std": 1.0})


@pytest.mark.parametrize("name", WRONG)
def test_the_cause_is_first(trusted, name):
    told = {"metrics": METRICS | {"advantage/all/std": 1.0}} | WRONG[name]
    told["metrics"] = {"advantage/all/std": 1.0} | told["metrics"]
    found = diagnose_records(trusted, make_record(**told))
    assert found.causes[0].name == name, str(found)
    assert found.causes[0].evidence
    assert found.equal == (name == "no_difference")


@pytest.mark.parametrize("kind", ["documents", "shards"])
def test_means_of_parts_are_recognised_by_the_loss(kind):
    laid = tokens()
    losses = laid["losses"][laid["trained"]]
    labels = laid[kind][laid["trained"]]
    wrong = torch.stack([losses[labels == label].mean() for label in labels.unique()]).mean()
    right = make_record(loss=float(losses.mean()), metrics={})
    found = diagnose_records(right, make_record(loss=float(wrong), metrics={}, changes=mixed([""])))
    assert found.causes[0].name == f"mean_per_{kind}"


def test_factors_are_named_from_norms_alone():
    found = diagnose_records(norms_alone(make_record()), norms_alone(make_record(scale=1 / 15)))
    assert found.causes[0].name == "over_dp_micro_batches"


def test_an_update_that_differs():
    def two(later):
        first = make_record().steps[0]
        second = RecordedStep(1, loss=0.3, tokens=tokens() | {"policy_logprobs": tokens()["policy_logprobs"] + later})
        return replace(make_record(), steps=(first, second))

    found = diagnose_records(two(0.0), two(torch.linspace(-1, 1, 18)))
    assert found.causes[0].name == "update"
    assert found.headline.startswith("from step 1 on")


def test_told_settings_are_compared(trusted):
    found = diagnose_records(trusted, make_record({"learning_rate": 2.0}, loss=0.26))
    assert "other_settings" not in [cause.name for cause in found.causes], "only one of them says it"
    both = diagnose_records(replace(trusted, context=trusted.context | {"learning_rate": 1.0}),
                            make_record({"learning_rate": 2.0}, loss=0.26))
    assert both["other_settings"].evidence == ("learning_rate is 2.0, not 1.0",)


def test_rounding_is_told_from_a_mistake():
    noise = torch.linspace(-1, 1, 18).roll(5) * 0.01
    small = {name: each + 0.01 * gradients(3)[name] for name, each in gradients().items()}
    found = diagnose_records(make_record(), make_record(
        {"precision": "float32"}, loss=0.2501, changes=small,
        tokens=values(policy_logprobs=lambda p: p + noise, entropy_nats=lambda h: h + noise.flip(0))))
    assert found.causes[0].name == "lower_precision"


def test_causes_are_data_of_distinct_names(trusted):
    names = [cause.name for cause in CAUSES]
    assert len(set(names)) == len(names)
    assert all(cause.words and name.replace("_", "").isalnum() for cause, name in zip(CAUSES, names, strict=True))
    same = Facts(compare_records(trusted, trusted))
    assert [cause.name for cause in CAUSES if cause.judge(same)[0]] == ["no_difference"]
