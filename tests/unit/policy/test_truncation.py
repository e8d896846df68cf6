"""Truncation of distributions, against a slow oracle and the logits processors of transformers."""

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.oracles.truncation import kept
from workbench.policy.truncation import kept_tokens, reported, truncate
from workbench.rollouts.sampling import Sampling

SETTINGS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 500},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.7},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.05},
]


BOTH = [{"top_p": 0.9, "min_p": 0.1}, {"top_p": 0.6, "min_p": 0.3}, {"top_k": 12, "top_p": 0.8, "min_p": 0.08}]


@pytest.mark.parametrize("settings", [*SETTINGS, *BOTH], ids=str)
def test_the_order_of_vllm_is_the_oracles(settings):
    logprobs_NV = torch.log_softmax(distributions(seed=2), dim=-1)
    kept_NV = kept_tokens(logprobs_NV, Sampling(**settings, order="vllm"))
    for row_V, logprobs_V in zip(kept_NV, logprobs_NV, strict=True):
        assert set(torch.nonzero(row_V)[:, 0].tolist()) == kept(logprobs_V.exp().tolist(), **settings, order="vllm")


@pytest.mark.parametrize("settings", BOTH, ids=str)
def test_the_order_matters_where_top_p_and_min_p_truncate(settings):
    logprobs_NV = torch.log_softmax(distributions(seed=2), dim=-1)
    orders = [kept_tokens(logprobs_NV, Sampling(**settings, order=order)) for order in ("transformers", "vllm")]
    assert not torch.equal(*orders)


def distributions(rows=24, vocabulary=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * 2.5


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_kept_tokens_are_the_oracles(settings):
    logprobs_NV = torch.log_softmax(distributions(), dim=-1)
    kept_NV = kept_tokens(logprobs_NV, Sampling(**settings))
    for row_V, logprobs_V in zip(kept_NV, logprobs_NV, strict=True):
        assert set(torch.nonzero(row_V)[:, 0].tolist()) == kept(logprobs_V.exp().tolist(), **settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_kept_tokens_are_those_of_transformers(settings):
    logits_NV = expected_NV = distributions(seed=1)
    if "top_k" in settings:
        expected_NV = TopKLogitsWarper(settings["top_k"])(None, expected_NV)
    if "top_p" in settings:
        expected_NV = TopPLogitsWarper(settings["top_p"])(None, expected_NV)
    if "min_p" in settings:
        expected_NV = MinPLogitsWarper(settings["min_p"])(None, expected_NV)
    kept_NV = kept_tokens(torch.log_softmax(logits_NV, dim=-1), Sampling(**settings))
    assert torch.equal(kept_NV, expected_NV > -torch.inf)
    truncated = truncate(torch.log_softmax(logits_NV, dim=-1), Sampling(**settings))
    torch.testing.assert_close(truncated.logprobs_NV, torch.log_softmax(expected_NV, dim=-1), rtol=0, atol=1e-13)


def test_ties_with_the_last_kept_token_stay():
    logprobs_NV = torch.tensor([[0.4, 0.2, 0.2, 0.2]], dtype=torch.float64).log()
    assert kept_tokens(logprobs_NV, Sampling(top_k=2)).tolist() == [[True, True, True, True]]


def test_three_quantities_differ_by_temperature_and_by_the_mass():
    logits_NV, temperature, sampling = distributions(), 0.7, Sampling(top_p=0.8)
    scaled_NV = torch.log_softmax(logits_NV / temperature, dim=-1)
    kept_NV, mass_N, truncated_NV = truncate(scaled_NV, sampling)
    raw_NV = reported(logits_NV, scaled_NV, truncated_NV, "raw")
    torch.testing.assert_close(raw_NV, torch.log_softmax(logits_NV, dim=-1))
    assert (mass_N < 1).all()
    difference_NV = (scaled_NV - mass_N.log()[:, None] - truncated_NV)[kept_NV]
    assert difference_NV.abs().max() < 1e-13
    assert torch.equal(reported(logits_NV, scaled_NV, truncated_NV, "scaled"), scaled_NV)
    assert torch.equal(reported(logits_NV, scaled_NV, truncated_NV, "truncated"), truncated_NV)
