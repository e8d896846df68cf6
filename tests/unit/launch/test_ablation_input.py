"""The file of an ablation, from a path, a name or settings; nothing is written for invalid ones."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.helpers.stand_in import stand_in
from workbench.errors import SpecError
from workbench.experiment import Experiment
from workbench.launch import ablation_input

TEXT = """
base: {steps: 4}
axes: {precision: [float64, float32]}
reference: a
truth: a-float64
configurations: {a: {}, b: {loss: {surrogate: {clip_low: 0.1}}}}
"""
SETTINGS = {
    "question": "Same?",
    "base": {"precision": "float64"},
    "reference": "a",
    "configurations": {"a": {}, "b": {"layout": {"cp": 2}}},
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ablation.yaml"
    path.write_text(TEXT)
    return path


def test_settings_without_a_folder_get_a_temporary_one(tmp_path, monkeypatch):
    monkeypatch.setattr(
        ablation_input, "tempfile", stand_in(tempfile, mkdtemp=lambda prefix: tempfile.mkdtemp(dir=tmp_path))
    )
    assert Experiment(SETTINGS).folder.parent == tmp_path


def test_a_name_is_a_folder_of_the_project(tmp_path):
    experiment = Experiment(SETTINGS, name="my_question", project=tmp_path)
    assert experiment.path == tmp_path / "experiments" / "my_question" / "ablation.yaml"
    assert experiment.name == "my_question"
    assert Experiment(SETTINGS, name="my_question", project=tmp_path).folder == experiment.folder
    assert Experiment("experiments/my_question", project=tmp_path).spec == experiment.spec
    with pytest.raises(SpecError, match=r"other settings[\s\S]*use another name"):
        Experiment(SETTINGS | {"question": "?"}, name="my_question", project=tmp_path)


def test_a_name_writes_nothing_into_an_installed_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ablation_input, "PACKAGED", tmp_path / "package")
    experiment = Experiment(SETTINGS, name="my_question", project=tmp_path / "package")
    assert experiment.folder == tmp_path / "experiments" / "my_question"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"name": "../up"}, "cannot be a folder's"),
        ({"name": ""}, "cannot be a folder's"),
        ({"name": "mine", "folder": "there"}, "a name and a folder"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(tmp_path, arguments, found):
    with pytest.raises(SpecError, match=found):
        Experiment(SETTINGS, project=tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_path_begins_here_and_else_at_the_project(tmp_path, monkeypatch):
    project, here = tmp_path / "project", tmp_path / "project" / "notebooks"
    there = Experiment(SETTINGS, name="parity", project=project).path
    here.mkdir()
    monkeypatch.chdir(here)
    for given in ("experiments/parity/ablation.yaml", Path("experiments/parity")):
        assert Experiment(given, project=project).path == there
    nearer = Experiment(SETTINGS, folder=here / "experiments" / "parity").path
    assert Experiment("experiments/parity", project=project).path.resolve() == nearer


def test_settings_never_replace_others(tmp_path):
    Experiment(SETTINGS, folder=tmp_path)
    Experiment(SETTINGS, folder=tmp_path)
    with pytest.raises(SpecError, match="a folder has one ablation"):
        Experiment(SETTINGS | {"question": "?"}, folder=tmp_path)


def test_invalid_settings_write_nothing(tmp_path):
    with pytest.raises(SpecError, match="reference 'c' does not exist"):
        Experiment(SETTINGS | {"reference": "c"}, folder=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_for_a_file_is_refused(file, tmp_path):
    with pytest.raises(SpecError, match="a file and a folder"):
        Experiment(file, folder=tmp_path)
    with pytest.raises(SpecError, match="or a name"):
        Experiment(file, name="mine", project=tmp_path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(SpecError, match="no such file"):
        Experiment(tmp_path / "none.yaml")


def test_an_axis_cannot_be_changed(file):
    with pytest.raises(SpecError, match="precision is an axis"):
        Experiment(file, changes={"precision": "float32"})
