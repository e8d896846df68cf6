"""The page of sensitivity states what its record has; the guide and the page are those of the saved record."""

import copy
from pathlib import Path

import pytest

from experiments.sensitivity.page import answer, gate_rows, page, write_sensitivity_report
from workbench.atomic import from_json, to_json, write_whole
from workbench.sensitivity.record import Sensitivity

ROOT = Path(__file__).parents[3]
SAVED = ROOT / "experiments/sensitivity"
GUIDE = ROOT / "docs/guides/what-a-check-can-see.md"


@pytest.fixture(scope="module")
def record():
    return from_json((SAVED / "sensitivity.json").read_text())


def test_the_saved_page_is_that_of_its_record(record, tmp_path):
    assert (SAVED / "report.html").read_text() == page(record)
    assert write_sensitivity_report(record, tmp_path).read_text() == page(record)


def test_the_saved_numbers_are_those_of_the_results(record):
    own, lower = record["float64"], record["float32"]
    assert own["killed"] == sum(result["killed"] for result in own["results"])
    assert own["admissible"] == len(own["results"])
    assert (lower["killed"], lower["admissible"]) == (sum(lower["results"].values()), len(lower["results"]))
    for gate in record["gates"]:
        assert gate["float64"]["killed"] == own["admissible"] - len(gate["float64"]["survivors"])
    differing = own["disagreements"] + lower["disagreements"]
    assert record["bars"]["predictions agree"]["holds"] == (not differing)
    assert record["bars"]["generated dataset"]["holds"]


def test_the_saved_record_reads_back(record, tmp_path):
    path = write_whole(tmp_path / "float64.json", to_json(record["float64"]))
    sensitivity = Sensitivity.load(path)
    assert sensitivity.killed == record["float64"]["killed"]


def test_the_guide_has_the_table_and_the_answer_of_the_record(record):
    text = GUIDE.read_text()
    for row in gate_rows(record):
        assert "| " + " | ".join([row[0], *row[3:]]) + " |" in text
    assert " ".join(answer(record).split()) in " ".join(text.split())
    assert f"took {record['bars']['cpu_seconds']['measured']:.0f} s of CPU time" in " ".join(text.split())
    assert record["bars"]["cpu_seconds"]["holds"]


def test_the_answer_counts_predictions_that_differ(record):
    right = copy.deepcopy(record)
    right["float32"]["disagreements"] = []
    assert ", and 0 of " in answer(right)
    wrong = copy.deepcopy(record)
    wrong["float32"]["disagreements"] = ["one", "two"]
    assert ", and 2 of " in answer(wrong)


def test_the_page_names_survivors_their_reasons_and_changes(record):
    text = page(record)
    survivor = next(result for result in record["float64"]["results"] if result["fault"] == "tool_mask_ignored")
    assert not survivor["killed"]
    for part in ("tool_mask_ignored", "no hole in a mask", "a hole in a mask", "radixark/miles 31f1ca96"):
        assert part in text
    unexpected = copy.deepcopy(record)
    for result in unexpected["float64"]["results"]:
        result["missing"] = []
        result["remedies"] = result["remedies"] and [{**result["remedies"][0], "killed": False}]
    assert "<b>not predicted</b>" in page(unexpected)
    assert "none of those tried" in page(unexpected)
