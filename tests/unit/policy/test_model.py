import pytest
import torch

from workbench.errors import ShardingError, SpecError
from workbench.policy.model import ATTENTION, load_policy
from workbench.policy.tiny import tiny_qwen3
from workbench.sharding.attention import AttentionShard
from workbench.sharding.mesh import Axis, Mesh
from workbench.sharding.plan import ShardPlan

TP3 = Mesh({"dp": Axis("dp"), "cp": Axis("cp"), "tp": Axis("tp", 3), "dp_cp": Axis("dp_cp")}, torch.device("cpu"))


def one_rank(documents):
    ids = torch.tensor(documents)
    return AttentionShard.make(ShardPlan.make("contiguous", num_tokens=len(ids), cp=1), ids, Axis("cp"))


def test_packed_documents_give_what_each_gives_alone():
    policy = load_policy("tiny-qwen3", precision="float64", seed=1)
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2])
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3])
    packed = policy.hidden_states(tokens, positions, one_rank([0, 0, 0, 1, 1, 1, 1]))
    alone = [policy.hidden_states(tokens[a:b], positions[a:b], one_rank([0] * (b - a))) for a, b in ((0, 3), (3, 7))]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-13)


def test_a_checkpoint_folder_loads_and_equals_the_stock_model(tmp_path):
    stock = tiny_qwen3(19, seed=2)
    stock.save_pretrained(tmp_path / "policy")
    policy = load_policy("policy", project=tmp_path, temperature=0.7)
    assert policy.model.config._attn_implementation == ATTENTION
    tokens = torch.tensor([3, 1, 4, 1, 5])
    hidden = policy.hidden_states(tokens, torch.arange(5), one_rank([0] * 5))
    logprobs, entropy = policy.token_logprobs(hidden[:-1], tokens[1:])
    with torch.no_grad():
        expected = torch.log_softmax(stock(input_ids=tokens[None]).logits[0] / 0.7, -1)
    torch.testing.assert_close(logprobs, expected[torch.arange(4), tokens[1:]], rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1)[:-1], rtol=0, atol=2e-6)


def test_a_checkpoint_that_is_not_there_is_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SpecError, match="checkpoint folder, a hub id that can be reached, or tiny-qwen3"):
        load_policy("no/such-model", project=tmp_path)


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(SpecError, match="needs the whole vocabulary"):
        load_policy("tiny-qwen3", mesh=TP3, implementation="reference")
    with pytest.raises(SpecError, match=r"policy\.logprobs = 'triton'"):
        load_policy("tiny-qwen3", implementation="triton")
    with pytest.raises(SpecError, match=r"model\.tied = True"):
        load_policy("some/checkpoint", tied=True)


def test_heads_that_tp_does_not_divide_are_refused():
    with pytest.raises(ShardingError, match="4 query heads, 2 key/value heads"):
        load_policy("tiny-qwen3", mesh=TP3)


def test_what_would_be_left_out_silently_is_refused(tmp_path):
    model = tiny_qwen3(19)
    model.config.final_logit_softcapping = 30.0
    model.save_pretrained(tmp_path / "capped")
    with pytest.raises(SpecError, match=r"final_logit_softcapping = 30\.0"):
        load_policy("capped", project=tmp_path)
