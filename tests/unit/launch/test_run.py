"""Launching: one failure never stops the rest, and every way to end is found and described.

The three real jobs of the suite's launching tests are in `jobs`; everything else is in process.
"""

from __future__ import annotations

import re

import pytest

from tests.helpers import fake_worker
from workbench.errors import LaunchError
from workbench.launch import run as launching
from workbench.launch.ablation import AblationSpec
from workbench.launch.devices import Placement
from workbench.launch.run import launch
from workbench.runs.spec import RunSpec
from workbench.runs.store import RunDirectory

FAKE = fake_worker.__name__


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """An ablation of three jobs of two ranks each: (runs by name, events)."""
    ablation = AblationSpec(reference="good", base={"steps": 2, "layout": {"cp": 2}}, configurations={
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


class TestHere:
    ABLATION = AblationSpec(reference="a", base={"steps": 2, "device": "cpu"}, configurations={
        "a": {}, "bad": {"faults": ["raise_here"]}, "c": {}})

    def test_one_failure_does_not_stop_the_rest(self, tmp_path):
        events = []
        runs = launch(self.ABLATION, tmp_path, where="here", worker=FAKE, project=tmp_path,
                      on_event=events.append)
        assert [run.status for run in runs] == ["succeeded", "failed", "succeeded"]
        assert [run.path.parent for run in runs] == [tmp_path / "runs"] * 3
        failure = runs[1].failure()
        assert (failure["rank"], failure["message"]) == (0, f"no good in {tmp_path.name}")
        assert runs[2].steps()[1]["device"] == "cpu"
        assert [event.state for event in events if event.number] == ["succeeded", "failed", "succeeded"]

    def test_several_ranks_are_refused_and_nothing_is_made(self, tmp_path):
        ablation = AblationSpec(reference="a", configurations={"a": {}, "cp2": {"layout": {"cp": 2}}})
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

    def test_interrupting_cancels_what_waits(self, tmp_path):
        def interrupt(event):
            if event.number == 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            launch(self.ABLATION, tmp_path, where="here", worker=FAKE, on_event=interrupt)
        runs = [RunDirectory.open(path) for path in (tmp_path / "runs").iterdir()]
        assert {run.name: run.status for run in runs} == {
            "a": "succeeded", "bad": "cancelled", "c": "cancelled"}

    def test_reuse_takes_what_succeeded_with_the_same_settings(self, tmp_path):
        first = launch(self.ABLATION, tmp_path, where="here", worker=FAKE)
        again = launch(self.ABLATION, tmp_path, where="here", worker=FAKE, reuse=True)
        assert [new.path == old.path for new, old in zip(again, first, strict=True)] == [True, False, True]
        changed = self.ABLATION.model_copy(update={"base": {"steps": 3, "device": "cpu"}})
        other = launch(changed, tmp_path, where="here", worker=FAKE, reuse=True)
        assert {run.path for run in other}.isdisjoint({run.path for run in [*first, *again]})


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
