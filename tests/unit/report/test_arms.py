"""Verdicts on online arms in the report: paired by seed, with what they could have seen."""

from dataclasses import replace

import pytest

from tests.unit.report.test_online import SECTION, configuration, spec
from workbench.compare.comparison import Comparison
from workbench.report.arms import arm_sentences
from workbench.report.online import RIGHT
from workbench.report.page import page

SEEDS = range(9)


def run(name, seed, value, **settings):
    steps = [{"step": step, RIGHT: value} for step in range(4)]
    return configuration(f"{name}-{seed}", seed, made=spec(seed, **settings), steps=steps)


def two_arms(effect=0.2, backwards=False):
    """A draw of each seed that is larger than the effect, and that both arms share."""
    first = [run("grpo", seed, seed * 0.1) for seed in SEEDS]
    second = [run("cispo", seed, seed * (0.1 + 1e-3) + effect, loss={"name": "cispo"}) for seed in SEEDS]
    return Comparison("online", "?", first + second[:: -1 if backwards else 1])


@pytest.mark.parametrize("backwards", [False, True])
def test_arms_are_paired_by_seed_in_any_order(backwards):
    [sentence] = arm_sentences(two_arms(backwards=backwards))
    assert sentence.startswith("cispo against grpo: different: +0.204 ")
    assert "9 shared seeds" in sentence
    assert "seeds an arm would be needed" in sentence


def test_the_page_of_online_runs_has_the_verdict_and_its_test():
    text = page(two_arms()).partition(SECTION)[2]
    assert "cispo against grpo: different" in text
    assert "takes 8 shared seeds" in text


def test_one_arm_and_few_seeds_are_no_verdict():
    arms = two_arms()
    assert "no other" in arm_sentences(replace(arms, configurations=arms.configurations[:9]))[0]
    few = replace(arms, configurations=[arms["grpo-0"], arms["grpo-1"], arms["cispo-1"]])
    assert "vacuous: 1 shared seed;" in arm_sentences(few)[0]


def test_seeds_without_a_finite_curve_or_a_partner_are_left_out():
    arms = two_arms()
    lost = [
        replace(c, steps=[{"step": 0, RIGHT: float("nan")}]) if c.name == "cispo-0" else c for c in arms.configurations
    ]
    assert "8 shared seeds" in arm_sentences(replace(arms, configurations=lost))[0]
    assert "1 seeds without a finite curve are left out" in arm_sentences(replace(arms, configurations=lost))[0]
    unlike = replace(arms, configurations=[arms["grpo-0"], arms["cispo-1"]])
    assert arm_sentences(unlike) == ["cispo-1 against grpo-0: not compared: no seed has a finite curve in both arms."]


def test_runs_that_gradients_judge_are_no_arms():
    arms = two_arms()
    judged = [replace(c, against="grpo-0") if c.name.startswith("cispo") else c for c in arms.configurations]
    assert arm_sentences(replace(arms, configurations=judged)) == []
    assert "shared seed" not in page(replace(arms, configurations=judged))
