import pytest
import torch

from workbench.errors import ShapeError
from workbench.shapes import check_shapes


def test_sizes_come_back_by_letter():
    assert check_shapes("f", hidden_TD=torch.zeros(3, 2), targets_T=torch.zeros(3), bias_V=None) == {"T": 3, "D": 2}


def test_every_mismatch_is_reported_at_once():
    with pytest.raises(ShapeError) as caught:
        check_shapes(
            "token_logprobs", hidden_TD=torch.zeros(3, 2), weight_VD=torch.zeros(5, 4), targets_T=torch.zeros(3, 1)
        )
    assert str(caught.value) == (
        "token_logprobs: shapes disagree\n"
        "  found: weight_VD has D=4, but hidden_TD has D=2 (shapes (5, 4) and (3, 2)); "
        "targets_T has shape (3, 1), which is not [T]\n"
        "  rule: the capitals that end a name are its logical shape\n"
        "  do: pass tensors whose shapes agree"
    )
