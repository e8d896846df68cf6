"""The sampler follows its decoder: padding, KV cache and batch change nothing."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from workbench.errors import SpecError
from workbench.policy.decoder import load_decoder
from workbench.policy.precision import lift_to_float64
from workbench.policy.sampling import Sampler, by_uniforms, generate

PROMPTS = ([16, 3, 12, 4, 15], [16, 9, 10, 1], [16, 7], [16, 2, 0, 11, 5, 5, 15, 8])
END = 17


def sampler(source="tiny-qwen3", precision="float64"):
    return Sampler(source, precision=precision)


def uniforms(seed, answers, tokens):
    return torch.rand(answers, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def written(found, uniforms_NM, prompts=PROMPTS, *, temperature=0.7, end_ids=(END,)):
    return found.answers(
        prompts, by_uniforms(uniforms_NM), temperature=temperature, max_new_tokens=uniforms_NM.shape[1], end_ids=end_ids
    )


@pytest.mark.parametrize("source", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_a_completion_does_not_depend_on_its_batch(source):
    """Shorter prompts are padded on the left; alone nothing is."""
    result, uniforms_NM = sampler(source), uniforms(1, len(PROMPTS), 10)
    together = written(result, uniforms_NM)
    assert len({tuple(answer.tokens) for answer in together}) == len(PROMPTS)
    for prompt, uniforms_M, answer in zip(PROMPTS, uniforms_NM, together, strict=True):
        [alone] = written(result, uniforms_M[None], [prompt])
        assert answer.tokens == alone.tokens
        assert answer.logprobs == pytest.approx(alone.logprobs, rel=0, abs=1e-12)


@pytest.mark.parametrize("temperature", [0.5, 1.3])
def test_logprobs_are_those_of_the_whole_document_at_the_temperature(temperature):
    result = sampler()
    model = lift_to_float64(load_decoder("tiny-qwen3").eval())
    for prompt, answer in zip(
        PROMPTS, written(result, uniforms(2, len(PROMPTS), 9), temperature=temperature), strict=True
    ):
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([[*prompt, *answer.tokens]]), use_cache=False).logits[0]
        said_TV = torch.log_softmax(logits_TV[len(prompt) - 1 : -1] / temperature, dim=-1)
        expected = said_TV.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert answer.logprobs == pytest.approx(expected.tolist(), rel=0, abs=1e-12)


def test_places_are_counted_from_the_first_token_of_the_prompt():
    """Angles between tokens are the same wherever a document begins; places that are learnt are not."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=19, n_positions=24, n_embd=16, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config).double().eval()
    uniforms_NM, how = uniforms(9, len(PROMPTS), 8), {"temperature": 1.0, "max_new_tokens": 8, "end_ids": (END,)}
    together = generate(model, PROMPTS, by_uniforms(uniforms_NM), **how)
    for prompt, uniforms_M, answer in zip(PROMPTS, uniforms_NM, together, strict=True):
        [alone] = generate(model, [prompt], by_uniforms(uniforms_M[None]), **how)
        assert answer.tokens == alone.tokens
        assert answer.logprobs == pytest.approx(alone.logprobs, rel=0, abs=1e-12)


def test_a_completion_ends_with_the_first_end_symbol_or_at_the_limit():
    ends = (END, 3, 11)
    answers = written(sampler(), uniforms(3, 40, 6), [PROMPTS[0]] * 40, temperature=1.0, end_ids=ends)
    ended = [answer for answer in answers if set(answer.tokens) & set(ends)]
    assert {answer.tokens[-1] for answer in ended} == set(ends)
    assert all(not set(answer.tokens[:-1]) & set(ends) for answer in ended)
    cut_off = [answer for answer in answers if answer not in ended]
    assert cut_off
    assert {len(answer.tokens) for answer in cut_off} == {6}
    assert all(len(answer.tokens) == len(answer.logprobs) for answer in answers)


def test_nothing_is_computed_after_the_last_completion_has_ended():
    result, places = sampler(), []

    def choose(logprobs_NV, place):
        places.append(place)
        return torch.tensor([END if place == 1 else 4, END if place == 2 else 5])

    answers = result.answers(PROMPTS[:2], choose, temperature=1.0, max_new_tokens=9, end_ids=(END,))
    assert [answer.tokens for answer in answers] == [[4, END], [5, 5, END]]
    assert places == [0, 1, 2]


def test_half_precision_is_lifted_before_the_softmax():
    answers = written(sampler(precision="bfloat16"), uniforms(4, len(PROMPTS), 4))
    outputs = [value for answer in answers for value in answer.logprobs]
    assert any(float(torch.tensor(value, dtype=torch.bfloat16)) != value for value in outputs)


def test_arguments_of_the_model_are_handed_on():
    model, shapes = load_decoder("tiny-qwen3").eval(), []
    forward = model.forward
    model.forward = lambda **given: (shapes.append(given["logits_to_keep"]), forward(**given))[1]
    generate(
        model,
        PROMPTS[:1],
        by_uniforms(uniforms(0, 1, 2)),
        temperature=1.0,
        max_new_tokens=2,
        end_ids=(),
        logits_to_keep=1,
    )
    assert shapes == [1, 1]


# ---- drawing -----------------------------------------------------------------------------------------------------


def oracle(probabilities, u):
    """The first token up to which the probabilities add up to more than u of their sum."""
    total, reached = math.fsum(probabilities), 0.0
    for token, probability in enumerate(probabilities):
        reached += probability
        if reached > u * total:
            return token
    raise AssertionError("a number below 1")


def test_tokens_are_drawn_in_the_order_of_the_vocabulary():
    logits_NV = torch.randn(300, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    logits_NV[:, 4] = -torch.inf
    logprobs_NV, uniforms_NM = torch.log_softmax(logits_NV, dim=-1), uniforms(6, 300, 3)
    for place in range(3):
        found_N = by_uniforms(uniforms_NM)(logprobs_NV, place)
        expected = [
            oracle(row.exp().tolist(), float(u)) for row, u in zip(logprobs_NV, uniforms_NM[:, place], strict=True)
        ]
        assert found_N.tolist() == expected
        assert set(expected) == set(range(11)) - {4}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("u", "expected"), [(0.0, 1), (0.4999, 1), (0.5001, 3), (math.nextafter(1.0, 0.0), 3)])
def test_impossible_tokens_are_never_drawn(u, expected, dtype):
    logprobs_NV = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]], dtype=dtype).log()
    assert by_uniforms(torch.tensor([[u]], dtype=torch.float64))(logprobs_NV, 0).tolist() == [expected]


def test_sums_that_miss_one_by_rounding_leave_no_gap():
    """In float32 the probabilities of many tokens add up to something else than 1."""
    logprobs_NV = torch.log_softmax(torch.randn(50, 4000, generator=torch.Generator().manual_seed(7)), dim=-1)
    assert (logprobs_NV.double().exp().sum(1) < 1).any()
    last = torch.full((50, 1), math.nextafter(1.0, 0.0), dtype=torch.float64)
    assert by_uniforms(last)(logprobs_NV, 0).tolist() == [3999] * 50


# ---- weights -----------------------------------------------------------------------------------------------------


def test_completions_use_the_weights_loaded_last():
    result, uniforms_NM = sampler(), uniforms(8, len(PROMPTS), 5)
    before = written(result, uniforms_NM)
    other = lift_to_float64(load_decoder("tiny-qwen3", seed=1))
    result.load_weights({name: parameter.detach() for name, parameter in other.named_parameters()})
    after = written(result, uniforms_NM)
    assert after != before
    expected = Sampler("tiny-qwen3", precision="float64", seed=1)
    assert after == written(expected, uniforms_NM)


def test_weights_are_rounded_to_the_samplers_own_precision():
    result = sampler(precision="bfloat16")
    weights = {name: torch.rand_like(p, dtype=torch.float32) for name, p in result.model.named_parameters()}
    result.load_weights(weights)
    for name, parameter in result.model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, weights[name].bfloat16())


@pytest.mark.parametrize("change", [{"model.norm.weight": None}, {"model.norm.bias": torch.zeros(1)}])
def test_weights_of_another_model_are_refused(change):
    result = sampler()
    weights = {name: p.detach() for name, p in result.model.named_parameters()} | change
    weights = {name: value for name, value in weights.items() if value is not None}
    with pytest.raises(SpecError, match=f"only one of the two has {next(iter(change))}"):
        result.load_weights(weights)
