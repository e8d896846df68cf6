import pytest
import torch

from workbench.mismatch.rounding import NEAREST, RandomRounding, stochastic, unit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_unit_is_the_distance_of_neighbours(dtype):
    values = torch.tensor([1.0, 1.5, 3.0, 0.011, 100.0]).to(dtype)
    following = torch.nextafter(values, torch.full_like(values, torch.inf))
    assert torch.equal(unit(values.double(), dtype), following.double() - values.double())


def test_rounding_is_right_in_the_mean_and_to_a_neighbour():
    generator = torch.Generator().manual_seed(0)
    value = 1 + 0.3 * 2**-7
    rounded = stochastic(torch.full((20000,), value, dtype=torch.float64), torch.bfloat16, generator).double()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert abs(float(rounded.mean()) - value) < 5 * 2**-7 * 0.46 / 20000**0.5


def test_what_the_dtype_has_stays():
    values = torch.tensor([0.0, -1.0, 2.5, 1e30, torch.inf])
    assert torch.equal(stochastic(values.double(), torch.bfloat16, torch.Generator()), values.bfloat16())


def test_its_variance_is_twice_that_of_rounding_to_nearest():
    generator = torch.Generator().manual_seed(0)
    values = 1 + torch.rand(100_000, generator=generator, dtype=torch.float64)
    drawn = (stochastic(values, torch.bfloat16, generator).double() - values).square().mean().sqrt()
    nearest = (values.bfloat16().double() - values).square().mean().sqrt()
    assert float(drawn / nearest) == pytest.approx(NEAREST, rel=0.01)


def test_a_sum_in_float32_has_the_rounding_of_its_partial_sums():
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(64, 512, generator=generator), torch.randn(512, 64, generator=generator)
    exact = left.double() @ right.double()
    total = torch.zeros(64, 64)
    for k in range(512):  # one product after the other
        total = total + left[:, k : k + 1] * right[k : k + 1]
    with RandomRounding(generator):
        drawn = left @ right
    real, noise = ((one.double() - exact).square().mean().sqrt() for one in (total, drawn))
    assert 0.75 < float(noise / NEAREST / real) < 1.35


def test_operations_in_place_round_as_others_do():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(4000, generator=generator)
    expected = values.double() / 0.7131
    with RandomRounding(generator):
        values /= 0.7131
    error = (values.double() - expected) / unit(expected, torch.float32)
    assert float(error.abs().max()) <= 1
    assert float(error.square().mean().sqrt()) == pytest.approx(6**-0.5, rel=0.05)


def test_attention_and_softmax_are_those_of_torch_up_to_rounding():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 6, 8, generator=generator) for _ in range(3))
    scores = torch.randn(5, 7, generator=generator)
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        plain = [attend(query, key, value, is_causal=True), torch.softmax(scores, -1), torch.nn.functional.silu(scores)]
        plain.append(torch.log_softmax(scores, -1))
        with RandomRounding(generator):
            drawn = [attend(query, key, value, is_causal=True), torch.softmax(scores, -1)]
            drawn += [torch.nn.functional.silu(scores), torch.log_softmax(scores, -1)]
    for one, other in zip(plain, drawn, strict=True):
        assert 0 < (one - other).abs().max() < 3e-6
