"""`workbench report`: the page again, without running anything."""

from __future__ import annotations

import pytest

from tests.helpers import comparisons
from workbench.cli import report as verb
from workbench.errors import RecordError


def test_writes_the_page_from_the_saved_comparison(tmp_path, capsys):
    comparison = _a_comparison()
    comparison.save(tmp_path / "comparison.json")
    assert verb.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'report.html'}\n"
    assert comparison.configurations[0].name in (tmp_path / "report.html").read_text()


def test_without_a_comparison_it_says_what_to_do(tmp_path):
    with pytest.raises(RecordError, match="run the ablation again"):
        verb.main([str(tmp_path)])


def _a_comparison():
    return comparisons.layout_parity()
