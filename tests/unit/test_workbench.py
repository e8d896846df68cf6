"""The door of the package: it opens at once, and every name that it promises is there."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

import workbench
from workbench.records.directory import project_root

LIGHT = ("torch", "pandas", "matplotlib", "transformers", "torchx", "pydantic", "IPython")


@pytest.mark.parametrize("statement", ["import workbench", "import workbench.cli", "import workbench.launch.run"])
def test_importing_it_imports_nothing_heavy(statement):
    heavy = LIGHT if statement == "import workbench" else ("torch", "pandas", "matplotlib", "transformers")
    code = f"{statement}; import sys; sys.exit(','.join(m for m in {heavy!r} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=project_root())
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", workbench.__all__)
def test_every_public_name_is_there(name):
    value = getattr(workbench, name)
    assert name in dir(workbench)
    assert getattr(value, "__doc__", None)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        _ = workbench.lunch


def test_the_version_is_the_one_that_is_packaged():
    project = tomllib.loads((project_root() / "pyproject.toml").read_text())["project"]
    assert workbench.__version__ == project["version"]
