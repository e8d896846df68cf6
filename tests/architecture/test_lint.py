"""The code keeps to the lint and format settings of pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["lint", "format"])
def test_ruff_is_clean(command):
    project = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "workbench", "tests", "notebooks", "experiments", "docs"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
