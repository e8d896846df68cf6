import pytest
import torch

from workbench.errors import ShapeError
from workbench.losses import LossInputs


def test_inputs_of_other_lengths_are_refused():
    with pytest.raises(ShapeError, match="old_logprobs_T has T=2, but T=3"):
        LossInputs(torch.zeros(3), torch.zeros(2), torch.zeros(3))
