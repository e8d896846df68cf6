"""`workbench lab` and `workbench notebooks`: JupyterLab on the notebooks, and a copy of them to change."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import tyro

from workbench.cli.terminal import answered
from workbench.errors import LaunchError
from workbench.records.provenance import PACKAGED, project_root

_PROJECT = (
    "notebooks/*.ipynb",
    "notebooks/*.md",
    "data/**/*",
    "experiments/*/ablation.yaml",
    "experiments/head/head.json",
    "experiments/sensitivity/sensitivity.json",
)
"""Files that make a project of a folder."""


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
            rule="a project has notebooks",
            fix="`workbench notebooks DIR` makes one; then run it there",
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
    if project == PACKAGED:
        raise LaunchError(
            "open JupyterLab on the notebooks",
            found="only those of the installed package",
            rule="notebooks are executed in a folder of yours",
            fix="`workbench notebooks DIR`, then `workbench lab` in DIR",
        )
    command = lab_command(project, arguments)
    path = os.pathsep.join([str(project), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode


def notebooks(to: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]) -> int:
    """Copy the notebooks, the rollout dataset and the ablations to a new folder, from which they run.

    Raises:
        LaunchError: the folder exists and is not empty.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise LaunchError(
            f"copy the notebooks to {to}",
            found="a file" if to.is_file() else "a folder that is not empty",
            rule="nothing is overwritten",
            fix="name a new folder",
        )
    source = PACKAGED if PACKAGED.is_dir() else project_root()
    for file in sorted(path for pattern in _PROJECT for path in source.glob(pattern) if path.is_file()):
        place = to / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    answered(lambda: {"folder": str(to)})
    print(f"{to}: notebooks/, data/, experiments/\nnext: cd {to} && workbench lab")
    print("or: workbench run experiments/layout_parity/ablation.yaml")
    return 0
