"""Every notebook: clean in the repository, and it runs from top to bottom with every claim checked."""

import os
import re
import statistics
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers import warm
from workbench.report.notebook import private_sockets

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EVERY = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert "01_quickstart" in [path.stem for path in NOTEBOOKS]


@EVERY
def test_no_outputs_and_no_execution_counts(path):
    assert code_cells(path)
    for cell in code_cells(path):
        assert cell.outputs == []
        assert cell.execution_count is None


@EVERY
def test_cell_ids_are_names_that_do_not_change_by_themselves(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z]+-\d\d", name) for name in ids)


@EVERY
def test_no_path_of_a_machine(path):
    text = path.read_text(encoding="utf8")
    assert not re.search(r"(?<![\w.])/(?:home|root|Users|tmp|work|mnt|opt|usr)/", text)
    assert str(ROOT) not in text


@EVERY
def test_one_import_first_parameters_tagged_and_cells_short(path):
    cells = code_cells(path)
    assert cells[0].source == "import workbench as wb"
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in cells) == 1
    assert statistics.median(len(cell.source.splitlines()) for cell in cells) <= 6


@EVERY
def test_it_ends_with_checked_claims_and_three_exercises(path):
    notebook = nbformat.read(path, as_version=4)
    assert notebook.cells[-2].cell_type == "code"
    assert "assert" in notebook.cells[-2].source
    last = notebook.cells[-1].source
    assert len(re.findall(r"^\d\. ", last.partition("<details>")[0], flags=re.MULTILINE)) == 3
    assert len(re.findall(r"^\d\. ", last.partition("<details>")[2], flags=re.MULTILINE)) == 3


@EVERY
@pytest.mark.timeout(600)
def test_it_runs_and_leaves_nothing_in_the_tree(path, monkeypatch, tmp_path):
    for name in ("TMPDIR", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("WORKBENCH_FAST", "1")
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(search))
    warm.kernels(tmp_path / "jupyter")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    before = _files()
    notebook = nbformat.read(path, as_version=4)
    with private_sockets() as config:
        resources = {"metadata": {"path": str(path.parent)}}
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources, config=config).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    kinds = {
        kind
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        for kind in output.get("data", {})
    }
    assert {"image/svg+xml", "text/html"} <= kinds
    assert _files() == before


def _files():
    """Return the files in the folders that a notebook could write to, byte code aside."""
    return {
        result
        for folder in ("notebooks", "experiments", "data")
        for result in (ROOT / folder).rglob("*")
        if "__pycache__" not in result.parts
    }
