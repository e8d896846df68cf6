"""The step whose check is timed is a right one, and a wrong one is named; the record is of a million tokens."""

from experiments.checked_steps import measure
from workbench.atomic import from_json


def test_the_measured_step_is_right_or_named():
    rows = measure.measure(3000)["steps"]
    assert [row["verdict"] for row in rows.values()] == ["agrees", "differs"]
    assert rows["divided by documents"]["cause"].startswith("denominator: the loss is divided by documents")


def test_the_record_is_of_a_million_tokens():
    record = from_json(measure.RECORD.read_text())
    assert record["bar_s"] == measure.BAR_S
    assert all(abs(row["tokens"] / measure.TOKENS - 1) < 1e-3 for row in record["steps"].values())
