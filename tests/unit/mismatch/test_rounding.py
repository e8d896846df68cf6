import pytest
import torch

from workbench.mismatch.rounding import (
    NEAREST,
    RUN,
    RandomRounding,
    by_name,
    measured_runs,
    stochastic,
    unit,
    variance_of_sums,
)


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


@pytest.mark.parametrize("inner", [64, 2 * RUN])
def test_a_sum_in_float32_has_the_rounding_of_its_partial_sums(inner):
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(48, inner, generator=generator), torch.randn(inner, 48, generator=generator)
    exact, total = left.double() @ right.double(), torch.zeros(48, 48)
    for first in range(0, inner, RUN):
        run = torch.zeros(48, 48)
        for k in range(first, min(inner, first + RUN)):  # one product after the other
            run = torch.addcmul(run, left[:, k : k + 1], right[k : k + 1])
        total = total + run
    with RandomRounding(generator):
        drawn = left @ right
    by_hand, noise = ((one.double() - exact).square().mean().sqrt() for one in (total, drawn))
    assert 0.85 < float(noise / NEAREST / by_hand) < 1.15


def test_a_run_is_as_long_as_the_librarys():
    """The library's own sums have the error that is drawn, at one run and at eight."""
    generator = torch.Generator().manual_seed(0)
    error = {}
    for inner in (RUN, 8 * RUN):
        left, right = (torch.randn(96, inner, generator=generator) for _ in range(2))
        exact = left.double() @ right.double().T
        with RandomRounding(generator):
            drawn = left @ right.T
        real, noise = ((one.double() - exact).square().mean().sqrt() for one in (left @ right.T, drawn))
        error[inner] = float(noise / NEAREST / real)
    assert all(0.5 < ratio < 2.5 for ratio in error.values()), error  # other libraries block otherwise


@pytest.mark.parametrize("inner", [64, RUN, 8 * RUN])
def test_runs_are_found_from_the_error_of_the_library(inner):
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(96, inner, generator=generator), torch.randn(80, inner, generator=generator).mT
    exact = left.double() @ right.double()
    real = float(((left @ right).double() - exact).square().mean().sqrt())
    runs = measured_runs(left.shape, right.shape, "cpu")
    last = unit(exact, torch.float32).square() / 12
    expected = (variance_of_sums(left.double(), right.double(), runs) / 2 + last).mean().sqrt()
    others = [
        abs(float((variance_of_sums(left.double(), right.double(), other) / 2 + last).mean().sqrt()) / real - 1)
        for other in (1, 64)
    ]
    assert abs(float(expected) / real - 1) <= min(0.2, *others) + 0.02, "a power of two is at most 2^(1/4) away"


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


@pytest.mark.parametrize(
    ("kernel", "between"),
    [
        ("flash_attention", (0.0,)),
        ("flash_attention_for_cpu", (0.0,)),
        ("efficient_attention", (None, False, 0.0)),
        ("cudnn_attention", (None, False, 0.0)),
    ],
)
def test_a_kernels_arguments_are_read_by_their_names(kernel, between):
    operation = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
    assert by_name(operation, ("q", "k", "v", *between, True), {})["is_causal"] is True
    assert by_name(operation, ("q", "k", "v", *between), {"scale": 0.5})["is_causal"] is False
    assert by_name(operation, ("q", "k", "v", *between), {"scale": 0.5})["scale"] == 0.5
