"""Changes of data and settings do what their name says, and the small dataset has all properties of data."""

import pytest

from tests.unit.sensitivity.test_facts import batch
from workbench.errors import SpecError
from workbench.records.provenance import project_root
from workbench.rollouts.files import load
from workbench.sensitivity import data_needs, layout_needs, loss_needs, needs
from workbench.sensitivity.changes import ALONE, DATA, SETTINGS, changed, small_dataset
from workbench.sensitivity.facts import step_facts
from workbench.specs.run import RunSpec

ROLLOUTS = batch([0, 1, 1, 1], [0, 1, 1], [0, 1], groups=[1, 1, 2])


def facts(rollouts, **settings):
    (step,) = step_facts(rollouts, RunSpec.model_validate(settings))
    return step


def test_every_change_that_a_need_names_exists():
    modules = (layout_needs, data_needs, loss_needs)
    every = [each for module in modules for each in vars(module).values() if isinstance(each, needs.Need)]
    named = {each.change for each in every if each.change}
    named |= {need.change for of_fault in needs.NEEDS.values() for need in of_fault if need.change}
    assert len(named) > 20
    assert named <= set(SETTINGS) | set(DATA)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_change_of_settings_is_valid(settings):
    ablation = RunSpec.model_validate({"loss": {"name": "grpo", "surrogate": {"clip_high": 0.28}}})
    if settings == SETTINGS["a clamped penalty"]:
        settings = {"loss": {**settings["loss"], "kl": SETTINGS["a penalty with its score"]["loss"]["kl"]}}
    spec = changed(ablation, settings)
    assert spec != ablation or settings in (SETTINGS["adamw"], SETTINGS["a mean over tokens"])  # the defaults


def test_another_loss_brings_its_own_surrogate_and_denominator():
    own = {"name": "grpo", "surrogate": {"clip_high": 0.28}, "denominator": "token", "kl": {"coefficient": 0.05}}
    spec = changed(RunSpec.model_validate({"loss": own}), {"loss": {"name": "luspo"}})
    assert (spec.loss.surrogate.kind, spec.loss.denominator) == ("luspo", "document")
    assert spec.loss.kl.coefficient == 0.05


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("a masked document", {"untrained": 1, "untrained_with_others": 1}),
        ("a hole in a mask", {"holes": 1}),
        ("mixed-up groups", {"groups_in_place": False}),
        ("a rollout of two documents", {"rollouts_of_several": 1}),
        ("one trained document", {"untrained": 2}),
    ],
)
def test_a_change_of_data_adds_its_property(name, changes):
    rollouts = batch([0, 1, 1, 1], [0, 1, 1], [0, 1, 1], [0, 1], groups=[1, 1, 2, 2]) if "groups" in name else ROLLOUTS
    before, after = facts(rollouts), facts(DATA[name](rollouts))
    for key, value in changes.items():
        assert getattr(after, key) == value
        assert getattr(before, key) != value


@pytest.mark.parametrize(
    ("name", "field"),
    [("other old log-probabilities", "old_logprobs_T"), ("another sampler", "sampler_logprobs_T")],
)
def test_moved_log_probabilities_go_both_ways_and_stay_below_0(name, field):
    moved = getattr(DATA[name](ROLLOUTS), field) - ROLLOUTS.old_logprobs_T
    trained = ROLLOUTS.loss_mask_T
    assert bool((moved[trained] > 0.1).any())
    assert bool((moved[trained] < -0.1).any())
    assert bool((getattr(DATA[name](ROLLOUTS), field) <= 0).all())
    assert not bool((getattr(DATA[name](ROLLOUTS), field) != getattr(ROLLOUTS, field))[~trained].any())


def test_a_batch_without_a_reference_keeps_none():
    assert DATA["another reference"](ROLLOUTS).ref_logprobs_T is None


def test_the_small_dataset_has_every_property_that_goes_together():
    small = small_dataset(load(project_root() / "data/arithmetic/rollouts"))
    step = facts(small)
    assert small.num_tokens < 200
    assert min(step.untrained_with_others, step.holes, step.trained_ends, step.rollouts_of_several) >= 1
    assert step.varied_advantages
    assert not step.groups_in_place
    assert step.largest_weight > 1.1 > 0.9 > step.least_weight
    assert len({*step.prompt_tokens}) > 1
    assert float((small.old_logprobs_T - small.ref_logprobs_T)[small.loss_mask_T].abs().max()) > 0.2
    assert set(ALONE) < set(DATA)


def test_no_two_documents_fit_in_too_few_tokens():
    with pytest.raises(SpecError, match="fewer than 8 tokens"):
        small_dataset(load(project_root() / "data/arithmetic/rollouts"), max_tokens=8)
