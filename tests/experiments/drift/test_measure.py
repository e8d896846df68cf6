"""Drift: what counts as agreement, the record, and that every adapter names the release it was verified against."""

import math

import pytest
import torch

from experiments.drift import draw, measure
from workbench.atomic import from_json
from workbench.systems import load_system, replay

RECORD = from_json(measure.RECORD.read_text())


def case_of(system, number=0):
    return draw.draw(system, number)


def results_of(case, system, **changes):
    made = replay(system, case["kind"], case["function"], case["config"], case["arrays"])
    return {**made, **changes}


@pytest.mark.parametrize("system", draw.OPTIONS)
def test_every_drawn_call_is_replayed(system):
    configs = [case_of(system, number)["config"] for number in range(12)]
    assert len({str(config) for config in configs}) > 8
    replay_of_nothing = case_of(system, draw.EMPTY_EVERY - 1)
    assert not replay_of_nothing["arrays"]["mask"].any()
    results_of(replay_of_nothing, system)


def test_a_result_agrees_within_the_bar_and_nan_with_nan():
    case = case_of("openrlhf")
    right = results_of(case, "openrlhf")
    near = {**right, "loss": right["loss"] + 1e-10}
    far = {**right, "loss": right["loss"] + 1e-8}
    lost = {**right, "loss": torch.tensor(math.nan)}
    broken = {"error": "ValueError: no"}
    agreement = {}
    for name, other in {"near": near, "far": far, "lost": lost, "broken": broken}.items():
        row = measure.compare("openrlhf", [case], {"as_it_is": [right], "lifted": [other]})
        agreement[name] = (row["agree"], bool(row["differing"]))
    assert agreement == {"near": (1, False), "far": (0, True), "lost": (0, True), "broken": (0, True)}
    undefined = {"loss": torch.tensor(math.nan), "metrics": {}}
    assert measure._differences(undefined, {**undefined}) == ([], [0.0])


def test_what_is_known_is_counted_apart():
    number = next(n for n in range(60) if case_of("liger", n)["config"]["loss_type"] == "luspo")
    case = case_of("liger", number)
    other = results_of(case, "liger", loss=torch.tensor(7.0))
    row = measure.compare("liger", [case], {"as_it_is": [other], "lifted": [other]})
    assert (row["agree"], row["known"], row["differing"], row["distance"]) == (0, 1, [], 0.0)


@pytest.mark.parametrize("system", RECORD["systems"])
def test_the_record_is_of_the_release_that_the_adapter_names(system):
    row = RECORD["systems"][system]
    assert row["release"] in load_system(system).version
    assert row["agree"] + row["known"] == row["cases"] == RECORD["cases"]
    assert row["distance"] <= RECORD["bar"]


def test_the_whole_config_of_trl_is_known():
    assert RECORD["systems"]["trl"]["options_not_known"] == []
    assert "learning_rate" in measure.options_of("trl")
