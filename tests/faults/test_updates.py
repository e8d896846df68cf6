"""Faults of the optimizer's step: weights after some steps, with and without each."""

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.online_runs import done
from workbench.errors import SpecError
from workbench.faults import fault_names, load_fault
from workbench.specs.reading import merge

NAMES = [name for name in fault_names() if load_fault(name).changes_update]


def outcome(folder, name, settings):
    """Weights after the run and its step records."""
    run = done(folder, name, **merge({"record": {"checkpoint_every": 1, "gradients": "full"}}, settings))
    folder_of = list(run.checkpoints().values())[-1] if run.checkpoints() else None
    return run, load_file(folder_of / "weights.safetensors") if folder_of else {}


def pair(folder, name, settings):
    right, weights = outcome(folder / "right", "run", settings)
    wrong, other = outcome(folder / "wrong", "run", merge(settings, {"faults": [name]}))
    return right, weights, wrong, other


def test_there_are_some():
    assert len(NAMES) == 4


@pytest.mark.parametrize("name", [name for name in NAMES if name != "overflow_not_skipped"])
def test_an_update_is_wrong_where_the_fault_shows_and_right_where_it_hides(name, tmp_path):
    fault = load_fault(name)
    right, weights, wrong, other = pair(tmp_path / "shows", name, fault.shows_in)
    first, its = (run.read_tensors("step0000.gradients") for run in (right, wrong))
    assert all(torch.equal(first[key], its[key]) for key in first), "the gradient is right"
    assert any(not torch.equal(weights[key], other[key]) for key in weights)
    _, weights, _, other = pair(tmp_path / "hides", name, merge(fault.shows_in, fault.hidden_in))
    assert weights
    assert all(torch.equal(weights[key], other[key]) for key in weights)


def test_an_overflow_that_is_not_skipped_ends_the_run(tmp_path):
    name = "overflow_not_skipped"
    fault = load_fault(name)
    run, weights = outcome(tmp_path / "right", "run", fault.shows_in)
    assert [step["precision/skipped"] for step in run.steps()] == [1.0, 1.0]
    assert all(value.isfinite().all() for value in weights.values())
    with pytest.raises(SpecError, match="log-probabilities that are not finite"):
        outcome(tmp_path / "wrong", "run", merge(fault.shows_in, {"faults": [name]}))
    _, weights, _, other = pair(tmp_path / "hides", name, merge(fault.shows_in, fault.hidden_in))
    assert weights
    assert all(torch.equal(weights[key], other[key]) for key in weights)


def test_masters_in_bfloat16_stand_still_at_the_rate_of_rl(tmp_path):
    settings = merge(load_fault("masters_in_bfloat16").shows_in, {"optimizer": {"learning_rate": 1e-6}})
    _, weights, _, other = pair(tmp_path, "masters_in_bfloat16", settings)
    start = {name: value.bfloat16() for name, value in weights.items()}
    still = [float((other[name].bfloat16() == start[name]).double().mean()) for name in weights]
    assert min(still) > 0.9
    assert any(not torch.equal(weights[name], other[name]) for name in weights)
