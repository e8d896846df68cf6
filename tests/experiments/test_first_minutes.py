"""The durations of the first commands are those of make in a clone, in a shell like a new user's."""

from __future__ import annotations

import subprocess

import pytest

from experiments.first_minutes import TARGETS, measure
from workbench.atomic import from_json

MAKEFILE = """\
.venv/.installed report browser test:
\t@echo "$@" $$PYTHONPATH >> done
\t@test "$@" != report || sleep 0.3
.venv/.installed-dev:
\t@echo "$@" >> done; exit $(CODE)
"""


@pytest.fixture
def project(tmp_path):
    """A repository whose make notes its targets."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "Makefile").write_text(MAKEFILE)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    return folder


def test_every_command_is_timed_in_a_clone(project, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "of-this-shell")
    monkeypatch.setenv("CODE", "0")
    measure(tmp_path / "clone", project=project, record=tmp_path / "record")
    record = from_json((tmp_path / "record").read_bytes())
    done = (tmp_path / "clone" / "done").read_text().splitlines()
    assert [line.strip() for line in done] == [target for targets in TARGETS.values() for target in targets]
    assert not (project / "done").exists()
    seconds = {name: measured["seconds"] for name, measured in record["commands"].items()}
    assert list(seconds) == list(TARGETS)
    assert seconds["report"] >= 0.3
    head = subprocess.run(["git", "-C", str(project), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert {measured["commit"] for measured in record["commands"].values()} == {head.stdout.strip()}


def test_a_command_that_fails_is_not_recorded_and_can_be_run_again_alone(project, tmp_path, monkeypatch):
    record = tmp_path / "record"
    monkeypatch.setenv("CODE", "3")
    with pytest.raises(subprocess.CalledProcessError):
        measure(tmp_path / "clone", project=project, record=record)
    assert list(from_json(record.read_bytes())["commands"]) == ["install", "report"]
    measure(tmp_path / "clone", ["test"], project=project, record=record)
    assert list(from_json(record.read_bytes())["commands"]) == ["install", "report", "test"]
    assert (tmp_path / "clone" / "done").read_text().splitlines()[-1].strip() == "test"
