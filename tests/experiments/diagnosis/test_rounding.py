"""Pairs of right runs in other loops: none is accused, and one with a fault is."""

import pytest

from experiments.diagnosis.rounding import measure
from workbench.atomic import from_json

PAIRS = measure.pairs()
SAMPLE = [2, 11, 18]
"""Of a reference, a critic and an unnoted reference whose batches are others than those that train."""


def test_there_are_thirty_pairs_in_five_loops():
    assert len(PAIRS) >= 30
    assert len({pair["loop"] for pair in PAIRS}) >= 5


@pytest.mark.parametrize("number", SAMPLE)
def test_a_right_pair_is_not_accused(number, tmp_path):
    sides = measure.record(tmp_path, "bf16-rich", PAIRS[number])
    assert measure.accused(sides) == []
    assert measure.accused(sides, 0.5) == []


def test_tolerances_of_nearly_nothing_accuse_a_pair(tmp_path):
    """What is counted can fail."""
    assert measure.accused(measure.record(tmp_path, "bf16-rich", PAIRS[2]), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("form", measure.FORMS)
@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_no_right_pair_is_accused(number, form, tmp_path):
    assert measure.accused(measure.record(tmp_path, form, PAIRS[number])) == []


def test_the_record_is_of_these_pairs_and_accuses_none():
    record = from_json((measure.FOLDER / "rounding.json").read_text())
    assert record["pairs"] == len(PAIRS)
    assert {form: counts["1.0"] for form, counts in record["accused_with_tolerances_times"].items()} == dict.fromkeys(
        measure.FORMS, 0
    )
