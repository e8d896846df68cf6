"""GEMMs of formats that tensor cores have, against the emulated ones on the same operands."""

import pytest
import torch

from workbench.policy.gemm_formats import emulated_formats, gemm, in_hardware, rounded
from workbench.policy.model import load_policy

pytestmark = pytest.mark.gpu
ROLES = [("activation", "weight"), ("gradient", "weight"), ("gradient", "activation")]


def operands(roles, rows=203, columns=384, summed=201):
    """[N, K], [M, K] in bfloat16 with a wide range of magnitudes; tokens are of any number."""
    draw = torch.Generator("cuda").manual_seed(0)
    if "weight" not in roles:
        rows = 208  # features
    else:
        summed = 640
    shapes = [(rows, summed), (columns, summed)]
    return [(torch.randn(shape, device="cuda", generator=draw) ** 3).bfloat16() for shape in shapes]


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"])
def test_products_are_those_of_the_rounded_operands(name, roles):
    left, right = operands(roles)
    if not in_hardware(name, left.device, left.dtype, right.shape[0]):
        pytest.skip(f"tensor cores here have no {name}")
    expected = rounded(left, name, roles[0]).double() @ rounded(right, name, roles[1]).double().T
    apart = (gemm(left, right, name, roles).double() - expected).norm() / expected.norm()
    exact = left.double() @ right.double().T
    assert float(apart) < 2**-8 < float((expected - exact).norm() / exact.norm())


def test_tf32_products_have_ten_bits():
    left, right = (operand.float() + 1e-3 for operand in operands(("activation", "weight")))
    before = torch.backends.cuda.matmul.fp32_precision
    expected = left.double() @ right.double().T
    apart = (gemm(left, right, "tf32", ("activation", "weight")).double() - expected).norm() / expected.norm()
    assert 1e-5 < float(apart) < 2**-10
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_an_odd_number_of_columns_is_emulated():
    left, right = operands(("activation", "weight"), columns=200)
    assert not in_hardware("fp8_rowwise", left.device, left.dtype, right.shape[0])
    expected = rounded(left, "fp8_rowwise", "activation") @ rounded(right, "fp8_rowwise", "weight").T
    assert torch.equal(gemm(left, right, "fp8_rowwise", ("activation", "weight")), expected.bfloat16())


def test_a_model_names_what_it_emulates():
    from workbench.sharding.mesh import single_process_mesh

    mesh = single_process_mesh(torch.device("cuda"))
    emulated = {
        name: emulated_formats(load_policy("tiny-qwen3", mesh=mesh, precision=name).model, torch.bfloat16)
        for name in ("fp8_rowwise", "mxfp8")
    }
    assert emulated["mxfp8"] == ["mxfp8"]
    rowwise = in_hardware("fp8_rowwise", torch.device("cuda"), torch.bfloat16, 64)
    assert emulated["fp8_rowwise"] == ([] if rowwise else ["fp8_rowwise"])
