import math

import pytest
import torch

from workbench.errors import ShapeError
from workbench.policy.logprobs.reference import kept_logits, token_logprobs, token_logprobs_from_logits


def test_equals_the_definition_by_hand():
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


def test_each_token_may_have_a_temperature_of_its_own():
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(4, 3, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, generator=g, dtype=torch.float64, requires_grad=True)
    targets, temperatures = torch.tensor([0, 6, 3, 2]), torch.tensor([0.3, 1.0, 2.5, 0.7], dtype=torch.float64)
    together = token_logprobs(hidden, weight, targets, temperature=temperatures)
    for field in range(3):
        alone = torch.cat([token_logprobs(hidden[t: t + 1], weight, targets[t: t + 1],
                                          temperature=float(temperatures[t]))[field] for t in range(4)])
        torch.testing.assert_close(together[field], alone, rtol=0, atol=1e-14)
        for ours, wanted in zip(*(torch.autograd.grad((x * torch.arange(1, 5)).sum(), (hidden, weight),
                                                      retain_graph=True) for x in (together[field], alone)),
                                strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-13)


def test_the_log_normaliser_is_that_of_logits_over_temperature():
    hidden = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    weight = torch.tensor([[1.0, 5.0], [2.0, 1.0], [4.0, 9.0]], dtype=torch.float64)
    found = token_logprobs(hidden, weight, torch.tensor([2]), temperature=2.0).logsumexp_T
    assert found.item() == pytest.approx(math.log(math.exp(0.5) + math.exp(1.0) + math.exp(2.0)), abs=1e-15)


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
    found = token_logprobs(hidden, weight, targets, temperature=torch.ones(3, dtype=torch.float64))
    assert {x.dtype for x in found if x is not None} == {torch.float32}


def test_half_precision_logits_are_widened_before_the_softmax():
    hidden, weight = torch.randn(4, 8).bfloat16(), torch.randn(7, 8).bfloat16()
    assert token_logprobs(hidden, weight, torch.zeros(4, dtype=torch.int64))[0].dtype == torch.float32


def test_bias_counts():
    hidden, weight = torch.zeros(1, 2), torch.zeros(3, 2)
    bias = torch.tensor([0.0, math.log(2.0), 0.0])
    logprobs = token_logprobs(hidden, weight, torch.tensor([1]), bias_V=bias).logprobs_T
    assert logprobs.item() == pytest.approx(math.log(0.5))


def test_sizes_that_disagree_are_named():
    with pytest.raises(ShapeError, match="weight_VD has D=4, but D=2"):
        token_logprobs(torch.zeros(3, 2), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64))


def test_the_mean_squared_logit_is_of_logits_over_temperature_and_only_there_if_it_is_wanted():
    logits, targets = torch.tensor([[1.0, -3.0], [0.5, 0.0]], dtype=torch.float64), torch.tensor([0, 1])
    assert token_logprobs_from_logits(logits, targets).mean_squared_logit_T is None
    found = token_logprobs_from_logits(logits, targets, temperature=2.0, wanted=("mean_squared_logit",))
    assert found.mean_squared_logit_T.tolist() == [(0.25 + 2.25) / 2, 0.0625 / 2]


def test_what_a_sampler_cut_off_has_no_probability_and_the_target_always_has():
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    kept = torch.tensor([[False, True, True], [False, False, True]])
    among = kept_logits(logits, kept, torch.tensor([1, 0]))
    assert among.tolist() == [[-math.inf, 1.0, 2.0], [0.0, -math.inf, 2.0]]
    token_logprobs_from_logits(among, torch.tensor([1, 0])).logprobs_T.sum().backward()
    assert (logits.grad == 0).tolist() == [[True, False, False], [False, True, False]]
