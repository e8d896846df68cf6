"""The executed notebook next to the report: every table and figure of the page as a cell that can be run again.

The page is for reading; the notebook is for the next question. Both are built from the same saved comparison.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from markupsafe import escape

from workbench.atomic import write_whole
from workbench.compare.comparison import Comparison
from workbench.compare.seeds import seed_groups
from workbench.errors import RecordError
from workbench.records.provenance import python_path, without_machine_paths
from workbench.report.online import online_groups

NAME = "report.ipynb"


def write_notebook(comparison_path: Path, *, timeout_s: float = 300.0) -> Path:
    """Build a notebook from a ``comparison.json``, execute it, and save it next to the comparison, outputs included.

    Raises:
        RecordError: there is no comparison, or a cell failed; then no notebook is written.
    """
    with _without_iri_grammar():
        import nbformat
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError

    comparison = Comparison.load(comparison_path)
    notebook = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    )
    for number, (kind, source) in enumerate(_cells(comparison, comparison_path.name)):
        new_cell = nbformat.v4.new_markdown_cell if kind == "text" else nbformat.v4.new_code_cell
        notebook.cells.append(new_cell(source, id=f"report-{number:02d}"))
    try:
        with private_sockets() as config:
            client = NotebookClient(
                notebook,
                timeout=timeout_s,
                kernel_name="python3",
                record_timing=False,
                resources={"metadata": {"path": str(comparison_path.parent)}},
                config=config,
            )
            # what a kernel writes to standard error is about itself; what a cell writes there is in its outputs
            client.execute(stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": python_path()})
    except CellExecutionError as error:
        raise RecordError(
            f"execute the notebook of {comparison_path.parent.name}",
            found=without_machine_paths(str(error)),
            rule="every cell runs on the saved comparison",
            fix="run the experiment again if its comparison is of another version",
        ) from None
    notebook.metadata.pop("language_info", None)
    return write_whole(comparison_path.with_name(NAME), nbformat.writes(notebook).encode())


@contextlib.contextmanager
def private_sockets() -> Iterator[Any]:
    """Settings of a kernel that is reached through files of a folder that only this user reads, as `traitlets.Config`.

    Jupyter's default are five ports of this machine that were free a moment before the kernel binds them; another
    process may have taken one by then, and others of the machine may listen. Where the temporary folder's name is too
    long for the address of a socket (104 bytes, POSIX's ``sun_path`` on macOS), the default stays.
    """
    from traitlets.config import Config

    with tempfile.TemporaryDirectory(prefix="kernel-") as folder:
        short = len(f"{folder}/kernel-ipc-5".encode()) < 104
        settings = {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}
        yield Config({"KernelManager": settings} if short else {})


@contextlib.contextmanager
def _without_iri_grammar() -> Iterator[None]:
    """Let jsonschema, which nbformat imports, load the grammar of IRIs when it first checks one.

    ``jsonschema[format-nongpl]``, which JupyterLab requires, imports rfc3987_syntax, which compiles that grammar for
    2 s; no check of a notebook reads it.
    """
    name = "rfc3987_syntax"
    if "jsonschema" in sys.modules or name in sys.modules or find_spec(name) is None:
        yield
        return
    stand_in: Any = ModuleType(name)
    stand_in.is_valid_syntax = lambda term, value: importlib.import_module(name).is_valid_syntax(term, value)
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]


def _cells(comparison: Comparison, file: str) -> Iterator[tuple[str, str]]:
    yield "text", f"# {escape(comparison.question or comparison.experiment)}"
    yield "code", f'import workbench as wb\n\ncomparison = wb.Comparison.load("{file}")'
    yield "code", "wb.show(comparison)"
    online = [("Online: reward and mismatch by step", "wb.report.online.online_curves(comparison)")]
    seeds = [("Across seeds", "wb.report.seeds.seeds_by_step(comparison)")]
    for title, *sources in (
        ("What differs between configurations", "comparison.settings_that_differ()"),
        ("Verdicts", "comparison.table()", "wb.figures.verdicts(comparison)"),
        *(online if online_groups(comparison) else []),
        *(seeds if seed_groups(comparison) else []),
        ("Gradient norm by step", "wb.figures.gradient_norm_by_step(comparison)"),
        ("Per-parameter norm ratios", "wb.figures.norm_ratios(comparison)"),
        ("Importance ratios", "wb.figures.importance_ratios(comparison)"),
        ("Loss", "wb.figures.loss_by_step(comparison)"),
        ("Provenance", "comparison.provenance"),
    ):
        yield "text", f"## {title}"
        yield from (("code", source) for source in sources)
