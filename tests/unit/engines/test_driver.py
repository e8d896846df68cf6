import sys

import pytest
import torch

from tests.helpers.stand_in import stand_in
from workbench.atomic import write_tensors
from workbench.engines import driver
from workbench.engines.case import EngineCase, EngineStep, read_step, write_cases
from workbench.engines.driver import Refused, load_weights, options, plain_norm, serve, snapshot
from workbench.engines.proof import DOCUMENTS
from workbench.errors import SpecError


def test_a_driver_answers_every_case(tmp_path, monkeypatch, capsys):
    def run(case):
        if case.packed:
            raise Refused("no packing")
        if case.clip is not None:
            raise ValueError("no clip")
        return EngineStep({"a": torch.ones(1)}, {"a": torch.zeros(1)})

    monkeypatch.setattr(driver, "sys", stand_in(sys, argv=["driver.py", str(tmp_path), "kind=sft"]))
    write_cases(tmp_path, [EngineCase(DOCUMENTS), EngineCase(DOCUMENTS, packed=True), EngineCase(DOCUMENTS, clip=1.0)])
    serve(run)
    steps = [read_step(tmp_path, number) for number in range(3)]
    assert [step.refused for step in steps] == ["", "no packing", ""]
    assert steps[2].error == "ValueError: no clip"
    assert options() == {"kind": "sft"}
    assert "no clip" in capsys.readouterr().err


def test_initial_weights_are_those_of_the_model(tmp_path):
    model = torch.nn.Linear(2, 1)
    file = write_tensors(tmp_path / "w.safetensors", {"weight": torch.ones(1, 2), "bias": torch.ones(1)})
    load_weights(model, EngineCase(DOCUMENTS, weights=str(file)))
    assert snapshot(model.named_parameters())["weight"].tolist() == [[1.0, 1.0]]
    other = write_tensors(tmp_path / "other.safetensors", {"weight": torch.ones(1, 2)})
    with pytest.raises(SpecError, match="bias"):
        load_weights(model, EngineCase(DOCUMENTS, weights=str(other)))


def test_the_norm_is_that_of_all_gradients():
    model = torch.nn.Linear(2, 1)
    model(torch.tensor([3.0, 4.0])).backward()
    assert plain_norm(model.parameters()) == pytest.approx(26**0.5)
