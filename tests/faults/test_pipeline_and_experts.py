"""Effects of faults of pipeline stages and of experts on several ranks, in their declared numbers."""

import pytest
import torch

from tests.helpers.planted_faults import shown
from workbench.faults import planted
from workbench.policy.model import load_policy
from workbench.sharding.simulated import simulate

EXPERTS = "mlp.experts.gate_up_proj"


def test_a_sum_is_back_propagated_through_stages():
    pair = shown("pipeline_loss_divided_after_backward")
    assert pair.factor == pytest.approx(pair.right.counts["tokens"], rel=1e-12)
    assert pair.cosine == pytest.approx(1, rel=1e-12)
    assert pair.ratio("loss/total") == 1


def test_each_call_of_a_schedule_divides_those_before_again():
    """Of two calls of two micro-batches the first counts 1/4, the second 1/2; each alone is right up to that."""
    pair = shown("pipeline_gradients_averaged_per_call")
    assert pair.cosine < 0.999
    at_once = shown("pipeline_gradients_averaged_per_call", data={"micro_batches": 2})
    assert at_once.factor == pytest.approx(1 / 2, rel=1e-12)
    averaged = shown("pipeline_gradients_averaged", data={"micro_batches": 4})
    name = "model.layers.1.mlp.up_proj.weight"
    wrong, right, even = pair.wrong.gradients[name], pair.right.gradients[name], averaged.wrong.gradients[name]
    torch.testing.assert_close(even, right / 4, rtol=1e-12, atol=1e-15)
    first = (right / 2 - wrong) * 4  # right = first + second, wrong = first / 4 + second / 2
    assert 0.05 < float(first.norm() / right.norm()) < 2
    assert float((first / 4 + (right - first) / 2 - wrong).norm()) < 1e-15 + 1e-12 * float(wrong.norm())


def test_the_last_stage_has_the_layers_of_the_first():
    pair = shown("stage_layers_numbered_locally")
    assert pair.wrong_gradients
    assert abs(pair.ratio("loss/total") - 1) > 1e-3

    def layers(mesh):
        model = load_policy("tiny-qwen3", mesh=mesh, precision="float64", seed=3).model
        return {name: value.clone() for name, value in model.named_parameters() if name.startswith("model.layers.")}

    right = simulate(layers, pp=2)
    with planted(["stage_layers_numbered_locally"]):
        wrong = simulate(layers, pp=2)
    for name, value in right[0].items():
        torch.testing.assert_close(wrong[0][name], value, rtol=0, atol=0)
    for name, value in wrong[1].items():
        first = right[0][name.replace("layers.2.", "layers.0.")]
        torch.testing.assert_close(value, first, rtol=0, atol=0)


def test_experts_without_replicas_double_with_every_micro_batch():
    """Of two, the first counts twice: what is too much is the gradient of that micro-batch, and lies in the sum."""
    pair = shown("expert_gradients_doubled_per_micro_batch", data={"micro_batches": 2})
    assert len(pair.wrong_gradients) == 4
    assert all(".experts." in name for name in pair.wrong_gradients)
    assert 1 < pair.factor_of(EXPERTS) < 2
