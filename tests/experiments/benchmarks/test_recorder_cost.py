"""The cost of a recorder: every way is measured in turns, and the bar is on a GPU's record."""

import pytest
import torch

from experiments.benchmarks import recorder_cost
from tests.helpers.stand_in import stand_in
from workbench.atomic import from_json
from workbench.records.provenance import project_root


@pytest.fixture
def record(monkeypatch):
    monkeypatch.setattr(recorder_cost, "torch", stand_in(torch, cuda=stand_in(torch.cuda, is_available=lambda: False)))
    return recorder_cost.measure(pairs=1)


def test_a_record_has_every_sample_and_the_summary_follows_from_them(record):
    assert {way: len(samples) for way, samples in record["step_ms"].items()} == dict.fromkeys(recorder_cost.WAYS, 2)
    medians = {way: sum(samples) / 2 for way, samples in record["step_ms"].items()}
    assert record["share"]["recorder"] == pytest.approx(medians["recorder"] / medians["without"] - 1)
    assert record["alone_share"] == pytest.approx(record["alone_ms"] / medians["without"])
    assert record["bars"] == {}  # a share of a tiny model's step means nothing
    assert "its own work at a step" in recorder_cost.format_record(record)


def test_the_saved_record_holds_its_bar():
    saved = from_json((project_root() / "experiments/benchmarks/recorder_cost.json").read_text())
    bar = saved["bars"]["recorder_share"]
    assert bar["holds"] == (saved["alone_share"] <= recorder_cost.BAR)
    assert bar["holds"]
