"""Numbers of one document, against the formula."""

import math

import pytest
import torch

from workbench.metrics.quantities import ClipRule
from workbench.systems import document_metrics as documents

TOKENS = torch.tensor([2.0, 4.0]).double()
LOGS = torch.tensor([0.6, -2.0]).double()
ADVANTAGES = torch.tensor([1.0, -4.0]).double()
RATIOS = [math.exp(0.3), math.exp(-0.5)]
CLIP = ClipRule(0.8, 1.2, None)


def test_functions_of_a_document():
    assert documents.ratio_of(TOKENS, LOGS).tolist() == pytest.approx(RATIOS)
    assert documents.ratio_of(TOKENS, LOGS, epsilon=1.0).tolist() == pytest.approx([math.exp(0.2), math.exp(-0.4)])
    assert documents.clamped_of(CLIP, TOKENS, LOGS).tolist() == pytest.approx([1.2, 0.8])
    assert documents.k3_of(TOKENS, LOGS).tolist() == pytest.approx([RATIOS[0] - 1 - 0.3, RATIOS[1] - 1 + 0.5])
    assert documents.outside_clip_of("cut_high", CLIP, TOKENS, LOGS, ADVANTAGES).tolist() == [1, 0]
    assert documents.outside_clip_of("cut_low", CLIP, TOKENS, LOGS, ADVANTAGES).tolist() == [0, 1]


def test_statistics_over_documents_and_tokens():
    def values(tokens_N, _):
        return tokens_N + 1

    assert documents.reduced(values, "mean", None, TOKENS, LOGS) == pytest.approx(4.0)
    assert documents.reduced(values, "mean", 4, TOKENS, LOGS) == pytest.approx(2.0)
    assert math.isnan(documents.reduced(values, "mean", 0, TOKENS, LOGS))
    assert documents.reduced(values, "max", 4, TOKENS, LOGS) == 5.0
    assert documents.token_mean(values, TOKENS, LOGS, epsilon=0.0) == pytest.approx((2 * 3 + 4 * 5) / 6)
    assert documents.token_mean(values, TOKENS, LOGS, epsilon=0.0, of=13) == pytest.approx(2.0)
    assert documents.token_mean(values, TOKENS, LOGS, epsilon=2.0) == pytest.approx(26 / 8)
    assert math.isnan(documents.token_mean(values, torch.zeros(1), torch.zeros(1), epsilon=0.0))


def test_declarations_say_what_they_read():
    metric = documents.per_document("ratio", "the ratio", documents.ratio_of, "max")
    assert metric.read(TOKENS, LOGS, ADVANTAGES) == pytest.approx(RATIOS[0])
    share = documents.token_share("clipped", "cut", CLIP, "share")
    assert share.read(TOKENS, LOGS, ADVANTAGES) == pytest.approx(1.0)
    assert share.weight == "its trained tokens"
