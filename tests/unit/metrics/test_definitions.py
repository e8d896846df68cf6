import math
import re

import pytest
import torch

from workbench.metrics.definitions import (
    LEVELS,
    WEIGHTS,
    Metric,
    declared,
    document_clip,
    document_ratio,
    metric_table,
    statistic,
)
from workbench.metrics.quantities import ClipRule, One
from workbench.metrics.values import Maximum, Mean


def test_every_metric_describes_itself():
    table = metric_table()
    assert table.index.is_unique
    assert all(re.fullmatch(r"[a-z_]+/[a-z0-9_]+/[a-z0-9_]+", key) for key in table.index)
    assert (table != "").all().all()
    assert set(table["level"]) == set(LEVELS) - {"none"}
    assert len(table) > 100
    row = table.loc["kl/policy_sampler/k3_mean"]
    assert row["population"] == "trained tokens with finite policy and sampler log-probability"
    assert row["weight"] == WEIGHTS["token"]
    assert (row["unit"], row["reducer"], row["level"]) == ("nats", "mean", "basic")


def test_the_reducer_does_not_come_from_the_key():
    misleading = Metric("admin/maximum/min_sum", "a mean, whatever its name says", "1", One(), Mean())
    assert metric_table([misleading]).loc["admin/maximum/min_sum", "reducer"] == "mean"
    assert all(isinstance(m.reducer, Maximum) for m in declared() if isinstance(m, Metric) and m.key.endswith("/max"))


def test_a_clip_of_documents_replaces_the_clip_of_tokens():
    tokens = {m.key: m for m in declared(clip=ClipRule(0.8, 1.2))}
    documents = {m.key: m for m in declared(clip=ClipRule(0.8, 1.2, None, True))}
    assert isinstance(tokens["clip/region/fraction"], Metric)
    assert documents["clip/region/fraction"].population.startswith("documents with trained tokens")
    assert "clip/dual/fraction" in tokens
    assert "clip/dual/fraction" not in documents
    assert "clip/kl/fraction" in {m.key for m in declared(("policy", "kl"))}


def test_documents_are_read_from_their_tokens_and_sums():
    tokens, log_ratios = torch.tensor([1.0, 4.0]), torch.tensor([0.0, 4.0])
    assert document_ratio("mean").read(tokens, log_ratios) == pytest.approx((1 + math.e) / 2)
    clip = document_clip("cut", "k", "m", ClipRule(0.8, 1.2))
    assert clip.read(tokens, log_ratios, torch.tensor([1.0, 4.0])) == 4 / 5
    assert clip.read(tokens, log_ratios, torch.tensor([1.0, -4.0])) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sum", 5.0),
        ("squared_sum", 11.0),
        ("min", 1.0),
        ("max", 3.0),
        ("mean", 5 / 3),
        ("effective_samples", 25 / 11),
        ("std", (8 / 9) ** 0.5),
    ],
)
def test_statistics_of_documents(name, value):
    """The standard deviation is the population's."""
    assert statistic(name, torch.tensor([1.0, 3.0, 1.0], dtype=torch.float64)) == pytest.approx(value)


def test_statistics_of_no_documents():
    none = torch.zeros(0)
    assert statistic("sum", none) == statistic("squared_sum", none) == 0
    assert (statistic("min", none), statistic("max", none)) == (float("inf"), float("-inf"))
    assert all(math.isnan(statistic(name, none)) for name in ("mean", "std", "effective_samples"))
