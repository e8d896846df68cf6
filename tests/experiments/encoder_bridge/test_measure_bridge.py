"""Bridges are measured in real processes, every path in the same run."""

from __future__ import annotations

import pytest
import torch

from experiments import entries
from experiments.encoder_bridge import measure_bridge as bridge
from tests.helpers import warm
from tests.helpers.stand_in import stand_in
from workbench.errors import LaunchError
from workbench.sharding.bridge import GridGroups
from workbench.sharding.bridge.delivery import Delivery, sides_of
from workbench.sharding.simulated import simulate


def entry(milliseconds):
    return {
        "forward_samples_ms": [milliseconds, 1.0, 9.0],
        "backward_samples_ms": [2.0],
        "forward_bytes": 2**20,
        "backward_bytes": 0,
        "wrong_numbers": 0,
    }


def test_a_record_has_medians_and_a_summary(monkeypatch):
    monkeypatch.setattr(bridge, "torch", stand_in(torch, cuda=stand_in(torch.cuda, device_count=lambda: 0)))
    monkeypatch.setattr(
        bridge,
        "_on",
        lambda ranks, samples: {"activation": "tiny", "bridges": {"equal": {"ways": {"a way": entry(3.0)}}}},
    )
    record = bridge.measure(pairs=3)
    assert record["bridges"]["equal"]["ways"]["a way"]["forward_ms"] == 3.0
    assert record["bars"] == {"exact": {"holds": True}}
    assert bridge.format_record(record).splitlines() == [
        "bridges over 4 ranks on cpu, tiny",
        "equal, a way: forward 3.00 ms (1.0 MiB), backward 2.00 ms (0.0 MiB)",
    ]


def wrong_numbers(mesh, way=lambda out: out):
    """One of an equal pair over four ranks, followed by another path."""
    groups, how = GridGroups(mesh["dp"]), Delivery(order="zigzag")
    pair = bridge.pairs_of(4)["equal"]
    cross, sides = bridge._crossing(pair, how, False, groups, 8), sides_of(pair, how, [1, 1], 8)
    return bridge._wrong(lambda values: way(cross(values)), sides, torch.zeros(1, 8, 3), groups)


def test_wrong_numbers_are_counted():
    assert simulate(wrong_numbers, dp=4) == [0] * 4
    [result, *_] = simulate(lambda mesh: wrong_numbers(mesh, lambda out: out.flip(1)), dp=4)
    assert result > 4 * 8 * 3


@pytest.mark.parametrize(
    ("ranks", "paths"),
    [(2, {"fan-in", "equal"}), (4, {"fan-in", "fan-out", "equal"}), (8, {"fan-in", "fan-out", "equal"})],
)
def test_pairs_match_their_names(ranks, paths):
    pairs = bridge.pairs_of(ranks)
    assert set(pairs) == paths
    assert {name: pair.path for name, pair in pairs.items()} == {name: name for name in paths}
    assert {pair.source.size for pair in pairs.values()} == {ranks}


def test_failing_ranks_are_reported(monkeypatch):
    warm.start_from(monkeypatch, entries)
    with pytest.raises(LaunchError, match="every rank ends with 0"):
        bridge._on(1, "none")


@pytest.mark.slow
def test_it_runs_without_gpus(tmp_path):
    record = bridge.measure(pairs=1)
    assert set(record["bridges"]) == {"fan-in", "fan-out", "equal"}
    reduced, gathered, *_ = record["bridges"]["equal"]["ways"].values()
    assert reduced["backward_bytes"] == 2 * gathered["backward_bytes"] > 0
    assert reduced["forward_ms"] > 0
    assert record["bars"]["exact"]["holds"]
    assert bridge.write_page(record, tmp_path).name == "bridge.html"
