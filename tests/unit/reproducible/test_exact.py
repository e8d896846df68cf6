"""The same bits on simulated ranks of every layout, and numbers that match the ordinary ones."""

import functools
import math

import pytest
import torch

from tests.helpers.exact_step import BLOCK, TOKENS, at_random, in_order, own_step
from tests.helpers.same_bits import same_bits
from workbench.errors import ShapeError, SpecError
from workbench.policy.model import load_policy
from workbench.reproducible import OutOfRange, Resolution, install
from workbench.sharding.mesh import single_process_mesh
from workbench.sharding.simulated import simulate

SINGLE, MIXED = ("float32", True), ("bfloat16", False)
LAYOUTS = [
    (SINGLE, {"dp": 2, "cp": 2}, at_random(2), {"backwards": True, "checkpointing": True}),
    (MIXED, {"cp": 2, "tp": 2}, in_order("zigzag"), {}),
    (SINGLE, {"tp": 2}, in_order("contiguous"), {"checkpointing": True}),
    (MIXED, {"dp": 2}, in_order("contiguous"), {"backwards": True}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (SINGLE, {"cp": 2}, in_order("zigzag"), {}),
            (MIXED, {"cp": 4}, at_random(1), {}),
            (SINGLE, {"dp": 4}, in_order("contiguous"), {}),
            (SINGLE, {"cp": 2, "tp": 2}, at_random(3), {}),
            (MIXED, {"dp": 2, "tp": 2}, in_order("contiguous"), {"checkpointing": True}),
        )
    ),
]


@functools.cache
def alone(precision, tied, exact=True):
    return own_step(
        single_process_mesh(), in_order("contiguous"), Resolution(BLOCK, 2), precision=precision, tied=tied, exact=exact
    )


def differing(found, expected):
    return sorted(
        {name for of_rank in found for name, value in of_rank.items() if not same_bits(value, expected[name])}
    )


@pytest.mark.parametrize(("numbers", "sizes", "plan_of", "more"), LAYOUTS)
def test_every_layout_gives_the_same_bits(numbers, sizes, plan_of, more):
    precision, tied = numbers
    by_rank = simulate(
        lambda mesh: own_step(mesh, plan_of, Resolution(BLOCK, 2), precision=precision, tied=tied, **more), **sizes
    )
    assert differing(by_rank, alone(precision, tied)) == []
    assert set().union(*by_rank) == set(alone(precision, tied))


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"cp": 2}, {"tp": 2}])
def test_the_ordinary_computation_does_not(sizes):
    by_rank = simulate(lambda mesh: own_step(mesh, in_order("contiguous"), Resolution(BLOCK, 2), exact=False), **sizes)
    assert len(differing(by_rank, alone("float32", True, exact=False))) > 20


def test_other_pieces_are_other_bits():
    result = own_step(
        single_process_mesh(), in_order("contiguous"), Resolution(2 * BLOCK, 2), precision="float32", tied=True
    )
    assert differing([result], alone("float32", True))


@pytest.mark.parametrize(("precision", "far"), [("float32", 3e-6), ("bfloat16", 0.03)])
def test_matches_the_ordinary_computation(precision, far):
    exact, fast = alone(precision, False), alone(precision, False, exact=False)
    assert len(fast) > 40
    for name, value in fast.items():
        expected = value.double()
        assert float((exact[name].double() - expected).norm()) <= far * float(expected.norm()), name
        if f"norm of {name}" in exact:
            assert float(exact[f"norm of {name}"]) == pytest.approx(float(exact[name].double().norm()), rel=1e-12)


FAMILIES = [
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    pytest.param("Qwen2", {"tie_word_embeddings": True}, marks=pytest.mark.slow),
    ("Mistral", {"sliding_window": 5}),
]


@pytest.mark.parametrize(("kind", "more"), FAMILIES)
def test_other_families_and_four_pieces(kind, more, tmp_path):
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": 19,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 64,
            "initializer_range": 0.1,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        | more
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path)
    step = functools.partial(own_step, plan_of=at_random(4), resolution=Resolution(BLOCK, 4), source=str(tmp_path))
    expected = step(single_process_mesh())
    for name, value in step(single_process_mesh(), exact=False).items():
        assert float((expected[name] - value).norm()) <= 3e-6 * float(value.norm()), name
    assert differing(simulate(lambda mesh: step(mesh), cp=2, tp=2), expected) == []


def test_one_ulp_in_one_weight_reaches_everything():
    def nudge(policy):
        weight = policy.model.base_model.layers[0].mlp.up_proj.weight
        with torch.no_grad():
            weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(math.inf))

    result = own_step(single_process_mesh(), in_order("contiguous"), Resolution(BLOCK, 2), spoil=nudge)
    assert len(differing([result], alone("float32", True))) > 40


def test_a_power_of_two_in_the_loss_takes_nothing_but_its_bits():
    policy = load_policy("tiny-qwen3")
    exact = install(policy, Resolution(BLOCK))
    results = []
    for scale in (1.0, 2.0**-9):
        exact.start(scale, bits=32 if scale == 1 else 41)
        backward_of(policy, scale)
        exact.reduce()
        results.append({name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()})
    assert differing(results[1:], results[0]) == []


def test_tokens_and_blocks_are_counted_over_the_micro_batches_of_a_step():
    """The number of added partials decides if integers fit."""
    policy = load_policy("tiny-qwen3")
    exact = install(policy, Resolution(BLOCK))
    results = []
    for micro_batches in (2, 1):
        exact.start()
        for _ in range(micro_batches):
            backward_of(policy, 1.0)
        results.append((exact.leaves.tokens, exact.leaves.blocks))
    assert results == [(2 * TOKENS, 2 * TOKENS // BLOCK), (TOKENS, TOKENS // BLOCK)]


def test_a_target_that_is_no_token_is_refused():
    policy = load_policy("tiny-qwen3")
    exact = install(policy, Resolution(BLOCK))
    last = policy.vocabulary_size - 1
    hidden_TD = torch.zeros(2, policy.model.config.hidden_size)
    with torch.no_grad():
        assert exact.token_logprobs(hidden_TD, torch.tensor([0, last])).logprobs_T.isfinite().all()
        with pytest.raises(ShapeError, match=f"an id of {last + 1}(.|\n)*0 <= id < {last + 1}"):
            exact.token_logprobs(hidden_TD, torch.tensor([0, last + 1]))


def backward_of(policy, factor):
    from tests.helpers.exact_step import DOCUMENTS
    from workbench.sharding.attention import AttentionShard
    from workbench.sharding.mesh import Axis

    shard = AttentionShard.make(in_order("contiguous")(1), DOCUMENTS[0], Axis("cp"))
    tokens_T = torch.arange(TOKENS) % 19
    hidden = policy.hidden_states(tokens_T, torch.arange(TOKENS), shard)
    (policy.token_logprobs(hidden, tokens_T.roll(-1)).logprobs_T.sum() * factor).backward()


@pytest.mark.parametrize(
    ("factor", "bits", "words"),
    [(2.0**30, 32, "more than fit with 32 bits"), (2.0**-30, 32, "fewer than 16"), (1.0, 55, "more than fit with 55")],
)
def test_out_of_range_gives_the_same_fitting_bits_on_every_rank(factor, bits, words):
    def until_it_fits(mesh):
        policy = load_policy("tiny-qwen3", mesh=mesh)
        exact = install(policy, Resolution(BLOCK, 2, bits))
        outputs = []
        while True:
            exact.start(factor, outputs[-1][1] if outputs else bits)
            backward_of(policy, factor)
            try:
                exact.reduce()
            except OutOfRange as error:
                assert all(parameter.grad is None for parameter in policy.model.parameters())
                outputs.append((str(error), error.bits))
            else:
                return outputs, exact.norms(), min(filter(None, exact.used_bits.values()))

    one = until_it_fits(single_process_mesh())
    assert words in one[0][0][0]
    assert one[2] >= 16
    plain = own_norms()
    assert one[1] == pytest.approx(plain, rel=1e-4)
    two = simulate(until_it_fits, tp=2)
    assert two[0] == two[1]
    assert [bits for _, bits in two[0][0]] == [bits for _, bits in one[0]]
    assert two[0][1] == one[1]


def own_norms():
    policy = load_policy("tiny-qwen3")
    backward_of(policy, 1.0)
    return {name: float(parameter.grad.norm()) for name, parameter in policy.model.named_parameters()}


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a_non_finite_gradient_raises_an_error(factor):
    def step(mesh):
        policy = load_policy("tiny-qwen3", mesh=mesh)
        exact = install(policy, Resolution(BLOCK))
        backward_of(policy, factor if mesh["dp"].rank == 0 else 1.0)
        with pytest.raises(OutOfRange, match="not finite") as raised:
            exact.reduce()
        return raised.value.bits

    assert simulate(step, dp=2) == [None, None]


def test_a_scale_that_would_round_is_refused():
    exact = install(load_policy("tiny-qwen3"), Resolution(BLOCK))
    for scale in (3.0, 0.0, -2.0, math.inf, math.nan):
        with pytest.raises(SpecError, match="a power of two"):
            exact.start(scale)
    exact.start(2.0**-20)


def test_autocast_is_refused():
    policy = load_policy("tiny-qwen3")
    install(policy, Resolution(BLOCK))
    with pytest.raises(SpecError, match="autocast is on"), torch.autocast("cpu", dtype=torch.bfloat16):
        backward_of(policy, 1.0)


def test_a_step_is_started_and_reduced_once():
    policy = load_policy("tiny-qwen3")
    exact = install(policy, Resolution(BLOCK))
    with pytest.raises(SpecError, match=r"exact\.norms\(\)"):
        exact.norms()
    backward_of(policy, 1.0)
    exact.reduce()
    with pytest.raises(SpecError, match=r"exact\.reduce\(\)"):
        exact.reduce()
    with pytest.raises(SpecError, match="no step that has begun"):
        backward_of(policy, 1.0)
    exact.start()
    backward_of(policy, 1.0)
    exact.reduce()
    assert min(exact.norms().values()) > 0
