"""The record of a mutation score: numbers, text, and JSON that reads back."""

import json
import math
from dataclasses import replace

import pytest

from workbench.errors import RecordError
from workbench.sensitivity.distances import Apart, Change, Distances
from workbench.sensitivity.gates import Gate
from workbench.sensitivity.record import FaultResult, Remedy, Sensitivity

DISTANCES = Distances((Change(1.0, 1.5),), (Change(2.0, math.inf),), (Apart(0.1, 0.1, 0.2, 3.0, 4.0),), None)


def result(name, *, killed, missing=(), gradient=True, **more):
    verdict = "different" if killed else "equal"
    return FaultResult(name, "A", "a mistake", gradient, "cp2", missing, verdict, "why", killed, DISTANCES, **more)


@pytest.fixture
def record():
    remedies = (
        Remedy("a hole in a mask", {}, False, "equal"),
        Remedy("two cp ranks", {"layout": {"cp": 2}}, True, "x"),
    )
    results = (
        result("seen", killed=True, generated=True),
        result("blind", killed=False, missing=("no hole in a mask",), remedies=remedies, generated=False),
        result("surprise", killed=False),
        result("numbers", killed=False, missing=("metrics",), gradient=False),
    )
    seams, stalls = {"elsewhere": "some.module:function"}, {"straggler": "stalls"}
    size = {"documents": 9, "tokens": 180}
    return Sensitivity("ours", {"cp2": "equal"}, {"fsdp": "no process group"}, results, seams, stalls, 2.5, 4, size)


def test_the_score_is_killed_over_admissible(record):
    assert (record.killed, record.score, record.of_gradients) == (1, 0.25, (1, 3))
    assert [each.fault for each in record.survivors] == ["blind", "surprise", "numbers"]
    assert math.isnan(replace(record, results=()).score)


def test_a_prediction_that_the_measurement_contradicts_is_reported(record):
    assert [each.fault for each in record.disagreements] == ["surprise"]
    lines = str(record).splitlines()
    assert "prediction and measurement differ:" in lines
    agreeing = replace(record, results=record.results[:2])
    assert "every prediction agrees with its measurement" in str(agreeing)


def test_the_text_has_reasons_and_the_smallest_change(record):
    text = str(record)
    assert "rejects 1 of 4 admissible faults (25.0 %), 1 of 3 of those" in text
    assert "kills 1 of 2 faults that data can show" in text
    assert "left out: fsdp: no process group" in text
    (row,) = [line for line in text.splitlines() if line.startswith("blind")]
    assert "hidden: no hole in a mask" in row
    assert row.rstrip().endswith("two cp ranks")


def test_a_saved_record_reads_back(record, tmp_path):
    record = record.with_gates(Gate(loss=0.6, name="loose"))
    path = record.save(tmp_path / "sensitivity.json")
    assert Sensitivity.load(path) == record
    content = json.loads(path.read_text())
    assert (content["score"], content["killed"], content["admissible"]) == (0.25, 1, 4)
    assert content["disagreements"] == ["surprise"]
    assert content["gates"][0]["survivors"] == ["seen", "blind", "surprise", "numbers"]


@pytest.mark.parametrize("text", ['{"format": "other/1"}', "{}", "[]", '{"format": "workbench.sensitivity/1"}'])
def test_a_file_that_is_no_record_is_an_error(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(RecordError, match="measure again"):
        Sensitivity.load(tmp_path / "a.json")


def test_the_result_of_an_inadmissible_fault_is_an_error(record):
    assert record.result("blind").remedy.change == "two cp ranks"
    with pytest.raises(RecordError, match="function is not called"):
        record.result("elsewhere")
    with pytest.raises(RecordError, match="no such fault"):
        record.result("nothing")
