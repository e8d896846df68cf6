"""The exact head matches the reference, and so do its gradients."""

import pytest
import torch

from workbench.policy.logprobs import token_logprobs
from workbench.reproducible.exact_sums import Accumulator, Leaves
from workbench.reproducible.kernels import plain
from workbench.reproducible.logprobs import ExactHead, from_hidden
from workbench.reproducible.modules import Pieces
from workbench.sharding.simulated import simulate
from workbench.sharding.tensor_parallel import shard_range

VOCABULARY, WIDTH, TOKENS = 19, 6, 12


def problem():
    draw = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(TOKENS, WIDTH, generator=draw), torch.randn(VOCABULARY, WIDTH, generator=draw)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=draw)
    targets[4] = -100
    gradients = torch.randn(4, TOKENS, generator=draw)
    return hidden, weight, targets, torch.linspace(0.5, 2, TOKENS), gradients


def said(mesh, chunks, dtype=torch.float32):
    """The four outputs, and the gradients of hidden states and of this rank's rows of the head."""
    hidden, weight, targets, temperature, gradients = problem()
    tp = mesh["tp"]
    first, last = shard_range(VOCABULARY, tp, what="vocabulary")
    hidden, weight = hidden.to(dtype).requires_grad_(), weight[first:last].to(dtype)
    into = Accumulator(weight.shape, weight.device, Leaves())
    into.start(32)
    head = ExactHead(weight, first, VOCABULARY, -(-VOCABULARY // chunks), into, Pieces(plain, 4, chunks // tp.size, tp))
    outputs = from_hidden(hidden, targets, temperature, head)
    sum((one * gradient).sum() for one, gradient in zip(outputs, gradients, strict=True)).backward()
    return [*(one.detach() for one in outputs), hidden.grad, into.total.double() * 2.0**-32]


@pytest.mark.parametrize(
    ("dtype", "far", "chunks"), [(torch.float32, 1e-5, 1), (torch.bfloat16, 0.1, 1), (torch.float32, 1e-5, 4)]
)
def test_matches_the_reference_with_one_and_several_vocabulary_chunks(dtype, far, chunks):
    hidden, weight, targets, temperature, gradients = problem()
    hidden, weight = hidden.to(dtype).double().requires_grad_(), weight.to(dtype).double().requires_grad_()
    expected = token_logprobs(
        hidden,
        weight,
        targets,
        implementation="reference",
        temperature=temperature,
        outputs=("entropy", "logsumexp", "mean_squared_logit"),
    )[:4]
    sum((one * gradient).sum() for one, gradient in zip(expected, gradients, strict=True)).backward()
    (result,) = simulate(lambda mesh: said(mesh, chunks, dtype))
    for actual, outputs in zip(result, [*(one.detach() for one in expected), hidden.grad, weight.grad], strict=True):
        torch.testing.assert_close(actual.double(), outputs, rtol=far, atol=far)


@pytest.mark.parametrize("chunks", [2, 4])
def test_over_tp_it_is_the_same_bits(chunks):
    (alone,) = simulate(lambda mesh: said(mesh, chunks))
    for tp in (2, 4)[: chunks // 2]:
        by_rank = simulate(lambda mesh: said(mesh, chunks), tp=tp)
        for of_rank in by_rank:
            assert all(torch.equal(actual, outputs) for actual, outputs in zip(of_rank[:5], alone[:5], strict=True))
        assert torch.equal(torch.cat([of_rank[5] for of_rank in by_rank]), alone[5])


def test_an_ignored_token_has_no_output_and_no_gradient():
    (result,) = simulate(lambda mesh: said(mesh, 1))
    assert [float(one[4]) for one in result[:4]] == [0.0, 0.0, 0.0, 0.0]
    assert float(result[4][4].abs().max()) == 0.0
    assert float(result[4][5].abs().max()) > 0.0
