"""The page of the engine matrix states what its record has."""

import copy
from pathlib import Path

import pytest

from experiments.engine_matrix.page import answer, counts, page, rows
from workbench.atomic import from_json
from workbench.engines.invariants import INVARIANTS

ROOT = Path(__file__).parents[3]
SAVED = ROOT / "experiments/engine_matrix"


@pytest.fixture(scope="module")
def record():
    return from_json((SAVED / "matrix.json").read_text())


def test_the_saved_page_is_that_of_its_record(record):
    assert (SAVED / "report.html").read_text() == page(record)


def test_the_matrix_has_a_verdict_for_every_engine_and_invariant(record):
    assert len({entry["versions"].split()[0] for entry in record["engines"].values()}) >= 5
    for entry in record["engines"].values():
        assert list(entry["invariants"]) == list(INVARIANTS)


def test_a_known_bad_release_fails_and_its_successor_does_not(record):
    old, new = (record["engines"][name]["invariants"] for name in ("Trainer of 2024", "Trainer"))
    for name in ("accumulation", "partners", "ranks"):
        assert (old[name]["verdict"], new[name]["verdict"]) == ("broken", "holds")


def test_an_unexpected_break_is_shown_as_one(record):
    other = copy.deepcopy(record)
    before = counts(record)
    result = other["engines"]["TRL SFT"]["invariants"]["clip"]
    result |= {"verdict": "broken", "description": "twice", "cases": ["one", "two"], "documents": ["..##"]}
    assert counts(other)["broken"] == before["broken"] + 1
    assert counts(other)["expected"] == before["expected"]
    assert answer(other) != answer(record)
    line = next(row for row in rows(other) if row[0] == "TRL SFT")
    assert line[2 + list(INVARIANTS).index("clip")] == "broken"
    assert "..##" in page(other)


def test_what_breaks_says_is_in_the_record(record):
    text = (SAVED / "breaks.md").read_text()
    for title, entry in record["engines"].items():
        for name, result in entry["invariants"].items():
            if result["verdict"] == "broken" and name not in entry["expected"]:
                assert f"**{title}**" in text, title
                assert f"`{name}`" in text, name
