"""Existing runs of an experiment: the record of the last sweep, and which runs may replace which."""

from __future__ import annotations

import fcntl
import json

import pytest

import workbench
from workbench.errors import LaunchError, RecordError, SpecError
from workbench.launch.ablation import PlannedRun
from workbench.launch.resume import (
    find_checkpoint,
    identify,
    interrupted,
    launch_lock,
    mark_lost,
    read_record,
    refuse_changed,
    refuse_running,
    reusable,
    sweep_identity,
    write_record,
)
from workbench.records.directory import RunDirectory
from workbench.records.provenance import this_process
from workbench.specs.run import RunSpec

INPUTS = {"recording": "r", "checkpoint": "c", "code": "k"}


def plan(name, **settings):
    return PlannedRun(name, RunSpec(**settings), "", "", name)


def made(folder, planned, state="succeeded", **noted):
    run = RunDirectory.create(folder, planned.name, planned.spec)
    run.note(inputs=INPUTS, device="cpu", **noted)
    run.set_state(state)
    return run


IDENTITY = {"inputs": INPUTS, "device": "cpu"}


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(LaunchError, match="FileExistsError"), launch_lock(tmp_path / "runs"):
        pass


def test_one_launcher_at_a_time_looks_at_an_experiment(tmp_path):
    runs = tmp_path / "runs"

    def is_free():
        with (runs / ".launch.lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    with launch_lock(runs):
        assert not is_free()
    assert is_free()


class TestReusable:
    def test_the_newest_counts_and_only_if_it_succeeded(self, tmp_path):
        first = made(tmp_path, plan("a"))
        assert reusable(tmp_path, plan("a"), IDENTITY).path == first.path
        second = made(tmp_path, plan("a"))
        assert reusable(tmp_path, plan("a"), IDENTITY).path == second.path
        made(tmp_path, plan("a"), "failed")
        assert reusable(tmp_path, plan("a"), IDENTITY) is None

    @pytest.mark.parametrize(
        "other", [{"device": "cuda"}, {"inputs": INPUTS | {"code": "other"}}, {"frozen_clip_run": "b-1"}]
    )
    def test_another_device_or_input_is_another_run(self, tmp_path, other):
        made(tmp_path, plan("a"))
        assert reusable(tmp_path, plan("a"), IDENTITY | other) is None

    def test_other_settings_are_another_run(self, tmp_path):
        made(tmp_path, plan("a"))
        assert reusable(tmp_path, plan("a", steps=2), IDENTITY) is None


def test_the_identity_of_a_sweep_is_its_content_and_not_its_order():
    one, two = plan("a"), plan("b", steps=2)
    assert sweep_identity([one, two]) == sweep_identity([two, one])
    assert len({sweep_identity(each) for each in ([one], [two], [one, two], [plan("a", steps=2)])}) == 4


class TestRecord:
    def test_a_trial_replaces_nothing_and_a_subset_keeps_the_rest(self, tmp_path):
        both, one = [plan("a"), plan("b")], plan("a", steps=3)
        first = [made(tmp_path, each) for each in both]
        write_record(tmp_path, both, first, trial=False)
        tried = made(tmp_path, one)
        write_record(tmp_path, [one], [tried], trial=True)
        record = read_record(tmp_path)
        assert record["latest"] == {"a": tried.path.name}
        assert record["runs"] == {run.name: run.path.name for run in first}
        again = made(tmp_path, both[1])
        write_record(tmp_path, both[1:], [again], trial=False)
        assert read_record(tmp_path)["runs"] == {"a": first[0].path.name, "b": again.path.name}
        assert read_record(tmp_path)["launcher"] == this_process()

    def test_none_is_none_and_a_damaged_one_is_refused(self, tmp_path):
        assert read_record(tmp_path) is None
        (tmp_path / "sweep.json").write_text("{")
        with pytest.raises(RecordError, match="remove the file"):
            read_record(tmp_path)


class TestChanged:
    @pytest.fixture
    def before(self, tmp_path):
        run = made(tmp_path, plan("a"))
        write_record(tmp_path, [plan("a")], [run], trial=False)
        return run

    def test_the_same_the_new_and_other_code_pass_where_other_settings_do_not(self, tmp_path, before):
        refuse_changed(tmp_path, [plan("a"), plan("b")], [INPUTS, INPUTS])
        refuse_changed(tmp_path, [plan("a")], [INPUTS | {"code": "newer"}])
        with pytest.raises(SpecError, match="a: steps 1 -> 2"):
            refuse_changed(tmp_path, [plan("a", steps=2)], [INPUTS])

    def test_every_changed_setting_and_input_is_named(self, tmp_path, before):
        with pytest.raises(SpecError) as caught:
            refuse_changed(tmp_path, [plan("a", steps=2, layout={"cp": 2})], [INPUTS | {"checkpoint": "x"}])
        assert caught.value.parts["found"] == "a: layout.cp 1 -> 2, steps 1 -> 2, another checkpoint"
        assert "--force" in caught.value.parts["fix"]

    def test_a_run_of_another_version_is_refused(self, tmp_path, before):
        (before.path / "config.json").write_text('{"layuot": {}}')
        with pytest.raises(SpecError, match=r"a: a-.* is of another version"):
            refuse_changed(tmp_path, [plan("a")], [INPUTS])

    def test_a_deleted_folder_has_no_effect(self, tmp_path, before):
        with pytest.raises(SpecError):
            refuse_changed(tmp_path, [plan("a", steps=2)], [INPUTS])
        before.path.rename(tmp_path / "elsewhere")
        refuse_changed(tmp_path, [plan("a", steps=2)], [INPUTS])


class TestRunning:
    def test_the_same_settings_on_their_way_are_refused_and_others_are_not(self, tmp_path):
        run = RunDirectory.create(tmp_path, "a", RunSpec())
        run.note(launcher=this_process())
        with pytest.raises(SpecError, match=r"a-\w+ \(pending"):
            refuse_running(tmp_path, [plan("a")])
        refuse_running(tmp_path, [plan("a", steps=2), plan("b")])

    def test_a_lost_run_is_recorded_and_does_not_block(self, tmp_path):
        run = RunDirectory.create(tmp_path, "a", RunSpec())
        run.note(launcher=this_process() | {"create_time": 0.0})
        refuse_running(tmp_path, [plan("a")])
        assert run.state["state"] == "pending"
        mark_lost(tmp_path, "a")
        assert run.state["state"] == "lost"


class TestInterrupted:
    def kept(self, run, *steps):
        for done in steps:
            (run.path / "checkpoints" / f"step{done:04d}").mkdir(parents=True)
        return run

    @pytest.mark.parametrize("state", ["failed", "cancelled", "lost"])
    def test_a_run_that_ended_early_is_gone_on_with_where_its_checkpoint_stands(self, tmp_path, state):
        run = self.kept(made(tmp_path, plan("a"), state), 20)
        assert interrupted(tmp_path, plan("a"), IDENTITY)[0].path == run.path

    def test_the_one_that_came_furthest_is_taken_and_not_the_newest(self, tmp_path):
        far = self.kept(made(tmp_path, plan("a"), "failed"), 20, 40)
        self.kept(made(tmp_path, plan("a"), "failed"), 30)
        made(tmp_path, plan("a"), "cancelled")
        assert interrupted(tmp_path, plan("a"), IDENTITY)[0].path == far.path

    def test_one_that_succeeded_is_no_beginning_of_another(self, tmp_path):
        self.kept(made(tmp_path, plan("a")), 40)
        made(tmp_path, plan("a"), "cancelled")
        assert interrupted(tmp_path, plan("a"), IDENTITY) == (None, "")

    def test_nothing_from_before_a_success_or_a_fresh_beginning(self, tmp_path):
        self.kept(made(tmp_path, plan("a"), "failed"), 40)
        made(tmp_path, plan("a"))
        assert interrupted(tmp_path, plan("a"), IDENTITY) == (None, "")
        self.kept(made(tmp_path, plan("b"), "failed"), 40)
        another = made(tmp_path, plan("b"), "cancelled", fresh=True)
        assert interrupted(tmp_path, plan("b"), IDENTITY) == (None, "")
        self.kept(another, 20)
        assert interrupted(tmp_path, plan("b"), IDENTITY)[0].path == another.path

    def test_without_a_checkpoint_there_is_no_resume(self, tmp_path):
        made(tmp_path, plan("a"), "failed")
        run = made(tmp_path, plan("b"), "failed")
        (run.path / "checkpoints" / ".step0020").mkdir(parents=True)  # being made when it was killed
        assert [interrupted(tmp_path, plan(name), IDENTITY) for name in ("a", "b")] == [(None, "")] * 2

    def test_a_running_run_is_not_taken_over(self, tmp_path):
        self.kept(made(tmp_path, plan("a"), "running"), 20)
        assert interrupted(tmp_path, plan("a"), IDENTITY) == (None, "")

    @pytest.mark.parametrize(
        ("other", "what"),
        [
            ({"device": "cuda"}, "another device"),
            ({"inputs": INPUTS | {"code": "o"}}, "another code"),
            ({"device": "cuda", "inputs": INPUTS | {"task": "t"}}, "another device, another task"),
        ],
    )
    def test_another_device_or_input_is_another_run_with_a_reason(self, tmp_path, other, what):
        run = self.kept(made(tmp_path, plan("a"), "failed"), 20)
        result, text = interrupted(tmp_path, plan("a"), IDENTITY | other)
        assert (result, text) == (None, f"starts again, not from {run.path.name} at step 20: {what}")
        assert interrupted(tmp_path, plan("a", steps=2), IDENTITY) == (None, "")

    def test_the_furthest_run_of_the_same_inputs_is_resumed(self, tmp_path):
        run = self.kept(made(tmp_path, plan("a"), "failed"), 20)
        other = self.kept(made(tmp_path, plan("a"), "failed"), 40)
        other.note(device="cuda")
        assert interrupted(tmp_path, plan("a"), IDENTITY)[0].path == run.path


# ---- Inputs of a run are found before it starts, and identified by content: a folder may change ----


SPEC = RunSpec(data={"path": "data/own"}, model={"source": "models/own"})


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a rollout dataset and a checkpoint, and a current folder elsewhere."""
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


def test_another_adapter_is_another_identity(project):
    spec, folder = SPEC.merged({"lora": {"source": "adapters/own"}}), project / "adapters/own"
    with pytest.raises(SpecError, match=r"lora\.source = 'adapters/own'\n  found: no adapter_config\.json"):
        identity(project, spec)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}')
    (folder / "adapter_model.safetensors").write_text("weights")
    before = identity(project, spec)
    assert before != identity(project) | {"adapter": ""}
    (folder / "adapter_model.safetensors").write_text("changed")
    assert identity(project, spec) != before


def test_equal_content_has_one_identity_in_any_place(project):
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
def test_a_model_that_is_no_folder_is_identified_by_its_name(project, source):
    assert identity(project, SPEC.merged({"model": {"source": source}}))["checkpoint"] == source


def refused(project, changes):
    with pytest.raises(SpecError) as caught:
        identity(project, SPEC.merged(changes))
    return str(caught.value)


@pytest.mark.parametrize("setting", ["data.path", "model.source"])
def test_a_folder_that_is_not_there_is_named_with_where_it_was_searched(project, setting):
    group, name = setting.split(".")
    message = refused(project, {group: {name: "some/where/else"}})
    assert message.startswith(f"{setting} = 'some/where/else'\n  found: no folder {project}/some")
    assert f"a relative path begins at the project root, {project}" in message


@pytest.mark.parametrize("setting", ["data.path", "model.source"])
def test_a_folder_that_is_there_from_the_current_folder_is_pointed_out(project, tmp_path, setting):
    here = tmp_path / "elsewhere/mine"
    here.mkdir()
    (here / "manifest.json").write_text("{}")
    (here / "config.json").write_text("{}")
    group, name = setting.split(".")
    message = refused(project, {group: {name: "mine"}})
    assert f"although there is one in {here}, relative to the current folder" in message
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
        (project / "data/own/manifest.json").unlink()  # no rollout dataset is read
        return project

    def test_a_task_is_identified_by_its_file(self, project):
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


@pytest.mark.parametrize(
    ("setting", "file", "other"),
    [("data.path", "config.json", "a checkpoint"), ("model.source", "manifest.json", "a rollout dataset")],
)
def test_a_folder_of_the_other_kind_is_told(project, setting, file, other):
    (project / "mine").mkdir()
    (project / "mine" / file).write_text("{}")
    group, name = setting.split(".")
    message = refused(project, {group: {name: "mine"}})
    assert f"it is {other}" in message
    assert "may be swapped" in message


def test_a_checkpoint_without_safetensors_names_what_it_holds(project):
    folder = project / "old"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert "has no *.safetensors; it holds nothing else" in refused(project, {"model": {"source": "old"}})
    (folder / "pytorch_model.bin").touch()
    assert "it holds pytorch_model.bin" in refused(project, {"model": {"source": "old"}})
    (folder / "model.safetensors").touch()
    assert find_checkpoint("old", project) == folder
