"""Adapters in peft's file format: what is written is read, and a file of another model is refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.adapters import adapter_values, write_peft_folder
from workbench.errors import RecordError, SpecError
from workbench.policy.adapters import WEIGHTS, read_values, write_adapter
from workbench.policy.decoder import TINY
from workbench.policy.model import load_policy
from workbench.sharding.simulated import simulate
from workbench.specs.lora import LoraSpec

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def named(values):
    results = {}
    for name, (a, b) in values.items():
        module, _, parameter = name.rpartition(".")
        results |= {f"{module}.lora_A.{parameter}": a, f"{module}.lora_B.{parameter}": b}
    return results


@pytest.fixture
def folder(tmp_path):
    model = TINY["tiny-qwen3-moe"](19)
    write_peft_folder(tmp_path, adapter_values(model, 3, seed=7), rank=3, alpha=6)
    return tmp_path


def loaded(folder, **more):
    return load_policy("tiny-qwen3-moe", precision="float64", lora=LoraSpec(source=str(folder)), **more)


def change(folder, edit):
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_values_of_a_folder_are_those_of_the_policy(folder):
    policy = loaded(folder)
    expected = named(adapter_values(TINY["tiny-qwen3-moe"](19), 3, seed=7))
    assert set(policy.lora.trained) == expected.keys()
    assert policy.lora.spec.scale == 2
    for name, value in expected.items():
        assert torch.equal(policy.model.get_parameter(name).detach(), value), name


def test_what_is_written_is_read_again_bit_for_bit(folder, tmp_path_factory):
    policy, other = loaded(folder), tmp_path_factory.mktemp("other")
    values = {name: policy.model.get_parameter(name).detach() for name in policy.lora.trained}
    write_adapter(other, policy.lora, values, base="tiny-qwen3-moe")
    before, after = load_file(folder / WEIGHTS), load_file(other / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    config = json.loads((other / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(
        json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    )
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert config["base_model_name_or_path"] == "tiny-qwen3-moe"
    again = loaded(other)
    assert all(torch.equal(again.model.get_parameter(name).detach(), value) for name, value in values.items())


def test_names_are_whole_where_short_ones_would_match_more(tmp_path):
    spec = LoraSpec(r=2, target_modules=r"model\.layers\.1\..*\.[qo]_proj")
    policy = load_policy("tiny-qwen3", lora=spec)
    assert policy.lora.target_modules == tuple(f"model.layers.1.self_attn.{name}_proj" for name in "qo")


@pytest.mark.parametrize("tied", [True, False])
def test_repeated_weights_of_the_base_must_be_the_base(tied, folder):
    """peft writes the weight of an adapted head too."""
    model = TINY["tiny-qwen3-moe"](19, tied=tied)
    change(folder, lambda t: t.update({"base_model.model.lm_head.base_layer.weight": model.lm_head.weight.detach()}))
    loaded(folder, tied=tied)
    simulate(lambda mesh: loaded(folder, tied=tied, mesh=mesh), tp=2)
    change(folder, lambda t: t["base_model.model.lm_head.base_layer.weight"].mul_(1.01))
    with pytest.raises(SpecError, match=r"with base_model\.model\.lm_head\.base_layer\.weight, for which"):
        loaded(folder, tied=tied)


def test_missing_and_unknown_tensors_are_named(folder):
    def edit(tensors):
        tensors["base_model.model.lm_head.lora_C.weight"] = tensors.pop("base_model.model.lm_head.lora_A.weight")

    change(folder, edit)
    with pytest.raises(SpecError, match=r"without .*lm_head\.lora_A\.weight and with .*lm_head\.lora_C\.weight"):
        loaded(folder)


def test_an_adapter_of_another_rank_or_model_is_refused(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 4}))
    with pytest.raises(SpecError, match=r"rank 4 and a weight of"):
        loaded(folder)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match=r"target_parameters: .*\n  found: a model without experts"):
        load_policy("tiny-qwen3", lora=LoraSpec(source=str(folder)))


def test_a_damaged_file_is_named(folder):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(RecordError, match=r"lora\.source"):
        loaded(folder)


def test_modules_that_are_trained_whole_are_in_the_file(tmp_path):
    spec = LoraSpec(r=2, target_modules=("q_proj",), modules_to_save=("lm_head",))
    policy = load_policy("tiny-qwen3", tied=False, lora=spec)
    values = {name: policy.model.get_parameter(name).detach() + 1 for name in policy.lora.trained}
    write_adapter(tmp_path, policy.lora, values, base="tiny-qwen3")
    assert torch.equal(load_file(tmp_path / WEIGHTS)["base_model.model.lm_head.weight"], values["lm_head.weight"])
    again = load_policy("tiny-qwen3", tied=False, lora=LoraSpec(source=str(tmp_path)))
    assert all(torch.equal(again.model.get_parameter(name).detach(), value) for name, value in values.items())
    read = read_values(tmp_path, policy.lora.adapted, policy.lora.saved, requested="it")
    assert read.keys() == values.keys()
