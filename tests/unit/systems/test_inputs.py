"""Arrays and options that a replay does not use are refused by name; what a system's function takes is accepted."""

import numpy as np
import pytest

from tests.unit.systems.test_cases import ALL, index
from tests.unit.systems.test_replays import FIRST, arguments
from workbench.errors import SpecError
from workbench.systems import replay
from workbench.systems.inputs import inputs_of
from workbench.systems.registry import SYSTEMS, load_system
from workbench.systems.replays import COMMON


@pytest.mark.parametrize(("system", "kind", "name"), FIRST)
def test_an_array_that_nothing_uses_is_refused_by_name(system, kind, name):
    case, inputs = arguments(system, name)
    with pytest.raises(SpecError) as caught:
        replay(system, kind, case["function"], case["config"], inputs | {"lunch_break": np.ones(3)})
    assert caught.value.parts["requested"] == f"replay of {kind} of {system} with 'lunch_break'"
    assert "uses lunch_break" in caught.value.parts["found"]
    for taken in inputs:
        assert taken in caught.value.parts["rule"]


@pytest.mark.parametrize(("system", "kind", "name"), FIRST)
def test_an_option_that_nothing_uses_is_refused_by_name(system, kind, name):
    case, inputs = arguments(system, name)
    with pytest.raises(SpecError, match="lunch_break"):
        replay(system, kind, case["function"], case["config"] | {"lunch_break": 0.5}, inputs)


def test_the_nearest_name_that_is_not_given_is_offered():
    case, inputs = arguments("areal", "000_ppo_mild")
    inputs["old_logprob"] = inputs.pop("old_logprobs")
    with pytest.raises(SpecError, match="did you mean 'old_logprobs' for 'old_logprob'"):
        replay("areal", case["kind"], case["function"], case["config"], inputs)


@pytest.mark.parametrize(
    ("system", "unused"),
    [
        ("openrlhf", "ref_logprobs"),
        ("openrlhf", "entropies"),
        ("verl", "sample_mask"),
        ("slime", "is_weights"),
        ("prime_rl", "old_logprobs"),
        ("trl", "label_counts"),
        ("areal", "logprobs_unfiltered"),
    ],
)
def test_what_another_system_takes_is_not_left_aside_either(system, unused):
    name = next(name for each, name in ALL if each == system and index(system)[name]["kind"].startswith("policy_loss"))
    case, inputs = arguments(system, name)
    with pytest.raises(SpecError, match=f"with '{unused}'"):
        replay(system, case["kind"], case["function"], case["config"], inputs | {unused: inputs["logprobs"]})


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_kind_says_what_it_takes(system):
    for kind in {**COMMON, **load_system(system).replays}:
        taken = inputs_of(system, kind)
        assert len(set(taken)) == len(taken) >= 2
    with pytest.raises(SpecError, match="one of policy_loss"):
        inputs_of(system, "lunch")


def test_flags_of_kept_tokens_may_have_any_name_and_are_refused_where_they_are_not_used():
    logits = np.array([[0.5, 1.0, -1.0]])
    inputs = {"logits": logits, "targets": np.array([0]), "cotangent_logprobs": np.ones(1)}
    kept = {"top_p": np.array([[1, 1, 0]])}
    found = replay("slime", "logprobs", "f", {"keep_mask": True}, inputs | kept)
    assert found["logprobs"] == pytest.approx(0.5 - np.log(np.exp(0.5) + np.exp(1.0)))
    with pytest.raises(SpecError, match="with 'top_p'"):
        replay("slime", "logprobs", "f", {}, inputs | kept)
    with pytest.raises(SpecError, match="with 'keep_mask'"):
        replay("slime", "logprobs", "f", {}, inputs | {"keep_mask": kept["top_p"]})
