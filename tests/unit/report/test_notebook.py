"""The notebook next to the page: executed, complete, about this comparison, without machine names."""

import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from tests.helpers import warm
from tests.helpers.comparisons import layout_parity
from workbench.errors import RecordError
from workbench.report import notebook as module
from workbench.report.notebook import write_notebook


@pytest.fixture(autouse=True)
def _warm_kernel(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("jupyter")
    warm.kernels(folder)
    monkeypatch.setenv("JUPYTER_PATH", str(folder))


def test_every_cell_was_executed_and_shows_this_comparison(tmp_path, capfd):
    whole = layout_parity()
    few = [whole[name] for name in ("one_rank-float64", "fault_missing_cp_factor")]
    hostile = replace(whole, question="<script>alert(1)</script> the same?", configurations=few)
    hostile.save(tmp_path / "comparison.json")
    path = write_notebook(tmp_path / "comparison.json")
    assert path == tmp_path / "report.ipynb"
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    kinds = {cell.source: {kind for output in cell.outputs for kind in output.get("data", {})} for cell in cells}
    assert "image/svg+xml" in kinds["wb.figures.verdicts(comparison)"]
    assert "text/html" in kinds["wb.show(comparison)"]
    shown = next(cell for cell in cells if cell.source == "wb.show(comparison)")
    assert "fault_missing_cp_factor" in shown.outputs[0].data["text/html"]
    drawn = [
        output.data.get(kind, "")
        for cell in cells
        for output in cell.outputs
        for kind in ("text/html", "image/svg+xml")
    ]
    assert "<script" not in "".join([*drawn, notebook.cells[0].source])
    assert "&lt;script&gt;" in notebook.cells[0].source
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work)/", path.read_text())
    assert capfd.readouterr().err == ""


def test_a_cell_that_fails_leaves_no_notebook(tmp_path, monkeypatch):
    layout_parity().save(tmp_path / "comparison.json")
    monkeypatch.setattr(module, "_cells", lambda comparison, file: iter([("code", "1 / 0")]))
    with pytest.raises(RecordError, match="ZeroDivisionError"):
        write_notebook(tmp_path / "comparison.json")
    assert not (tmp_path / "report.ipynb").exists()


class TemporaryFolders:
    """The module `tempfile`, with folders below a given one."""

    def __init__(self, folder):
        self.folder = folder

    def TemporaryDirectory(self, **options):
        return tempfile.TemporaryDirectory(dir=self.folder, **options)


@pytest.mark.parametrize(("folder", "transport"), [("a", "ipc"), ("a" * 120, "tcp")])
def test_its_kernel_takes_no_port_of_the_machine_where_sockets_can_be_files(folder, transport, tmp_path, monkeypatch):
    layout_parity().save(tmp_path / "comparison.json")
    with tempfile.TemporaryDirectory() as short:
        used = Path(short) / folder
        used.mkdir()
        monkeypatch.setattr(module, "tempfile", TemporaryFolders(used))
        code = "import json, ipykernel\nprint(json.loads(ipykernel.get_connection_info())['transport'])"
        monkeypatch.setattr(module, "_cells", lambda comparison, file: iter([("code", code)]))
        notebook = nbformat.read(write_notebook(tmp_path / "comparison.json"), as_version=4)
        assert notebook.cells[0].outputs[0].text.strip() == transport
        assert list(used.iterdir()) == []


def test_without_a_comparison_there_is_none(tmp_path):
    with pytest.raises(RecordError, match=r"comparison\.json"):
        write_notebook(tmp_path / "comparison.json")


def test_nbformat_is_imported_without_the_grammar_of_iris_which_is_there_when_one_is_checked():
    code = """
import sys
from workbench.report.notebook import _without_iri_grammar
assert not {"nbformat", "jsonschema"} & sys.modules.keys()
with _without_iri_grammar():
    import nbformat, jsonschema
assert not any(name.split(".")[0] in ("lark", "rfc3987_syntax") for name in sys.modules)
checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
print([checker.conforms(text, "iri") for text in ("http://example.org/ä", "no iri")])
"""
    ended = subprocess.run([warm.python(), "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert ended.stdout == "[True, False]\n", ended.stderr
