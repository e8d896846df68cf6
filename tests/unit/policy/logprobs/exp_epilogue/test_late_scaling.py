"""The kernels, interpreted where no GPU is."""

from __future__ import annotations

import pytest
import torch

from tests.unit.policy.logprobs.exp_epilogue.test_kernels import DEVICE
from workbench.policy.logprobs.exp_epilogue.late_scaling import add_in_place, scale_in_place


@pytest.mark.parametrize("factor", [1.0, -0.25])
def test_every_element_once(factor):
    old = torch.arange(9000.0, device=DEVICE)
    values, by = old.clone(), torch.tensor([factor], device=DEVICE)
    scale_in_place(values, by)
    assert values.tolist() == (old * factor).tolist()
    add_in_place(values, old, by)
    assert values.tolist() == (old * factor + old * factor).tolist()
