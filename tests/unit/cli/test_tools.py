"""Tools of `workbench mcp` as functions: answers for inputs that have two forms, and inputs that are refused."""

import importlib
import inspect

import pytest

from tests.helpers.proofs import make_proof
from workbench.cli import tools
from workbench.errors import SpecError


def test_forms_of_a_loss(monkeypatch):
    given = []

    def pretend(loss, **settings):
        given.append((loss, settings))
        return make_proof(broken=False)

    monkeypatch.setattr(importlib.import_module("workbench.prove"), "prove", pretend)
    read = tools.prove({"name": "gspo"}, seed=4, invariants=["cp_degree"])
    assert (read.data["ok"], read.data["subject"]) == (make_proof(broken=False).ok, make_proof(broken=False).subject)
    tools.prove("gspo", {"policy": {"temperature": 0.7}})
    (settings, asked), (spec, _) = given
    assert (settings, asked["seed"], asked["invariants"]) == ({"name": "gspo"}, 4, ["cp_degree"])
    assert (spec.loss.name, spec.policy.temperature) == ("gspo", 0.7)


def test_settings_of_a_run_are_those_of_its_loss():
    with pytest.raises(SpecError, match="temprature"):
        tools.prove("gspo", {"policy": {"temprature": 2.0}}, invariants=["cp_degree"])


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_misspelt_setting_names_its_side(side):
    with pytest.raises(SpecError, match=f"(?s)^{side}: .*layuot") as error:
        tools.bisect(**({"a": {}, "b": {}} | {side: {"layuot": {}}}))
    assert error.value.parts["fix"]


def test_settings_without_a_system_are_refused():
    with pytest.raises(SpecError, match="no other_system"):
        tools.translate("verl", {}, other_settings={"clip_ratio": 0.2})


def test_every_tool_says_what_each_argument_is():
    for tool in tools.TOOLS:
        assert inspect.getdoc(tool)
        for name, parameter in inspect.signature(tool, eval_str=True).parameters.items():
            assert any(getattr(part, "description", "") for part in parameter.annotation.__metadata__), (tool, name)
