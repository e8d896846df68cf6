"""Shards read from the marks of megatron-core, on a model that has them; megatron-core itself: tests/engines."""

import importlib
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from workbench.sharding.mesh import Axis

NAME = "workbench.attach.megatron"


def module(monkeypatch, core):
    for name, package in ((NAME, None), ("megatron", ModuleType("megatron")), ("megatron.core", core)):
        monkeypatch.delitem(sys.modules, name, raising=False)
        if name != NAME:
            monkeypatch.setitem(sys.modules, name, package)
    return importlib.import_module(NAME)


def marked(parameter, dim, stride=1, parallel=True):
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = parallel, dim, stride


def test_marks_of_parameters_are_their_plan(monkeypatch):
    core = ModuleType("megatron.core")
    core.parallel_state = ModuleType("megatron.core.parallel_state")
    core.parallel_state.get_tensor_model_parallel_group = lambda: Axis("tp", size=2)
    attach = module(monkeypatch, core)
    monkeypatch.delitem(sys.modules, NAME)
    model = nn.ModuleDict({"qkv": nn.Linear(4, 6), "out": nn.Linear(3, 4), "fc1": nn.Linear(4, 8, bias=False)})
    marked(model["qkv"].weight, 0)
    marked(model["qkv"].bias, 0)
    marked(model["out"].weight, 1)
    marked(model["out"].bias, -1, parallel=False)
    marked(model["fc1"].weight, 0, stride=2)
    shards = attach.tensor_shards(nn.ModuleDict({"module": model}))
    shapes = {name: tuple(shards.weights(value).shape) for name, value in model.named_parameters()}
    assert shapes == {
        "qkv.weight": (12, 4),
        "qkv.bias": (12,),
        "out.weight": (4, 6),
        "out.bias": (4,),
        "fc1.weight": (16, 4),
    }
    assert shards._shards["fc1.weight"].parts == (8, 8)
    assert shards._shards["qkv.weight"].parts == ()
    alone = attach.tensor_shards(model, Axis("tp"))
    assert all(torch.equal(alone.weights(value), value) for value in model.parameters())


def test_without_the_package_its_name_is_in_the_error(monkeypatch):
    with pytest.raises(ImportError, match="megatron"):
        module(monkeypatch, None)
