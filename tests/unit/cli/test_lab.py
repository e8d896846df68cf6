"""`workbench lab`: the right JupyterLab on the right folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import workbench
from tests.helpers import warm
from workbench.cli import lab as verb
from workbench.cli import main
from workbench.errors import LaunchError
from workbench.launch.ablation import load_ablation
from workbench.records.provenance import project_root


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


def test_notebooks_are_copied_with_all_that_they_read(tmp_path, capsys):
    place = tmp_path / "new" / "project"
    assert main(["notebooks", str(place)]) == 0
    assert str(place) in capsys.readouterr().out
    assert project_root(place) == place
    for folder in ("notebooks", "data"):
        original = sorted(path.relative_to(project_root()) for path in (project_root() / folder).rglob("*.*"))
        assert sorted(path.relative_to(place) for path in (place / folder).rglob("*.*")) == original
    text = "".join(path.read_text() for path in (place / "notebooks").glob("*.ipynb"))
    for named in set(re.findall(r"project_root\(\) / \\\"([\w/.]+)", text)):
        assert (place / named).exists(), named
    load_ablation(place / "experiments/layout_parity/ablation.yaml")


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("kept")
    assert main(["notebooks", str(tmp_path)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this source tree, unpacked where nothing else is."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=Path(workbench.__file__).parent.parent,
        check=True,
        capture_output=True,
    )
    [built] = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def in_wheel(wheel, folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    command = [warm.python(), "-P", "-m", "workbench", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_a_wheel_has_the_pytest_plugin(wheel):
    [points] = wheel.glob("workbench-*.dist-info/entry_points.txt")
    assert "[pytest11]\nworkbench = workbench.pytest_plugin" in points.read_text()


def test_a_wheel_runs_an_ablation_outside_of_any_checkout(wheel, tmp_path):
    assert "notebooks DIR" in in_wheel(wheel, tmp_path, "lab").stderr
    made = in_wheel(wheel, tmp_path, "notebooks", "project")
    assert made.returncode == 0, made.stderr
    options = ["--only", "one_rank-float64", "--steps", "1", "--where", "here", "--no-notebook"]
    ran = in_wheel(wheel, tmp_path / "project", "run", "experiments/layout_parity/ablation.yaml", *options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [run] = (tmp_path / "project/experiments/layout_parity/runs").glob("one_rank-*/state.json")
    assert json.loads(run.read_text())["state"] == "succeeded"
    assert not list(wheel.rglob("runs")), "nothing is written next to the package"
