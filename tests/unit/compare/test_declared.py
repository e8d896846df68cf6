"""Invariants that a loss declares to break are read from a configuration's settings, and told in a sentence."""

import pytest

from workbench.compare.declared import MEANINGS, declared_breaks, declared_note
from workbench.prove.invariants import DECLARED
from workbench.specs.losses import PRESETS, LossSpec


@pytest.mark.parametrize("name", list(PRESETS))
def test_the_settings_of_a_run_declare_what_its_loss_declares(name):
    settings = {"loss": LossSpec(name=name).model_dump(mode="json")}
    assert declared_breaks(settings) == LossSpec(name=name).breaks
    assert bool(declared_note(settings)) == bool(LossSpec(name=name).breaks)


def test_losses_that_break_an_invariant_by_definition_are_told():
    assert {"micro_batch", "dp"} <= set(declared_breaks({"loss": {"name": "bnpo"}}))
    for name in ("clip_cov", "kl_cov"):
        assert {"micro_batch", "packing", "dp", "cp"} <= set(declared_breaks({"loss": {"name": name}}))
        assert declared_note({"loss": {"name": name}}).startswith(f"{name} declares")


@pytest.mark.parametrize(
    "settings",
    [{}, {"loss": None}, {"loss": {"name": "no such loss"}}, {"loss": "own.py:mine"}, {"loss": {"no_such_key": 1}}],
)
def test_a_loss_that_cannot_be_read_declares_nothing(settings):
    assert declared_breaks(settings) == ()
    assert declared_note(settings) == ""


def test_every_declaration_has_a_meaning():
    assert set(MEANINGS) == set(DECLARED)
