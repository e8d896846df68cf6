"""Lightning's callback with a stand-in for the package; Lightning itself: tests/engines."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from workbench.records import trainer_files as files

NAME = "workbench.attach.lightning"


def module(monkeypatch, **packages):
    for name in (NAME, "lightning", "lightning.pytorch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name.replace("_", "."), package)
    return importlib.import_module(NAME)


def test_the_context_is_that_of_the_trainer_and_each_step_is_recorded(monkeypatch, tmp_path):
    package, pytorch = ModuleType("lightning"), ModuleType("lightning.pytorch")
    pytorch.Callback = object
    attach = module(monkeypatch, lightning=package, lightning_pytorch=pytorch)
    monkeypatch.delitem(sys.modules, NAME)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = SimpleNamespace(
        world_size=1,
        accumulate_grad_batches=2,
        gradient_clip_val=None,
        optimizers=[optimizer],
        precision_plugin=SimpleNamespace(),
    )
    callback = attach.RecorderCallback(tmp_path / "mine", gradients="full")
    callback.on_train_start(trainer, net)

    def closure(first):
        loss = net(torch.ones(2, 3)).square().mean() / 2
        loss.backward()
        return loss if not first else None

    closure(first=True)
    optimizer.step(lambda: closure(first=False))  # the last micro-batch is computed inside the step
    callback.on_train_end(trainer, net)
    optimizer.step()
    context, [step] = files.read_context(tmp_path / "mine"), files.read_steps(tmp_path / "mine")
    assert (context["dp"], context["micro_batches"], "max_grad_norm" in context) == (1, 2, False)
    loss = float(files.read_tensors(tmp_path / "mine", 0, "gradients")["bias"][0]) ** 2 / 4  # (d y^2 / d b)^2 / 4
    assert step["loss"] == pytest.approx(loss, rel=1e-5)


def test_without_the_package_its_name_is_in_the_error(monkeypatch):
    with pytest.raises(ImportError, match="lightning"):
        module(monkeypatch, lightning=None)
