import pytest
import torch

from tests.helpers.ranks import run_ranks
from workbench.errors import UnreducedError
from workbench.reduction.partial import Scalar
from workbench.sharding.mesh import make_mesh

PARTIAL = Scalar(torch.tensor(2.0), frozenset({"dp_cp"}))


@pytest.mark.parametrize("read", [float, bool, lambda s: s == 2, lambda s: s < 1, lambda s: f"{s:.2f}"])
def test_an_unfinished_number_refuses_to_be_read(read):
    with pytest.raises(UnreducedError, match="partial over dp_cp"):
        read(PARTIAL)


def test_whole_numbers_are_numbers():
    whole = Scalar(torch.tensor(2.0), frozenset())
    assert (float(whole), f"{whole:.1f}", repr(whole)) == (2.0, "2.0", "Scalar(2)")
    assert repr(PARTIAL) == "Scalar(partial over dp_cp)"


def test_parts_over_other_axes_do_not_add():
    with pytest.raises(UnreducedError, match="added to"):
        PARTIAL + Scalar(torch.tensor(1.0), frozenset())
    assert (PARTIAL + PARTIAL).partial_over == {"dp_cp"}


def completed():
    mesh = make_mesh(cp=2)
    part = Scalar(torch.tensor(1.0 + mesh["cp"].rank, requires_grad=True), frozenset({"dp_cp"}))
    whole = part.complete(mesh)
    return float(whole), whole.value.requires_grad, float(part.value.detach())


def test_completing_sums_over_the_missing_axes(tmp_path):
    assert run_ranks(completed, 2, tmp_path) == [(3.0, False, 1.0), (3.0, False, 2.0)]
