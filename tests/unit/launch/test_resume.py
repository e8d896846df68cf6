"""What an experiment has already: the record of the last sweep, and who may stand for whom."""

from __future__ import annotations

import fcntl

import pytest

from workbench.errors import LaunchError, RecordError, SpecError
from workbench.launch.ablation import PlannedRun
from workbench.launch.resume import (
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
from workbench.records.directory import RunDirectory, this_process
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


def test_a_place_where_nothing_can_be_written_is_refused_in_words(tmp_path):
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
    def test_a_trial_answers_for_nothing_and_a_part_leaves_the_rest(self, tmp_path):
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

    def test_a_run_of_another_version_is_refused_in_words(self, tmp_path, before):
        (before.path / "config.json").write_text('{"layuot": {}}')
        with pytest.raises(SpecError, match=r"a: a-.* is of another version"):
            refuse_changed(tmp_path, [plan("a")], [INPUTS])

    def test_a_folder_that_was_deleted_binds_nobody(self, tmp_path, before):
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

    def test_what_is_lost_is_written_down_and_in_nobodys_way(self, tmp_path):
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
        anew = made(tmp_path, plan("b"), "cancelled", fresh=True)
        assert interrupted(tmp_path, plan("b"), IDENTITY) == (None, "")
        self.kept(anew, 20)
        assert interrupted(tmp_path, plan("b"), IDENTITY)[0].path == anew.path

    def test_without_a_checkpoint_there_is_nothing_to_go_on_with(self, tmp_path):
        made(tmp_path, plan("a"), "failed")
        run = made(tmp_path, plan("b"), "failed")
        (run.path / "checkpoints" / ".step0020").mkdir(parents=True)  # being made when it was killed
        assert [interrupted(tmp_path, plan(name), IDENTITY) for name in ("a", "b")] == [(None, "")] * 2

    def test_what_goes_on_is_not_taken_from_whoever_runs_it(self, tmp_path):
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
    def test_another_device_or_input_is_another_run_and_that_is_said(self, tmp_path, other, what):
        run = self.kept(made(tmp_path, plan("a"), "failed"), 20)
        found, said = interrupted(tmp_path, plan("a"), IDENTITY | other)
        assert (found, said) == (None, f"starts again, not from {run.path.name} at step 20: {what}")
        assert interrupted(tmp_path, plan("a", steps=2), IDENTITY) == (None, "")

    def test_the_furthest_of_the_same_inputs_is_taken_before_one_of_others_that_came_further(self, tmp_path):
        run = self.kept(made(tmp_path, plan("a"), "failed"), 20)
        other = self.kept(made(tmp_path, plan("a"), "failed"), 40)
        other.note(device="cuda")
        assert interrupted(tmp_path, plan("a"), IDENTITY)[0].path == run.path
