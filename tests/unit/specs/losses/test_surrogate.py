"""Each kind of surrogate has its own settings, paired by name with the function that computes it."""

import importlib
import inspect
from pathlib import Path

import pytest
from pydantic import ValidationError

import workbench.losses
import workbench.specs.losses
from workbench.errors import SpecError
from workbench.specs.losses import SURROGATES, LossSpec, parse_surrogate


def modules(package):
    return {path.stem for path in Path(package.__file__).parent.glob("*.py")}


def test_settings_and_mathematics_have_modules_of_one_name():
    """Modules of settings alone: the base classes, the spec, and what other packages compute."""
    alone = {"__init__", "base", "compat", "loss", "surrogate"}
    assert modules(workbench.specs.losses) - alone <= modules(workbench.losses)
    for name in {kind.__module__.rpartition(".")[2] for kind in SURROGATES.values()}:
        importlib.import_module(f"workbench.losses.{name}")


@pytest.mark.parametrize("kind", [kind for kind in SURROGATES if kind != "own"])  # a function of a file
def test_settings_and_mathematics_of_a_surrogate_are_paired(kind):
    """One name, one module name, the same parameters with the same defaults."""
    from workbench.losses.build import SURROGATES as FUNCTIONS

    settings, function = SURROGATES[kind], FUNCTIONS[kind]
    assert settings.__module__.rpartition(".")[2] == function.__module__.rpartition(".")[2]
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    computed = {"log_correction_T"}  # not a setting: the output of a correction
    assert {p.name: p.default for p in keywords if p.name not in computed} == parse_surrogate(kind=kind).parameters
    described = settings.model_json_schema()["properties"]
    assert [name for name, part in described.items() if name != "kind" and not part.get("description")] == []


def test_every_surrogate_has_settings():
    from workbench.losses.build import SURROGATES as FUNCTIONS

    assert [*FUNCTIONS, "own"] == list(SURROGATES)


@pytest.mark.parametrize(
    ("kind", "given", "users"),
    [
        ("ppo", {"tau_positive": 1.0}, "sapo"),
        ("reinforce", {"clip_low": 0.1}, "ppo, cispo, gspo"),
        ("gmpo", {"delta": 2.0}, "ppo, gspo, luspo"),
        ("sft", {"beta": 0.1}, "dro, dpo"),
    ],
)
def test_a_parameter_of_another_kind_is_refused_with_those_that_use_it(kind, given, users):
    with pytest.raises(
        ValidationError, match=f"{next(iter(given))} is not used by the surrogate '{kind}'; it belongs to {users}"
    ):
        parse_surrogate(kind=kind, **given)


@pytest.mark.parametrize("kind", ["clip_cov", "kl_cov"])
def test_a_share_of_the_tokens_is_at_most_all_of_them(kind):
    assert LossSpec(surrogate={"kind": kind, "cov_fraction": 1.0}).surrogate.cov_fraction == 1.0
    with pytest.raises(SpecError, match="less than or equal to 1"):
        LossSpec(surrogate={"kind": kind, "cov_fraction": 1.01})
