"""The page of two modules matches the record for each check, with reproducible bytes."""

from pathlib import Path

from experiments.encoder_bridge.page import answer, page, write_encoder_bridge_report
from workbench.atomic import from_json

SAVED = Path(__file__).parents[3] / "experiments/encoder_bridge"


def fault(distance, adam):
    return {
        "what": "a mistake",
        "loss": 1.0,
        "encoder": 0.5,
        "policy": 1.0,
        "scales_encoder": True,
        "distance": distance,
        "adam_largest": adam,
        "passes_adam": adam < 1e-3,
        "diagnosis": "module_scaled",
        "evidence": "so it is",
    }


def record(distance=1e-14):
    layout = {
        "encoder": {"tp": 2, "dp": 4},
        "policy": {},
        "delivery": "whole",
        "path": "fan-in",
        "micro_batches": 1,
        "parameters": 7,
        "distance": distance,
    }
    return {
        "device": "cpu",
        "layouts": {"one": layout},
        "adam": {"learning_rate": 1e-4, "tolerance": 1e-3},
        "faults": {"half_of_it": fault(0.5, 1e-5), "seen_by_both": fault(0.9, 1.0), "no_bug": fault(0.0, 0.0)},
        "bars": {"layouts": {"holds": distance < 1e-12}},
        "provenance": {"torch": "2"},
    }


def test_the_summary_counts_detections_of_each_check():
    assert answer(record()) == (
        "Yes: in 1 pairs of layouts the farthest gradient of all parameters is 1.0e-14 off. Of 3 planted bugs "
        "gradients see 2; the usual check, weights after one step of Adam, lets 2 pass."
    )
    assert answer(record(0.1)).startswith("No: in 1 pairs")


def test_the_page_names_layouts_faults_and_causes(tmp_path):
    text = write_encoder_bridge_report(record(), tmp_path).read_text()
    assert text == page(record())
    for words in ("tp2 x dp4", "1 rank", "half of it", "module scaled", "<b>passes</b>", "so it is."):
        assert words in text


def test_the_saved_page_is_that_of_its_record():
    assert (SAVED / "report.html").read_text() == page(from_json((SAVED / "encoder_bridge.json").read_text()))
