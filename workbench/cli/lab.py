"""`workbench lab`: JupyterLab on the notebooks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from workbench.errors import LaunchError
from workbench.records.provenance import project_root


def lab_command(project: Path, more: Sequence[str] = ()) -> list[str]:
    """Return the command that opens JupyterLab with the project as its files and the first notebook in view.

    Raises:
        LaunchError: no notebooks there, or JupyterLab is not installed.
    """
    notebooks = sorted((project / "notebooks").glob("*.ipynb"))
    if not notebooks:
        raise LaunchError(
            "open JupyterLab on the notebooks",
            found="no notebooks/*.ipynb in the project",
            rule="run it in a clone of the project",
            fix="change to the project's folder",
        )
    if find_spec("jupyterlab") is None:
        raise LaunchError(
            "open JupyterLab",
            found="it is not installed",
            rule="jupyterlab is a dependency",
            fix="run `make lab`, or install the project with pip",
        )
    root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--ServerApp.root_dir={project}",
        f"--LabApp.default_url=/lab/tree/notebooks/{notebooks[0].name}",
        *root,
        *more,
    ]


def lab(arguments: Sequence[str]) -> int:
    """Run `workbench lab`; returns when JupyterLab has ended."""
    if {"-h", "--help"}.intersection(arguments):
        print("usage: workbench lab [arguments of jupyter lab]\n\nOpen JupyterLab on the notebooks.")
        return 0
    project = project_root()
    command = lab_command(project, arguments)
    path = os.pathsep.join([str(project), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode
