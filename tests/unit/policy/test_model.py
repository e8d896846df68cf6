from dataclasses import replace

import pytest
import torch
import transformers

from workbench.errors import ShardingError, SpecError
from workbench.policy import attention
from workbench.policy.attention import SHARDED
from workbench.policy.decoder import tiny_qwen3
from workbench.policy.logprobs.engine import count_gemms
from workbench.policy.model import load_policy
from workbench.sharding.attention import AttentionShard
from workbench.sharding.gradients import full_gradients
from workbench.sharding.mesh import Axis, Mesh, single_process_mesh
from workbench.sharding.plan import ShardPlan
from workbench.sharding.simulated import simulate

TP3 = Mesh({"dp": Axis("dp"), "cp": Axis("cp"), "tp": Axis("tp", 3), "dp_cp": Axis("dp_cp")}, torch.device("cpu"))


def one_rank(documents):
    ids = torch.tensor(documents)
    return AttentionShard.make(ShardPlan.make("contiguous", num_tokens=len(ids), cp=1), ids, Axis("cp"))


def test_packed_documents_match_separate_ones():
    policy = load_policy("tiny-qwen3", precision="float64", seed=1)
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2])
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3])
    packed = policy.hidden_states(tokens, positions, one_rank([0, 0, 0, 1, 1, 1, 1]))
    alone = [policy.hidden_states(tokens[a:b], positions[a:b], one_rank([0] * (b - a))) for a, b in ((0, 3), (3, 7))]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-13)


@pytest.mark.parametrize("active", [None, [True, False, True, True]])
def test_rows_go_through_the_head_once(active):
    """Their number is told or counted, and right: after a wrong one they would go through it again."""
    policy = load_policy("tiny-qwen3", precision="float64", implementation="chunked")
    hidden = torch.ones(4, policy.model.config.hidden_size, dtype=torch.float64)
    with torch.no_grad(), count_gemms() as count:
        policy.token_logprobs(hidden, torch.arange(4), active_T=None if active is None else torch.tensor(active))
    assert count.rows == (4 if active is None else 3)


def test_inputs_of_the_first_layer_may_be_given():
    policy = load_policy("tiny-qwen3", precision="float64", seed=1)
    tokens, positions, shard = torch.tensor([3, 1, 4, 1]), torch.arange(4), one_rank([0, 0, 0, 0])
    words = policy.embeddings(tokens)
    assert torch.equal(words, policy.model.get_input_embeddings().weight[tokens])
    own = policy.hidden_states(tokens, positions, shard)
    assert torch.equal(policy.hidden_states(tokens, positions, shard, embeddings_TD=words), own)
    other = policy.hidden_states(tokens, positions, shard, embeddings_TD=words.roll(1, dims=0))
    rolled = policy.hidden_states(tokens.roll(1), positions, shard)
    assert torch.equal(other, rolled)
    assert not torch.equal(other, own)
    sharded = replace(policy, trunk=torch.nn.Identity())
    with pytest.raises(ShardingError, match="embeddings of a policy with sharded parameters"):
        sharded.embeddings(tokens)


def test_the_temperature_divides_logits_in_every_implementation():
    hidden, targets = torch.randn(5, 64, dtype=torch.float64), torch.tensor([0, 18, 3, 7, 7])
    results = [
        load_policy("tiny-qwen3", precision="float64", temperature=temperature, implementation=name)
        .token_logprobs(hidden, targets)[0]
        .detach()
        for temperature in (0.7, 1.0)
        for name in ("reference", "vocabulary_parallel", "chunked")
    ]
    for cooler, plain in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(cooler, results[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(plain, results[3], rtol=0, atol=1e-12)
        assert (cooler - plain).abs().max() > 0.1


def test_a_temperature_per_token_replaces_the_policys_in_every_implementation():
    hidden, targets = torch.randn(5, 64, dtype=torch.float64), torch.tensor([0, 18, 3, 7, 7])
    temperatures = torch.tensor([1.0, 0.7, 1.0, 0.7, 0.7], dtype=torch.float64)
    for name in ("reference", "vocabulary_parallel", "chunked"):
        policy = load_policy("tiny-qwen3", precision="float64", temperature=0.7, implementation=name)
        output = policy.token_logprobs(hidden, targets, temperatures)
        cooler = policy.token_logprobs(hidden, targets)
        plain = policy.token_logprobs(hidden, targets, torch.ones(5, dtype=torch.float64))
        for mixed, at_07, at_1 in zip(output[:3], cooler[:3], plain[:3], strict=True):
            torch.testing.assert_close(mixed, torch.where(temperatures == 0.7, at_07, at_1), rtol=0, atol=1e-12)
            assert (at_07 - at_1).abs().max() > 0.01


def test_a_checkpoint_folder_loads_and_equals_the_stock_model(tmp_path):
    stock = tiny_qwen3(19, seed=2)
    stock.save_pretrained(tmp_path / "policy")
    policy = load_policy("policy", project=tmp_path, temperature=0.7)
    assert policy.model.config._attn_implementation == SHARDED
    tokens = torch.tensor([3, 1, 4, 1, 5])
    hidden = policy.hidden_states(tokens, torch.arange(5), one_rank([0] * 5))
    logprobs, entropy, *_ = policy.token_logprobs(hidden[:-1], tokens[1:])
    with torch.no_grad():
        expected = torch.log_softmax(stock(input_ids=tokens[None]).logits[0] / 0.7, -1)
    torch.testing.assert_close(logprobs, expected[torch.arange(4), tokens[1:]], rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1)[:-1], rtol=0, atol=2e-6)


def test_a_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(SpecError, match="a hub id that can be reached, or one of tiny-qwen3, tiny-qwen3-moe, "):
        load_policy("no/such-model", project=tmp_path)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(SpecError, match="needs the whole vocabulary"):
        load_policy("tiny-qwen3", mesh=TP3, implementation="reference")
    with pytest.raises(SpecError, match=r"policy\.logprobs = 'liger'"):
        load_policy("tiny-qwen3", implementation="liger")
    with pytest.raises(SpecError, match=r"policy\.logprobs = 'triton'(.|\n)*float64|not installed"):
        load_policy("tiny-qwen3", implementation="triton", precision="float64")
    with pytest.raises(SpecError, match=r"model\.tied = True"):
        load_policy("some/checkpoint", tied=True)


def test_heads_that_tp_does_not_divide_are_refused():
    with pytest.raises(ShardingError, match="4 query heads, 2 key/value heads"):
        load_policy("tiny-qwen3", mesh=TP3)


def small(kind, folder, **more):
    """A tiny checkpoint of another architecture."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": 19,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        | more
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / kind)
    return model


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Llama", {"attention_bias": True}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen3", {"head_dim": 8}),
        ("Phi3", {}),
        ("GPT2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_other_dense_decoders_are_taken(kind, more, precision, tmp_path):
    stock = small(kind, tmp_path, **more)
    policy = load_policy(kind, project=tmp_path, precision=precision)
    tokens = torch.tensor([3, 1, 4, 1, 5])
    hidden = policy.hidden_states(tokens, torch.arange(5), one_rank([0] * 5))
    logprobs = policy.token_logprobs(hidden[:-1], tokens[1:]).logprobs_T
    with torch.no_grad():
        expected = torch.log_softmax(stock(input_ids=tokens[None]).logits[0], -1)[torch.arange(4), tokens[1:]]
    torch.testing.assert_close(logprobs, expected.to(logprobs.dtype), rtol=0, atol=5e-6)


def test_an_id_that_a_tokenizer_pads_with_trains_where_it_is_text(tmp_path):
    """On one rank as over tp, whose pieces of the embedding know no such id."""
    small("Llama", tmp_path, pad_token_id=3)
    tokens = torch.tensor([3, 1, 3, 5])

    def gradient(mesh):
        policy = load_policy("Llama", project=tmp_path, mesh=mesh, precision="float64")
        hidden = policy.hidden_states(tokens, torch.arange(4), one_rank([0] * 4))
        policy.token_logprobs(hidden, tokens.roll(-1)).logprobs_T.sum().backward()
        return full_gradients(policy.model, policy.shards, mesh)["model.embed_tokens.weight"]

    alone = gradient(single_process_mesh())
    assert alone[3].abs().max() > 0
    for over_tp in simulate(gradient, tp=2):
        torch.testing.assert_close(over_tp, alone)


WINDOWED = [
    ("Mistral", {"sliding_window": 4}),
    ("Mistral", {"sliding_window": 4096}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("Gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 8, "sliding_window": 4}),
]


@pytest.mark.parametrize(("kind", "more"), WINDOWED)
def test_sliding_windows_are_those_of_the_stock_model(kind, more, tmp_path):
    stock = small(kind, tmp_path, **more)
    policy = load_policy(kind, project=tmp_path)
    tokens = torch.arange(30) % 19
    hidden = policy.hidden_states(
        torch.cat([tokens, tokens[:9]]), torch.cat([torch.arange(30), torch.arange(9)]), one_rank([0] * 30 + [1] * 9)
    )
    with torch.no_grad():
        long, short = (
            stock.base_model(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in (tokens, tokens[:9])
        )
    torch.testing.assert_close(hidden, torch.cat([long, short]), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("kind", "more"), WINDOWED)
def test_an_ignored_window_is_detected_by_measurement_at_any_length(kind, more, tmp_path, monkeypatch):
    small(kind, tmp_path, **more)
    monkeypatch.setattr(
        attention,
        "sharded_attention",
        lambda *tensors, sliding_window=None, whole=attention.sharded_attention, **rest: whole(*tensors, **rest),
    )
    with pytest.raises(SpecError, match="packed run"):
        load_policy(kind, project=tmp_path)


def test_windows_are_as_long_as_before_after_they_were_measured(tmp_path):
    small("Mistral", tmp_path, sliding_window=4096)
    policy = load_policy("Mistral", project=tmp_path)
    assert policy.model.config.sliding_window == 4096


def test_layers_of_an_unknown_kind_are_refused_by_name(tmp_path):
    stock = tiny_qwen3(19)
    stock.config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(SpecError, match="layers of type 'chunked_attention'"):
        attention.refuse_unknown(stock)


@pytest.mark.parametrize(
    ("kind", "settings", "found"),
    [
        ("Qwen3Next", {"layer_types": ["linear_attention", "full_attention"]}, "layers of type 'linear_attention'"),
        ("Mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 1}, "layers of type 'linear_attention'"),
        (
            "Glm4Moe",
            {"first_k_dense_replace": 2, "num_mtp_layers": 2},
            "num_mtp_layers = 2, layers that predict several",
        ),
    ],
)
def test_linear_attention_and_multi_token_prediction_are_refused_by_name(kind, settings, found):
    sizes = {"vocab_size": 19, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "num_experts": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None} if kind != "Mamba2" else {}
    config = getattr(transformers, f"{kind}Config")(**sizes | {"pad_token_id": None} | settings)
    with torch.device("meta"):
        stock = getattr(transformers, f"{kind}ForCausalLM")(config)
    with pytest.raises(SpecError, match=found):
        attention.refuse_unknown(stock)


@pytest.mark.parametrize(
    ("kind", "more", "option", "value"),
    [
        ("Granite", {"logits_scaling": 4.0}, "logit_scale", 0.25),
        ("Cohere", {"logit_scale": 0.0625}, "logit_scale", 0.0625),
        (
            "Gemma2",
            {
                "final_logit_softcapping": 0.5,
                "attn_logit_softcapping": None,
                "head_dim": 8,
                "layer_types": ["full_attention"] * 2,
            },
            "soft_cap",
            0.5,
        ),
    ],
)
def test_logit_options_of_the_configuration_go_to_the_head(kind, more, option, value, tmp_path):
    stock = small(kind, tmp_path, **more)
    for implementation in ("reference", "vocabulary_parallel", "chunked"):
        policy = load_policy(kind, project=tmp_path, implementation=implementation)
        assert policy.head_arguments()[option] == value
        tokens = torch.tensor([3, 1, 4, 1, 5])
        hidden = policy.hidden_states(tokens, torch.arange(5), one_rank([0] * 5))
        logprobs = policy.token_logprobs(hidden[:-1], tokens[1:]).logprobs_T
        with torch.no_grad():
            expected = torch.log_softmax(stock(input_ids=tokens[None]).logits[0], -1)[torch.arange(4), tokens[1:]]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=5e-6)


def test_ignored_options_of_the_configuration_are_detected_by_measurement(tmp_path):
    model = tiny_qwen3(19)
    model.config.final_logit_softcapping = 0.5
    model.save_pretrained(tmp_path / "capped")
    with pytest.raises(SpecError, match="scaled and capped as the configuration says"):
        load_policy("capped", project=tmp_path)


def test_silently_unsupported_options_are_refused_by_name(tmp_path):
    small("Gemma2", tmp_path, attn_logit_softcapping=50.0, head_dim=8)
    with pytest.raises(SpecError, match=r"attn_logit_softcapping = 50\.0"):
        load_policy("Gemma2", project=tmp_path)


def test_rotary_that_depends_on_the_longest_position_is_refused_in_every_precision(tmp_path):
    small("Llama", tmp_path, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(SpecError, match="rotary embedding 'dynamic'"):
        load_policy("Llama", project=tmp_path)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("GPTNeo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}),  # its own attention
        ("Bloom", {"n_layer": 2, "n_head": 4}),  # positions by distance
        ("Gemma", {"head_dim": 8}),  # norms of another kind
    ],
)
def test_a_decoder_that_would_mean_something_else_is_refused_by_measuring_it(kind, more, tmp_path):
    small(kind, tmp_path, **more)
    with pytest.raises(SpecError, match=r"policy of model type|float64 run of a model"):
        load_policy(kind, project=tmp_path, precision="float64")


def test_a_checkpoint_with_missing_tensors_is_refused_by_their_names(tmp_path):
    from safetensors.torch import load_file, save_file

    small("Llama", tmp_path)
    path = tmp_path / "Llama/model.safetensors"
    kept = load_file(path)
    del kept["model.layers.1.mlp.up_proj.weight"]
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(SpecError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_policy("Llama", project=tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SpecError, match=r"load model\.source = 'Llama'"):
        load_policy("Llama", project=tmp_path)


def test_no_pickle_is_read(tmp_path):
    model = small("Llama", tmp_path)
    (tmp_path / "Llama/model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "Llama/pytorch_model.bin")
    with pytest.raises(SpecError, match=r"\*\.safetensors"):
        load_policy("Llama", project=tmp_path)


def test_embeddings_are_refused_in_the_reproducible_mode():
    from workbench.reproducible import Resolution, install

    policy = load_policy("tiny-qwen3")
    exact = install(policy, Resolution(block_tokens=8))
    tokens_T = torch.arange(8)
    with pytest.raises(SpecError, match="embeddings in the reproducible mode"):
        policy.hidden_states(tokens_T, tokens_T, None, embeddings_TD=policy.embeddings(tokens_T))
    exact.remove()
