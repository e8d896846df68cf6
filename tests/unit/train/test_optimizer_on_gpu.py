"""The optimizer on a GPU: torch's fused kernel, against the formula in float64, and across a checkpoint."""

from pathlib import Path

import pytest
import torch

from workbench.records.directory import RunDirectory
from workbench.sharding.mesh import single_process_mesh
from workbench.specs.run import RunSpec
from workbench.train.checkpoint import build_policy, load_checkpoint, save_checkpoint
from workbench.train.optimizer import build_optimizer

pytestmark = pytest.mark.gpu


def held(spec):
    policy = build_policy(spec, single_process_mesh(torch.device("cuda")), Path(), temperature=1.0)
    return policy, build_optimizer(policy, spec)


def train(policy, optimizer, steps):
    for step in steps:
        draw = torch.Generator("cuda").manual_seed(step)
        for parameter in policy.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw, device="cuda").to(parameter.dtype)
        optimizer.step()


def weights(policy):
    return {name: value.detach().clone() for name, value in policy.model.named_parameters()}


def test_a_step_is_that_of_the_formula_rounded_once():
    spec = RunSpec(precision="bfloat16", optimizer={"learning_rate": 1e-2, "weight_decay": 0.1})
    policy, optimizer = held(spec)
    before = weights(policy)
    train(policy, optimizer, range(1))
    for name, parameter in policy.model.named_parameters():
        w, g = before[name].double(), parameter.grad.double()
        expected = (1 - 1e-3) * w - 1e-2 * g / (g.abs() + 1e-8)  # after one step m_hat = g, v_hat = g^2
        gap = 2.0**-7 * expected.abs().clamp_min(2.0**-20)  # of neighbouring bfloat16 numbers, at most
        assert bool(((parameter.double() - expected).abs() <= 0.51 * gap).all()), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resumed_optimizer_goes_on_with_the_same_bits(precision, tmp_path):
    spec = RunSpec(precision=precision, optimizer={"learning_rate": 1e-2})
    policy, optimizer = held(spec)
    train(policy, optimizer, range(2))
    run = RunDirectory.create(tmp_path, "run", spec)
    save_checkpoint(run, 2, policy, optimizer)
    again, its_optimizer = held(spec)
    load_checkpoint(run.checkpoints()[2], again, its_optimizer)
    for each in ((policy, optimizer), (again, its_optimizer)):
        train(*each, range(2, 4))
    for name, value in weights(policy).items():
        assert torch.equal(value, weights(again)[name]), name
