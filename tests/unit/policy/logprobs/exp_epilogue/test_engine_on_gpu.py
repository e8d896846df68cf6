"""GPU-only properties of the Triton engine: sizes of models, memory, and the process's precision settings."""

import pytest
import torch

from tests.helpers.engine_chunks import chunk_and_back, error, like_a_model, triton
from workbench.policy.logprobs import driver, fastest
from workbench.policy.logprobs.chunked import ChunkedEngine
from workbench.policy.logprobs.engine import Accumulators, RowGradients
from workbench.policy.logprobs.exp_epilogue.engine import ExpEpilogueEngine
from workbench.policy.logprobs.from_logits import token_logprobs_from_logits
from workbench.policy.logprobs.head import make_head

pytestmark = pytest.mark.gpu
MIB = 2**20


def grown(call):
    """Bytes by which the peak of allocated memory exceeds the allocation before, after one run to compile."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_errors_at_the_size_of_a_model_are_those_of_one_rounding():
    hidden, weight, targets = like_a_model(2048, 4096, 151936)
    gradient = torch.randn(2048, device="cuda") / 2048
    chunk, into = chunk_and_back(
        ExpEpilogueEngine,
        hidden,
        weight,
        None,
        targets,
        1.0,
        [gradient, None, None, None],
        outputs=frozenset({"entropy"}),
    )
    rows, columns = slice(0, 256), torch.cat([targets[:1000], torch.arange(1000, device="cuda")]).unique()
    wide, logprobs, entropy, d_weight = weight.double(), [], [], 0
    for piece in hidden.split(256):
        log_p = torch.log_softmax(piece.double() @ wide.T, -1)
        own = targets[len(logprobs) * 256 :][:256, None]
        logprobs.append(log_p.gather(1, own)[:, 0])
        d = log_p.exp()
        entropy.append(-(d * log_p).sum(1))
        d = -d.scatter_add_(1, own, -torch.ones_like(d[:, :1])) * gradient[len(logprobs) * 256 - 256 :][:256, None]
        if len(logprobs) == 1:
            d_hidden = d @ wide
        d_weight = d_weight + d[:, columns].T @ piece.double()
    assert (chunk.head_output.logprobs_T - torch.cat(logprobs)).abs().mean() < 1e-4
    assert (chunk.head_output.entropy_T - torch.cat(entropy)).abs().mean() < 1e-3
    assert error(into.hidden_TD[rows], d_hidden) < 3.5e-3
    assert error(into.weight_VD[columns], d_weight) < 3.5e-3


def test_a_row_of_a_million_tokens():
    hidden, weight, targets = like_a_model(2**20 + 7, 64, 4099)
    wants = torch.randn(len(targets), device="cuda")
    results = {}
    for name, engine in (("triton", ExpEpilogueEngine), ("chunked", ChunkedEngine)):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        output = driver.token_logprobs(*leaves, targets, engine=engine, temperature=0.7, outputs=("entropy",))
        (output.logprobs_T * wants).sum().backward()
        results[name] = output.logprobs_T.detach(), output.entropy_T.detach(), *(x.grad for x in leaves)
    for one, other in zip(results["triton"][:2], results["chunked"][:2], strict=True):
        assert (one - other).abs().max() < 1e-3
    for one, other in zip(results["triton"][2:], results["chunked"][2:], strict=True):
        assert error(one, other) < 7e-3


def test_the_ratio_to_the_policy_s_own_old_self_is_exactly_one():
    hidden, weight, targets = like_a_model(5001, 1024, 50001)
    with torch.no_grad():
        old = triton(hidden, weight, targets, temperature=0.7, chunk_tokens=5001, outputs=()).logprobs_T
    new = triton(hidden.requires_grad_(), weight, targets, temperature=0.7, chunk_tokens=1000, keep_bytes=2**30)
    assert (new.logprobs_T - old).exp().eq(1).all()


def test_two_runs_give_the_same_bits():
    hidden, weight, targets = like_a_model(3000, 512, 30001)
    runs = []
    for _ in range(2):
        chunk, into = chunk_and_back(
            ExpEpilogueEngine, hidden, weight, None, targets, 1.0, [torch.ones(3000), torch.ones(3000), None, None]
        )
        runs.append((*chunk.head_output[:4], into.hidden_TD, into.weight_VD))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_forward_alone_takes_less_than_64_mebibytes():
    hidden, weight, targets = like_a_model(16384, 1024, 151936)
    with torch.no_grad():
        assert grown(lambda: triton(hidden, weight, targets, outputs=("entropy", "logsumexp"))) < 64 * MIB


def test_backward_takes_one_chunk_of_exponentials():
    hidden, weight, targets = like_a_model(4096, 4096, 151936)
    into = Accumulators(torch.empty_like(hidden), torch.empty_like(weight))
    gradient = torch.randn(4096, device="cuda")

    def there_and_back():
        engine = ExpEpilogueEngine(make_head(weight))
        chunk = engine.forward(hidden, targets, 1.0, outputs=frozenset(), keep="scratch")
        engine.backward(chunk, RowGradients(gradient), into, slice(0, 4096), first=True)

    assert grown(there_and_back) < 1.3 * 1024 * MIB


def test_a_float32_head_is_exact_under_any_global_setting():
    hidden, weight, targets = like_a_model(500, 1000, 2003, torch.float32)
    expected = chunk_and_back(
        ChunkedEngine,
        hidden.double(),
        weight.double(),
        None,
        targets,
        1.0,
        [torch.ones(500, dtype=torch.float64), None, None, None],
    )
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        result = chunk_and_back(
            ExpEpilogueEngine, hidden, weight, None, targets, 1.0, [torch.ones(500), None, None, None]
        )
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert (result[0].head_output.logprobs_T - expected[0].head_output.logprobs_T).abs().max() < 3e-5
    assert error(result[1].hidden_TD, expected[1].hidden_TD) < 2e-5
    assert error(result[1].weight_VD, expected[1].weight_VD) < 2e-5


@pytest.mark.parametrize("outputs", [(), ("entropy", "logsumexp", "mean_squared_logit")])
def test_logits_that_are_there_already(outputs):
    logits = 4 * torch.randn(701, 50257, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, 50257, (701,), device="cuda")
    results = []
    for implementation, dtype in (("triton", torch.bfloat16), ("torch", torch.float64)):
        leaf = logits.detach().to(dtype, copy=True).requires_grad_()
        output = token_logprobs_from_logits(
            leaf, targets, implementation=implementation, temperature=0.8, outputs=outputs
        )
        sum((x * torch.arange(701, device="cuda")).sum() for x in output if x is not None).backward()
        results.append((*(x.detach() for x in output if x is not None), leaf.grad))
    for one, other in zip(results[0][:-1], results[1][:-1], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)
    assert error(results[0][-1], results[1][-1]) < 3e-3


def test_a_gradient_over_the_logits_takes_no_memory_of_its_own():
    hidden, weight, targets = like_a_model(4096, 256, 50257)

    def there_and_back():
        logits = hidden.detach().requires_grad_() @ weight.T
        output = token_logprobs_from_logits(logits, targets, outputs=("entropy",), inplace_backward=True)
        output.logprobs_T.sum().backward()

    assert grown(there_and_back) < 4096 * 50257 * 2 + 16 * MIB


def test_bfloat16_on_this_gpu_uses_the_kernels():
    assert fastest(torch.bfloat16, torch.device("cuda", 0)) == "triton"
