"""The saved page and numbers are those of the saved record."""

from pathlib import Path

import pytest

from experiments.attribution.measure import record_of
from experiments.attribution.page import answer, page
from workbench.atomic import from_json
from workbench.mismatch.factors import BY_NAME
from workbench.mismatch.verdict import SEEDED

SAVED = Path(__file__).parents[3] / "experiments/attribution"


@pytest.fixture(scope="module")
def record():
    return from_json((SAVED / "attribution.json").read_text())


def test_the_saved_page_is_that_of_its_record(record):
    text = page(record)
    assert (SAVED / "report.html").read_text() == text
    assert SEEDED in text
    assert "no blind set" in answer(record)


def test_the_summary_is_that_of_the_rows(record):
    again = record_of(record["floors"], record["planted"], record["clean"], record["steps"], record["seconds"])
    assert again["summary"] == record["summary"]
    assert again["bars"] == record["bars"]
    assert {name for row in record["planted"] for name in row["planted"]} == set(BY_NAME)


def test_the_alarm_and_the_floor_keep_their_bars(record):
    assert record["summary"]["clean"] >= 200
    assert record["bars"]["accused"]["holds"]
    assert all(abs(row["ratio"] - 1) <= 0.2 for row in record["floors"])
    assert len(record["floors"]) == 12
    [rare] = [row for row in record["floors"] if (row["kind"], row["precision"]) == ("moe", "float16")]
    assert min(rare["far_documents"]) >= 10, "the standard error of their count is a third at most"


def test_stale_weights_are_found_from_the_step_on_at_which_the_sampler_is_stuck(record):
    for step, one in record["steps"].items():
        causes = [part["factor"] for part in one["parts"] if not part["stated"]]
        assert causes == (["stale weights"] if int(step) > 5 else []), step
