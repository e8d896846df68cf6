"""Modules are swapped and restored, and modules not known to be exact are refused by name."""

import doctest

import pytest
import torch

import workbench as wb
from tests.helpers.exact_step import BLOCK, in_order
from workbench.errors import ShapeError, ShardingError, SpecError
from workbench.policy.model import load_policy
from workbench.reproducible import Resolution, install, reproducibly
from workbench.sharding.attention import AttentionShard
from workbench.sharding.mesh import Axis
from workbench.sharding.simulated import simulate

TOKENS = torch.arange(32) % 19


def logprobs(policy, tp=1):
    shard = AttentionShard.make(in_order("contiguous")(1), torch.zeros(32, dtype=torch.long), Axis("cp"))
    return policy.token_logprobs(policy.hidden_states(TOKENS, torch.arange(32), shard), TOKENS.roll(-1)).logprobs_T


def gradients(policy):
    policy.model.zero_grad()
    logprobs(policy).sum().backward()
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in policy.model.named_parameters()
    }


def test_after_the_context_everything_is_as_before():
    def there_and_back(mesh):
        policy = load_policy("tiny-qwen3", mesh=mesh)
        forwards = {name: vars(module).get("forward") for name, module in policy.model.named_modules()}
        before = gradients(policy)
        with wb.reproducibly(policy, block_tokens=BLOCK, weight_chunks=2) as exact:
            assert policy.exact is exact
            inside = gradients(policy)
            assert set(inside.values()) == {None}
            exact.reduce()
        assert policy.exact is None
        assert forwards == {name: vars(module).get("forward") for name, module in policy.model.named_modules()}
        after = gradients(policy)
        return [name for name, value in before.items() if not torch.equal(value, after[name])]

    assert simulate(there_and_back, tp=2) == [[], []]
    assert simulate(there_and_back) == [[]]


def test_one_thread_computes_inside():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with reproducibly(load_policy("tiny-qwen3"), block_tokens=BLOCK):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_documented_example_works():
    (example,) = doctest.DocTestFinder().find(reproducibly, "reproducibly", globs={})
    result = doctest.DocTestRunner().run(example)
    assert result.failed == 0
    assert result.attempted > 10


def test_an_error_inside_puts_everything_back_too():
    policy = load_policy("tiny-qwen3")
    with pytest.raises(KeyError), reproducibly(policy, block_tokens=BLOCK):
        raise KeyError
    assert policy.exact is None


def test_a_second_install_is_refused():
    policy = load_policy("tiny-qwen3")
    exact = install(policy, Resolution(BLOCK))
    with pytest.raises(SpecError, match="computes exactly already"):
        install(policy, Resolution(BLOCK))
    exact.remove()
    install(policy, Resolution(BLOCK))


@pytest.mark.parametrize(
    ("source", "load", "chunks", "words"),
    [
        ("tiny-qwen3-moe", {}, 1, "Qwen3MoeAttention at model.layers.0.self_attn"),
        ("tiny-qwen3", {"precision": "float64"}, 1, "embed_tokens.weight in float64"),
        ("tiny-qwen3", {"fp32_head": True}, 1, "fp32_head"),
        ("tiny-qwen3", {}, 4, "2 key/value heads"),
        ("tiny-qwen3", {}, 32, "19 tokens of a vocabulary"),
    ],
)
def test_modules_not_known_to_be_exact_are_refused_by_name(source, load, chunks, words):
    policy = load_policy(source, **load)
    with pytest.raises(SpecError, match=words):
        install(policy, Resolution(BLOCK, chunks))
    assert policy.exact is None
    assert "forward" not in vars(policy.model.get_input_embeddings())


def test_untrained_parameters_and_dropout_are_refused():
    policy = load_policy("tiny-qwen3")
    policy.model.model.norm.weight.requires_grad_(False)
    policy.model.train()
    policy.model.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(SpecError, match=r"1\.self_attn in training mode, with dropout, .*norm\.weight, which is not"):
        install(policy, Resolution(BLOCK))


def test_a_module_of_ones_own_is_refused_by_name():
    class Scaled(torch.nn.Linear):
        pass

    policy = load_policy("tiny-qwen3")
    policy.model.model.layers[0].mlp.up_proj = Scaled(64, 192, bias=False)
    with pytest.raises(SpecError, match=r"Scaled at model\.layers\.0\.mlp\.up_proj"):
        install(policy, Resolution(BLOCK))


def test_more_ranks_than_pieces_and_sequence_parallelism_are_refused():
    def with_one_piece(mesh):
        with pytest.raises(SpecError, match="tp=2"):
            install(load_policy("tiny-qwen3", mesh=mesh), Resolution(BLOCK))
        policy = load_policy("tiny-qwen3", mesh=mesh, sequence_parallel=True)
        with pytest.raises(ShardingError, match="sequence parallelism"):
            install(policy, Resolution(BLOCK, 2))
        return policy.exact

    assert simulate(with_one_piece, tp=2) == [None, None]


def test_options_unsupported_by_the_exact_head_are_refused():
    policy = load_policy("tiny-qwen3")
    hidden = torch.zeros(32, 64)
    with reproducibly(policy, block_tokens=BLOCK):
        with pytest.raises(SpecError, match="leave active_T and kept out"):
            policy.token_logprobs(hidden, TOKENS, active_T=TOKENS > 3)
        with pytest.raises(SpecError, match="'variance'"):
            policy.token_logprobs(hidden, TOKENS, outputs=("variance",))


def test_targets_and_temperatures_that_mean_nothing_are_refused():
    policy, hidden = load_policy("tiny-qwen3"), torch.zeros(32, 64)
    with reproducibly(policy, block_tokens=BLOCK):
        with pytest.raises(ShapeError, match="an id of 19"):
            policy.token_logprobs(hidden, TOKENS + 1)
        with pytest.raises(ShapeError, match="T=31"):
            policy.token_logprobs(hidden, TOKENS[1:])
        with pytest.raises(ShapeError, match="temperature"):
            policy.token_logprobs(hidden, TOKENS, torch.zeros(32))


def test_a_temperature_divides_logits():
    one, two = load_policy("tiny-qwen3", temperature=0.5), load_policy("tiny-qwen3")
    with reproducibly(one, block_tokens=BLOCK), reproducibly(two, block_tokens=BLOCK), torch.no_grad():
        shard = AttentionShard.make(in_order("contiguous")(1), torch.zeros(32, dtype=torch.long), Axis("cp"))
        hidden = one.hidden_states(TOKENS, torch.arange(32), shard)
        expected = one.token_logprobs(hidden, TOKENS).logprobs_T
        assert torch.equal(two.token_logprobs(hidden, TOKENS, torch.full((32,), 0.5)).logprobs_T, expected)
        assert not torch.equal(two.token_logprobs(hidden, TOKENS).logprobs_T, expected)
