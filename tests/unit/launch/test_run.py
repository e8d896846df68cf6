"""Launching: one failure never stops the rest, and every way to end is found and described.

The three real jobs of the suite's launching tests are in `jobs`; everything else is in process.
"""

from __future__ import annotations

import re

import pytest

from tests.helpers import fake_worker
from workbench.errors import LaunchError, ShapeError, SpecError
from workbench.launch import ablation as planning
from workbench.launch import run as launching
from workbench.launch.ablation import AblationSpec
from workbench.launch.devices import Placement
from workbench.launch.run import launch
from workbench.runs.spec import RunSpec
from workbench.runs.store import RunDirectory

FAKE = fake_worker.__name__


@pytest.fixture(scope="module", autouse=True)
def _faults_of_the_fake_worker():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "fault_names", lambda: ["raise_on_1", "kill_1", "raise_here"])
        yield


@pytest.fixture
def project(tmp_path):
    """A folder that holds a recording, as far as launching looks."""
    recording = tmp_path / "data/own"
    recording.mkdir(parents=True)
    (recording / "manifest.json").write_text("{}")
    return tmp_path


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """An ablation of three jobs of two ranks each: (runs by name, events)."""
    base = {"steps": 2, "precision": "float64", "layout": {"cp": 2}}
    ablation = AblationSpec(reference="good", base=base, configurations={
        "raises": {"faults": ["raise_on_1"]}, "killed": {"faults": ["kill_1"]}, "good": {}})
    events = []
    runs = launch(ablation, tmp_path_factory.mktemp("experiment"), on_event=events.append, worker=FAKE)
    return {run.name: run for run in runs}, events


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
        assert run.exits()[0]["connection_error"]
        assert len(run.steps()) == 1

    def test_the_rank_that_was_killed_is_found_and_described(self, jobs):
        run = jobs[0]["killed"]
        failure = run.failure()
        assert run.status == "failed"
        assert failure["rank"] == 1
        assert "rank 1 was killed by SIGKILL" in failure["message"]
        assert "about to go" in failure["message"]

    def test_the_reference_ran_first_and_the_others_ran_all_the_same(self, jobs):
        ended = [event for event in jobs[1] if event.number]
        assert [(event.number, event.name, event.state) for event in ended] == [
            (1, "good", "succeeded"), (2, "raises", "failed"), (3, "killed", "failed")]
        assert ended[1].why == "rank 1 ValueError: the second rank had enough"

    def test_events_read_as_lines(self, jobs):
        line = str(next(event for event in jobs[1] if event.name == "good" and event.number))
        assert re.search(r"^\[1/3\] good +2 ranks cpu  2/2 steps  succeeded \d+\.\d s", line)


    def test_interrupting_stops_jobs_and_leaves_no_folder_of_what_never_started(self, tmp_path, project, monkeypatch):
        stopped = []

        class Endless:
            def poll(self):
                return "running"

            def cancel(self):
                stopped.append(self)

        def interrupt(event):
            raise KeyboardInterrupt

        monkeypatch.setattr(launching, "submit", lambda *_: Endless())
        monkeypatch.setattr(launching, "_cores", lambda: 1)
        with pytest.raises(KeyboardInterrupt):
            launch(TestHere.ABLATION, tmp_path, project=project, on_event=interrupt)
        runs = [RunDirectory.open(path) for path in (tmp_path / "runs").iterdir()]
        assert {run.name: run.status for run in runs} == {"a": "cancelled"}
        assert len(stopped) == 1


BASE = {"steps": 2, "device": "cpu", "precision": "float64", "model": {"source": "tiny-qwen3"},
        "data": {"path": "data/own"}}


class TestHere:
    ABLATION = AblationSpec(reference="a", base=BASE, configurations={
        "a": {}, "bad": {"faults": ["raise_here"]}, "c": {}})

    def test_one_failure_does_not_stop_the_rest(self, tmp_path, project):
        events = []
        runs = launch(self.ABLATION, tmp_path, where="here", worker=FAKE, project=project, on_event=events.append)
        assert [run.status for run in runs] == ["succeeded", "failed", "succeeded"]
        assert [run.path.parent for run in runs] == [tmp_path / "runs"] * 3
        failure = runs[1].failure()
        assert (failure["rank"], failure["message"]) == (0, f"no good in {tmp_path.name}")
        assert runs[2].steps()[1]["device"] == "cpu"
        assert [event.state for event in events if event.number] == ["succeeded", "failed", "succeeded"]

    def test_a_failure_is_told_with_what_was_found(self, tmp_path, project, monkeypatch):
        def fail(run, project):
            raise ShapeError("split 7 tokens", found="an odd row", rule="even", fix="pad")

        monkeypatch.setattr(fake_worker, "run_here", fail)
        events = []
        launch(self.ABLATION, tmp_path, where="here", worker=FAKE, project=project, on_event=events.append)
        assert events[-1].why == "rank 0 ShapeError: split 7 tokens; found: an odd row"

    def test_several_ranks_are_refused_and_nothing_is_made(self, tmp_path):
        ablation = AblationSpec(reference="a", base={"precision": "float64"},
                                configurations={"a": {}, "cp2": {"layout": {"cp": 2}}})
        with pytest.raises(LaunchError, match=r"cp2 \(2 ranks\)"):
            launch(ablation, tmp_path, where="here", worker=FAKE)
        assert list(tmp_path.iterdir()) == []

    def test_cuda_without_gpus_is_refused_and_nothing_is_made(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", "")
        ablation = AblationSpec(reference="a", base={"device": "cuda"}, configurations={"a": {}})
        with pytest.raises(LaunchError, match="run a on cuda"):
            launch(ablation, tmp_path, where="here", worker=FAKE)
        assert list(tmp_path.iterdir()) == []

    def test_the_reason_for_a_device_is_kept(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", "")
        ablation = AblationSpec(reference="a", configurations={"a": {}})
        [run] = launch(ablation, tmp_path, where="here", worker=FAKE)
        assert (run.state["device"], run.state["device_note"]) == ("cpu", "no GPU here")

    def test_a_recording_that_is_not_there_is_refused_and_nothing_is_made(self, tmp_path):
        with pytest.raises(SpecError, match=r"data\.path = 'data/own'"):
            launch(self.ABLATION, tmp_path, where="here", worker=FAKE, project=tmp_path)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(("name", "number", "left"), [
        ("a", 0, {"a": "cancelled"}), ("a", 1, {"a": "succeeded"}), ("bad", 0, {"a": "succeeded", "bad": "cancelled"})])
    def test_interrupting_leaves_no_folder_of_what_never_started(self, tmp_path, project, name, number, left):
        def interrupt(event):
            if (event.name, event.number) == (name, number):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            launch(self.ABLATION, tmp_path, where="here", worker=FAKE, project=project, on_event=interrupt)
        runs = [RunDirectory.open(path) for path in (tmp_path / "runs").iterdir()]
        assert {run.name: run.status for run in runs} == left

    def test_a_run_that_is_interrupted_is_cancelled_whatever_its_worker_says(self, tmp_path, project, monkeypatch):
        def interrupted(run, project):
            run.set_state("failed")
            raise KeyboardInterrupt

        monkeypatch.setattr(fake_worker, "run_here", interrupted)
        with pytest.raises(KeyboardInterrupt):
            launch(self.ABLATION, tmp_path, where="here", worker=FAKE, project=project)
        assert [RunDirectory.open(path).status for path in (tmp_path / "runs").iterdir()] == ["cancelled"]

    def test_reuse_takes_what_succeeded_with_the_same_settings(self, tmp_path, project):
        options = {"where": "here", "worker": FAKE, "project": project}
        first = launch(self.ABLATION, tmp_path, **options)
        again = launch(self.ABLATION, tmp_path, reuse=True, **options)
        assert [new.path == old.path for new, old in zip(again, first, strict=True)] == [True, False, True]
        changed = self.ABLATION.model_copy(update={"base": BASE | {"steps": 3}})
        other = launch(changed, tmp_path, reuse=True, **options)
        assert {run.path for run in other}.isdisjoint({run.path for run in [*first, *again]})

    def test_reuse_takes_nothing_that_read_something_else(self, tmp_path, project):
        options = {"where": "here", "worker": FAKE, "project": project, "reuse": True}
        first = launch(self.ABLATION, tmp_path, **options)
        (project / "data/own/manifest.json").write_text('{"another": "recording"}')
        second = launch(self.ABLATION, tmp_path, **options)
        third = launch(self.ABLATION, tmp_path, **options)
        assert (first[0].path == second[0].path, second[0].path == third[0].path) == (False, True)

    FROZEN = AblationSpec(reference="a", base=BASE, configurations={
        "a": {"frozen_clip": "b"}, "b": {"frozen_clip": "c"}, "c": {}})

    def test_a_run_knows_the_very_run_whose_clip_decisions_it_takes(self, tmp_path, project):
        """Also here they run in that order, whatever the order of the ablation, and older runs do not count."""
        events = []
        for seed in (0, 1, 0):
            again = self.FROZEN.model_copy(update={"base": BASE | {"seed": seed}})
            a, b, c = launch(again, tmp_path, where="here", worker=FAKE,
                             project=project, on_event=events.append)
            assert (a.state["frozen_clip_run"], b.state["frozen_clip_run"]) == (b.path.name, c.path.name)
            assert "frozen_clip_run" not in c.state
        assert [event.name for event in events if event.number] == ["c", "b", "a"] * 3

    def test_reuse_takes_nothing_that_took_the_clip_decisions_of_another_run(self, tmp_path, project):
        options = {"where": "here", "worker": FAKE, "project": project, "reuse": True}
        first = launch(self.FROZEN, tmp_path, **options)
        assert [run.path for run in launch(self.FROZEN, tmp_path, **options)] == [run.path for run in first]
        first[2].set_state("failed")
        second = launch(self.FROZEN, tmp_path, **options)
        assert {run.path for run in first}.isdisjoint({run.path for run in second})


class TestOrder:
    def task(self, tmp_path, name, ranks, *, gpus=(), frozen_clip=None):
        spec = RunSpec(layout={"cp": ranks}, frozen_clip=frozen_clip)
        placement = Placement("cuda" if gpus else "cpu", gpus=tuple(gpus))
        return launching._Task(RunDirectory.create(tmp_path, name, spec), placement, ranks)

    def test_as_many_ranks_at_a_time_as_cores(self, tmp_path, monkeypatch):
        monkeypatch.setattr(launching, "_cores", lambda: 2)
        one, two, four = (self.task(tmp_path, f"r{n}", n) for n in (1, 2, 4))
        assert launching._next([one], [one]) is one
        assert launching._next([two], [one]) is None
        assert launching._next([four], [one]) is None
        assert launching._next([four], []) is four
        assert launching._next([], []) is None

    def test_one_at_a_time_on_gpus(self, tmp_path, monkeypatch):
        monkeypatch.setattr(launching, "_cores", lambda: 64)
        cpu, cuda = self.task(tmp_path, "cpu", 1), self.task(tmp_path, "cuda", 1, gpus=["0"])
        assert launching._next([cuda], [cuda]) is None
        assert launching._next([cpu], [cuda]) is None
        assert launching._next([cpu], [cpu]) is cpu

    def test_a_run_waits_for_the_one_whose_clip_decisions_it_takes(self, tmp_path):
        first, second = self.task(tmp_path, "a", 1), self.task(tmp_path, "b", 1, frozen_clip="a")
        assert launching._next([second, first], []) is first
        assert launching._next([second], [first]) is None
        assert launching._next([second], []) is second


class TestDeath:
    """What the agent of torch.distributed.run prints when ranks die, and what becomes of it."""

    SUMMARY = """
workbench.runs.worker FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-01_00:00:00
  host      : somewhere
  rank      : 2 (local_rank: 2)
  exitcode  : -15 (pid: 12)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  rank      : 3 (local_rank: 3)
  exitcode  : -11 (pid: 13)
  error_file: <N/A>
"""

    @pytest.fixture
    def run(self, tmp_path, monkeypatch):
        monkeypatch.setattr(launching, "agent_output", lambda folder: self.SUMMARY)
        return RunDirectory.create(tmp_path, "x", RunSpec())

    def test_the_rank_that_was_not_told_to_stop_is_the_cause(self, run):
        run.write_exit(0, {}, ConnectionError("gone"))
        launching._describe_death(run, "failed")
        assert run.failure()["rank"] == 3
        assert "SIGSEGV" in run.failure()["message"]

    def test_a_rank_that_spoke_for_itself_is_not_overwritten(self, run):
        run.write_exit(3, {}, ConnectionError("its own words"))
        launching._describe_death(run, "failed")
        assert run.exits()[3]["message"] == "its own words"

    def test_an_agent_that_never_started_ranks_is_quoted(self, run, monkeypatch):
        monkeypatch.setattr(launching, "agent_output", lambda folder: "Traceback\nImportError: no torch\n")
        launching._describe_death(run, "failed")
        assert run.failure()["rank"] is None
        assert "ImportError: no torch" in run.failure()["message"]

    def test_a_job_that_ended_well_without_saying_so_failed(self, run, monkeypatch):
        monkeypatch.setattr(launching, "agent_output", lambda folder: "")
        task = launching._Task(run, Placement("cpu"), 1)
        run.set_state("running")
        assert launching._settle(task, "succeeded") == "failed"
        assert "none said that the run succeeded" in run.failure()["message"]
        assert run.status == "failed"
