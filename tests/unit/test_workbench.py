"""The public API of the package: it imports fast, and every promised name exists."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

import workbench
from tests.helpers import warm
from workbench.records.provenance import project_root

PUBLIC = """
Experiment Comparison figures show
RunSpec LossSpec RolloutBatch load_rollouts project_root
build_loss LossInputs token_logprobs fused_loss token_credit
align_loss simulate reproducibly
prove assert_proved prove_engine assert_engine_proved planted_faults
Recorder Record RecordedStep diagnose check_step attribute bisect
sensitivity assert_sensitive assert_agrees Gate Tolerance
loss_spec explain replay
WorkbenchError
"""
LIGHT = ("torch", "pandas", "matplotlib", "transformers", "torchx", "pydantic", "IPython")


@pytest.mark.parametrize("statement", ["import workbench", "import workbench.cli", "import workbench.experiment"])
def test_importing_it_imports_nothing_heavy(statement):
    heavy = LIGHT if statement == "import workbench" else ("torch", "pandas", "matplotlib", "transformers")
    code = f"{statement}; import sys; sys.exit(','.join(m for m in {heavy!r} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=project_root())
    assert (done.returncode, done.stderr) == (0, "")


def test_the_public_names_are_these():
    assert workbench.__all__ == PUBLIC.split()


@pytest.mark.parametrize("name", workbench.__all__)
def test_every_public_name_is_there(name):
    value = getattr(workbench, name)
    assert name in dir(workbench)
    assert getattr(value, "__doc__", None)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        _ = workbench.lunch


def run_alone(code):
    """Run code in a process that has loaded torch and transformers, but nothing of the workbench."""
    first = "import sys; assert not [name for name in sys.modules if name.startswith('workbench')]; "
    return subprocess.run([warm.python(), "-c", first + code], capture_output=True, text=True, cwd=project_root())


@pytest.mark.parametrize("before", [False, True], ids=["alone", "imported before"])
@pytest.mark.parametrize(
    "path",
    ["losses.terms.Term", "sharding.bridge.traffic.Traffic", "systems.translate.contract_table", "rollouts.task"],
)
def test_every_module_is_an_attribute_of_its_package(path, before):
    """In an interpreter where nothing else has imported it; also of a package that something has imported."""
    first = f"import workbench.{path.split('.')[0]}.{path.split('.')[1]}; " if before else ""
    done = run_alone(f"{first}import workbench as wb; wb.{path}; wb.sharding.orders")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["prove", "diagnose"])
def test_a_public_name_is_no_package_of_that_name(name):
    code = f"import workbench.{name}, workbench as wb; wb.{name}.__call__; from workbench.{name} import {name}"
    done = run_alone(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_modules_of_a_package_are_completed():
    assert {"orders", "plan", "bridge"} <= set(dir(workbench.sharding))
    with pytest.raises(AttributeError, match=r"module 'workbench.sharding' has no attribute 'order'"):
        _ = workbench.sharding.order


def test_the_version_is_the_one_that_is_packaged():
    project = tomllib.loads((project_root() / "pyproject.toml").read_text())["project"]
    assert workbench.__version__ == project["version"]
