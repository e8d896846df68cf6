"""Needs of rows compare what the denominator counts."""

import pytest

from workbench.sensitivity.data_needs import _counted
from workbench.sensitivity.facts import RowFacts


@pytest.mark.parametrize(
    ("denominator", "count"), [("token", 7), ("document", 2), ("document_sum", 2), ("constant", 3)]
)
def test_a_row_has_what_a_denominator_counts(denominator, count):
    assert _counted(RowFacts(3, 2, 7, (7,), 0, 0, 0, 0, frozenset({0}), 0, 0, 0), denominator) == count
