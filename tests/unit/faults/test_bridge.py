"""Faults of two modules describe themselves, name existing seams, and restore them."""

import ast
from pathlib import Path

import pytest

from workbench.faults import FAMILIES, _resolve, fault_names, planted_faults
from workbench.faults.bridge import BRIDGE_FAULTS
from workbench.sharding.bridge.direct import Direct
from workbench.sharding.mesh import Axis

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", BRIDGE_FAULTS)
def test_a_fault_describes_itself(name):
    fault = BRIDGE_FAULTS[name]
    assert fault.family in FAMILIES
    assert all([fault.what, fault.origin, fault.signature])
    assert {"encoder", "layout", "delivery"} <= fault.shows_in.keys() & fault.hidden_in.keys()
    file, _, test = fault.detected_by.partition("::")
    tests = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
    assert test in tests


@pytest.mark.parametrize("name", BRIDGE_FAULTS)
def test_its_seam_is_there_and_whole_again_afterwards(name):
    owner, attribute = _resolve(BRIDGE_FAULTS[name].seam)
    right = vars(owner)[attribute]
    with planted_faults([BRIDGE_FAULTS[name]]):
        assert vars(owner)[attribute] is not right
    assert vars(owner)[attribute] is right


@pytest.mark.parametrize(("slot", "taken"), [(0, 1), (1, 2), (2, 0)])
def test_the_neighbours_slot_is_the_next_and_the_first_ones_for_the_last(slot, taken):
    """With two slots alone, the next and the one before would be the same."""

    def own_slot(values, direct):
        return values[direct.slot]

    axis = Axis("dp")
    direct = Direct("fan-in", slot, slots=3, batch_dim=0, sequence_dim=1, gather=axis, cp=axis)
    assert BRIDGE_FAULTS["gradient_of_next_slot"].broken(own_slot)(["a", "b", "c"], direct) == "abc"[taken]


def test_bridge_faults_are_not_accepted_by_single_module_runs():
    assert not BRIDGE_FAULTS.keys() & set(fault_names())
