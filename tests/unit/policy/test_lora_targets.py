"""What the settings of LoRA match in a decoder, and what they may not."""

import pytest

from workbench.errors import SpecError
from workbench.policy.decoder import tiny_qwen3, tiny_qwen3_moe
from workbench.policy.lora import install_lora
from workbench.policy.lora_targets import find_adapted
from workbench.sharding.mesh import single_process_mesh
from workbench.sharding.tensor_parallel import ParameterShard
from workbench.specs.lora import LoraSpec


def shapes_of(model):
    return {name: value.shape for name, value in model.named_parameters()}


def matched(model, **settings):
    return [each.weight for each in find_adapted(model, LoraSpec(r=2, **settings), shapes_of(model))]


def test_all_linear_is_every_linear_layer_but_the_head():
    names = matched(tiny_qwen3(19))
    assert len(names) == 3 * 7
    assert "lm_head.weight" not in names
    assert len(matched(tiny_qwen3_moe(19))) == 3 * 4 + 3, "the layers of the dense one, and no expert"


def test_targets_are_ends_of_names_or_one_regular_expression():
    model = tiny_qwen3_moe(19)
    assert matched(model, target_modules=("q_proj",)) == [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(3)]
    assert matched(model, target_modules=(), target_parameters=("experts.down_proj",)) == [
        f"model.layers.{n}.mlp.experts.down_proj" for n in (0, 2)
    ]
    assert matched(model, target_modules=r"model\.layers\.1\..*_proj") == matched(model, target_modules=r".*\.1\..*")
    assert matched(model, target_modules=("lm_head",)) == ["lm_head.weight"]
    assert find_adapted(model, LoraSpec(r=2, target_modules=("lm_head",)), shapes_of(model))[0].is_head


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ("q_proj", "query")}, r"target_modules: 'query'\n  found: linear layers .*q_proj"),
        ({"target_modules": ("embed_tokens",)}, "an embedding, a norm and a router are none"),
        ({"target_modules": "q_proj"}, "target_modules: 'q_proj'"),
        ({"target_modules": "(q"}, "no regular expression"),
        ({"target_modules": ("proj",)}, "target_modules: 'proj'"),  # the end of a word is not the end of a name
        ({"target_parameters": ("mlp.gate.weight",)}, r"found: weights of experts .*down_proj"),
        ({"modules_to_save": ("score",)}, "no module of that name"),
        ({"modules_to_save": ("lm_head",)}, "also that of model.embed_tokens"),
        ({"target_modules": ("lm_head",), "modules_to_save": ("norm", "lm_head")}, "also that of|trained whole"),
    ],
)
def test_targets_that_match_nothing_are_named(settings, message):
    model = tiny_qwen3_moe(19)
    with pytest.raises(SpecError, match=message):
        install_lora(
            model,
            single_process_mesh(),
            {name: ParameterShard() for name in shapes_of(model)},
            LoraSpec(r=2, **settings),
            shapes=shapes_of(model),
        )
