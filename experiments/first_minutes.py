"""Durations of a new user's first commands, in a clean clone: installation, report, test suite.

``python -m experiments.first_minutes FOLDER`` clones the last commit of this checkout into a new folder, runs targets
of make there, and writes ``first_minutes.json`` next to this file; with names of commands it runs those, in a folder
that may exist. Durations mean something on an idle machine, so the load before each command is recorded. Downloads
come from where pip's settings say.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.atomic import from_json, to_json, write_whole

PROJECT = Path(__file__).parent.parent
RECORD = PROJECT / "experiments/first_minutes.json"

TARGETS = {
    "install": [".venv/.installed"],
    "report": ["report"],
    "install the development tools": [".venv/.installed-dev", "browser"],
    "test": ["test"],
}
"""Command -> make's targets, in order; a duration is that of what the commands before have left to do."""

OF_PYTHON = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONPATH")
"""Variables that would make a shell unlike a new user's."""


def measure(folder: Path, commands: Sequence[str] = (), *, project: Path = PROJECT, record: Path = RECORD) -> None:
    """Run commands in a clone, all if none is named, and record each as soon as it has succeeded.

    Raises:
        subprocess.CalledProcessError: a command failed; its output is on the terminal.
    """
    if not folder.exists():
        subprocess.run(["git", "clone", "--quiet", project, folder], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True)
    environment = {name: value for name, value in os.environ.items() if name not in OF_PYTHON}
    for name in commands or TARGETS:
        load, began = os.getloadavg()[0], time.monotonic()
        subprocess.run(["make", *TARGETS[name]], cwd=folder, env=environment, check=True)
        measured = {
            "seconds": round(time.monotonic() - began, 1),
            "load_before": round(load, 2),
            "commit": head.stdout.strip(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
        }
        known: dict[str, Any] = from_json(record.read_bytes()) if record.exists() else {"commands": {}}
        known = {"command": "python -m experiments.first_minutes FOLDER", "commands": known["commands"]}
        known["commands"][name] = measured
        write_whole(record, to_json(known))


if __name__ == "__main__":
    measure(Path(sys.argv[1]).resolve(), sys.argv[2:])
