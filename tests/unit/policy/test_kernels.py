"""Compiled and liger kernels of a decoder's trunk, against the decoder as it is."""

import itertools
import sys
import threading
import types

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from workbench.errors import SpecError
from workbench.faults import planted
from workbench.policy import kernels
from workbench.policy.decoder import load_decoder
from workbench.policy.kernels import gated, rms_norm, rotate, use_kernels
from workbench.policy.model import load_policy
from workbench.sharding.attention.shard import AttentionShard
from workbench.sharding.mesh import single_process_mesh
from workbench.sharding.simulated import simulate

FORMULAS = {"norm": rms_norm, "rope": rotate, "mlp": gated}


@pytest.fixture
def eager(monkeypatch):
    """The formulas without the compiler, and their calls."""
    calls = []

    def watched(part):
        return lambda *inputs: calls.append(part) or FORMULAS[part](*inputs)

    monkeypatch.setattr(kernels, "_compiled", watched)
    return calls


def results(model):
    """Logits and gradients of a row."""
    model.zero_grad()
    logits = model(input_ids=torch.arange(12)[None] % 19, use_cache=False).logits
    logits.square().sum().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("part", ["norm", "rope", "mlp"])
def test_logits_and_gradients_stay(part, eager):
    model = load_decoder("tiny-qwen3").double()
    expected = results(model)
    actual = results(use_kernels(model, {part: "compiled"}))
    assert set(eager) == {part}
    for one, other in zip(actual, expected, strict=True):
        # the norms of transformers compute in float32, the formula in float64
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max()))


def test_the_rotation_of_another_model_in_this_process_stays(eager):
    changed, stock = load_decoder("tiny-qwen3"), load_decoder("tiny-qwen3")
    use_kernels(changed, {"rope": "compiled"})
    results(stock)
    assert not eager
    results(changed)
    assert len(eager) == changed.config.num_hidden_layers


def test_every_norm_and_mlp_is_replaced_once(eager):
    model = use_kernels(load_decoder("tiny-qwen3"), {"norm": "compiled", "mlp": "compiled", "rope": "torch"})
    results(model)
    layers = model.config.num_hidden_layers
    assert (eager.count("norm"), eager.count("mlp"), eager.count("rope")) == (4 * layers + 1, layers, 0)


def test_formulas_compile():
    x, weight = torch.randn(2, 5, 8), torch.randn(8)
    compiled = torch.compile(rms_norm, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight, 1e-6), rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize(
    ("requested", "texts"),
    [
        ({"norms": "compiled"}, ("kernels.norms", "norm, rope, mlp")),
        ({"norm": "fast"}, ("'fast'", "torch, compiled, liger")),
    ],
)
def test_unknown_names_are_refused(requested, texts):
    with pytest.raises(SpecError) as caught:
        use_kernels(torch.nn.Linear(2, 2), requested)
    assert all(text in str(caught.value) for text in texts)


def test_a_model_without_such_modules_is_refused(eager):
    model = load_decoder("tiny-qwen3")
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    with pytest.raises(SpecError, match="SiLU"):
        use_kernels(model, {"mlp": "compiled"})


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None)
    with pytest.raises(SpecError, match="liger"):
        use_kernels(load_decoder("tiny-qwen3"), {"norm": "liger"})


def test_the_functions_of_liger_are_called(monkeypatch):
    calls = []

    def function(part):
        return types.SimpleNamespace(apply=lambda *inputs: calls.append(part) or FORMULAS[part](*inputs[:4]))

    norm = types.SimpleNamespace(apply=lambda x, w, epsilon, *rest: calls.append(rest) or rms_norm(x, w, epsilon))
    stand_in = types.SimpleNamespace(
        LigerRMSNormFunction=norm, LigerRopeFunction=function("rope"), LigerSiLUMulFunction=function("mlp")
    )
    monkeypatch.setattr(kernels, "_liger", lambda: stand_in)
    results(use_kernels(load_decoder("tiny-qwen3"), dict.fromkeys(("norm", "rope", "mlp"), "liger")))
    assert set(calls) == {(0.0, "llama", False), "rope", "mlp"}


def test_every_shape_and_dtype_is_compiled():
    """torch compiles eight graphs of a function, and runs it uncompiled from then on."""
    kernels._compiled("norm")
    graphs = CompileCounter()
    norm = torch.compile(rms_norm, backend=graphs)
    cases = list(itertools.product((2, 3, 4), (torch.float32, torch.float64), (False, True)))
    for dims, dtype, gradient in cases:
        x = torch.randn(*(2,) * dims, dtype=dtype, requires_grad=gradient)
        with torch.set_grad_enabled(gradient):
            norm(x, torch.ones(2, dtype=dtype), 1e-6)
    assert graphs.frame_count == len(cases) == 12


def test_shards_over_tp_are_checked_without_kernels(monkeypatch):
    """The check is on the host, whose tensors Triton refuses."""
    this_rank, loaded = threading.local(), []

    def apply(*inputs):
        loaded.append(this_rank.loaded)
        return gated(*inputs)

    operators = types.SimpleNamespace(LigerSiLUMulFunction=types.SimpleNamespace(apply=apply))
    monkeypatch.setattr(kernels, "_liger", lambda: operators)

    def hidden(mesh):
        this_rank.loaded = False
        policy = load_policy("tiny-qwen3", mesh=mesh, kernels={"mlp": "liger"})
        this_rank.loaded = True
        shard = AttentionShard(torch.arange(4)[None, None], documents_T=torch.zeros(4, dtype=torch.int64))
        return policy.hidden_states(torch.arange(4), torch.arange(4), shard).detach()

    alone = hidden(single_process_mesh())
    for over_tp in simulate(hidden, tp=2):
        torch.testing.assert_close(over_tp, alone)
    assert set(loaded) == {True}


def test_a_fault_can_be_planted_at_a_rotation_that_takes_kernels(eager):
    model = use_kernels(load_decoder("tiny-qwen3").double(), {"rope": "compiled"})
    expected = results(model)[0]
    with planted(["rotary_tables_in_bfloat16"]):
        planted_logits = results(model)[0]
    assert 1e-6 < float((planted_logits - expected).norm() / expected.norm()) < 0.1
    assert torch.equal(results(model)[0], expected)
