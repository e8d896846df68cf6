"""Systems: known by name, and their options refused by name."""

import dataclasses
import importlib

import pytest

from workbench import systems
from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems import metrics as aliases
from workbench.systems.case import inputs_of
from workbench.systems.registry import SYSTEMS, Settings, System, load_system, parse_settings, translate_settings
from workbench.systems.replays import COMMON
from workbench.systems.translate import translation


class Two(Settings):
    """Two options."""

    clip: float = 0.2
    """A length."""
    mode: str = "a"
    """A name."""


class Grouped(Settings):
    """Two options in a group."""

    cut: float = 0.2
    """A length."""
    group: Two | None = None
    """The group."""


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_is_whole(name):
    system = load_system(name)
    assert isinstance(system, System)
    assert system.name == name
    assert system.version
    assert system.scaling
    assert issubclass(system.settings, Settings)
    result = translation(name, {})
    assert isinstance(result.spec, LossSpec)
    assert set(result.given) <= set(system.settings.model_fields)
    undocumented = [option for option, field in system.settings.model_fields.items() if not field.description]
    assert undocumented == []


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_is_registered_everywhere(name):
    assert importlib.import_module(f"tests.oracles.systems.{name}")
    assert len(aliases.alias_table(name)) >= 2
    for kind in {**COMMON, **load_system(name).replays}:
        assert inputs_of(name, kind), kind


@pytest.mark.parametrize("name", ["nemo-rl", "NeMo-RL", "nemorl"])
def test_an_unknown_system_is_refused_with_the_nearest(name):
    with pytest.raises(SpecError, match="did you mean 'nemo_rl'"):
        load_system(name)


def test_an_unknown_option_is_refused_with_the_nearest():
    with pytest.raises(SpecError, match=r"somewhere: 1 option\(s\) cannot be used") as caught:
        parse_settings(Two, {"clipp": 0.1}, where="somewhere")
    assert "unknown option 'clipp' (did you mean 'clip'?)" in str(caught.value)
    assert "options of Two: clip, mode" in str(caught.value)


def test_an_unknown_option_of_a_group_is_refused_with_the_nearest_in_the_group():
    with pytest.raises(SpecError) as caught:
        parse_settings(Grouped, {"group": {"clipp": 0.1}}, where="somewhere")
    assert "unknown option 'group.clipp' (did you mean 'clip'?)" in str(caught.value)
    assert caught.value.parts["rule"] == "options of Two: clip, mode"


def test_an_invalid_value_is_reported_with_its_option():
    with pytest.raises(SpecError, match="clip = 'wide'") as caught:
        parse_settings(Two, {"clip": "wide"}, where="somewhere")
    assert "options of Two" not in str(caught.value)


@pytest.mark.parametrize("settings", [None, ["clip"], "clip"])
def test_options_that_are_no_mapping_are_refused(settings):
    with pytest.raises(SpecError, match="options of somewhere") as caught:
        parse_settings(Two, settings, where="somewhere")
    assert caught.value.parts["found"] == repr(settings)


def test_an_error_of_our_spec_is_reported():
    def clashing(_):
        return LossSpec(denominator="token", denominator_constant=3.0)

    system = dataclasses.replace(load_system("verl"), title="Somebody", translate=clashing)
    with pytest.raises(SpecError, match="Somebody: translation of these options to a LossSpec") as caught:
        translate_settings(system, Two())
    assert "denominator_constant is not used" in str(caught.value)


def test_the_package_exports_functions_in_any_import_order():
    for place in ("explanations", "replays", "translate"):
        importlib.import_module(f"workbench.systems.{place}")
    for name in ("loss_spec", "settings_for", "explain", "replay", "contract_table", "scaling_contract"):
        assert callable(getattr(systems, name)), name
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        _ = systems.lunch
