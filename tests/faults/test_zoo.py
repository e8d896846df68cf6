"""Every fault shows where and as it is declared, and changes nothing where it hides."""

import ast
import functools
from pathlib import Path

import pytest

from tests.helpers.bars import assert_float64_parity
from tests.helpers.planted_faults import hidden, shown
from workbench.faults import FAMILIES, fault_names, load_fault

NAMES = [name for name in fault_names() if load_fault(name).changes_numbers]
HIDING = [name for name in NAMES if load_fault(name).hidden_in is not None]
ROOT = Path(__file__).parents[2]


def test_every_family_has_a_fault_that_changes_numbers():
    assert {load_fault(name).family for name in NAMES} == set(FAMILIES) - {"U"}
    others = {name: load_fault(name) for name in set(fault_names()) - set(NAMES)}
    assert sorted(name for name in others if not others[name].changes_update) == ["skipped_collective", "straggler"]
    assert {fault.family for fault in others.values() if fault.changes_update} == {"U"}


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_turns_parity_red(name):
    fault, pair = load_fault(name), shown(name)
    if fault.changes_gradient:
        with pytest.raises(AssertionError, match="parameters differ"):
            assert_float64_parity(pair.wrong.gradients, pair.right.gradients, context=name)
    else:
        assert_float64_parity(pair.wrong.gradients, pair.right.gradients, context=name)
    assert bool(pair.wrong_numbers) == fault.changes_metrics, pair.wrong_numbers[:5]


@pytest.mark.parametrize("name", HIDING)
def test_a_fault_without_effect_is_called_equal(name):
    pair = hidden(name)
    assert_float64_parity(pair.wrong.gradients, pair.right.gradients, context=f"{name}, hidden")
    assert pair.wrong_numbers == []


@pytest.mark.parametrize("name", fault_names())
def test_a_fault_describes_itself(name):
    fault = load_fault(name)
    assert fault.family in FAMILIES
    assert all([fault.what, fault.origin, fault.signature])
    file, _, test = fault.detected_by.partition("::")
    assert test in functions_of(ROOT / file), f"{name}: no test {fault.detected_by}"


@functools.cache  # of some forty files for two hundred faults
def functions_of(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
