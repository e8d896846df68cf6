"""Norms and checksums on a GPU: sums in float64 of numbers of any dtype, and the digits of the CPU."""

import pytest
import torch
from torch import nn

from workbench.records.observed import checksum
from workbench.sharding.gradients import given_norms

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_those_of_float64(dtype):
    parameters = {}
    for number, shape in enumerate([(3_000_000,), (1000, 1001), (7,), (0, 4), (1,)]):
        draw = torch.Generator().manual_seed(number)
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device="cuda"))
        parameter.grad = torch.randn(shape, generator=draw).to(parameter)
        parameters[str(number)] = parameter
    norms = given_norms(parameters)
    for name, parameter in parameters.items():
        assert norms[name] == pytest.approx(float(parameter.grad.double().norm()), rel=1e-13, abs=0)


def test_a_checksum_has_the_digits_of_the_cpu():
    draw = torch.Generator().manual_seed(0)
    weights = {str(shape): torch.randn(shape, generator=draw) for shape in [(64, 32), (33, 7), (5,), (2, 3, 4)]}
    weights |= {f"bf16 {name}": value.bfloat16() for name, value in weights.items()}
    assert checksum({name: value.cuda() for name, value in weights.items()}) == checksum(weights)
