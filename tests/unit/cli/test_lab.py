"""`workbench lab`: the right JupyterLab on the right folder."""

from __future__ import annotations

import sys

import pytest

from workbench.cli import lab as verb
from workbench.errors import LaunchError


def test_the_command(tmp_path):
    (tmp_path / "notebooks").mkdir()
    for name in ("02_more", "01_quickstart"):
        (tmp_path / "notebooks" / f"{name}.ipynb").touch()
    command = verb.lab_command(tmp_path, ["--no-browser"])
    assert command[:3] == [sys.executable, "-m", "jupyterlab"]
    assert f"--ServerApp.root_dir={tmp_path}" in command
    assert "--LabApp.default_url=/lab/tree/notebooks/01_quickstart.ipynb" in command
    assert command[-1] == "--no-browser"


def test_missing_notebooks_are_reported(tmp_path):
    with pytest.raises(LaunchError, match="no notebooks"):
        verb.lab_command(tmp_path)
