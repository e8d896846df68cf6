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
    put,
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


@pytest.mark.parametrize("name", WRONG)
def test_the_cause_is_first(trusted, name):
    told = {"metrics": METRICS | {"advantage/all/std": 1.0}} | WRONG[name]
    told["metrics"] = {"advantage/all/std": 1.0} | told["metrics"]
    diagnosis = diagnose_records(trusted, make_record(**told))
    assert diagnosis.causes[0].name == name, str(diagnosis)
    assert diagnosis.causes[0].evidence
    assert diagnosis.equal == (name == "no_difference")


def test_causes_are_data_of_distinct_names(trusted):
    names = [cause.name for cause in CAUSES]
    assert len(set(names)) == len(names)
    assert all(cause.description and name.replace("_", "").isalnum() for cause, name in zip(CAUSES, names, strict=True))
    same = Facts(compare_records(trusted, trusted))
    assert [cause.name for cause in CAUSES if cause.judge(same)[0]] == ["no_difference"]
