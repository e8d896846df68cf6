"""Verdicts on pairs of settings: correct on batches that the verdict has not seen, with a text."""

import itertools
import json
from functools import cache

import numpy as np
import pytest
import torch

from tests.helpers.rectangles import rectangle
from tests.unit.systems.test_cases import ALL, CASES, index
from workbench.errors import SpecError
from workbench.losses.build import build_loss
from workbench.reduction.evaluate import evaluate_loss, loss_inputs
from workbench.reduction.weights import step_weights
from workbench.specs.losses import LossSpec
from workbench.systems import case_settings, explain, loss_spec
from workbench.systems.counterexample import (
    TOLERANCE,
    Outcome,
    compare,
    outcome,
    relative_distance,
    same_scaling,
)
from workbench.systems.explanations import decides
from workbench.systems.registry import load_system
from workbench.systems.translate import FACTORS

POLICY = {"policy_loss", "policy_loss_packed", "policy_loss_logits", "fused_linear_policy_loss"}
LOSSES = [(system, name) for system, name in ALL if index(system)[name]["kind"] in POLICY]


@cache
def settings_of(system, name):
    case = index(system)[name]
    with np.load(CASES / system / case["file"]) as arrays:
        inputs = {key[3:]: arrays[key] for key in arrays if key.startswith("in.")}
    return case_settings(system, case["kind"], case["function"], case["config"], inputs)


@cache
def spec_of(system, name):
    return loss_spec(system, settings_of(system, name))


@cache
def on_batch(system, name, seed):
    """Loss and gradient of a case's settings on a batch of random documents, through the evaluator."""
    spec, (row, text) = spec_of(system, name), rectangle(seed, spread=1.2)
    leaves = text._replace(
        **{key: value.clone().requires_grad_() for key, value in text._asdict().items() if value is not None}
    )
    (weights,), totals = step_weights([row], spec)
    total = (
        evaluate_loss(build_loss(spec), loss_inputs(row, leaves, totals), weights, row.loss_mask_T)
        .scalars["total"]
        .value
    )
    wanted = [leaf for leaf in leaves if leaf is not None]
    gradients = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
    return Outcome(float(total.detach()), torch.cat(gradients))


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_the_verdict_of_all_pairs_matches_five_other_batches(every):
    pairs = list(itertools.combinations(LOSSES, 2))[::every]
    verdicts, wrong = [], []
    for one, other in pairs:
        verdict, same_loss, same_gradient, witness = compare(spec_of(*one), spec_of(*other))
        verdicts.append(verdict)
        differ = any(
            max(relative_distance(on_batch(*one, seed), on_batch(*other, seed))) > TOLERANCE for seed in range(5)
        )
        if verdict != "cannot say" and (verdict == "different") != differ:
            wrong.append((one, other, verdict))
        assert (verdict == "different") == (witness is not None), (one, other)
        assert (verdict == "same") == (same_loss is True and same_gradient is True), (one, other)
    assert len(pairs) > 9000 / every
    assert wrong == []
    assert verdicts.count("cannot say") <= 0.05 * len(pairs)
    assert verdicts.count("same") >= 50 / every


# ---- one pair --------------------------------------------------------------------------------------------------


def test_the_same_clip_is_not_the_same_where_a_dual_clip_is_always_on():
    explanation = explain(
        "verl", {"clip_ratio": 0.2}, "trl", {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.2}
    )
    assert explanation.verdict == "different"
    assert explanation.same_loss is False
    assert explanation.same_gradient is False
    acting = [d for d in explanation.differences if d.acts]
    assert [d.setting for d in acting] == ["surrogate.dual_clip"]
    assert acting[0].values == (3.0, None)
    assert "clip_ratio_c=3, its default" in acting[0].options[0]
    assert (acting[0].topic, acting[0].silent) == ("clip", (True, True))
    assert "dual clip" in " ".join(explanation.notes[0])
    table = explanation.table()
    assert table.loc["surrogate.dual_clip", "acts"]
    assert not table.drop(index="surrogate.dual_clip")["acts"].any()
    assert str(explanation).startswith("verl | TRL: different\n  batch ")


def test_a_bound_acts_on_the_side_on_which_it_differs():
    explanation = explain("trl", {"epsilon": 0.2, "epsilon_high": 0.28}, "trl", {"epsilon": 0.2})
    assert [(d.setting, d.values) for d in explanation.differences if d.acts] == [("surrogate.clip_high", (0.28, 0.2))]


def test_factors_of_contracts_are_listed_only_where_they_come_to_another_product():
    exact, local = {"loss_type": "dapo", "epsilon": 0.2}, {"loss_type": "bnpo", "epsilon": 0.2}
    factors = {f"compat.scaling.{name}" for name in FACTORS}
    for settings, listed in ((exact, set()), (local, {"compat.scaling.multiplied_by", "compat.scaling.divided_by"})):
        explanation = explain("verl", {}, "trl", settings)
        assert {d.setting for d in explanation.differences} & factors >= listed
        assert bool({d.setting for d in explanation.differences} & factors) == bool(listed)


def test_a_threshold_that_only_a_far_document_passes_is_a_difference():
    assert explain("trl", {"off_policy_mask_threshold": 4.0}, "trl", {}).verdict == "different"
    sampled = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
    assert explain("trl", sampled | {"off_policy_mask_threshold": 4.0}, "trl", sampled).verdict == "different"


def test_a_witness_can_be_looked_at_again():
    explanation = explain("fast_llm", {"type": "gspo"}, "fast_llm", {"type": "grpo"})
    again = [outcome(spec, explanation.counterexample.seed) for spec in explanation.specs]
    assert explanation.counterexample.losses == (again[0].loss, again[1].loss)
    assert explanation.counterexample.relative == relative_distance(*again)
    assert max(explanation.counterexample.relative) > TOLERANCE


def test_differences_have_topics_and_mark_defaults():
    explanation = explain(
        "nemo_rl",
        {"token_level_loss": False, "sequence_level_importance_ratios": True},
        "fast_llm",
        {"type": "gspo", "epsilon_low": 0.1},
    )
    by_setting = {d.setting: d for d in explanation.differences}
    assert {d.topic for d in explanation.differences} >= {"denominator", "clip", "policy term", "KL"}
    assert by_setting["denominator"].silent == (True, False)  # NeMo-RL's only one next to ratios of rows
    assert by_setting["surrogate.clip_low"].silent == (True, False)
    assert by_setting["kl.coefficient"].silent == (True, True)
    assert [d.acts for d in explanation.differences] == sorted((d.acts for d in explanation.differences), reverse=True)


def test_the_same_loss_by_other_names():
    explanation = explain("fast_llm", {"epsilon_high": 0.28}, "trl", {"loss_type": "dapo", "epsilon_high": 0.28})
    assert (explanation.verdict, explanation.same_loss, explanation.same_gradient, explanation.same_scaling) == (
        "same",
        True,
        True,
        True,
    )
    assert not any(d.acts for d in explanation.differences)
    assert str(explanation).splitlines()[0] == "Fast-LLM | TRL: same"


def test_the_same_on_one_micro_batch_and_not_on_a_step_of_several():
    explanation = explain("trl", {"loss_type": "bnpo"}, "trl", {"loss_type": "dapo"})
    assert explanation.verdict == "same"
    assert explanation.same_scaling is False
    assert "on one micro-batch" in str(explanation)
    assert list(explanation.table().columns[:3]) == ["topic", "TRL (a)", "TRL (b)"]


def test_a_penalty_in_the_reward_is_no_part_of_the_loss_and_is_noted():
    explanation = explain("nemo_rl", {"use_kl_in_reward": True}, "nemo_rl", {"reference_policy_kl_penalty": 0.0})
    assert explanation.verdict == "same"
    assert "kl.placement" in {d.setting for d in explanation.differences}
    assert "in the advantages that the loss receives" in " ".join(explanation.notes[0])


@pytest.mark.parametrize(
    ("settings", "alike"),
    [
        ({"compat": {"scaling": {"multiplied_by": ["dp"], "engine_divides": ["dp"]}}}, True),
        ({"compat": {"scaling": {"counts": "pass"}}}, False),
        ({"compat": {"scaling": {"engine_divides": ["cp"]}}}, False),
        ({"denominator": "local_token"}, False),
    ],
)
def test_other_counts_or_a_factor_change_the_scaling(settings, alike):
    assert same_scaling(LossSpec(), LossSpec(**settings)) == alike
    assert not same_scaling(LossSpec(compat={"scaling": {"counts": "micro_batch"}}), LossSpec(**settings))


def test_the_gradient_may_be_the_same_when_the_loss_is_not():
    verdict, same_loss, same_gradient, _ = compare(LossSpec(name="on_policy"), LossSpec(name="reinforce"))
    assert (verdict, same_loss, same_gradient) == ("different", False, True)


def test_a_temperature_separates_losses_on_logits():
    explanation = explain("pipelinerl", {"temperature": 0.7}, "pipelinerl", {})
    assert (explanation.verdict, explanation.same_loss, explanation.same_gradient) == ("different", False, False)
    heat = explanation.differences[0]
    assert (heat.setting, heat.topic, heat.values) == ("policy.temperature", "temperature", (0.7, 1.0))
    assert (heat.options, heat.silent) == (("temperature=0.7", "temperature=1, its default"), (False, True))
    assert (
        explain("fast_llm", {"logits_scale_factor": 2.0}, "pipelinerl", {"temperature": 0.5}).differences[0].topic
        != "temperature"
    )
    assert explain("fast_llm", {"logits_scale_factor": 2.0}, "areal", {}).verdict == "same"  # on log-probabilities


def test_exclusive_options_do_not_stop_the_search_for_deciding_ones():
    explanation = explain(
        "nous_torchtitan",
        {"rollout_is": {"rollout_is_threshold": 2.0}},
        "areal",
        {"rejection_sampling": {"action": "clamp", "upper": 2.0}},
    )
    assert explanation.verdict == "different"


def test_an_undecided_pair_is_reported():
    far = LossSpec(name="dual_clip", surrogate={"kind": "ppo", "dual_clip": 1e6})
    assert compare(far, LossSpec(name="ppo"))[0] == "cannot say"


def test_options_are_attributed_by_their_effect():
    system = load_system("trl")
    result = decides(system, system.settings(loss_type="dapo"))
    assert "epsilon_low" in result["surrogate.clip_low"]
    assert "beta" in result["kl.coefficient"]
    assert "loss_type" in result["denominator"]


def test_options_of_a_strictly_typed_system_are_attributed():
    system = load_system("prime_rl")
    assert decides(system, system.settings())["surrogate.threshold_low"] == ("type", "dppo_mask_low")
    assert decides(system, system.settings(type="ipo"))["surrogate.threshold"] == ("type", "ipo_threshold")


def test_grouped_options_are_attributed_with_and_without_their_group():
    system = load_system("verl")
    for text in ({}, {"policy_loss": {"loss_mode": "vanilla"}}):
        assert "policy_loss.loss_mode" in decides(system, system.settings(**text))["surrogate.kind"]


def test_options_that_are_none_are_refused_by_name():
    with pytest.raises(SpecError, match=r"unknown option 'clip_ration' \(did you mean 'clip_ratio'"):
        explain("verl", {"clip_ration": 0.2}, "trl", {})


def test_settings_of_a_recorded_call_name_the_loss_of_its_function():
    assert settings_of("verl", "036_gspo_wild")["policy_loss"]["loss_mode"] == "gspo"
    assert settings_of("fast_llm", "024_gspo_2d_onpolicy")["type"] == "gspo"
    explanation = explain(
        "verl", settings_of("verl", "040_gpg_wild"), "verl", settings_of("verl", "000_vanilla_onpolicy")
    )
    assert explanation.verdict == "different"


def test_counts_of_a_batch_decide_nothing():
    config = json.loads((CASES / "nemo_rl/index.json").read_text())["cases"][0]["config"]
    assert config["global_valid_toks"]
    assert explain("nemo_rl", config, "nemo_rl", config | {"global_valid_toks": 5.0}).verdict == "same"
