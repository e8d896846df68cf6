"""The JSON Schema of ablation files: it accepts what is accepted, refuses misspelt keys, and is saved as it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from workbench.errors import SpecError
from workbench.launch.ablation import AblationSpec, load_ablation
from workbench.launch.schema import ablation_schema, settings_by_name
from workbench.specs.losses import PRESETS, SURROGATES, LossSpec
from workbench.specs.mistakes import setting_names
from workbench.specs.reading import flatten
from workbench.specs.run import RunSpec

ROOT = Path(__file__).parents[3]
SAVED = ROOT / "docs/reference/ablation.schema.json"
HEADER = re.compile(r"# yaml-language-server: \$schema=(\S+)")


class Core(yaml.SafeLoader):
    """YAML 1.2 as editors read it: 1e-4 is a number there."""


Core.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


SETTINGS = {*AblationSpec.model_fields, *RunSpec.model_fields}


def is_ablation(path):
    """A mapping of settings of ablations or runs alone; reading each here would cost seconds of every collection."""
    names = set(re.findall(r"^(\w+):", path.read_text(), re.MULTILINE))
    return bool(names) and names <= SETTINGS


SHIPPED = [path for path in sorted((ROOT / "experiments").rglob("*.yaml")) if is_ablation(path)]


@pytest.fixture(scope="module")
def validator():
    schema = ablation_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def mistakes(validator, settings):
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(settings)]


def one(**settings):
    return {"reference": "a", "configurations": {"a": settings}}


def test_the_saved_schema_is_that_of_the_code():
    assert json.loads(SAVED.read_text()) == ablation_schema(), f"workbench schema {SAVED.relative_to(ROOT)} writes it"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT / "experiments")))
def test_a_shipped_ablation_is_valid_and_names_the_schema(validator, path):
    assert mistakes(validator, yaml.load(path.read_text(), Core)) == []
    [named] = HEADER.findall(path.read_text())
    assert (path.parent / named).resolve() == SAVED


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_and_its_own_settings_are_valid(validator, preset):
    assert mistakes(validator, one(loss={"name": preset})) == []
    assert mistakes(validator, one(loss=LossSpec(name=preset).model_dump(mode="json"))) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"optimiser": {"learning_rate": 1}},
        {"layout": {"ordr": "zigzag"}},
        {"layout": {"order": "zigzig"}},
        {"layout": {"cp": 0}},
        {"loss": {"surrogate": {"clip_hgih": 0.2}}},
        {"loss": {"surrogate": {"kind": "gspo", "beta": 1.0}}},
        {"loss": {"name": "grop"}},
        {"faults": ["no_such_fault"]},
        {"steps": "many"},
        {"optimizer": {"learning_rate": -1}},
    ],
    ids=str,
)
def test_a_mistake_is_seen_wherever_settings_stand(validator, settings):
    assert mistakes(validator, one(**settings))
    assert mistakes(validator, one() | {"base": settings})
    assert mistakes(validator, one() | {"extra": {"b": settings}})
    assert mistakes(validator, settings), "the file of one run"
    with pytest.raises(SpecError):
        load_ablation(one(**settings))


@pytest.mark.parametrize(
    "file",
    [{"configurations": {"a": {}}}, one() | {"axis": {}}, one() | {"axes": {"precison": ["float64"]}}],
    ids=["no reference", "misspelt key", "misspelt axis"],
)
def test_a_mistake_of_the_ablation_itself_is_seen(validator, file):
    assert mistakes(validator, file)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": {"name": "my_losses.py:grpo", "settings": {"clip": 0.2}, "engine": "mean"}},
        {"loss": {"surrogate": {"clip_low": 0.1}}},
        {"faults": "local_denominator"},
        {"layout": {"cp": 2, "order": "zigzag"}, "steps": 3},
    ],
    ids=str,
)
def test_what_is_accepted_is_valid(validator, settings):
    assert mistakes(validator, one(**settings)) == []
    assert mistakes(validator, settings) == []


def test_every_setting_has_a_name_and_a_meaning():
    names = settings_by_name()
    assert names.keys() >= set(setting_names(RunSpec))
    assert names.keys() >= flatten(RunSpec().model_dump(mode="json")).keys()
    assert [name for name, setting in names.items() if not setting.meaning] == []
    assert all(part["description"] for part in ablation_schema()["then"]["properties"].values())
    assert ablation_schema()["then"]["properties"].keys() == AblationSpec.model_fields.keys()


def test_a_setting_is_as_its_class_says():
    names = settings_by_name()
    order = names["layout.order"]
    assert (order.choices[:2], order.default, order.kinds) == (("contiguous", "zigzag"), "contiguous", ())
    high = names["loss.surrogate.clip_high"]
    assert (high.kind, high.default["gspo"], high.default["ppo"]) == ("number, at least 0", 4e-4, 0.2)
    assert high.default == {kind: SURROGATES[kind]().clip_high for kind in high.kinds}
    assert names["loss.surrogate.dual_clip"].kind == "number, greater than 1 or none"
    assert names["layout"].settings[0] == "layout.dp"
    assert names["faults"].choices[0] == "adapter_counted_by_every_tp_rank"
