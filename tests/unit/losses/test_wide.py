"""Float64 throughout a function; what else `prove` needs of it is in tests/unit/prove."""

import torch

from workbench.losses.wide import InFloat64


def test_casts_and_new_tensors_are_float64_and_integers_stay():
    half = torch.ones(2, dtype=torch.bfloat16)
    with InFloat64():
        made = [half.float(), half.to(torch.float16), torch.zeros(2), torch.full((2,), 0.5), torch.arange(2)]
    assert [each.dtype for each in made] == [*[torch.float64] * 4, torch.int64]
    assert torch.zeros(2).dtype == torch.float32
