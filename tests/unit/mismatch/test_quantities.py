import math

import pytest
import torch

from workbench.mismatch.quantities import recorded_quantity, sampling_logprobs
from workbench.rollouts.sampling import Sampling

LOGITS = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.15), math.log(0.05)]], dtype=torch.float64)
NONE = {"temperature": 1.0, "sampling": Sampling()}


def test_each_quantity_by_hand():
    token = torch.tensor([1])
    settings = {"temperature": 0.5, "sampling": Sampling(top_k=2)}
    squares = [0.25, 0.09, 0.0225, 0.0025]
    expected = {
        "raw": math.log(0.3),
        "scaled": math.log(0.09 / sum(squares)),
        "processed": math.log(0.09 / 0.34),
        "divided": math.log(0.3) / 0.5,
    }
    for name, value in expected.items():
        assert float(recorded_quantity(LOGITS, token, logprobs=name, **settings)) == pytest.approx(value, abs=1e-12)


def test_the_drawn_token_is_always_in_what_is_recorded_and_not_in_what_is_drawn():
    token = torch.tensor([3])
    value = recorded_quantity(LOGITS, token, logprobs="processed", **NONE | {"sampling": Sampling(top_k=1)})
    assert float(value) == pytest.approx(math.log(0.05 / 0.55))
    assert float(sampling_logprobs(LOGITS, token, **NONE | {"sampling": Sampling(top_k=1)})) == -math.inf


def test_a_softmax_in_bfloat16_rounds():
    token = torch.tensor([1])
    value = recorded_quantity(LOGITS, token, logprobs="raw", softmax_dtype=torch.bfloat16, **NONE)
    assert 0 < abs(float(value) - math.log(0.3)) < 0.02
