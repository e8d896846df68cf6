"""The vocabulary over ranks is measured in real processes, against one that has it all."""

from __future__ import annotations

import pytest
import torch

from experiments import entries
from experiments.head import measure_parallel as head_parallel
from tests.helpers import warm
from tests.helpers.stand_in import stand_in
from workbench.errors import LaunchError


def test_efficiency_is_against_one_rank(monkeypatch):
    monkeypatch.setattr(
        head_parallel,
        "torch",
        stand_in(torch, cuda=stand_in(torch.cuda, device_count=lambda: 4, get_device_name=lambda: "a device")),
    )
    monkeypatch.setattr(head_parallel, "_on", lambda ranks, samples: {"A": [8.0 / ranks + 1.0] * samples})
    record = head_parallel.measure(pairs=3)
    assert list(record["heads"]["A"]) == ["1", "2", "4"]
    assert record["heads"]["A"]["2"] == {"samples_ms": [5.0] * 3, "median_ms": 5.0, "efficiency": 0.9}
    assert "A, 4: 3.00 ms, efficiency 0.750" in head_parallel.format_record(record)


def test_without_the_record_of_one_gpu_there_is_no_page(tmp_path):
    assert head_parallel.write_page({}, tmp_path) is None


def test_failing_ranks_are_reported(monkeypatch):
    warm.start_from(monkeypatch, entries)
    with pytest.raises(LaunchError, match="every rank ends with 0"):
        head_parallel._on(1, "none")


@pytest.mark.slow
def test_it_runs_without_gpus():
    record = head_parallel.measure(pairs=1)
    assert set(record["heads"]["tiny"]) == {"1", "2"}
    assert record["heads"]["tiny"]["2"]["median_ms"] > 0
