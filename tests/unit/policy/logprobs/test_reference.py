import math

import pytest
import torch

from workbench.errors import ShapeError
from workbench.policy.logprobs.reference import token_logprobs


def test_equals_the_definition_by_hand():
    hidden = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    weight = torch.tensor([[math.log(1.0), 5.0], [math.log(2.0), 1.0], [math.log(5.0), 9.0]], dtype=torch.float64)
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([2]))
    assert logprobs.item() == pytest.approx(math.log(5 / 8), abs=1e-15)
    assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8)), abs=1e-15)


def test_temperature_divides_logits_and_not_logprobs():
    hidden, weight = torch.randn(4, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    targets = torch.tensor([0, 6, 3, 2])
    at_half, _ = token_logprobs(hidden, weight, targets, temperature=0.5)
    scaled, _ = token_logprobs(2 * hidden, weight, targets)
    torch.testing.assert_close(at_half, scaled, rtol=0, atol=1e-14)
    plain, _ = token_logprobs(hidden, weight, targets)
    assert (at_half - plain / 0.5).abs().max() > 0.1


def test_half_precision_logits_are_widened_before_the_softmax():
    hidden, weight = torch.randn(4, 8).bfloat16(), torch.randn(7, 8).bfloat16()
    assert token_logprobs(hidden, weight, torch.zeros(4, dtype=torch.int64))[0].dtype == torch.float32


def test_bias_counts():
    hidden, weight = torch.zeros(1, 2), torch.zeros(3, 2)
    logprobs, _ = token_logprobs(hidden, weight, torch.tensor([1]), bias_V=torch.tensor([0.0, math.log(2.0), 0.0]))
    assert logprobs.item() == pytest.approx(math.log(0.5))


def test_sizes_that_disagree_are_named():
    with pytest.raises(ShapeError, match="weight_VD has D=4, but D=2"):
        token_logprobs(torch.zeros(3, 2), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64))
