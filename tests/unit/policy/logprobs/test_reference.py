"""The reference against loops over Python floats, option by option and all of them crossed."""

import math

import pytest
import torch

from tests.helpers.head_problem import PLAIN, crossed, named, problem, wants
from tests.oracles.head import row
from workbench.errors import ShapeError
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.logprobs.reference import support_logits, token_logprobs, token_logprobs_from_logits


def oracle(leaves, call, coefficients):
    hidden, weight, bias = leaves
    tokens = len(hidden)
    temperature = call["temperature"]
    kept, active = call["support"], call["active_T"]
    return row(
        hidden.tolist(),
        weight.tolist(),
        [0.0] * len(weight) if bias is None else bias.tolist(),
        call["targets_T"].tolist(),
        temperatures=[temperature] * tokens if isinstance(temperature, float) else temperature.tolist(),
        scale=call["logit_scale"],
        cap=call["soft_cap"],
        valid=call["valid"] or len(weight),
        active=[True] * tokens if active is None else active.tolist(),
        kept=None if kept is None else [ids.tolist() for ids in kept.ids_P.split(kept.offsets_S.diff().tolist())],
        wants={
            name.removesuffix("_T"): [0.0] * tokens if w_T is None else w_T.tolist()
            for name, w_T in zip(TokenLogprobs._fields, coefficients, strict=True)
        },
    )


@pytest.mark.parametrize("options", crossed(40), ids=named)
def test_equals_loops_over_floats(options):
    leaves, call = problem(options, tokens=7, vocabulary=13, width=4)
    leaves = [None if x is None else x.requires_grad_() for x in leaves]
    output = token_logprobs(*leaves[:2], bias_V=leaves[2], **call)
    coefficients = wants(output)
    sum((x_T * w_T).sum() for x_T, w_T in zip(output, coefficients, strict=True) if x_T is not None).backward()
    fields, *gradients = oracle([None if x is None else x.detach() for x in leaves], call, coefficients)
    for name, x_T in output._asdict().items():
        if x_T is not None:
            expected = fields[name.removesuffix("_T")]
            torch.testing.assert_close(
                x_T.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
            )
    for leaf, expected in zip(leaves, gradients, strict=True):
        if leaf is not None:
            torch.testing.assert_close(leaf.grad, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_unrequested_outputs_are_none():
    leaves, call = problem(PLAIN | {"support": True, "outputs": ("logsumexp",)})
    output = token_logprobs(*leaves[:2], **call)
    assert [name for name, x_T in output._asdict().items() if x_T is None] == [
        "entropy_T",
        "mean_squared_logit_T",
        "mean_logit_T",
        "support_entropy_T",
    ]


def test_matches_the_definition():
    hidden = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    weight = torch.tensor([[math.log(1.0), 5.0], [math.log(2.0), 1.0], [math.log(5.0), 9.0]], dtype=torch.float64)
    logprobs, entropy, *_ = token_logprobs(hidden, weight, torch.tensor([2]))
    assert logprobs.item() == pytest.approx(math.log(5 / 8), abs=1e-15)
    assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8)), abs=1e-15)


def test_temperature_divides_logits_and_not_logprobs():
    hidden, weight = torch.randn(4, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    targets = torch.tensor([0, 6, 3, 2])
    at_half = token_logprobs(hidden, weight, targets, temperature=0.5).logprobs_T
    scaled = token_logprobs(2 * hidden, weight, targets).logprobs_T
    torch.testing.assert_close(at_half, scaled, rtol=0, atol=1e-14)
    plain = token_logprobs(hidden, weight, targets).logprobs_T
    assert (at_half - plain / 0.5).abs().max() > 0.1


def test_the_soft_cap_bounds_logits_before_the_temperature_divides_them():
    hidden = torch.tensor([[100.0]], dtype=torch.float64)
    weight = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    result = token_logprobs(hidden, weight, torch.tensor([1]), soft_cap=3.0, temperature=0.5).logprobs_T
    assert result.item() == pytest.approx(-12 - math.log1p(math.exp(-12)), abs=1e-12)


def test_the_log_normaliser_is_that_of_logits_over_temperature():
    hidden = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    weight = torch.tensor([[1.0, 5.0], [2.0, 1.0], [4.0, 9.0]], dtype=torch.float64)
    result = token_logprobs(hidden, weight, torch.tensor([2]), temperature=2.0).logsumexp_T
    assert result.item() == pytest.approx(math.log(math.exp(0.5) + math.exp(1.0) + math.exp(2.0)), abs=1e-15)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_divides_nothing_is_refused(bad):
    hidden, weight, targets = torch.zeros(3, 2), torch.zeros(5, 2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ShapeError, match="positive and finite"):
        token_logprobs(hidden, weight, targets, temperature=bad)
    with pytest.raises(ShapeError, match=r"at \[1\]"):
        token_logprobs(hidden, weight, targets, temperature=torch.tensor([1.0, bad, 1.0]))
    with pytest.raises(ShapeError, match="temperature_T has T=2"):
        token_logprobs(hidden, weight, targets, temperature=torch.ones(2))


def test_a_temperature_in_float64_does_not_widen_a_float32_run():
    hidden, weight, targets = torch.zeros(3, 2), torch.zeros(5, 2), torch.zeros(3, dtype=torch.int64)
    output = token_logprobs(hidden, weight, targets, temperature=torch.ones(3, dtype=torch.float64))
    assert {x.dtype for x in output if x is not None} == {torch.float32}


def test_half_precision_logits_are_widened_before_the_softmax():
    hidden, weight = torch.randn(4, 8).bfloat16(), torch.randn(7, 8).bfloat16()
    assert token_logprobs(hidden, weight, torch.zeros(4, dtype=torch.int64))[0].dtype == torch.float32


def test_an_fp32_head_computes_in_float32_and_returns_original_dtypes():
    leaves, call = problem(PLAIN, dtype=torch.bfloat16)
    hidden, weight = (x.requires_grad_() for x in leaves[:2])
    lifted = token_logprobs(hidden, weight, call["targets_T"], fp32_head=True)
    expected = token_logprobs(hidden.float(), weight.float(), call["targets_T"])
    assert torch.equal(lifted.logprobs_T, expected.logprobs_T)
    lifted.logprobs_T.sum().backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)


def test_bias_counts():
    hidden, weight = torch.zeros(1, 2), torch.zeros(3, 2)
    bias = torch.tensor([0.0, math.log(2.0), 0.0])
    logprobs = token_logprobs(hidden, weight, torch.tensor([1]), bias_V=bias).logprobs_T
    assert logprobs.item() == pytest.approx(math.log(0.5))


def test_given_logits_give_the_same():
    leaves, call = problem(PLAIN)
    expected = token_logprobs(*leaves[:2], call["targets_T"], temperature=0.7)
    output = token_logprobs_from_logits(leaves[0] @ leaves[1].T, call["targets_T"], temperature=0.7)
    for one, other in zip(output[:3], expected[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_sizes_that_disagree_are_named():
    with pytest.raises(ShapeError, match="weight_VD has D=4, but hidden_TD has D=2"):
        token_logprobs(torch.zeros(3, 2), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64))


def test_the_mean_squared_logit_uses_temperature_and_is_optional():
    logits, targets = torch.tensor([[1.0, -3.0], [0.5, 0.0]], dtype=torch.float64), torch.tensor([0, 1])
    assert token_logprobs_from_logits(logits, targets).mean_squared_logit_T is None
    output = token_logprobs_from_logits(logits, targets, temperature=2.0, outputs=("mean_squared_logit",))
    assert output.mean_squared_logit_T.tolist() == [(0.25 + 2.25) / 2, 0.0625 / 2]


def test_truncated_tokens_have_no_probability_and_the_target_always_has():
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    kept = torch.tensor([[False, True, True], [False, False, True]])
    among = support_logits(logits, kept, torch.tensor([1, 0]))
    assert among.tolist() == [[-math.inf, 1.0, 2.0], [0.0, -math.inf, 2.0]]
    token_logprobs_from_logits(among, torch.tensor([1, 0])).logprobs_T.sum().backward()
    assert (logits.grad == 0).tolist() == [[True, False, False], [False, True, False]]
