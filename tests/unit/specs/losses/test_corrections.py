"""Settings of corrections and KL: kinds are explicit once read, and contradictions raise an error."""

import pytest

from workbench.errors import SpecError
from workbench.specs.losses import CORRECTIONS, CorrectionSpec, KLSpec, LossSpec


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_kind_becomes_settings_that_read_back_as_themselves(kind):
    spec = CorrectionSpec(kind=kind)
    stored = spec.model_dump(mode="json")
    assert {name: stored[name] for name in CORRECTIONS[kind]} == CORRECTIONS[kind]
    assert CorrectionSpec.model_validate(stored) == spec
    assert spec.acts == (kind != "none")


def test_an_explicit_value_overrides_a_kind_even_if_none():
    assert CorrectionSpec(kind="tis", ratio_high=4.0).ratio_high == 4.0
    assert CorrectionSpec(kind="tis", ratio_high=None).ratio_high is None
    whole = LossSpec(name="grpo", correction={"kind": "icepop", "ratio_low": None})
    assert (whole.correction.ratio_low, whole.correction.ratio_high) == (None, 5.0)
    assert LossSpec.model_validate(whole.model_dump(mode="json")) == whole


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ratio_high": 2.0}, "name its ratio"),
        ({"normalize": True}, "name its ratio"),
        ({"ratio": "token", "outside": "zero"}, "needs ratio_low or ratio_high"),
        ({"ratio": "token", "ratio_low": 3.0, "ratio_high": 2.0}, "ratio_low = 3.0 is above ratio_high = 2.0"),
        ({"gate_high": 2.0}, "name its statistic"),
        ({"gate_level": "document_mean"}, "name its statistic"),
        ({"gate": "k3"}, "a gate needs"),
        ({"gate": "k3", "gate_low": 1.0, "gate_high": 0.5}, "gate_low = 1.0 is above gate_high = 0.5"),
        ({"opsm_anchor": "old"}, "needs opsm_threshold"),
        ({"kind": "tis", "population": "micro_batch"}, "about normalize and m2_threshold"),
        ({"kind": "tis", "denominator": "survivors"}, "nothing rejects"),
        ({"kind": "opsm", "denominator": "survivors"}, "live policy"),
        ({"kind": "m2po", "denominator": "survivors", "population": "micro_batch"}, "use population: step"),
        ({"log_clamp": 20.0}, "name its ratio or its statistic"),
        ({"kind": "tis", "given_epsilon": 0.1}, "about the ratio given_document_mean"),
        ({"kind": "tis", "mean_epsilon": 0.1}, "mean_epsilon is about normalize"),
        ({"further_gates": [{"statistic": "k2", "high": 1.0}]}, "need a first one"),
        ({"gate": "k2", "gate_high": 1.0, "further_gates": [{"statistic": "k2"}]}, "a gate needs low or high"),
        (
            {"gate": "k2", "gate_high": 1, "further_gates": [{"statistic": "k2", "low": 2, "high": 1}]},
            "low is above high",
        ),
        ({"kind": "icepop", "denominator": "gated"}, "no gate rejects a token"),
        ({"gate_action": "truncate"}, "are about a gate"),
        ({"gate": "k2", "gate_high": 1.0, "gate_action": "truncate"}, "clamps a weight to"),
        (
            {
                "gate": "k2",
                "gate_high": 1.0,
                "gate_action": "truncate",
                "ratio": "token",
                "ratio_high": 2.0,
                "surrogate_over": "kept",
            },
            "nothing rejects a token",
        ),
        ({"kind": "tiss"}, "Input should be"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, words):
    with pytest.raises(SpecError, match=words):
        CorrectionSpec(**settings)


def test_only_micro_batch_statistics_break_an_invariant():
    assert LossSpec(correction={"kind": "m2po"}).breaks == ()
    assert "micro_batch" in LossSpec(correction={"kind": "m2po", "population": "micro_batch"}).breaks
    assert CorrectionSpec(kind="m2po").needs_step_statistics
    assert not CorrectionSpec(kind="m2po", population="micro_batch").needs_step_statistics
    assert not CorrectionSpec(kind="tis").needs_step_statistics


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"placement": "reward", "gradient": "score"}, "in the reward the penalty is data"),
        ({"placement": "reward", "importance": "old"}, "in the reward the penalty is data"),
        ({"placement": "reward", "against": "sampler"}, "compares the old policy with ref"),
        ({"input_clamp": 0.0}, "greater than 0"),
    ],
)
def test_settings_of_a_penalty_that_cannot_be_are_refused(settings, words):
    with pytest.raises(SpecError, match=words):
        KLSpec(coefficient=0.1, **settings)
