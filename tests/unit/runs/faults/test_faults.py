import pytest

from workbench.errors import SpecError
from workbench.runs import step
from workbench.runs.faults import fault_names, load_fault, planted


@pytest.mark.parametrize("name", fault_names())
def test_a_fault_swaps_its_seam_and_puts_it_back(name):
    fault = load_fault(name)
    right = getattr(step, fault.seam)
    with planted([name]):
        assert getattr(step, fault.seam) is not right
    assert getattr(step, fault.seam) is right
    assert all([fault.what, fault.origin, fault.signature])


def test_seams_are_whole_again_after_an_error():
    right = step.split_row
    with pytest.raises(RuntimeError, match="planned"), planted(["shift_after_shard"]):
        raise RuntimeError("planned")
    assert step.split_row is right


def test_two_faults_on_one_seam_both_act_and_leave():
    right = step.split_row
    with planted(["shift_after_shard", "local_denominator"]):
        assert step.split_row is not right
    assert step.split_row is right


def test_an_unknown_fault_is_refused_with_the_known_ones():
    with pytest.raises(SpecError, match="local_denominator, micro_batch_denominator, missing_cp_factor"):
        load_fault("local_denominators")
