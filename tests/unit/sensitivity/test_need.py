"""A need holds of facts, and names what is missing."""

from tests.helpers.planted_faults import BASE
from tests.unit.sensitivity.test_needs import facts
from workbench.sensitivity.need import Need


def test_a_need_is_a_test_of_facts():
    two = Need("one cp rank", lambda f: f.spec.layout.cp > 1)
    assert (two.holds(facts(BASE)), two.change, two.observed) == (False, "", False)
