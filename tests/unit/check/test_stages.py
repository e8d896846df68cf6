"""Quantities, their stages, and differences beyond a tolerance."""

import math
from dataclasses import replace

import torch

from tests.helpers.dumped_step import dump
from workbench.check.stages import STAGES, compare, recorded_quantities, stage_of, tolerances


def test_every_quantity_has_one_stage():
    names = {"advantages": "advantages", "counts/tokens": "mask and denominator", "losses/total": "loss"}
    names |= {"coefficients": "coefficients", "metrics/actor/ppo_kl": "metrics", "ratios": "ratios"}
    assert {name: stage_of(name) for name in names} == names
    assert next(iter(STAGES)) == "advantages"


def test_what_a_step_recorded():
    step = replace(dump(), counts={"tokens": 33.0}, metrics={"a": 1.0})
    recorded = recorded_quantities(step)
    assert {*recorded} == {
        "advantages",
        "coefficients",
        "counts/tokens",
        "losses/total",
        "losses/policy",
        "losses/kl",
        "metrics/a",
    }


def test_the_largest_difference_is_the_one_that_is_shown():
    step = dump()
    expected = {"coefficients": step.tokens["coefficients"]}
    changed = expected["coefficients"].clone()
    changed[3] += 0.5
    changed[5] += 0.25
    bounds = tolerances(expected, (), "float32")
    (mismatch,) = compare(step, {"coefficients": changed}, expected, bounds).values()
    assert (mismatch.token, mismatch.tokens, mismatch.of) == (3, 2, 56)
    assert mismatch.recorded - mismatch.expected == 0.5
    assert compare(step, expected, expected, bounds) == {"coefficients": None}


def test_padding_is_compared_for_coefficients_only():
    step = dump()
    at = int(torch.nonzero(~step.loss_mask_T)[0])
    changed = torch.zeros(56).double()
    changed[at] = 1.0
    for name, differs in (("coefficients", True), ("ratios", False)):
        expected = {name: torch.zeros(56).double()}
        results = compare(step, {name: changed}, expected, tolerances(expected, (), "float64"))
        assert (results[name] is not None) is differs


def test_a_number_that_is_nan_in_both_agrees_and_a_mean_of_means_is_accepted():
    expected = {"metrics/a": math.nan, "metrics/b": 2.0, "means/b": 3.0}
    bounds = tolerances(expected, (), "float32")
    step = dump()
    assert compare(step, {"metrics/a": math.nan, "metrics/b": 3.0}, expected, bounds) == {
        "metrics/a": None,
        "metrics/b": None,
    }
    assert compare(step, {"metrics/b": 2.5}, expected, bounds)["metrics/b"].expected == 2.0


def test_a_tolerance_holds_what_rounding_changes():
    expected, moved = {"ratios": torch.tensor([1.0, 0.0])}, {"ratios": torch.tensor([1.5, 0.0])}
    bounds = tolerances(expected, (moved,), "float32")["ratios"]
    assert 0.5 <= float(bounds[0]) < 0.51
    assert float(bounds[1]) < 1e-7
