"""A recorder around an engine with DeepSpeed's calls; DeepSpeed itself: tests/engines."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from workbench.errors import SpecError
from workbench.records import trainer_files as files

NAME = "workbench.attach.deepspeed"


@pytest.fixture
def attach(monkeypatch):
    package, utils = ModuleType("deepspeed"), ModuleType("deepspeed.utils")
    utils.safe_get_full_grad = lambda parameter: parameter.in_buffer
    for name, module in (("deepspeed", package), ("deepspeed.utils", utils)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


class Engine:
    """ZeRO on one rank: gradients go to buffers, and the flat copy of the weights is what the optimizer has."""

    dp_world_size = 1

    def __init__(self, stage=2, fp16=False, managed=True):
        torch.manual_seed(0)
        self.module = nn.Linear(3, 1)
        flat = nn.Parameter(torch.zeros(4))
        base = torch.optim.SGD([flat] if stage else self.module.parameters(), lr=0.1)
        self.optimizer = SimpleNamespace(optimizer=base, param_groups=base.param_groups) if stage else base
        self.micro_steps, self.updates, self._settings = 0, 0, (stage, fp16, managed)
        for value in self.module.parameters() if stage == 3 else ():
            value.ds_tensor, value.ds_shape = value.detach().flatten()[:2].clone(), value.shape

    zero_optimization_stage = lambda self: self._settings[0]  # noqa: E731
    fp16_enabled = lambda self: self._settings[1]  # noqa: E731
    managed_gradient_accumulation = lambda self: self._settings[2]  # noqa: E731
    gradient_accumulation_steps = lambda self: 2  # noqa: E731
    gradient_clipping = lambda self: 0.5  # noqa: E731

    def is_gradient_accumulation_boundary(self):
        return self.micro_steps % 2 == 1

    def backward(self, loss):
        (loss / 2).backward()
        for value in self.module.parameters() if self._settings[0] else ():
            before = value.in_buffer if self.micro_steps % 2 else torch.zeros_like(value)
            value.in_buffer, value.grad = before + value.grad, None

    def step(self):
        self.updates += self.is_gradient_accumulation_boundary()
        self.micro_steps += 1


def trained(engine, steps=2):
    for number in range(2 * steps):
        engine.backward(engine.module(torch.full((2, 3), 1.0 + number)).square().mean())
        engine.step()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_of_the_record_is_an_update_of_the_engine(stage, attach, tmp_path):
    engine = Engine(stage)
    recorder = attach.EngineRecorder(tmp_path / "mine", engine, gradients="full", context={"order": "given"})
    trained(engine)
    assert engine.updates == recorder.number == 2
    recorder.close()
    assert engine.step.__func__ is Engine.step
    trained(engine)
    context, steps = files.read_context(tmp_path / "mine"), files.read_steps(tmp_path / "mine")
    assert {name: context[name] for name in ("dp", "micro_batches", "max_grad_norm", "zero_stage", "order")} == {
        "dp": 1,
        "micro_batches": 2,
        "max_grad_norm": 0.5,
        "zero_stage": stage,
        "order": "given",
    }
    expected = Engine().module
    losses = [expected(torch.full((2, 3), one)).square().mean() / 2 for one in (1.0, 2.0)]
    sum(losses).backward()
    assert steps[0]["loss"] == pytest.approx(sum(losses).item(), rel=1e-6)
    assert steps[0]["observed"]["clip"] == {"max_norm": 0.5}
    gradients = files.read_tensors(tmp_path / "mine", 0, "gradients")
    for name, value in expected.named_parameters():
        torch.testing.assert_close(gradients[name], value.grad)
        assert steps[0]["gradient_norms"][name] == pytest.approx(value.grad.norm().item(), rel=1e-6)
    seen = context["observed"]
    assert seen["parameters"]["weight"]["shape"] == [1, 3], "whole also where this rank has a partition"
    assert (seen["sharded"], "left_out" in seen) == (stage == 3, stage == 0)


@pytest.mark.parametrize(
    ("changes", "found"),
    [({"fp16": True}, "a scaled loss"), ({"managed": False}, "managed_gradient_accumulation: false")],
)
def test_engines_whose_buffers_may_hold_something_else_are_refused(changes, found, attach, tmp_path):
    with pytest.raises(SpecError, match="train in bf16 or fp32") as caught:
        attach.EngineRecorder(tmp_path / "mine", Engine(**changes))
    assert caught.value.parts["found"] == found
    engine = Engine()
    engine.optimizer = None
    with pytest.raises(SpecError, match="give it an optimizer"):
        attach.EngineRecorder(tmp_path / "mine", engine)
