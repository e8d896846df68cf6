"""Settings of LoRA: its scale, names that are refused, and an adapter's own file."""

import json
import math

import pytest

from workbench.errors import SpecError
from workbench.specs.lora import LoraSpec, from_peft, lora_scale, read_settings, to_peft
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec

FILE = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["v_proj", "q_proj"]}


def test_the_scale_is_alpha_over_the_rank_or_over_its_root():
    assert lora_scale(8, 16, use_rslora=False) == 2
    assert lora_scale(16, 8, use_rslora=True) == 2
    assert LoraSpec(r=7).scale == 1
    assert LoraSpec(r=2, lora_alpha=3, use_rslora=True).scale == 3 / math.sqrt(2)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"lora_dropout": 0.1},
        {"bias": "all"},
        {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {"q_proj": 2}},
        {"layers_to_transform": [0]},
        {"exclude_modules": ["q_proj"]},
        {"trainable_token_indices": [1]},
        {"ensure_weight_tying": True},
    ],
)
def test_what_is_not_supported_is_refused_by_name(settings):
    [name] = settings
    with pytest.raises(SpecError, match=f"{name} = .* is not supported: "):
        LoraSpec(r=4, **settings)
    with pytest.raises(SpecError, match=f"{name} = .* is not supported: "):
        parse_spec(LoraSpec, from_peft(FILE | settings), where="a file")


def test_settings_that_would_not_be_used_are_refused():
    with pytest.raises(SpecError, match="lora_alpha without r or source"):
        LoraSpec(lora_alpha=3)
    with pytest.raises(SpecError, match="r with source"):
        LoraSpec(source="folder", r=3)
    with pytest.raises(SpecError, match="nothing is adapted"):
        LoraSpec(r=3, target_modules=())
    with pytest.raises(SpecError, match=r"lora\.sampler = 'unmerged' without online\.task"):
        RunSpec(lora={"r": 3, "sampler": "unmerged"})
    with pytest.raises(SpecError, match="lora with the reproducible mode"):
        RunSpec(lora={"r": 3}, reproducible={"block_tokens": 8})


def test_initial_values_have_the_names_of_peft():
    assert LoraSpec(r=3, init_lora_weights=True).init_lora_weights == "kaiming"
    assert LoraSpec(r=3, init_lora_weights=False).init_lora_weights == "random"


def test_a_run_without_lora_keeps_its_name():
    assert "lora" not in json.loads(RunSpec().canonical())
    assert RunSpec(lora={"r": 3}).content_hash() != RunSpec(lora={"r": 4}).content_hash() != RunSpec().content_hash()


def test_a_file_gives_its_settings_and_pefts_defaults():
    spec = parse_spec(
        LoraSpec, from_peft(FILE | {"bias": "none", "task_type": "CAUSAL_LM", "revision": None}), where=""
    )
    assert (spec.r, spec.lora_alpha, spec.target_modules) == (4, 6, ("q_proj", "v_proj"))
    assert from_peft({"peft_type": "LORA", "target_modules": "q_.*"}) == {
        "r": 8,
        "lora_alpha": 8,
        "target_modules": "q_.*",
    }
    again = to_peft(spec, base="base", targets=("q_proj", "v_proj"), parameters=())
    assert parse_spec(LoraSpec, from_peft(again), where="") == spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3', and only LORA"),
        ({"eva_config": {"rho": 2}}, "eva_config = .*: a variant of LoRA"),
        ({"of_tomorrow": 1}, "of_tomorrow = 1: an unknown field"),
    ],
)
def test_a_file_of_another_method_is_refused(change, message, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(FILE | change))
    with pytest.raises(SpecError, match=message):
        read_settings(tmp_path, LoraSpec(source="there"))


def test_the_dropout_of_a_file_is_refused_unless_it_is_turned_off(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(FILE | {"lora_dropout": 0.05}))
    with pytest.raises(SpecError, match=r"lora_dropout = 0\.05 is not supported"):
        read_settings(tmp_path, LoraSpec(source="there"))
    spec = read_settings(tmp_path, LoraSpec(source="there", lora_dropout=0, sampler="unmerged"))
    assert (spec.r, spec.lora_dropout, spec.sampler) == (4, 0, "unmerged")


def test_a_folder_without_an_adapter_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"lora\.source = 'there'\n  found: no adapter_config\.json in "):
        read_settings(tmp_path, LoraSpec(source="there"))
