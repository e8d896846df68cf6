"""What a run reads is found before it starts, and known by content: a folder may hold something else tomorrow."""

from __future__ import annotations

import json

import pytest

import workbench
from workbench.errors import SpecError
from workbench.launch.inputs import identify
from workbench.specs.run import RunSpec

SPEC = RunSpec(data={"path": "data/own"}, model={"source": "models/own"})


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a recording and a checkpoint, and a current folder elsewhere."""
    for name, text in {
        "data/own/manifest.json": "{}",
        "models/own/config.json": "{}",
        "models/own/model.safetensors": "weights",
    }.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "project"


def identity(project, spec=SPEC):
    return identify([spec], project)[0]


@pytest.mark.parametrize(
    "name",
    ["data/own/manifest.json", "models/own/config.json", "models/own/model.safetensors", "models/own/more.safetensors"],
)
def test_another_content_is_another_identity(project, name):
    before = identity(project)
    (project / name).write_text("changed")
    assert identity(project) != before


def test_the_same_content_is_the_same_wherever_it_lies(project):
    before = identity(project)
    (project / "data/own").rename(project / "data/copy")
    (project / "models").rename(project / "checkpoints")
    again = RunSpec(data={"path": "data/copy"}, model={"source": str(project / "checkpoints/own")})
    assert identity(project, again) == before
    assert str(project) not in json.dumps(before)


def test_another_code_is_another_identity(project, monkeypatch):
    package = project / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(workbench, "__file__", str(package / "__init__.py"))
    codes = [identity(project)["code"]]
    for text in ("x = 1", "x = 2"):
        (package / "more.py").write_text(text)
        after = identity(project)
        codes.append(after["code"])
    assert len(set(codes)) == 3
    monkeypatch.setattr(workbench, "__version__", "0.0.0")
    assert identity(project)["versions"] != after["versions"]


@pytest.mark.parametrize("source", ["tiny-qwen3", "Qwen/Qwen3-0.6B", "gpt2"])
def test_what_is_no_folder_is_known_by_its_name(project, source):
    assert identity(project, SPEC.merged({"model": {"source": source}}))["checkpoint"] == source


def refused(project, changes):
    with pytest.raises(SpecError) as caught:
        identity(project, SPEC.merged(changes))
    return str(caught.value)


@pytest.mark.parametrize("setting", ["data.path", "model.source"])
def test_a_folder_that_is_not_there_is_named_with_where_it_was_searched(project, setting):
    group, name = setting.split(".")
    message = refused(project, {group: {name: "some/where/else"}})
    assert message.startswith(f"{setting} = 'some/where/else'\n  found: nothing of that kind at {project}/some")
    assert f"a relative path begins at the project root, {project}" in message


@pytest.mark.parametrize("setting", ["data.path", "model.source"])
def test_a_folder_that_is_there_from_the_current_folder_is_pointed_out(project, tmp_path, setting):
    here = tmp_path / "elsewhere/mine"
    here.mkdir()
    (here / "manifest.json").write_text("{}")
    (here / "config.json").write_text("{}")
    group, name = setting.split(".")
    message = refused(project, {group: {name: "mine"}})
    assert f"although there is at {here}, relative to the current folder" in message
    assert message.endswith(f"write {setting}: {here}")


def test_a_folder_without_a_configuration_is_no_checkpoint(project):
    assert "a checkpoint folder with config.json" in refused(project, {"model": {"source": "models"}})


class TestTask:
    SPEC = RunSpec(
        model={"source": "models/own"}, data={"advantages": {"name": "grpo"}}, online={"task": "tasks/own.py:Own"}
    )

    @pytest.fixture
    def project(self, project):
        (project / "tasks").mkdir()
        (project / "tasks/own.py").write_text("class Own: ...")
        (project / "data/own/manifest.json").unlink()  # no recording is read
        return project

    def test_a_task_is_known_by_its_file(self, project):
        before = identity(project, self.SPEC)
        assert "recording" not in before
        (project / "tasks/own.py").write_text("class Own: right_reward = 2")
        assert identity(project, self.SPEC) != before

    def test_the_task_of_this_package_by_its_name(self, project):
        named = self.SPEC.merged({"online": {"task": "arithmetic"}})
        assert identity(project, named)["task"] == "arithmetic"

    @pytest.mark.parametrize("task", ["tasks/another.py:Own", "tasks/own.py", "arithmetics"])
    def test_a_task_that_is_not_there_is_refused_before_anything_starts(self, project, task):
        with pytest.raises(SpecError, match=f"online.task = '{task}'"):
            identity(project, self.SPEC.merged({"online": {"task": task}}))
