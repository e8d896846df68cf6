"""The kernels one by one, against their documented results."""

import math

import pytest
import torch

from workbench.policy.logprobs.chunked import ChunkedEngine
from workbench.policy.logprobs.engine import Accumulators, RowGradients
from workbench.policy.logprobs.exp_epilogue import kernels
from workbench.policy.logprobs.exp_epilogue.engine import ExpEpilogueEngine
from workbench.policy.logprobs.head import make_head

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, V, D = 19, 53, 40


def operands(dtype=torch.float32):
    g = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(T, D, generator=g), torch.randn(V, D, generator=g) / 4
    return (hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), torch.randint(0, V, (T,), generator=g).to(DEVICE))


def test_the_product_stores_exponentials_of_logits_less_the_targets():
    hidden, weight, targets = operands()
    engine = ExpEpilogueEngine(make_head(weight))
    saved = engine.forward(hidden, targets, 0.7, outputs=frozenset(), keep="own").saved
    logits = hidden.double() @ weight.double().T / 0.7
    own = logits.gather(1, targets[:, None])
    torch.testing.assert_close(saved.shifts_C.double(), own[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(saved.exponentials_CV.double(), (logits - own).exp(), rtol=2e-5, atol=0)
    torch.testing.assert_close(saved.totals_FC[0].double(), (logits - own).exp().sum(1), rtol=2e-5, atol=0)


def test_an_underflowing_exponential_stores_its_exponent_if_squares_are_requested():
    hidden = torch.tensor([[1.0]], device=DEVICE)
    weight = torch.tensor([[0.0], [-50.0], [-200.0]], device=DEVICE)
    engine = ExpEpilogueEngine(make_head(weight))
    target = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    stored = engine.forward(hidden, target, 1.0, outputs=frozenset({"mean_squared_logit"}), keep="own").saved
    expected = [1.0, math.exp(-50), -200 / math.log(2)]
    torch.testing.assert_close(stored.exponentials_CV[0].cpu(), torch.tensor(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("below", "lost"), [(kernels.LIMIT - 1, False), (kernels.LIMIT + 1, True)])
def test_a_target_whose_probability_is_below_the_limit_has_overflowed(below, lost):
    weight = torch.tensor([[0.0], [below]], device=DEVICE)
    chunk = ExpEpilogueEngine(make_head(weight)).forward(
        torch.ones(2, 1, device=DEVICE),
        torch.tensor([0, 1], device=DEVICE),
        1.0,
        outputs=frozenset({"entropy"}),
        keep="no",
    )
    assert chunk.overflowed_C.tolist() == [lost, False]
    assert chunk.head_output.logprobs_T[0].item() == pytest.approx(-below, rel=1e-6)
    assert torch.isfinite(torch.stack([x for x in chunk.head_output if x is not None])).all()


def test_a_row_of_minus_infinity_has_no_distribution():
    hidden, weight, targets = operands()
    output = {}
    for engine in (ExpEpilogueEngine, ChunkedEngine):
        head = make_head(weight, bias_V=torch.full((V,), -torch.inf, device=DEVICE))
        output[engine] = (
            engine(head).forward(hidden, targets, 1.0, outputs=frozenset({"entropy"}), keep="no").head_output
        )
    for one, other in zip(output[ExpEpilogueEngine][:3], output[ChunkedEngine][:3], strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert one.isnan().all()


def test_a_row_just_within_the_limit_keeps_a_gradient_that_is_small():
    """Its scale, g / S, must be representable in bfloat16."""
    weight = torch.tensor([[0.0], [kernels.LIMIT - 1]], device=DEVICE).bfloat16()
    engine = ExpEpilogueEngine(make_head(weight))
    chunk = engine.forward(
        torch.ones(1, 1, device=DEVICE).bfloat16(),
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
        1.0,
        outputs=frozenset(),
        keep="scratch",
    )
    into = Accumulators(torch.empty(1, 1, device=DEVICE).bfloat16(), torch.empty(2, 1, device=DEVICE))
    engine.backward(chunk, RowGradients(torch.full((1,), 1e-10, device=DEVICE)), into, slice(0, 1), first=True)
    torch.testing.assert_close(into.weight_VD[:, 0] * 1e10, torch.tensor([1.0, -1.0], device=DEVICE), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_element_or_one_pass_make_the_same_gradient(dtype):
    hidden, weight, targets = operands(dtype)
    engine = ExpEpilogueEngine(make_head(weight))
    g = torch.Generator().manual_seed(3)
    to_logprob, to_logsumexp = torch.randn(2, T, generator=g).to(DEVICE)
    results = []
    for to_entropy in (None, torch.zeros(T, device=DEVICE)):  # a zero that is not None takes the pass
        chunk = engine.forward(hidden, targets, 0.7, outputs=frozenset({"entropy"}), keep="scratch")
        into = Accumulators(torch.empty_like(hidden), torch.empty_like(weight, dtype=torch.float32))
        engine.backward(chunk, RowGradients(to_logprob, to_entropy, to_logsumexp), into, slice(0, T), first=True)
        results.append(into)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 6e-3}[dtype]
    for name in ("hidden_TD", "weight_VD"):
        by_element, by_pass = getattr(results[0], name).float(), getattr(results[1], name).float()
        assert (by_element - by_pass).norm() / by_pass.norm() < tolerance


def test_the_target_alone_is_left_where_two_gradients_cancel():
    """k = g_logsumexp - g_logprob = 0: all of the gradient is the target's own g_logprob."""
    hidden, weight, targets = operands()
    engine = ExpEpilogueEngine(make_head(weight))
    ones = torch.ones(T, device=DEVICE)
    chunk = engine.forward(hidden, targets, 1.0, outputs=frozenset({"logsumexp"}), keep="scratch")
    into = Accumulators(torch.empty_like(hidden), None)
    engine.backward(chunk, RowGradients(ones, None, ones), into, slice(0, T), first=True)
    torch.testing.assert_close(into.hidden_TD, weight[targets], rtol=1e-5, atol=1e-6)


def test_tile_sums_have_one_order_for_any_row_position():
    g = torch.Generator().manual_seed(4)
    sums = torch.randn(2, 71, 45, generator=g).to(DEVICE)
    results = []
    for columns in (slice(0, 45), slice(7, 8), slice(30, 45)):
        part = sums[:, :, columns].contiguous()
        totals = torch.full((2, part.shape[2]), torch.nan, device=DEVICE)
        kernels.add_tiles[(2, 2)](part, totals, part.shape[2], 71, ROWS=32, TILES=32)
        results.append(totals)
    torch.testing.assert_close(results[0].double(), sums.double().sum(1), rtol=0, atol=1e-5)
    assert torch.equal(results[0][:, 7:8], results[1])
    assert torch.equal(results[0][:, 30:45], results[2])
