"""The tiny models have every part that sharding can get wrong, and the seed decides their weights."""

import pytest
import torch

from workbench.errors import SpecError
from workbench.policy import decoder
from workbench.policy.decoder import (
    TINY,
    TINY_VISION,
    decoder_config,
    load_decoder,
    published_qwen3,
    tiny_qwen3,
    tiny_qwen3_moe,
)


def test_grouped_heads_query_norms_and_a_vocabulary_of_any_size():
    model = tiny_qwen3(19)
    config = model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (19, 64, 3)
    assert any("q_norm" in name for name, _ in model.named_parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training


def test_experts_a_router_and_a_dense_layer_between():
    model = tiny_qwen3_moe(19)
    kinds = [type(layer.mlp).__name__ for layer in model.model.layers]
    assert kinds == ["Qwen3MoeSparseMoeBlock", "Qwen3MoeMLP", "Qwen3MoeSparseMoeBlock"]
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape == (4, 2 * 96, 64)
    assert (model.config.num_experts_per_tok, model.config.norm_topk_prob) == (2, True)
    assert any("q_norm" in name for name, _ in model.named_parameters())
    assert not model.training


@pytest.mark.parametrize("make", TINY.values(), ids=TINY)
def test_tied_and_untied_heads(make):
    tied, untied = make(19), make(19, tied=False)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    assert not torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)


@pytest.mark.parametrize("make", TINY.values(), ids=TINY)
def test_the_seed_alone_decides_the_weights(make):
    first, other = make(19, seed=1).state_dict(), make(19, seed=2).state_dict()
    torch.manual_seed(123)
    again = make(19, seed=1).state_dict()
    assert all(torch.equal(again[name], value) for name, value in first.items())
    assert not torch.equal(other["model.embed_tokens.weight"], first["model.embed_tokens.weight"])


@pytest.mark.parametrize("make", TINY.values(), ids=TINY)
def test_the_global_random_state_is_left_alone(make):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    make(19)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("make", TINY_VISION.values(), ids=TINY_VISION)
def test_vision_models_are_small_drawn_from_their_seed_and_without_dropout(make):
    torch.manual_seed(123)
    first, again, other = (make(seed=seed).state_dict() for seed in (1, 1, 2))
    after = torch.rand(1)
    torch.manual_seed(123)
    assert torch.equal(after, torch.rand(1))
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not any(torch.equal(value, other[name]) for name, value in first.items() if value.is_floating_point())
    model = make()
    assert sum(parameter.numel() for parameter in model.parameters()) < 25_000
    assert (model.training, model.config.attention_dropout) == (False, 0.0)


def test_qwen3_has_the_weights_of_the_published_checkpoint():
    with torch.device("meta"):
        model = published_qwen3("qwen3-0.6b")
    assert sum(p.numel() for p in model.parameters()) == 596_049_920  # the head is the embedding, counted once
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.rope_parameters["rope_theta"] == 1e6


def test_a_tiny_decoder_and_its_configuration_are_the_callers_own():
    """This process keeps what it has made."""
    model, expected = load_decoder("tiny-qwen3"), tiny_qwen3(19)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.config.vocab_size = decoder_config("tiny-qwen3").vocab_size = 1
    again = load_decoder("tiny-qwen3")
    assert all(map(torch.equal, again.parameters(), expected.parameters()))
    assert again.config.to_dict() == decoder_config("tiny-qwen3").to_dict() == expected.config.to_dict()


class TestSmallCheckpoints:
    """A process keeps the most recent one, and gives out copies."""

    @pytest.fixture
    def folder(self, tmp_path):
        tiny_qwen3(19).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    @staticmethod
    def weights(folder):
        return load_decoder(str(folder)).state_dict()

    def test_a_copy_is_what_the_first_one_was_and_draws_no_random_number(self, folder):
        torch.manual_seed(7)
        first = load_decoder(str(folder))
        before = {name: weight.clone() for name, weight in first.state_dict().items()}
        with torch.no_grad():
            for weight in first.parameters():
                weight.add_(1)
        first.config.vocab_size = 3
        second = load_decoder(str(folder))
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))
        assert all(torch.equal(weight, before[name]) for name, weight in second.state_dict().items())
        assert second.config.vocab_size == 19
        assert second.lm_head.weight is second.model.embed_tokens.weight
        assert not second.training

    def test_a_file_that_changed_is_read_again(self, folder):
        before = self.weights(folder)
        tiny_qwen3(19, seed=1).save_pretrained(folder)
        assert not torch.equal(self.weights(folder)["lm_head.weight"], before["lm_head.weight"])
        (folder / "model.safetensors").write_bytes(b"damaged")
        with pytest.raises(SpecError, match=r"load model\.source"):
            load_decoder(str(folder))

    def test_a_large_one_is_not_kept(self, folder, monkeypatch):
        monkeypatch.setattr(decoder, "SMALL_BYTES", 1)
        monkeypatch.setattr(decoder, "_small", {})
        self.weights(folder)
        assert decoder._small == {}


class TestFormsOfACheckpoint:
    """One in several files or another dtype is the same model; a part of one is refused by name."""

    def test_several_files(self, tmp_path):
        tiny_qwen3(19).save_pretrained(tmp_path, max_shard_size="100KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        expected = tiny_qwen3(19).state_dict()
        assert all(torch.equal(expected[name], each) for name, each in load_decoder(str(tmp_path)).state_dict().items())
        sorted(tmp_path.glob("*.safetensors"))[0].unlink()
        with pytest.raises(SpecError, match="model-00001-of-"):
            load_decoder(str(tmp_path))

    def test_another_dtype(self, tmp_path):
        stock = tiny_qwen3(19).to(torch.bfloat16)
        stock.save_pretrained(tmp_path)
        loaded = load_decoder(str(tmp_path)).state_dict()
        assert all(torch.equal(loaded[name], each.float()) for name, each in stock.state_dict().items())
        assert {each.dtype for each in loaded.values()} == {torch.float32}

    def test_an_adapter(self, tmp_path):
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(SpecError, match=r"an adapter(?s:.)*lora\.source"):
            load_decoder(str(tmp_path))

    def test_a_folder_of_checkpoints(self, tmp_path):
        with pytest.raises(SpecError, match=r"without config\.json"):
            load_decoder(str(tmp_path))
        (tmp_path / "checkpoint-10").mkdir()
        (tmp_path / "checkpoint-10/config.json").write_text("{}")
        with pytest.raises(SpecError, match=r"without config\.json(?s:.)*its checkpoints: checkpoint-10"):
            load_decoder(str(tmp_path))


def test_a_configuration_is_read_without_the_weights(tmp_path):
    tiny_qwen3(23).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    config = decoder_config(str(tmp_path))
    assert (config.vocab_size, config.hidden_size) == (23, 64)
    assert decoder_config("tiny-qwen3-moe").vocab_size == 19
    assert decoder_config(tmp_path.name, project=tmp_path.parent).vocab_size == 23


def test_a_configuration_that_is_absent_or_damaged_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"a folder without config\.json"):
        decoder_config(str(tmp_path))
    with pytest.raises(SpecError, match=r"load model\.source = 'nowhere'"):
        decoder_config("nowhere", project=tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecError, match=r"load model\.source"):
        decoder_config(str(tmp_path))
