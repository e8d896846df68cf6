"""Formats of GEMM operands against numbers enumerated from the formats' definitions, one element at a time."""

import math

import pytest
import torch

from tests.helpers.stand_in import stand_in
from workbench.errors import SpecError
from workbench.policy import gemm_formats
from workbench.policy.decoder import load_decoder
from workbench.policy.gemm_formats import emulating, in_hardware, round_to_tf32, rounded, use_gemm_formats
from workbench.policy.model import load_policy


def numbers(exponent_bits, mantissa_bits, bias, last):
    """Every non-negative number of a format, in order, up to its largest."""
    found = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            share = mantissa / 2**mantissa_bits
            found.append((1 + share) * 2.0 ** (exponent - bias) if exponent else share * 2.0 ** (1 - bias))
    return [value for value in found if value <= last]


E4M3, E5M2 = numbers(4, 3, 7, 448.0), numbers(5, 2, 15, 57344.0)


def nearest(value, grid):
    """The nearest number of a grid; of two, the one with an even mantissa, which has an even place."""
    at = min(range(len(grid)), key=lambda i: (abs(grid[i] - abs(value)), i % 2))
    return math.copysign(grid[at], value)


def by_hand(operand, name, role):
    """The definition of each format, element by element."""
    rows, columns = len(operand), len(operand[0])
    grid = E5M2 if (name, role) == ("fp8_tensorwise", "gradient") else E4M3
    tall = rows if name == "fp8_tensorwise" else 128 if (name, role) == ("fp8_blockwise", "weight") else 1
    wide = {"fp8_tensorwise": columns, "fp8_rowwise": columns, "fp8_blockwise": 128, "mxfp8": 32}[name]
    result = [[0.0] * columns for _ in range(rows)]
    for top in range(0, rows, tall):
        for left in range(0, columns, wide):
            places = [(i, j) for i in range(top, min(top + tall, rows)) for j in range(left, min(left + wide, columns))]
            largest = max(abs(operand[i][j]) for i, j in places)
            scale = 2.0 ** (math.floor(math.log2(largest)) - 8) if name == "mxfp8" else largest / grid[-1]
            for i, j in places:
                value = operand[i][j] / scale
                result[i][j] = nearest(min(max(value, -grid[-1]), grid[-1]), grid) * scale
    return result


@pytest.mark.parametrize("role", ["activation", "weight", "gradient"])
@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8"])
def test_operands_have_the_values_of_the_format(name, role):
    draw = torch.Generator().manual_seed(1)
    operand = torch.randn(3, 150, generator=draw, dtype=torch.float64) * torch.logspace(-3, 2, 150, dtype=torch.float64)
    expected = torch.tensor(by_hand(operand.tolist(), name, role), dtype=torch.float64)
    torch.testing.assert_close(rounded(operand, name, role), expected, rtol=1e-14, atol=0)
    assert 0.005 < float((expected - operand).norm() / operand.norm()) < 0.1


def test_tf32_keeps_ten_bits():
    values = torch.tensor([1 + 2**-10, 1 + 2**-11, 1 + 2**-12, -(1 + 2**-11), math.inf, -math.inf, 3.0])
    assert round_to_tf32(values).tolist() == [1 + 2**-10, 1 + 2**-10, 1.0, -(1 + 2**-10), math.inf, -math.inf, 3.0]
    assert math.isnan(round_to_tf32(torch.tensor([math.nan]))[0])
    numbers_of_bfloat16 = torch.randn(50).bfloat16().float()
    assert torch.equal(round_to_tf32(numbers_of_bfloat16), numbers_of_bfloat16)


def test_zeros_stay_zeros():
    for name in ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "tf32"):
        assert torch.equal(rounded(torch.zeros(2, 40), name, "weight"), torch.zeros(2, 40))


def test_the_three_gemms_of_a_layer_have_rounded_operands():
    """Each along the dimension that it sums over."""
    torch.manual_seed(0)
    model = load_decoder("tiny-qwen3").double()
    layer = model.model.layers[1].mlp.up_proj
    use_gemm_formats(model, {"attention": "dense", "mlp": "fp8_rowwise"})
    hidden = torch.randn(2, 5, 64, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(2, 5, 192, dtype=torch.float64)
    output = layer(hidden)
    output.backward(gradient)
    rows, to_rows = hidden.detach().reshape(10, 64), gradient.reshape(10, 192)

    def product(a, b):
        """a b^T, both rounded along their second dimension."""
        return (
            torch.tensor(by_hand(a.tolist(), "fp8_rowwise", "any")).double()
            @ torch.tensor(by_hand(b.tolist(), "fp8_rowwise", "any")).double().T
        )

    bar = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(output.detach().reshape(10, 192), product(rows, layer.weight.detach()), **bar)
    torch.testing.assert_close(hidden.grad.reshape(10, 64), product(to_rows, layer.weight.detach().T), **bar)
    torch.testing.assert_close(layer.weight.grad, product(to_rows.T, rows.T), **bar)


@torch.no_grad()
def outputs(formats):
    model = use_gemm_formats(load_decoder("tiny-qwen3").double(), formats)
    return model(input_ids=torch.arange(12)[None] % 19, use_cache=False).logits


def test_only_the_named_part_is_rounded():
    plain, attention, mlp = (
        outputs({"attention": one, "mlp": two})
        for one, two in (("dense", "dense"), ("fp8_rowwise", "dense"), ("dense", "fp8_rowwise"))
    )
    stock = load_decoder("tiny-qwen3").double()
    with torch.no_grad():
        assert torch.equal(plain, stock(input_ids=torch.arange(12)[None] % 19, use_cache=False).logits)
    for other in (attention, mlp):
        assert 1e-3 < float((other - plain).norm() / plain.norm()) < 0.3
    assert not torch.equal(attention, mlp)


def test_names_and_parameters_stay():
    policy = load_policy("tiny-qwen3", precision="fp8_rowwise")
    assert [name for name, _ in policy.model.named_parameters()] == list(policy.shapes)


def test_experts_are_refused_by_name():
    with pytest.raises(SpecError, match=r"experts at model\.layers\.0\.mlp\.experts"):
        load_policy("tiny-qwen3-moe", precision="fp8_rowwise")


def test_hardware_is_not_asked_where_formats_are_emulated(monkeypatch):
    hopper = stand_in(torch.cuda, get_device_capability=lambda device: (9, 0))
    monkeypatch.setattr(gemm_formats, "torch", stand_in(torch, cuda=hopper))
    asked = ("tf32", torch.device("cuda"), torch.float32, 64)
    assert in_hardware(*asked)
    with emulating():
        assert not in_hardware(*asked)
    assert in_hardware(*asked)
