"""The ratio at step 0 on the report page: of synthetic runs, and of the records of experiments that ran on a GPU."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.comparisons import bare
from workbench.compare.comparison import Comparison, Configuration
from workbench.report.first_ratio import effects, first_ratio, first_ratio_section
from workbench.report.page import page
from workbench.specs.run import RunSpec

EXPERIMENTS = Path(__file__).parents[3] / "experiments"
ONLINE = {"online": {"task": "arithmetic"}, "data": {"advantages": {"name": "grpo"}}}


def run(name, smallest=1.0, largest=1.0, online=None, **changes):
    settings = ONLINE | {"online": ONLINE["online"] | (online or {})} | changes
    ratios = {"ratio/policy_old/min": smallest, "ratio/policy_old/max": largest, "ratio/policy_old/mean": 1.0}
    spec = RunSpec.model_validate(settings).model_dump(mode="json")
    return Configuration(name, spec, steps=[{"step": 0, **ratios}, {"step": 1, **dict.fromkeys(ratios, 7.0)}])


def text_of(*configurations):
    return first_ratio_section(Comparison("e", "q", list(configurations)))


def test_an_old_pass_of_the_trainer_shares_everything():
    ratio = first_ratio(run("a"))
    assert (ratio.exact, ratio.shared, ratio.distance, ratio.differences) == (True, True, 0.0, ())
    assert ">yes<" in text_of(run("a"))


def test_one_that_is_not_1_although_all_is_shared_stands_out():
    broken = run("a", 0.9999999)
    assert not first_ratio(broken).exact
    assert "<b>no, though all is shared</b>" in text_of(broken)
    assert "though all is shared" not in text_of(run("b", 0.9, online={"old_logprobs": "sampler"}))


SAMPLER = {"old_logprobs": "sampler"}


@pytest.mark.parametrize(
    ("online", "changes", "difference"),
    [
        ({}, {}, "another program"),
        ({"sampler_precision": "bfloat16"}, {}, "precision: bfloat16 in the sampler, float32 in the trainer"),
        ({"temperature": 0.7}, {"policy": {"temperature": 1.0}}, "temperature: 0.7 in the sampler, 1 in the trainer"),
        ({}, {"precision": "bfloat16", "policy": {"fp32_head": True}}, "head: logits in float32 in the trainer alone"),
        ({"top_p": 0.9}, {}, "truncated support: of the sampler alone"),
        ({}, {"sync": {"cast": "bfloat16"}}, "weights: rounded to bfloat16 on their way"),
        ({}, {"faults": ["temperature_missing_in_policy"]}, "planted: temperature_missing_in_policy"),
    ],
)
def test_each_difference_from_the_sampler_is_named(online, changes, difference):
    ratio = first_ratio(run("a", 0.5, online=SAMPLER | online, **changes))
    assert any(text.startswith(difference) for text in ratio.differences)
    plain = first_ratio(run("a", 0.5, online=SAMPLER))
    assert len(ratio.differences) == len(plain.differences) + (difference != "another program")


def test_all_weights_are_those_of_the_start_at_step_0():
    """So an old pass with the weights that sampled is the trainer's own."""
    assert first_ratio(run("a", online={"old_logprobs": "behaviour"}, sync={"queue": 2})).shared
    assert first_ratio(run("a", sync={"queue": 2, "cast": "bfloat16"})).shared


def test_a_replayed_support_is_no_difference():
    ratio = first_ratio(run("a", online=SAMPLER | {"top_p": 0.9}, policy={"support": "recorded"}))
    assert len(ratio.differences) == 1


def test_a_planted_fault_is_a_difference_of_the_trainers_own_pass():
    assert first_ratio(run("a", 0.5, faults=["temperature_missing_in_policy"])).shared is False


def test_runs_that_differ_in_one_setting_measure_it():
    runs = [
        run("at_0.7", 0.9, online=SAMPLER | {"temperature": 0.7}, policy={"temperature": 0.7}),
        run("at_1", 0.2, online=SAMPLER | {"temperature": 0.7}, policy={"temperature": 1.0}),
        run("both", 0.1, online=SAMPLER | {"temperature": 0.7}, policy={"temperature": 1.0}, precision="bfloat16"),
        run("longer", 0.9, online=SAMPLER | {"temperature": 0.7}, policy={"temperature": 0.7}, steps=9),
    ]
    comparison = Comparison("e", "q", runs)
    assert effects(comparison, "at_0.7") == [("policy.temperature", "at_1", -math.log(0.2))]
    assert [(key, other) for key, other, _ in effects(comparison, "both")] == [("precision", "at_1")]
    assert "policy.temperature: 0.7 here, 0.11; 1 in at_1, 1.6" in text_of(*runs).replace("<wbr>", "")


@pytest.mark.parametrize("step", [{}, {"ratio/policy_old/min": None}, {"step": 0}])
def test_runs_without_a_ratio_have_no_row(step):
    configuration = Configuration("a", run("a").settings, steps=[step])
    assert first_ratio(configuration) is None
    assert text_of(configuration) is None
    offline = Configuration("a", RunSpec().model_dump(mode="json"), steps=run("a").steps)
    assert first_ratio(offline) is None


def test_ratios_that_overflow_are_at_an_infinite_distance():
    assert first_ratio(run("a", 0.0)).distance == math.inf
    assert first_ratio(run("a", 1.0, math.inf)).distance == math.inf


# ---- records ---------------------------------------------------------------------------------------------


def test_every_layout_of_the_record_starts_at_exactly_1():
    comparison = Comparison.load(EXPERIMENTS / "online_layouts" / "comparison.json")
    ratios = [first_ratio(c) for c in comparison.configurations]
    assert len(ratios) >= 5
    assert all(ratio.exact and (ratio.shared or "planted: missing_cp_factor" in ratio.differences) for ratio in ratios)
    two = [bare(c, "steps") for c in comparison.configurations[:2]]
    assert "Ratio at step 0" in page(replace(comparison, configurations=two))


def test_the_temperature_moved_it_most_in_the_record_of_bfloat16():
    comparison = Comparison.load(EXPERIMENTS / "ratio_at_step_zero" / "bfloat16" / "comparison.json")
    own = first_ratio(comparison["trainer-0.7-reference-False"])
    moved = {key: distance for key, _, distance in effects(comparison, "trainer-0.7-reference-False")}
    assert moved.keys() == {"policy.fp32_head", "policy.logprobs", "policy.temperature"}
    assert max(moved, key=moved.get) == "policy.temperature"
    assert moved["policy.temperature"] > 10 * own.distance
    assert not own.shared
