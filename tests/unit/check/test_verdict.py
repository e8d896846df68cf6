"""The result as text and as JSON."""

import json

from tests.helpers.dumped_step import dump
from workbench.check import check_step


def test_text_names_stages_places_and_causes():
    text = str(check_step(dump(factor=0.5)))
    assert text.startswith("differs: a step\n  33 trained tokens of 8 documents, of 8")
    assert "first difference: coefficients" in text
    assert "1. factor: coefficients times 0.5" in text
    assert "this dump cannot decide:" in text


def test_json_has_all_of_it():
    data = json.loads(json.dumps(check_step(dump(factor=-1.0)).as_json()))
    assert (data["verdict"], data["first"]) == ("differs", "coefficients")
    assert data["causes"][0]["description"] == "the sign is reversed"
    assert data["causes"][0]["explains"] == ["coefficients", "loss"]
    assert data["stages"][5]["mismatches"][0]["tokens"] == 33
    assert json.loads(json.dumps(check_step(dump()).as_json()))["first"] is None
