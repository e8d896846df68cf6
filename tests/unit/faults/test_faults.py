import pkgutil

import pytest

from workbench import faults
from workbench.errors import SpecError
from workbench.faults import Fault, fault_names, load_fault, planted
from workbench.policy.model import Policy
from workbench.sharding.mesh import Mesh
from workbench.train import step


def at(seam):
    """The function at a seam now."""
    return pkgutil.resolve_name(seam if ":" in seam else f"workbench.train.step:{seam}")


@pytest.fixture
def invented(monkeypatch):
    """A fault at any seam, under the name of a known one; it adds itself to a list when it is called."""
    called = []

    def plant(seam, word="called"):
        def broken(right):
            def wrong(*args, **settings):
                called.append(word)
                return right(*args, **settings)

            return wrong

        fault = Fault(name="invented", family="S", what="w", origin="o", signature="s", seam=seam, broken=broken)
        monkeypatch.setattr(faults, "load_fault", lambda name: fault)
        return called

    return plant


@pytest.mark.parametrize("name", fault_names())
def test_a_fault_swaps_its_seam_and_puts_it_back(name):
    seam = load_fault(name).seam
    right = at(seam)
    with planted([name]):
        assert at(seam) is not right
    assert at(seam) == right


def test_seams_are_whole_again_after_an_error():
    right = step.split_row
    with pytest.raises(RuntimeError, match="planned"), planted(["shift_after_shard"]):
        raise RuntimeError("planned")
    assert step.split_row is right


def test_two_faults_on_one_seam_both_act_and_leave():
    right = step.split_row
    with planted(["shift_after_shard"]):
        first = step.split_row
        with planted(["local_denominator"]):
            assert step.split_row.__closure__[0].cell_contents is first
    with planted(["shift_after_shard", "local_denominator"]):
        inner = step.split_row.__closure__[0].cell_contents
        assert inner is not right
        assert inner.__closure__[0].cell_contents is right
    assert step.split_row is right


def test_a_seam_may_be_a_method_of_a_class_anywhere(invented):
    called, right = invented("workbench.policy.model:Policy.head_arguments"), Policy.head_arguments
    with planted(["one"]):
        with pytest.raises(AttributeError, match="mesh"):
            Policy.head_arguments(object())
        assert called == ["called"]
    assert Policy.head_arguments is right


@pytest.mark.parametrize(
    "seam", ["workbench.sharding.plan:ShardPlan.make", "workbench.sharding.collectives:_Paired.backward"]
)
def test_class_methods_and_static_methods_keep_their_kind(seam, invented):
    owner = at(seam.rpartition(".")[0])
    held = vars(owner)[seam.rpartition(".")[2]]
    invented(seam)
    with planted(["one"]):
        swapped = vars(owner)[seam.rpartition(".")[2]]
        assert swapped is not held
        assert type(swapped) is type(held)
    assert vars(owner)[seam.rpartition(".")[2]] is held


@pytest.mark.parametrize(
    ("seam", "found"),
    [
        ("no_such_function", "found: nothing of that name"),
        ("workbench.sharding.mesh:Mesh.is_first", "found: property"),
        ("workbench.rollouts.batch:PADDING", "found: int"),
    ],
)
def test_a_seam_that_is_no_function_is_refused_and_stays(seam, found, invented):
    invented(seam)
    held = Mesh.is_first
    with pytest.raises(SpecError, match=found), planted(["one"]):
        pass
    assert Mesh.is_first is held


def test_an_unknown_fault_is_refused_with_the_nearest_names():
    with pytest.raises(SpecError, match=r"(?s)did you mean 'local_denominator' or .*fault_names\(\) there lists them"):
        load_fault("local_denominators")


def test_a_fault_that_stands_twice_is_refused():
    with pytest.raises(SpecError, match="straggler more than once"), planted(["straggler", "straggler"]):
        pass
