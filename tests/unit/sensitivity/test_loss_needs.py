"""Needs of terms ask whether any of them has a gradient."""

from tests.helpers.planted_faults import BASE
from tests.unit.sensitivity.test_needs import facts
from workbench.sensitivity.loss_needs import CLIPPED_BELOW, POLICY_TERM, UNLIKE_RATIOS


def test_a_clip_at_epsilon_frees_tokens_above_it_alone():
    assert CLIPPED_BELOW.holds(facts(BASE, ratio_below=0.7))
    assert not CLIPPED_BELOW.holds(facts(BASE, ratio_below=0.1))


def test_ratios_of_parts_show_above_the_budget_of_the_precision():
    assert POLICY_TERM.holds(facts(BASE))
    assert UNLIKE_RATIOS.holds(facts(BASE, ratios_of_parts=1e-6))
    assert not UNLIKE_RATIOS.holds(facts(BASE, ratios_of_parts=0.0))
    assert not UNLIKE_RATIOS.holds(facts({**BASE, "precision": "float32"}, ratios_of_parts=1e-6))
