"""The cost of metrics: every level is measured in turns, and the bar applies to GPUs only."""

import pytest
import torch

from experiments.benchmarks import metrics_cost
from tests.helpers.stand_in import stand_in


@pytest.fixture
def record(monkeypatch):
    monkeypatch.setattr(metrics_cost, "TOKENS_WITHOUT_GPU", 128)
    monkeypatch.setattr(metrics_cost, "torch", stand_in(torch, cuda=stand_in(torch.cuda, is_available=lambda: False)))
    return metrics_cost.measure(pairs=2)


def test_a_record_has_every_sample_and_the_summary_follows_from_them(record):
    assert {level: len(samples) for level, samples in record["step_ms"].items()} == {"none": 2, "basic": 2, "full": 2}
    assert all(value > 0 for samples in record["step_ms"].values() for value in samples)
    step = record["step_ms"]
    over = sorted(basic - none for basic, none in zip(step["basic"], step["none"], strict=True))
    assert record["share"]["basic"] == pytest.approx(sum(over) / 2 / (sum(step["none"]) / 2))
    assert record["alone"]["metrics"] > 20
    assert record["bars"] == {}  # a share of a tiny model's step means nothing
    assert "basic metrics alone" in metrics_cost.format_record(record)


def test_a_missed_bar_is_reported(record):
    record["bars"] = {"basic_share": {"bar": 0.01, "median": 0.02, "holds": False}}
    assert metrics_cost.format_record(record).endswith("basic_share: 0.0200, bar 0.01: MISSED")


def test_rollouts_fill_the_step_with_documents_of_many_lengths():
    batch = metrics_cost._rollouts(4096, 50)
    assert batch.num_tokens == 4096
    assert batch.num_documents == metrics_cost.DOCUMENTS
    assert len(set(batch.lengths_N.tolist())) > 10


def test_basic_metrics_are_few_launches():
    cost = metrics_cost.metrics_alone(tokens=257, documents=5, repeats=2)
    full = metrics_cost.metrics_alone(tokens=257, documents=5, repeats=2, level="full")
    assert 40 < cost.launches < 110  # 5 us each to launch, and a step takes 100 ms: half a percent at most
    assert cost.launches * 3 < full.launches
    assert cost.metrics > 30
    assert 0 < cost.issue_ms <= cost.total_ms
    assert cost.share_of(2 * cost.total_ms) == 0.5
