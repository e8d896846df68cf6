"""Drawn ablations are the same on every machine; the guide states what their record has."""

import json
from pathlib import Path

import pytest

from experiments.sensitivity.drawn import (
    INADMISSIBLE,
    RECORD,
    SHOWN,
    commit_of_announcement,
    drawn,
    load_record,
    packed,
    predict_again,
    summary,
    unpacked,
)
from workbench.errors import RecordError

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs/guides/what-a-check-can-see.md"


@pytest.fixture(scope="module")
def ablations():
    entries = load_record()["ablations"]
    return [entry for entry in entries if "refused" not in entry]


def test_a_draw_is_the_recorded_one(ablations, tmp_path):
    for entry in ablations[:2]:
        draw = drawn(entry["number"], tmp_path / "rollouts", ROOT)
        assert (draw["documents"], draw["tokens"], draw["edits"]) == tuple(
            entry[key] for key in ("documents", "tokens", "edits")
        )
        assert draw["ablation"]["configurations"]["changed"] == entry["changed"]
        assert draw["ablation"]["base"]["loss"] == entry["base"]["loss"]


def test_a_prediction_that_differs_is_named(ablations):
    for entry in ablations:
        results = entry["results"]
        assert len(results) == entry["admissible"]
        wrong = [name for name, result in results.items() if result["killed"] == bool(result["missing"])]
        assert wrong == entry["disagreements"]
        assert all(name in summary(entry) for name in wrong)


def test_the_guide_has_the_counts_of_the_record(ablations):
    def wrong(entries):
        return sum(len(entry["disagreements"]) for entry in entries)

    text = " ".join(GUIDE.read_text().split())
    one = [entry for entry in ablations if "one trained document" in entry["edits"]]
    lower = [entry for entry in ablations if entry["base"]["precision"] == "float32"]
    total = sum(entry["admissible"] for entry in ablations)
    assert f"In {len(ablations)} ablations that were drawn" in text
    assert f"{wrong(ablations)} of {total} predictions differ:" in text
    first = sum(len(entry["first_disagreements"]) for entry in ablations)
    assert f"{first} of {total} predictions differed when they were measured" in text
    assert f"{wrong(one)} of them in {len(one)} draws in which one document alone" in text
    assert f"{wrong(lower)} in {len(lower)} draws in float32" in text
    blind = [entry for entry in ablations if "announced" in entry]
    numbers = [str(entry["number"]) for entry in blind]
    assert f"Draws {', '.join(numbers[:-1])} and {numbers[-1]} are blind" in text
    differed = sum(len(entry["first_disagreements"]) for entry in blind)
    assert f"{differed} of their {sum(entry['admissible'] for entry in blind)} predictions differed" in text


def test_blind_draws_are_those_that_were_announced(ablations):
    announced = json.loads((RECORD.parent / "announced.json").read_text())
    for entry in (entry for entry in ablations if "announced" in entry):
        signs = dict(zip(announced["faults"], announced["draws"][str(entry["number"])], strict=True))
        assert {name for name, sign in signs.items() if sign != INADMISSIBLE} == set(entry["results"])
        wrong = {name for name, result in entry["results"].items() if result["killed"] != (signs[name] == SHOWN)}
        assert wrong == set(entry["first_disagreements"])


def test_a_packed_record_reads_back(ablations):
    record = {"ablations": [*ablations[:2], {"number": 9, "refused": "vacuous"}], "command": "command"}
    assert unpacked(packed(record)) == record


def test_an_announced_draw_is_refused_with_other_predictions(ablations):
    entry = next(entry for entry in ablations if "announced" in entry)
    assert commit_of_announcement({**entry, "number": 10_000}) == "", "not announced"
    hidden = {name: {**result, "missing": ["a fact"]} for name, result in entry["results"].items()}
    with pytest.raises(RecordError, match="other predictions now"):
        commit_of_announcement({**entry, "results": hidden})


def test_predictions_of_a_record_are_repeated_from_clean_runs(ablations):
    entry = next(entry for entry in ablations if entry["number"] == 14)
    again = predict_again({**entry, "disagreements": ["kept"]}, ROOT)
    assert {name: result["missing"] for name, result in again["results"].items()} == {
        name: result["missing"] for name, result in entry["results"].items()
    }
    assert again["first_disagreements"] == entry["first_disagreements"]
    assert again["disagreements"] == entry["disagreements"]
