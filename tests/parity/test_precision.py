"""A float64 run makes no float32 tensor on the way from tokens to gradients."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.test_layouts import settings
from tests.parity.test_oracle import documents_near
from workbench.policy.model import load_policy
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.run import RunSpec
from workbench.train import step as flow


class LowPrecision(TorchDispatchMode):
    """Notes every operation that returns a floating tensor below float64."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64:
                self.seen.append(f"{function} -> {value.dtype} {tuple(value.shape)}")
        return out


def watched_step(lift):
    spec = RunSpec.model_validate(settings({}))
    policy = load_policy("tiny-qwen3", precision="float64", seed=3)
    if not lift:
        for module in policy.model.modules():  # the result of stock modules
            if hasattr(module, "variance_epsilon") or hasattr(module, "inv_freq"):
                del module.forward
    rows, totals = flow.prepare_rows(RolloutBatch.from_documents(documents_near(11)), spec, policy.mesh)
    with LowPrecision() as watch:
        flow.run_step(policy, flow.build_loss(spec.loss), rows, totals)
    return watch.seen


def test_float64_step_has_no_float32_intermediate():
    assert watched_step(lift=True) == []


def test_stock_norms_and_rotary_would_be_seen():
    assert any("float32" in line for line in watched_step(lift=False))
