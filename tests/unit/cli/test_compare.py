"""`workbench compare`: the saved verdicts, printed."""

from __future__ import annotations

import pytest

from workbench.cli import compare as verb
from workbench.compare.comparison import Comparison, Configuration
from workbench.errors import RecordError
from workbench.runs.spec import RunSpec

SETTINGS = RunSpec().model_dump(mode="json")


@pytest.mark.parametrize(("verdict", "code"), [("equal", 0), ("different", 0), ("failed", 1)])
def test_prints_verdicts(tmp_path, capsys, verdict, code):
    two = Configuration("two", SETTINGS, verdict=verdict, why="because")
    Comparison("x", "Same?", [Configuration("one", SETTINGS), two]).save(tmp_path / "comparison.json")
    assert verb.main([str(tmp_path)]) == code
    assert capsys.readouterr().out == f"Same?\none  reference    \ntwo  {verdict:<13}  because\n"


def test_a_damaged_comparison_is_refused(tmp_path):
    (tmp_path / "comparison.json").write_text("{")
    with pytest.raises(RecordError, match=r"comparison\.json"):
        verb.main([str(tmp_path)])
