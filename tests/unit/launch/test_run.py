"""Launching: one failure never stops the rest, and every kind of end is detected and described.

The three real jobs of the suite's launching tests are in `jobs`; everything else is in process.
"""

from __future__ import annotations

import os
import re
import threading

import pytest

from tests.helpers import fake_worker
from workbench.errors import LaunchError, ShapeError, SpecError
from workbench.launch import ablation as planning
from workbench.launch import resume
from workbench.launch.ablation import AblationSpec
from workbench.launch.run import launch, requests
from workbench.launch.sweep import Sweep
from workbench.records.directory import RunDirectory
from workbench.records.provenance import this_process

FAKE = fake_worker.__name__


@pytest.fixture(scope="module", autouse=True)
def _faults_of_the_fake_worker():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "fault_names", lambda: ["raise_on_1", "kill_1", "raise_here"])
        yield


@pytest.fixture
def project(tmp_path):
    """A folder that contains a rollout dataset, as far as launching checks."""
    recording = tmp_path / "data/own"
    recording.mkdir(parents=True)
    (recording / "manifest.json").write_text("{}")
    return tmp_path


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """An ablation of three jobs of two ranks each: (runs by name, events)."""
    base = {"steps": 2, "precision": "float64", "layout": {"cp": 2}}
    ablation = AblationSpec(
        reference="good",
        base=base,
        configurations={"raises": {"faults": ["raise_on_1"]}, "killed": {"faults": ["kill_1"]}, "good": {}},
    )
    events = []
    sweep = launch(ablation, tmp_path_factory.mktemp("experiment"), worker=FAKE).follow(events.append)
    return {run.name: run for run in sweep}, events


class TestJobs:
    def test_a_good_run_is_recorded_by_both_ranks(self, jobs):
        run = jobs[0]["good"]
        assert run.status == "succeeded"
        assert [(record["ranks/all/sum"], record["device"]) for record in run.steps()] == [(2.0, "cpu")] * 2
        assert [run.exits()[rank]["ok"] for rank in (0, 1)] == [True, True]

    def test_the_rank_that_raised_is_named_although_the_other_lost_its_connection(self, jobs):
        run = jobs[0]["raises"]
        failure = run.failure()
        assert run.status == "failed"
        assert (failure["rank"], failure["exception"], failure["coordinates"]) == (1, "ValueError", {"cp": 1})
        assert 'raise ValueError("the second rank had enough")' in failure["traceback"]
        assert run.exits()[0]["cause"] == "peer"
        assert len(run.steps()) == 1

    def test_a_killed_rank_is_identified_and_described(self, jobs):
        run = jobs[0]["killed"]
        failure = run.failure()
        assert run.status == "failed"
        assert failure["rank"] == 1
        assert "rank 1 was killed by SIGKILL" in failure["message"]
        assert "about to go" in failure["message"]

    def test_the_reference_ran_first_and_the_others_ran_all_the_same(self, jobs):
        ended = [event for event in jobs[1] if event.number]
        assert [(event.number, event.name, event.state) for event in ended] == [
            (1, "good", "succeeded"),
            (2, "raises", "failed"),
            (3, "killed", "failed"),
        ]
        assert ended[1].why == "rank 1 ValueError: the second rank had enough"

    def test_events_read_as_lines(self, jobs):
        line = str(next(event for event in jobs[1] if event.name == "good" and event.number))
        assert re.search(r"^\[1/3\] good +2 ranks cpu  2/2 steps  succeeded \d+\.\d s", line)


BASE = {
    "steps": 2,
    "device": "cpu",
    "precision": "float64",
    "model": {"source": "tiny-qwen3"},
    "data": {"path": "data/own"},
}


def test_a_run_with_an_own_loss_runs_again_when_its_file_has_changed_and_settings_are_an_axis(tmp_path, project):
    file = project / "my_losses.py"
    file.write_text("def mine(inputs, low):\n    return inputs.policy_logprobs_T\n")
    ablation = AblationSpec(
        base=BASE | {"loss": {"name": "my_losses.py:mine"}},
        axes={"loss.settings.low": [0.1, 0.2]},
        reference="a",
        configurations={"a": {}},
    )

    def launched():
        sweep = launch(ablation, tmp_path / "mine", where="here", worker=FAKE, project=project)
        return {run.name: run.path.name for run in sweep.runs}

    first = launched()
    assert list(first) == ["a-0.1", "a-0.2"]
    assert launched() == first, "reused"
    file.write_text("def mine(inputs, low):\n    return -inputs.policy_logprobs_T\n")
    again = launched()
    assert not set(again.values()) & set(first.values())
    assert launched() == again
    file.write_text("def mine(inputs, high):\n    return -inputs.policy_logprobs_T\n")
    with pytest.raises(SpecError, match="low"):
        launched()


class TestHere:
    ABLATION = AblationSpec(
        reference="a", base=BASE, configurations={"a": {}, "bad": {"faults": ["raise_here"]}, "c": {}}
    )

    def test_one_failure_does_not_stop_the_rest(self, tmp_path, project):
        events = []
        runs = launch(self.ABLATION, tmp_path, where="here", worker=FAKE, project=project, on_event=events.append).runs
        assert [run.status for run in runs] == ["succeeded", "failed", "succeeded"]
        assert [run.path.parent for run in runs] == [tmp_path / "runs"] * 3
        failure = runs[1].failure()
        assert (failure["rank"], failure["message"]) == (0, f"no good in {tmp_path.name}")
        assert runs[2].steps()[1]["device"] == "cpu"
        assert [event.state for event in events if event.number] == ["succeeded", "failed", "succeeded"]

    def test_a_failure_is_reported_with_its_evidence(self, tmp_path, project, monkeypatch):
        def fail(run, project):
            raise ShapeError("split 7 tokens", found="an odd row", rule="even", fix="pad")

        monkeypatch.setattr(fake_worker, "run_here", fail)
        events = []
        launch(self.ABLATION, tmp_path, where="here", worker=FAKE, project=project, on_event=events.append)
        assert events[-1].why == "rank 0 ShapeError: split 7 tokens; found: an odd row"

    def test_several_ranks_are_simulated_but_not_those_of_sharded_parameters(self, tmp_path):
        ablation = AblationSpec(
            reference="a",
            base={"precision": "float64"},
            configurations={
                "a": {},
                "cp2": {"layout": {"cp": 2}},
                "dp2": {"layout": {"dp": 2, "shard_parameters": True}},
            },
        )
        with pytest.raises(LaunchError, match=r"found: shard_parameters in dp2 \(2 ranks\)\n"):
            launch(ablation, tmp_path, where="here", worker=FAKE)
        assert list(tmp_path.iterdir()) == []

    def test_cuda_without_gpus_is_refused_and_nothing_is_made(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", "")
        ablation = AblationSpec(reference="a", base={"device": "cuda"}, configurations={"a": {}})
        with pytest.raises(LaunchError, match="run a on cuda"):
            launch(ablation, tmp_path, where="here", worker=FAKE)
        assert list(tmp_path.iterdir()) == []

    def test_the_reason_for_a_device_is_recorded(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", "")
        ablation = AblationSpec(reference="a", configurations={"a": {}})
        [run] = launch(ablation, tmp_path, where="here", worker=FAKE)
        assert (run.state["device"], run.state["device_note"]) == ("cpu", "no GPU here")

    def test_a_missing_rollout_dataset_is_refused_and_nothing_is_created(self, tmp_path):
        with pytest.raises(SpecError, match=r"data\.path = 'data/own'"):
            launch(self.ABLATION, tmp_path, where="here", worker=FAKE, project=tmp_path)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("name", "number", "left"),
        [
            ("a", 0, {"a": "cancelled"}),
            ("a", 1, {"a": "succeeded"}),
            ("bad", 0, {"a": "succeeded", "bad": "cancelled"}),
        ],
    )
    def test_an_interrupt_leaves_no_folder_of_unstarted_runs(self, tmp_path, project, name, number, left):
        def interrupt(event):
            if (event.name, event.number) == (name, number):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            launch(self.ABLATION, tmp_path, where="here", worker=FAKE, project=project, on_event=interrupt)
        runs = [RunDirectory.open(path) for path in (tmp_path / "runs").iterdir() if path.is_dir()]
        assert {run.name: run.status for run in runs} == left

    def test_an_interrupted_run_is_cancelled_whatever_its_worker_reports(self, tmp_path, project, monkeypatch):
        def interrupted(run, project):
            run.set_state("failed")
            raise KeyboardInterrupt

        monkeypatch.setattr(fake_worker, "run_here", interrupted)
        with pytest.raises(KeyboardInterrupt):
            launch(self.ABLATION, tmp_path, where="here", worker=FAKE, project=project)
        folders = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
        assert [RunDirectory.open(path).status for path in folders] == ["cancelled"]

    def test_a_second_launch_runs_only_what_is_missing(self, tmp_path, project):
        options = {"where": "here", "worker": FAKE, "project": project}
        first = launch(self.ABLATION, tmp_path, **options)
        again = launch(self.ABLATION, tmp_path, **options)
        assert [new.path == old.path for new, old in zip(again.runs, first.runs, strict=True)] == [True, False, True]
        fresh = launch(self.ABLATION, tmp_path, fresh=True, **options)
        assert {run.path for run in fresh}.isdisjoint({run.path for run in [*first, *again]})

    @pytest.mark.parametrize("damage", ["cut", "missing"])
    def test_a_run_with_a_damaged_record_is_run_again(self, tmp_path, project, damage):
        ablation = AblationSpec(reference="a", base=BASE, configurations={"a": {}, "b": {"seed": 1}})
        first = launch(ablation, tmp_path, where="here", project=project, worker=FAKE)
        path = first.runs[1].path / "metrics.jsonl"
        path.unlink() if damage == "missing" else path.write_bytes(path.read_bytes()[:-10])
        events = []
        again = launch(ablation, tmp_path, where="here", project=project, worker=FAKE, on_event=events.append)
        assert again.runs[0].path == first.runs[0].path
        assert again.runs[1].path != first.runs[1].path
        assert len(again.runs[1].steps()) == 2
        [text] = {event.device_note for event in events if event.name == "b"}
        assert text.startswith(
            f"runs again, because the record of the earlier run is damaged: {first.runs[1].path.name}/metrics.jsonl: "
        )
        assert text.endswith(
            "no such file" if damage == "missing" else "1 whole records; the last line is cut or damaged"
        )
        assert path.parent.is_dir(), "the damaged one is kept"

    def test_an_interrupted_run_resumes_from_its_checkpoint_unless_fresh(self, tmp_path, project):
        options = {"where": "here", "worker": FAKE, "project": project}
        failed = launch(self.ABLATION, tmp_path, **options).runs[1]
        (failed.path / "checkpoints" / "step0001").mkdir(parents=True)
        reports = []
        again = launch(self.ABLATION, tmp_path, on_event=reports.append, **options).runs[1]
        fresh = launch(self.ABLATION, tmp_path, fresh=True, **options).runs[1]
        assert (again.state["continues"], fresh.state.get("continues")) == (failed.path.name, None)
        texts = {str(event).rpartition("(")[2] for event in reports if event.name == again.name}
        assert any(f"resumes from {failed.path.name} at step 1)" in words for words in texts)
        assert failed.status == "failed"

    def test_changed_settings_are_refused_and_nothing_is_created_unless_forced(self, tmp_path, project):
        options = {"where": "here", "worker": FAKE, "project": project}
        first = launch(self.ABLATION, tmp_path, **options)
        before = sorted(path.name for path in (tmp_path / "runs").iterdir())
        changed = self.ABLATION.model_copy(update={"base": BASE | {"steps": 3}})
        with pytest.raises(SpecError, match=r"a: steps 2 -> 3; bad: steps 2 -> 3; c: steps 2 -> 3"):
            launch(changed, tmp_path, **options)
        assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == before
        other = launch(changed, tmp_path, force=True, **options)
        assert {run.path for run in other}.isdisjoint({run.path for run in first})
        assert all(run.path.is_dir() for run in first)
        with pytest.raises(SpecError, match="steps 3 -> 2"):
            launch(self.ABLATION, tmp_path, **options)

    def test_a_trial_is_not_compared_with_earlier_runs_and_replaces_none(self, tmp_path, project):
        options = {"where": "here", "worker": FAKE, "project": project}
        first = launch(self.ABLATION, tmp_path, **options)
        changed = self.ABLATION.model_copy(update={"base": BASE | {"steps": 3}})
        trial = launch(changed, tmp_path, trial=True, **options)
        assert [run.spec.steps for run in trial] == [3, 3, 3]
        again = launch(self.ABLATION, tmp_path, **options)
        assert again.runs[0].path == first.runs[0].path

    def test_a_changed_rollout_dataset_is_refused(self, tmp_path, project):
        options = {"where": "here", "worker": FAKE, "project": project}
        launch(self.ABLATION, tmp_path, **options)
        (project / "data/own/manifest.json").write_text('{"another": "recording"}')
        with pytest.raises(SpecError, match="a: another recording"):
            launch(self.ABLATION, tmp_path, **options)

    def test_nothing_stands_for_a_run_that_read_something_else(self, tmp_path, project):
        options = {"where": "here", "worker": FAKE, "project": project, "force": True}
        first = launch(self.ABLATION, tmp_path, **options).runs
        (project / "data/own/manifest.json").write_text('{"another": "recording"}')
        second = launch(self.ABLATION, tmp_path, **options).runs
        third = launch(self.ABLATION, tmp_path, **options).runs
        assert (first[0].path == second[0].path, second[0].path == third[0].path) == (False, True)

    FROZEN = AblationSpec(
        reference="a", base=BASE, configurations={"a": {"frozen_clip": "b"}, "b": {"frozen_clip": "c"}, "c": {}}
    )

    def test_a_run_names_the_source_of_its_clip_decisions(self, tmp_path, project):
        """Also here they run in that order, whatever the order of the ablation, and older runs do not count."""
        events = []
        for seed in (0, 1, 0):
            again = self.FROZEN.model_copy(update={"base": BASE | {"seed": seed}})
            a, b, c = launch(
                again,
                tmp_path,
                where="here",
                worker=FAKE,
                project=project,
                fresh=True,
                force=True,
                on_event=events.append,
            )
            assert (a.state["frozen_clip_run"], b.state["frozen_clip_run"]) == (b.path.name, c.path.name)
            assert "frozen_clip_run" not in c.state
        assert [event.name for event in events if event.number] == ["c", "b", "a"] * 3

    def test_nothing_stands_for_a_run_that_took_the_clip_decisions_of_another(self, tmp_path, project):
        options = {"where": "here", "worker": FAKE, "project": project}
        first = launch(self.FROZEN, tmp_path, **options).runs
        assert [run.path for run in launch(self.FROZEN, tmp_path, **options)] == [run.path for run in first]
        first[2].set_state("failed")
        second = launch(self.FROZEN, tmp_path, **options)
        assert {run.path for run in first}.isdisjoint({run.path for run in second})


def test_one_experiment_does_not_run_twice_at_once(tmp_path, project):
    started = RunDirectory.create(tmp_path / "runs", "a", TestHere.ABLATION.expand()[0].spec)
    started.note(launcher=this_process())
    words = rf"already running or waiting: {started.path.name} \(pending, process {os.getpid()}\)"
    with pytest.raises(SpecError, match=words):
        launch(TestHere.ABLATION, tmp_path, where="here", worker=FAKE, project=project)
    started.note(launcher=this_process() | {"create_time": 0.0})
    assert started.status == "lost"
    assert launch(TestHere.ABLATION, tmp_path, where="here", worker=FAKE, project=project).states()["a"] == "succeeded"
    assert started.state["state"] == "lost"


def test_two_simultaneous_launches_run_it_only_once(tmp_path, project, monkeypatch):
    def slowly(*arguments):
        refuse_running(*arguments)
        both.wait(0.5)  # the other one looks, too, before anything is made

    refuse_running, both, ended = resume.refuse_running, threading.Event(), []
    monkeypatch.setattr(resume, "refuse_running", slowly)
    monkeypatch.setattr(Sweep, "in_jobs", lambda self, *_, **__: self)

    def launch_one():
        try:
            ended.append(launch(TestHere.ABLATION.expand()[:1], tmp_path, project=project).runs[0].path.name)
        except SpecError as error:
            ended.append(error.parts["found"])

    threads = [threading.Thread(target=launch_one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum("already running or waiting" in word for word in ended) == 1
    assert len(list((tmp_path / "runs").glob("*/config.json"))) == 1


class TestRequests:
    def test_every_run_has_one_and_nothing_is_made(self, tmp_path, project):
        planned = TestHere.ABLATION.expand()
        for where, words in (("torchx", "--nproc-per-node=1"), ("slurm", "#SBATCH")):
            for per_job, names in ((1, ["a", "bad", "c"]), (2, ["a, bad", "c"]), (None, ["a, bad, c"])):
                shown = requests(planned, tmp_path / "x", where=where, project=project, per_job=per_job)
                assert list(shown) == names
                for runs, request in shown.items():
                    assert words in request
                    assert FAKE not in request
                    assert [name for name in ["a", "bad", "c"] if f"/runs/{name}-" in request] == runs.split(", ")
        assert not (tmp_path / "x").exists()

    def test_a_way_without_a_scheduler_is_refused(self, tmp_path):
        with pytest.raises(LaunchError, match="no scheduler is asked"):
            requests(AblationSpec(reference="a", configurations={"a": {}}).expand(), tmp_path, where="processes")

    def test_settings_are_checked_first(self, tmp_path):
        planned = planning.load_ablation({"layout": {"dp": 64, "cp": 64}}).expand()
        with pytest.raises(LaunchError, match="4096 ranks"):
            requests(planned, tmp_path, where="processes")

    @pytest.mark.parametrize("function", [requests, launch], ids=["requests", "launch"])
    def test_an_unknown_place_is_refused_with_the_known_ones(self, tmp_path, function):
        with pytest.raises(SpecError, match=r"one of torchx, processes, here, slurm, sbatch, kubernetes"):
            function(TestHere.ABLATION.expand(), tmp_path, where="local")
        assert not (tmp_path / "runs").exists()
