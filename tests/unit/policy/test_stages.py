"""Stages of a decoder: the layers of each, the names that remain, and models that cannot be split."""

import itertools

import pytest
import torch

from workbench.errors import ShardingError, SpecError
from workbench.policy import stages
from workbench.policy.attention import with_our_attention
from workbench.policy.decoder import tiny_qwen3
from workbench.policy.model import load_policy
from workbench.policy.stages import split_stages
from workbench.sharding.simulated import simulate
from workbench.sharding.tensor_parallel import ParameterShard
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec


def load(mesh, **settings):
    return load_policy("tiny-qwen3", mesh=mesh, precision="float64", **settings)


def layers(name):
    return name.split(".")[2] if ".layers." in name else name


def test_a_rank_keeps_its_layers_under_their_names_in_the_whole_model():
    whole = [name for name, _ in tiny_qwen3(19).named_parameters()]
    policies = simulate(load, pp=2)
    names = [[name for name, _ in policy.model.named_parameters()] for policy in policies]
    assert [list(dict.fromkeys(map(layers, each))) for each in names] == [
        ["model.embed_tokens.weight", "0", "1"],
        ["model.embed_tokens.weight", "2", "model.norm.weight"],
    ]
    assert set(names[0]) | set(names[1]) == set(whole)
    assert [list(policy.shapes) for policy in policies] == [whole, whole]
    assert [policy.shards["model.embed_tokens.weight"].on_both_ends for policy in policies] == [True, True]
    assert [policy.shards.keys() for policy in policies] == [set(each) for each in names]


def test_without_a_tied_head_every_parameter_is_on_one_rank():
    names = simulate(lambda mesh: list(load(mesh, tied=False).shards), pp=3)
    whole = [name for name, _ in tiny_qwen3(19, tied=False).named_parameters()]
    assert sorted(itertools.chain(*names)) == sorted(whole)
    assert "lm_head.weight" in names[2]
    assert "model.embed_tokens.weight" in names[0]


def test_interleaved_stages_are_dealt_in_turn():
    dealt = simulate(lambda mesh: load(mesh, pipeline_schedule="interleaved_1f1b", stages_per_rank=2).stages, pp=2)
    assert [stage.own for stage in dealt] == [(0, 2), (1, 3)]
    assert dealt[0].layers == (range(1), range(1, 2), range(2, 3), range(3, 3))
    assert dealt[0].last == 3


def test_stages_have_the_layers_that_the_layout_gives_them():
    dealt = simulate(lambda mesh: load(mesh, stage_layers=(2, 1)).stages, pp=2)
    assert dealt[0].layers == (range(2), range(2, 3))
    assert list(simulate(lambda mesh: load(mesh, stage_layers=(3, 0)).stages, pp=2)[1].layers[1]) == []


@pytest.mark.parametrize("layers", [(1, 1), (0, 3)])
def test_stages_without_all_layers_are_refused(layers):
    with pytest.raises(ShardingError, match="every layer is in one stage, and every stage but the last has a layer"):
        simulate(lambda mesh: load(mesh, stage_layers=layers), pp=2)


@pytest.mark.parametrize("layout", [{"pp": 2, "stage_layers": [3]}, {"stage_layers": [3]}], ids=str)
def test_a_layout_with_layers_of_other_stages_is_refused(layout):
    with pytest.raises(SpecError, match="it has the number of layers of each stage"):
        parse_spec(RunSpec, {"layout": layout}, where="run")


def test_stages_are_checked_in_float32_and_computed_in_their_own_dtype(monkeypatch):
    seen, probe = [], stages.probe_hidden_states
    monkeypatch.setattr(
        stages, "probe_hidden_states", lambda model, *more: seen.append(model.dtype) or probe(model, *more)
    )
    policies = simulate(lambda mesh: load_policy("tiny-qwen3-moe", mesh=mesh, precision="bfloat16"), pp=2)
    assert set(seen) == {torch.float32}
    assert {parameter.dtype for policy in policies for parameter in policy.model.parameters()} == {torch.bfloat16}


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ShardingError, match=r"pp=5 = 5 stages") as caught:
        simulate(load, pp=5)
    assert "at most 4 stages" in str(caught.value)


def test_hidden_states_of_a_part_are_refused():
    def forward(mesh):
        return load(mesh).hidden_states(torch.arange(4), torch.arange(4), None)

    with pytest.raises(ShardingError, match="hidden states of a policy in pipeline stages"):
        simulate(forward, pp=2)


def small_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=19, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=None)
    return with_our_attention(GPT2LMHeadModel(config).eval())


def split(mesh, model):
    shards = {name: ParameterShard() for name, _ in model.named_parameters()}
    return split_stages(model, mesh, shards, schedule_name="1f1b", stages_per_rank=1)


def test_a_model_that_adds_positions_behind_its_embedding_is_refused():
    with pytest.raises(SpecError, match="pipeline stages of model type 'gpt2'") as caught:
        simulate(lambda mesh: split(mesh, small_gpt2()), pp=2)
    assert "found: wpe" in str(caught.value)


def test_stages_that_compute_something_else_are_refused():
    def broken(mesh):
        model = with_our_attention(tiny_qwen3(19).eval())
        forward = type(model.model).forward

        def scaled(self, *args, inputs_embeds=None, **more):  # as models that multiply their embeddings do
            inputs_embeds = self.embed_tokens(more.pop("input_ids")) if inputs_embeds is None else inputs_embeds
            return forward(self, *args, inputs_embeds=2 * inputs_embeds, **more)

        model.model.forward = scaled.__get__(model.model)
        return split(mesh, model)

    with pytest.raises(SpecError, match="one after another, give the hidden states"):
        simulate(broken, pp=2)
