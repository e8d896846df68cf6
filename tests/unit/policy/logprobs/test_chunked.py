"""The torch engine alone: its protocol, and logits at the edges of the number range."""

import math

import pytest
import torch

from workbench.policy.logprobs import chunked
from workbench.policy.logprobs.chunked import ChunkedEngine
from workbench.policy.logprobs.engine import Accumulators, RowGradients, count_gemms
from workbench.policy.logprobs.head import make_head
from workbench.policy.logprobs.reference import token_logprobs
from workbench.sharding.simulated import simulate

EVERYTHING = frozenset({"entropy", "logsumexp", "mean_squared_logit", "mean_logit"})


def engine_and_rows(rows=5, vocabulary=7, width=3, dtype=torch.float64, **options):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocabulary, width, generator=g, dtype=torch.float64).to(dtype)
    return ChunkedEngine(make_head(weight, **options)), hidden, torch.arange(rows) % 4


def ones(rows, fields=4):
    return RowGradients(*[torch.ones(rows, dtype=torch.float64)] * fields)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_same_bits_for_any_saved_chunks(dtype):
    engine, hidden, targets = engine_and_rows(dtype=dtype)
    outputs = [
        engine.forward(hidden, targets, 0.7, outputs=EVERYTHING, keep=keep).head_output
        for keep in ("no", "scratch", "own")
    ]
    for fields in zip(*outputs, strict=True):
        if fields[0] is not None:
            assert torch.equal(fields[0], fields[1])
            assert torch.equal(fields[0], fields[2])


def test_a_saved_chunk_outlives_the_next_forward_and_a_scratch_one_does_not():
    engine, hidden, targets = engine_and_rows()
    gradients = {}
    for keep in ("own", "scratch"):
        chunk = engine.forward(hidden, targets, 1.0, outputs=EVERYTHING, keep=keep)
        engine.forward(-2 * hidden, targets, 1.0, outputs=EVERYTHING, keep="scratch")
        into = Accumulators(torch.empty_like(hidden), None)
        engine.backward(chunk, ones(5), into, slice(0, 5), first=True)
        gradients[keep] = into.hidden_TD
    chunk = engine.forward(hidden, targets, 1.0, outputs=EVERYTHING, keep="scratch")
    into = Accumulators(torch.empty_like(hidden), None)
    engine.backward(chunk, ones(5), into, slice(0, 5), first=True)
    assert torch.equal(gradients["own"], into.hidden_TD)
    assert not torch.equal(gradients["scratch"], into.hidden_TD)


def test_a_target_is_read_by_the_rank_of_its_slice():
    """Its column there is its id less the slice's first: values, and the parts of the gradient that ranks add up."""
    whole, hidden, targets = engine_and_rows(rows=7)
    targets = torch.arange(7)

    def sliced(mesh):
        axis = mesh["tp"]
        start, stop = ((0, 3), (3, 7))[axis.rank]
        return said_and_moved(make_head(whole.head.weight_VD[start:stop], axis=axis, first_token=start))

    def said_and_moved(head):
        engine = ChunkedEngine(head)
        chunk = engine.forward(hidden, targets, 1.0, outputs=EVERYTHING, keep="own")
        into = Accumulators(torch.empty_like(hidden), None)
        engine.backward(chunk, ones(7), into, slice(0, 7), first=True)
        return chunk.head_output.logprobs_T, into.hidden_TD

    expected, slope = said_and_moved(whole.head)
    parts = simulate(sliced, tp=2)
    for logprobs, _ in parts:
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(parts[0][1] + parts[1][1], slope, rtol=0, atol=1e-13)


def test_the_first_chunk_overwrites_and_the_next_add():
    engine, hidden, targets = engine_and_rows(bias_V=torch.zeros(7, dtype=torch.float64), valid=5)
    into = Accumulators(
        torch.full((10, 3), math.nan, dtype=torch.float64),
        torch.full((7, 3), math.nan, dtype=torch.float64),
        torch.full((7,), math.nan).double(),
    )
    for number in range(2):
        chunk = engine.forward(hidden, targets, 1.0, outputs=EVERYTHING, keep="scratch")
        engine.backward(chunk, ones(5), into, slice(5 * number, 5 * number + 5), first=number == 0)
        if number == 0:
            once = into.weight_VD.clone(), into.bias_V.clone()
            assert into.hidden_TD[5:].isnan().all()
    torch.testing.assert_close(into.weight_VD, 2 * once[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(into.bias_V, 2 * once[1], rtol=0, atol=1e-14)
    assert torch.equal(into.hidden_TD[:5], into.hidden_TD[5:])
    assert torch.equal(into.weight_VD[5:], torch.zeros(2, 3, dtype=torch.float64))
    assert torch.equal(into.bias_V[5:], torch.zeros(2, dtype=torch.float64))


def test_a_row_that_is_not_finite_and_moves_nothing_spoils_nothing():
    engine, hidden, targets = engine_and_rows(bias_V=torch.zeros(7, dtype=torch.float64))
    spoiled = hidden.clone()
    spoiled[1], spoiled[3, 0] = math.nan, math.inf
    results = []
    for rows in (hidden, spoiled):
        chunk = engine.forward(rows, targets, 1.0, outputs=EVERYTHING, keep="own")
        into = Accumulators(torch.empty_like(hidden), torch.empty(7, 3).double(), torch.empty(7).double())
        wants = torch.tensor([1.0, 0.0, 2.0, 0.0, -1.0], dtype=torch.float64)
        engine.backward(chunk, RowGradients(*[wants] * 5), into, slice(0, 5), first=True)
        results.append(into)
    assert chunk.head_output.logprobs_T.isnan().tolist() == [False, True, False, True, False]
    assert torch.equal(results[0].hidden_TD, results[1].hidden_TD)
    assert torch.equal(results[0].weight_VD, results[1].weight_VD)
    assert torch.equal(results[0].bias_V, results[1].bias_V)


def test_several_blocks_of_a_chunk_match_one(monkeypatch):
    results = []
    for block_bytes in (2**28, 2 * 7 * 8):
        monkeypatch.setattr(chunked, "BLOCK_BYTES", block_bytes)
        engine, hidden, targets = engine_and_rows(soft_cap=2.0)
        assert len(engine._blocks(5)) == (1 if block_bytes > 1000 else 3)
        temperature = 0.5 + torch.arange(5) / 4
        chunk = engine.forward(hidden, targets, temperature, outputs=EVERYTHING, keep="own")
        into = Accumulators(torch.empty_like(hidden), torch.empty(7, 3).double())
        engine.backward(chunk, ones(5), into, slice(0, 5), first=True)
        results.append([*chunk.head_output[:4], into.hidden_TD, into.weight_VD])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_only_requested_gemms_run():
    engine, hidden, targets = engine_and_rows()
    with count_gemms() as count:
        chunk = engine.forward(hidden, targets, 1.0, outputs=EVERYTHING, keep="own")
        assert count.rows == 5
        engine.backward(
            chunk, ones(5), Accumulators(None, torch.empty(7, 3, dtype=torch.float64)), slice(0, 5), first=True
        )
        assert count.rows == 10


def test_saved_bytes_match_the_buffer():
    engine, hidden, targets = engine_and_rows(valid=5, dtype=torch.bfloat16)
    saved = engine.forward(hidden, targets, 1.0, outputs=frozenset(), keep="own").saved
    assert engine.saved_bytes(5) == saved.untyped_storage().nbytes() == 5 * 5 * 4


def test_logits_of_half_precision_are_not_rounded_to_it():
    engine, hidden, targets = engine_and_rows(width=64, dtype=torch.bfloat16)
    exact = torch.log_softmax(hidden.double() @ engine.head.weight_VD.double().T, -1)
    output = engine.forward(hidden, targets, 1.0, outputs=frozenset(), keep="no").head_output
    torch.testing.assert_close(output.logprobs_T.double(), exact[torch.arange(5), targets], rtol=0, atol=1e-5)


def planted(logits, targets, dtype):
    """All outputs of given logits, and the gradient of their sum by the logits."""
    logits_CV, targets_C = torch.tensor(logits, dtype=dtype), torch.tensor(targets)
    engine = ChunkedEngine(make_head(torch.eye(logits_CV.shape[1], dtype=dtype)))
    # No GEMM of finite numbers gives a logit of -inf, so those are planted.
    chunk = engine.forward(logits_CV.nan_to_num(neginf=0.0), targets_C, 1.0, outputs=EVERYTHING, keep="own")
    chunk.saved.copy_(logits_CV)
    chunk.head_output = engine._outputs(chunk.saved, targets_C, EVERYTHING)
    into = Accumulators(torch.empty_like(logits_CV), None)
    engine.backward(chunk, ones(len(targets)), into, slice(0, len(targets)), first=True)
    return chunk.head_output, into.hidden_TD


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_logits_match_the_definition(dtype):
    """p down to e^-200, columns of -inf, logits of 1e4 and 1e30."""
    logits = [
        [0.0, -200.0, -3.0, -1.0],
        [1e4, 1e4 - 1, -1e4, 0.0],
        [-math.inf, 2.0, -math.inf, 1.0],
        [1e30, 0.0, -1e30, 5.0],
    ]
    text, gradient = planted(logits, [1, 1, 3, 0], dtype)
    exact = torch.tensor(logits, dtype=torch.float64)
    logprobs = torch.log_softmax(exact, -1)
    expected = logprobs[torch.arange(4), torch.tensor([1, 1, 3, 0])]
    torch.testing.assert_close(text.logprobs_T.double(), expected, rtol=1e-6, atol=1e-6)
    assert text.logprobs_T[0] < -200
    entropy = -(logprobs.exp() * logprobs.nan_to_num(neginf=0.0)).sum(-1)
    torch.testing.assert_close(text.entropy_T.double(), entropy, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(text.logsumexp_T.double(), torch.logsumexp(exact, -1), rtol=1e-6, atol=0)
    squares = exact.nan_to_num(neginf=0.0).square().mean(-1)
    torch.testing.assert_close(text.mean_squared_logit_T[:3].double(), squares[:3], rtol=1e-6, atol=0)
    assert gradient.isfinite().all()
    assert torch.equal(gradient[2, [0, 2]], torch.zeros(2, dtype=dtype))
    # Of the row with p = e^-200: the whole weight of the target's gradient is there.
    share = logprobs[0].exp()
    square = 2 * exact[0] / 4
    row = torch.tensor([0.0, 1.0, 0.0, 0.0]).double() - share * (logprobs[0] + entropy[0]) + square
    torch.testing.assert_close(gradient[0].double(), row, rtol=1e-5, atol=1e-5)


def test_a_bias_of_minus_infinity_is_a_token_that_does_not_exist():
    bias = torch.tensor([0.0, 0.0, -math.inf, 0.0, 0.0, 0.0, -math.inf], dtype=torch.float64)
    engine, hidden, targets = engine_and_rows(bias_V=bias)
    exists = [0, 1, 3, 4, 5]
    alone = ChunkedEngine(make_head(engine.head.weight_VD[exists]))
    targets = torch.tensor([0, 1, 3, 4, 5])
    result, expected = (
        e.forward(hidden, t, 0.7, outputs=frozenset({"entropy", "logsumexp"}), keep="own")
        for e, t in ((engine, targets), (alone, torch.arange(5)))
    )
    for one, other in zip(result.head_output[:3], expected.head_output[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
    gradients = []
    for e, chunk in ((engine, result), (alone, expected)):
        into = Accumulators(torch.empty_like(hidden), None)
        e.backward(chunk, ones(5, 3), into, slice(0, 5), first=True)
        gradients.append(into.hidden_TD)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_products_of_any_width_are_summed_in_float32(dtype):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 256, generator=g).to(dtype).cuda() / 4 for rows in (100, 1001))
    targets = torch.arange(100, device="cuda")
    engine = ChunkedEngine(make_head(weight))
    chunk = engine.forward(hidden, targets, 0.7, outputs=EVERYTHING, keep="own")
    into = Accumulators(torch.full_like(hidden, math.nan), torch.full_like(weight, math.nan, dtype=torch.float32))
    gradients = RowGradients(*torch.randn(4, 100, generator=g).cuda())
    engine.backward(chunk, gradients, into, slice(0, 100), first=True)
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    output = token_logprobs(*exact, targets, temperature=0.7, outputs=EVERYTHING)
    sum((x_T * g_T).sum() for x_T, g_T in zip(output[:4], gradients[:4], strict=True)).backward()
    for one, other in zip(chunk.head_output[:4], output[:4], strict=True):
        torch.testing.assert_close(one.double(), other.detach(), rtol=1e-5, atol=1e-5)
    bar = max(1e-6, torch.finfo(dtype).eps)  # measured on an H200: 2.3e-7 in float32, 2.8e-3 in bfloat16
    for one, other in zip((into.hidden_TD, into.weight_VD), exact, strict=True):
        assert (one.double() - other.grad).norm() <= bar * other.grad.norm()
