"""Attribution on a GPU: the FP8 layer of its sampler, one case without a GPU, and the saved record with its page."""

from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.attribution_gpu import measure as module
from experiments.attribution_gpu.page import answer, page
from tests.helpers.stand_in import stand_in
from workbench.atomic import from_json
from workbench.mismatch.verdict import SEEDED
from workbench.policy.gemm_formats import rounded

SAVED = Path(__file__).parents[3] / "experiments/attribution_gpu"


def test_the_samplers_fp8_layer_multiplies_the_values_of_the_rowwise_format():
    torch.manual_seed(0)
    layer, rows = nn.Linear(32, 16, bias=False).bfloat16(), torch.randn(2, 5, 32).bfloat16()
    flat = rows.flatten(0, 1)
    expected = rounded(flat, "fp8_rowwise", "activation") @ rounded(layer.weight, "fp8_rowwise", "weight").T
    result = module.Fp8Linear(layer)(rows)
    assert result.shape == (2, 5, 16)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.flatten(0, 1).float(), expected.detach(), rtol=2**-7, atol=1e-6)


def test_a_case_without_a_gpu_is_a_row_of_the_record(monkeypatch):
    monkeypatch.setattr(module, "torch", stand_in(torch, cuda=stand_in(torch.cuda, is_available=lambda: False)))
    record = module.measure(only=("bfloat16, one pass, stated",))
    (row,) = record["cases"]
    assert (row["planted"], row["causes"], row["alarms"]) == ([], [], {})
    assert row["tokens"] == 96
    assert row["gap"] > 0
    assert all(bar["holds"] for bar in record["bars"].values())
    assert "nothing found" in module.format_record(record)


def test_bars_are_missed_by_another_name_an_alarm_an_accusation_and_a_far_floor():
    planted = {"planted": ["a"], "causes": ["a"], "alarms": {}}
    clean = {"planted": [], "causes": [], "alarms": {}}

    def holding(rows, ratio=1.0):
        return {name for name, bar in module.bars(rows, [{"ratio": ratio}]).items() if bar["holds"]}

    assert holding([planted, clean]) == {"named", "accused", "floor"}
    assert holding([{**planted, "causes": ["a", "b"]}, clean]) == {"accused", "floor"}
    assert holding([{**planted, "alarms": {"mean": 2.0}}, clean]) == {"accused", "floor"}
    assert holding([planted, {**clean, "causes": ["a"]}], 1.3) == {"named"}


@pytest.fixture(scope="module")
def record():
    return from_json((SAVED / "attribution_gpu.json").read_text())


def test_the_saved_page_is_that_of_its_record(record):
    text = page(record)
    assert (SAVED / "report.html").read_text() == text
    assert SEEDED in text
    assert "no blind set" in answer(record)
    assert record["bars"] == module.bars(record["cases"], record["floors"])
    assert record["parameters"] > 5e8
