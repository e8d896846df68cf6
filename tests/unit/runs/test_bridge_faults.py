"""Faults of two modules say what they are, stand at seams that are there, and leave them whole."""

import ast
from pathlib import Path

import pytest

from workbench.runs.bridge_faults import BRIDGE_FAULTS
from workbench.runs.faults import FAMILIES, _place, fault_names, planted_faults

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", BRIDGE_FAULTS)
def test_a_fault_says_what_it_is(name):
    fault = BRIDGE_FAULTS[name]
    assert fault.family in FAMILIES
    assert all([fault.what, fault.origin, fault.signature])
    assert {"encoder", "layout", "delivery"} <= fault.shows_in.keys() & fault.hidden_in.keys()
    file, _, test = fault.detected_by.partition("::")
    tests = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
    assert test in tests


@pytest.mark.parametrize("name", BRIDGE_FAULTS)
def test_its_seam_is_there_and_whole_again_afterwards(name):
    owner, attribute = _place(BRIDGE_FAULTS[name].seam)
    right = vars(owner)[attribute]
    with planted_faults({name: BRIDGE_FAULTS[name]}):
        assert vars(owner)[attribute] is not right
    assert vars(owner)[attribute] is right


def test_no_run_of_one_module_can_ask_for_one():
    assert not BRIDGE_FAULTS.keys() & set(fault_names())
