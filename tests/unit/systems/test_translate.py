"""From options to a spec, and back where there is a way."""

import dataclasses

import pytest

from tests.unit.systems.test_explanations import LOSSES, spec_of
from workbench.errors import SpecError
from workbench.losses.canonical import canonical
from workbench.specs.losses import LossSpec
from workbench.systems import loss_spec, settings_for
from workbench.systems import registry as systems
from workbench.systems.registry import load_system
from workbench.systems.translate import translation


def test_defaults_are_the_systems():
    assert loss_spec("verl", {}).surrogate.dual_clip == 3.0
    assert loss_spec("trl", {}) == translation("trl", {}).spec


def led_back(system, spec):
    """The spec of the options for a spec; None where the system, in words, has none."""
    try:
        options = settings_for(system, spec)
    except SpecError:
        return None
    return loss_spec(system, options)


@pytest.mark.parametrize("system", systems.SYSTEMS)
def test_options_for_a_systems_own_loss_lead_back_to_it(system):
    own = [loss_spec(system, {}), *(spec_of(*case) for case in LOSSES if case[0] == system)]
    pairs = [(back, spec) for spec in own if (back := led_back(system, spec)) is not None]
    assert len(pairs) > 0.5 * len(own)
    for back, spec in pairs:
        assert canonical(back) == canonical(spec)


@pytest.mark.parametrize("system", systems.SYSTEMS)
def test_a_loss_that_a_system_does_not_have_is_refused_in_words(system):
    spec = LossSpec(name="clip_cov") if system != "verl" else LossSpec(name="vespo")
    with pytest.raises(SpecError) as caught:
        settings_for(system, spec)
    assert caught.value.parts["rule"]


def test_a_system_without_a_way_back_says_so(monkeypatch):
    one_way = dataclasses.replace(load_system("verl"), back=None)
    monkeypatch.setattr("workbench.systems.translate.load_system", lambda _: one_way)
    with pytest.raises(SpecError, match="options of verl for a spec"):
        settings_for("verl", LossSpec())
