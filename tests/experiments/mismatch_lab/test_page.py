"""The saved page and numbers are those of the saved record."""

from pathlib import Path

import pytest

from experiments.mismatch_lab.measure import CORRECTIONS, ONLINE, SEEDS, STEPS, format_record
from experiments.mismatch_lab.page import answer, gap_rows, online_rows, page
from workbench.atomic import from_json

SAVED = Path(__file__).parents[3] / "experiments/mismatch_lab"


@pytest.fixture(scope="module")
def record():
    return from_json((SAVED / "mismatch_lab.json").read_text())


def test_the_saved_page_is_that_of_its_record(record):
    assert (SAVED / "report.html").read_text() == page(record)


def test_every_correction_model_and_seed_is_in_the_record(record):
    assert [row[0] for row in gap_rows(record)] == list(CORRECTIONS)
    assert [tuple(row[:2]) for row in online_rows(record)] == [(m, n) for m, of in ONLINE.items() for n in of]
    assert record["steps"] == STEPS
    assert all(len(row["rewards"]) == len(SEEDS) for row in record["online"])


def test_the_answer_counts_what_is_seen(record):
    seen = [row for row in record["online"] if row["seen"] and row["name"] not in ("none", "synchronous")]
    assert f" {len(seen)} of " in answer(record)
    assert f"of one sign{': ' if seen else '.'}" in answer(record)
    dense = [row for row in record["online"] if row["model"] == "dense"]
    falling = sum(row["reward"] < row["start"] for row in dense)
    assert f"falls in {falling} of {len(dense)} configurations of the dense model" in answer(record)
    assert "of the credit left" in format_record(record)
