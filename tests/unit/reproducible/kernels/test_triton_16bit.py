"""The Triton kernels match the plain ones, and are chosen where they can compute."""

from __future__ import annotations

import torch

from tests.helpers.kernel_numbers import DEVICE, draw, zeros
from workbench.reproducible.kernels import choose, plain, triton_16bit


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
