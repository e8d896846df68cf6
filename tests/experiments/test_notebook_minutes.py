"""Minutes of the notebooks: measured by executing them, and those of the index are the record's."""

from __future__ import annotations

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from experiments.notebook_minutes import NOTEBOOKS, RECORD, ROW, measure, minutes, with_minutes
from workbench.atomic import from_json


def test_a_notebook_is_executed_as_it_is_stored_and_timed(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_FAST", "1")
    lines = ("import os, pathlib, time", "time.sleep(0.5)", "found = os.environ.get('WORKBENCH_FAST', '')")
    source = "\n".join((*lines, "pathlib.Path('seen').write_text(found)"))
    nbformat.write(new_notebook(cells=[new_code_cell(source)]), tmp_path / "one.ipynb")
    measure([tmp_path / "one.ipynb"], tmp_path / "record.json")
    record = from_json((tmp_path / "record.json").read_bytes())
    assert 0.5 < record["notebooks"]["one.ipynb"]["seconds"] < 60
    assert (tmp_path / "seen").read_text() == "", "a stored notebook has its own parameters"


@pytest.mark.parametrize(("seconds", "text"), [(4, "½"), (30, "½"), (31, "1"), (60, "1"), (61, "2"), (300.5, "6")])
def test_minutes_are_rounded_up(seconds, text):
    assert minutes(seconds) == text


def test_the_index_has_every_notebook_with_the_minutes_of_the_record():
    index, record = (NOTEBOOKS / "README.md").read_text(), from_json(RECORD.read_bytes())
    assert sorted(row["file"] for row in ROW.finditer(index)) == sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
    assert with_minutes(index, record) == index
