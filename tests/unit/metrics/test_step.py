import math
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.metric_rows import inputs_of, nasty_documents, segment_lengths
from tests.helpers.ranks import run_ranks
from workbench.metrics.policy import policy_metrics
from workbench.metrics.quantities import DocumentSlots
from workbench.metrics.step import StepClock, gradient_group_norms, parameter_group, parameter_layer, peak_bytes
from workbench.policy.model import load_policy
from workbench.specs.losses import LossSpec


@pytest.mark.parametrize(
    ("name", "group", "layer"),
    [
        ("model.embed_tokens.weight", "embedding", None),
        ("model.layers.0.self_attn.q_proj.weight", "attention", 0),
        ("model.layers.11.self_attn.q_norm.weight", "norm", 11),
        ("model.layers.2.input_layernorm.weight", "norm", 2),
        ("model.layers.2.mlp.gate_proj.weight", "mlp", 2),
        ("model.norm.weight", "norm", None),
        ("lm_head.weight", "head", None),
        ("vision.normalizer.mlp_like.weight", "other", None),  # whole names of modules, not pieces of them
    ],
)
def test_a_parameter_belongs_to_one_group(name, group, layer):
    assert parameter_group(name) == group
    assert parameter_layer(name) == layer


def test_every_parameter_of_the_models_here_has_a_group():
    policy = load_policy("tiny-qwen3", tied=False)
    groups = {parameter_group(name) for name, _ in policy.model.named_parameters()}
    assert groups == {"embedding", "attention", "norm", "mlp", "head"}


def test_squares_of_groups_add_up_to_the_global_norm():
    g = torch.Generator().manual_seed(3)
    names = [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        *(f"model.layers.{layer}.{part}.weight" for layer in range(3) for part in ("self_attn.o_proj", "mlp.up_proj")),
    ]
    norms = dict(zip(names, torch.rand(len(names), generator=g).tolist(), strict=True))
    basic, full = gradient_group_norms(norms), gradient_group_norms(norms, "full")
    squares = sum(norm**2 for norm in norms.values())
    assert sum(norm**2 for norm in basic.values()) == pytest.approx(squares)
    assert list(basic) == [f"gradient/norm/{group}" for group in ("norm", "attention", "mlp", "embedding", "head")]
    assert full["gradient/norm/layer_01"] == pytest.approx(
        math.hypot(norms["model.layers.1.self_attn.o_proj.weight"], norms["model.layers.1.mlp.up_proj.weight"])
    )
    assert len(full) == len(basic) + 3
    assert gradient_group_norms(norms, "none") == {}


def test_clock_counts_milliseconds():
    with StepClock(torch.device("cpu")) as clock:
        time.sleep(0.02)
    assert 15 < clock.step_ms < 2000


def peaks_around_a_tensor():
    before = peak_bytes(torch.device("cpu"))
    ballast = torch.ones(24_000_000)
    after = peak_bytes(torch.device("cpu"))
    del ballast
    return before, after


def test_peak_memory_grows_with_live_tensors(tmp_path):
    """In a process that has not had a higher peak before."""
    [(before, after)] = run_ranks(peaks_around_a_tensor, 1, tmp_path)
    assert after >= before + 64_000_000


class NoWaiting(TorchDispatchMode):
    """Refuses to bring a number from the device to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "this waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", ["basic", "full"])
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_measuring_waits_for_nothing(level, name):
    documents = nasty_documents(4)
    inputs, mask = inputs_of(documents)
    spec = LossSpec(name=name)
    slots = DocumentSlots(0, len(documents), segment_lengths(documents))
    with NoWaiting():
        assert policy_metrics(inputs, {}, mask, level, spec, slots)
    with NoWaiting(), pytest.raises(AssertionError, match="this waits"):
        float(torch.ones(1).sum())
