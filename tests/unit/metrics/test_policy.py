import math

import pytest
import torch

from workbench.losses import LossInputs, grpo
from workbench.metrics.policy import policy_metrics
from workbench.metrics.values import finish_metrics
from workbench.sharding.mesh import Axis


def test_metrics_of_two_trained_tokens_and_one_that_is_not():
    policy = torch.log(torch.tensor([2.0, 0.9, 100.0], dtype=torch.float64))
    zero = torch.zeros(3, dtype=torch.float64)
    inputs = LossInputs(policy, zero, torch.tensor([1.0, -3.0, 50.0], dtype=torch.float64), ref_logprobs_T=zero,
                        entropy_T=torch.tensor([0.5, 1.5, 9.0]))
    terms = grpo(inputs, kl_coefficient=0.1)
    found = finish_metrics([policy_metrics(inputs, terms, torch.tensor([True, True, False]))], Axis("dp_cp"))
    assert found["tokens/trained/sum"] == 2
    assert found["ratio/policy_old/mean"] == pytest.approx(1.45)
    assert found["ratio/policy_old/std"] == pytest.approx(0.55)
    assert found["ratio/policy_old/max"] == pytest.approx(2.0)
    assert found["ratio/policy_old/min"] == pytest.approx(0.9)
    assert found["clip/policy/fraction"] == 0.5
    assert found["entropy/policy/mean"] == 1.0
    assert found["advantage/all/mean"] == -1.0
    assert found["logprob/policy/mean"] == pytest.approx(math.log(1.8) / 2)
    assert (found["advantage/all/min"], found["advantage/all/max"]) == (-3.0, 1.0)
    k3 = [math.expm1(-math.log(r)) + math.log(r) for r in (2.0, 0.9)]
    assert found["kl/policy_ref/k3_mean"] == pytest.approx(sum(k3) / 2)
    assert "kl/policy_sampler/k3_mean" not in found
