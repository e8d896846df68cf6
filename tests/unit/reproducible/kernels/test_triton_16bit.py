"""The Triton kernels match the plain ones, and are chosen where they can compute."""

from __future__ import annotations

import torch

from tests.helpers.kernel_numbers import DEVICE, draw, zeros
from workbench.reproducible.exact_sums import Accumulator, Leaves
from workbench.reproducible.kernels import choose, plain, triton_16bit
from workbench.reproducible.logprobs import ExactHead, from_hidden
from workbench.reproducible.modules import Pieces
from workbench.sharding.mesh import Axis


def test_rows_of_logits():
    logits = (3 * draw(6, 56).float())[:, :50]
    local = torch.tensor([3, -1, 49, 50, 7, 0], device=DEVICE)
    divisor = torch.tensor([1.0, 0.7, 1.3, 1.0, 1.0, 2.0], device=DEVICE)
    text, expected = (
        triton_16bit.piece_statistics(logits, local, divisor),
        plain.piece_statistics(logits.clone(), local, divisor),
    )
    torch.testing.assert_close(text, expected, rtol=1e-5, atol=1e-5)
    assert text[4].isfinite().tolist() == [True, False, True, False, True, True]
    logsumexp = expected[0] + expected[1].log()
    entropy = expected[1].log() - expected[2] / expected[1]
    gradients = draw(4, 6, seed=4).float()
    result, right = zeros(6, 50), zeros(6, 50)
    for kernels, out in ((triton_16bit, result), (plain, right)):
        kernels.piece_gradient(logits.clone(), local, divisor, logsumexp, entropy, gradients, out)
    torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-5)


def test_they_are_taken_where_they_can_compute():
    assert choose(torch.device("cpu"), torch.bfloat16, 128) is plain
    assert "float32" in triton_16bit.refusal(torch.float32, torch.device(DEVICE), 128)
    assert "multiples of 16" in triton_16bit.refusal(torch.bfloat16, torch.device(DEVICE), 24)
    assert triton_16bit.refusal(torch.bfloat16, torch.device(DEVICE), 128) is None


def test_a_row_of_logits_does_not_depend_on_how_many_are_computed_at_a_time(monkeypatch):
    """So that few exist at a time: in float32, those of a block take as much memory as a layer's activations."""
    block, tokens, width, vocabulary = 32, 64, 16, 40
    assert (triton_16bit.rows_of_logits(block), triton_16bit.rows_of_logits(2048)) == (block, 512)
    assert plain.rows_of_logits(2048) == 2048
    targets = torch.arange(tokens, device=DEVICE) % vocabulary
    temperature = torch.linspace(0.5, 2, tokens, device=DEVICE)
    results, sizes = [], []

    def noted(inner):
        return lambda logits_bv, *more: (sizes.append(len(logits_bv)), inner(logits_bv, *more))[1]

    for name in ("piece_statistics", "piece_gradient"):
        monkeypatch.setattr(triton_16bit, name, noted(getattr(triton_16bit, name)))
    for few in (block, 16):
        monkeypatch.setattr(triton_16bit, "rows_of_logits", lambda block, few=few: few)
        hidden, weight = draw(tokens, width).requires_grad_(), draw(vocabulary, width, seed=1)
        into = Accumulator(weight.shape, weight.device, Leaves())
        into.start(32)
        head = ExactHead(weight, 0, vocabulary, vocabulary, into, Pieces(triton_16bit, block, 1, Axis("tp")))
        outputs = from_hidden(hidden, targets, temperature, head)
        sum(one.sin().sum() for one in outputs).backward()
        results.append([*(one.detach() for one in outputs), hidden.grad, into.total])
    assert sizes == [block] * 4 + [16] * 8  # forward and backward
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert all(bool(one.any()) for one in results[0])
