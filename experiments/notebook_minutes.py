"""Durations of the notebooks, executed from top to bottom as they are stored.

``python -m experiments.notebook_minutes`` executes every notebook with its own parameters, writes
``notebook_minutes.json`` next to this file and the minutes in ``notebooks/README.md``. Durations mean something on an
idle machine, so the load before each notebook is recorded.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from workbench.atomic import from_json, to_json, write_whole

PROJECT = Path(__file__).parent.parent
NOTEBOOKS = PROJECT / "notebooks"
RECORD = PROJECT / "experiments/notebook_minutes.json"
ROW = re.compile(r"^(\| \[[^]]+\]\((?P<file>[^)]+\.ipynb)\) \| )[^|]*( \| .*)$", re.MULTILINE)
"""A line of the index: link, minutes, lesson."""


def measure(notebooks: Sequence[Path] = (), record: Path = RECORD) -> None:
    """Execute notebooks, all if none is given, and record each as soon as it has succeeded.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    of_shell = {name: value for name, value in os.environ.items() if name != "WORKBENCH_FAST"}
    for path in notebooks or sorted(NOTEBOOKS.glob("*.ipynb")):
        load, began = os.getloadavg()[0], time.monotonic()
        notebook = nbformat.read(path, as_version=4)
        resources = {"metadata": {"path": str(path.parent)}}
        NotebookClient(notebook, timeout=3600, kernel_name="python3", resources=resources).execute(
            env=of_shell | {"PYTHONPATH": str(PROJECT)}
        )
        known: dict[str, Any] = from_json(record.read_bytes()) if record.exists() else {"notebooks": {}}
        known |= {
            "command": "python -m experiments.notebook_minutes",
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
        }
        seconds = round(time.monotonic() - began, 1)
        known["notebooks"][path.name] = {"seconds": seconds, "load_before": round(load, 2)}
        write_whole(record, to_json(known))
        print(f"{path.name}: {seconds} s", flush=True)


def with_minutes(index: str, record: Mapping[str, Any]) -> str:
    """Return the index of the notebooks with the minutes of a record."""
    return ROW.sub(lambda row: f"{row[1]}{minutes(record['notebooks'][row['file']]['seconds'])}{row[3]}", index)


def minutes(seconds: float) -> str:
    """Round up to whole minutes, or below one to half a minute."""
    return "½" if seconds <= 30 else str(-int(-seconds // 60))


def main() -> None:
    """Measure all notebooks and write the record and the index."""
    measure()
    index = NOTEBOOKS / "README.md"
    index.write_text(with_minutes(index.read_text(), from_json(RECORD.read_bytes())))


if __name__ == "__main__":
    main()
