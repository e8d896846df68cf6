"""A sweep: rows as they stand, and while it goes on how to follow them."""

import pytest

from tests.helpers.trials import make_sweep
from workbench.report.rich.sweep import as_html


@pytest.fixture
def sweep(tmp_path):
    return make_sweep(tmp_path / "exp", "a", "b")


def test_a_row_for_each_run_in_order(sweep):
    drawn = as_html(sweep)
    assert 0 < drawn.index("a: pending") < drawn.index("b: pending")


def test_it_says_how_to_follow_it_while_there_is_something_to_follow(sweep):
    assert "wb.attach(sweep)" in as_html(sweep)
    for run in sweep.runs:
        run.set_state("succeeded")
    assert "wb.attach(sweep)" not in as_html(sweep)
