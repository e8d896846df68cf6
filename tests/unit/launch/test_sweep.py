"""A sweep in this process: starts, ends, and leftovers; with simulated jobs."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from workbench.errors import LaunchError, RecordError
from workbench.launch import task as tasks
from workbench.launch.ablation import PlannedRun
from workbench.launch.devices import Placement
from workbench.launch.sweep import Sweep
from workbench.launch.task import Task
from workbench.records.directory import RunDirectory
from workbench.specs.run import RunSpec


class Pretended:
    """A job that runs until its end is set."""

    handle, reason, ended_by_scheduler = "pretended", "", False

    def __init__(self, run):
        self.run, self.state = run, "running"
        if run.name != "queued":
            run.set_state("running")

    def poll(self):
        return self.state

    def cancel(self):
        if self.state == "running":
            self.state = "cancelled"

    def end(self, state):
        self.run.write_exit(0, {}, None if state == "succeeded" else ValueError("no"))
        self.run.set_state(state)
        self.state = state


class Scheduler:
    """Starts pretended jobs and keeps them by name."""

    def __init__(self):
        self.jobs = {}

    def __call__(self, runs, world_size, placement):
        run = runs[0]
        if run.name == "broken":
            raise LaunchError("start job broken", found="nothing works")
        job = Pretended(run)
        job.runs, job.placement = runs, placement
        self.jobs[run.name] = job  # seen by the test's thread from here on
        return job


_begun = []  # sweeps of a test; a thread that lives on would take the devices of the next one


@pytest.fixture
def leases(monkeypatch):
    """Free devices, as `devices.take` sees them; taken ones are gone until released."""
    free = {"core": ["0", "1"], "gpu": ["4", "5"]}

    class Lease:
        def __init__(self, kind, ids):
            self.kind, self.ids = kind, tuple(ids)

        def release(self):
            free[self.kind] += self.ids

        def note(self, pid, create_time):
            noted.append((pid, create_time))

    noted = free["noted"] = []

    def take(kind, wanted, of, *, requester):
        wanted = min(wanted, len(of))
        chosen = [name for name in free[kind] if name in of][:wanted]
        if len(chosen) < wanted:
            return None
        free[kind] = [name for name in free[kind] if name not in chosen]
        return Lease(kind, chosen)

    monkeypatch.setattr(tasks, "take", take)
    monkeypatch.setattr(tasks, "cores", lambda: ["0", "1"])
    yield free
    while _begun:  # before the patches end
        sweep = _begun.pop()
        sweep.cancel()
        with contextlib.suppress(Exception):  # a run's own error, which its test has seen
            sweep.wait(10)


def task(folder, name, ranks=1, *, device="cpu", frozen_clip=None, steps=2):
    spec = RunSpec(layout={"cp": ranks}, frozen_clip=frozen_clip, steps=steps)
    run = RunDirectory.create(folder / "runs", name, spec)
    return Task(PlannedRun(name, spec, "", "", name), run, Placement(device))


def until(condition, *, within_s=120.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass in time"
        time.sleep(0.01)


def begin(tasks, folder, **options):
    scheduler = Scheduler()
    _begun.append(Sweep(tasks, folder, **options))
    return _begun[-1].in_jobs(scheduler, gpus=["4", "5"]), scheduler.jobs


@pytest.mark.usefixtures("leases")
class TestOrder:
    def test_returns_at_once_and_runs_as_many_ranks_as_cores(self, tmp_path):
        sweep, jobs = begin([task(tmp_path, "a"), task(tmp_path, "b"), task(tmp_path, "c", 4)], tmp_path)
        assert not sweep.done
        until(lambda: set(jobs) == {"a", "b"})
        assert sweep.states() == {"a": "running", "b": "running", "c": "pending"}
        jobs["a"].end("succeeded")
        time.sleep(0.3)
        assert set(jobs) == {"a", "b"}  # the four ranks take every core
        jobs["b"].end("failed")
        until(lambda: "c" in jobs)
        jobs["c"].end("succeeded")
        assert sweep.wait(10).states() == {"a": "succeeded", "b": "failed", "c": "succeeded"}

    def test_runs_share_out_the_gpus(self, tmp_path):
        sweep, jobs = begin([task(tmp_path, name, device="cuda") for name in "abc"], tmp_path)
        until(lambda: set(jobs) == {"a", "b"})
        assert {jobs["a"].placement.gpus, jobs["b"].placement.gpus} == {("4",), ("5",)}
        jobs["a"].end("succeeded")
        until(lambda: "c" in jobs)
        assert jobs["c"].placement.gpus == jobs["a"].placement.gpus
        for job in (jobs["b"], jobs["c"]):
            job.end("succeeded")
        sweep.wait(10)

    def test_a_run_waits_for_the_source_of_its_clip_decisions(self, tmp_path):
        sweep, jobs = begin([task(tmp_path, "b", frozen_clip="a"), task(tmp_path, "a")], tmp_path)
        until(lambda: "a" in jobs)
        time.sleep(0.3)
        assert set(jobs) == {"a"}
        jobs["a"].end("succeeded")
        until(lambda: "b" in jobs)
        jobs["b"].end("succeeded")
        sweep.wait(10)

    def test_on_a_cluster_nothing_waits_for_devices_of_this_machine(self, tmp_path):
        scheduler = Scheduler()
        sweep = Sweep([task(tmp_path, name, 4) for name in "abc"], tmp_path).in_jobs(scheduler, leased=False)
        until(lambda: len(scheduler.jobs) == 3)
        for job in scheduler.jobs.values():
            job.end("succeeded")
        sweep.wait(10)

    def test_why_a_job_waits_is_stored_with_its_runs_and_reported(self, tmp_path):
        events, scheduler = [], Scheduler()
        sweep = Sweep([task(tmp_path, "queued")], tmp_path, on_event=events.append).in_jobs(scheduler, leased=False)
        until(lambda: "queued" in scheduler.jobs)
        job, [run] = scheduler.jobs["queued"], sweep.runs
        job.reason = "PENDING (Resources)"
        until(lambda: run.state.get("scheduler") == job.reason)
        until(lambda: [event.why for event in events if event.state == "pending"] == [job.reason])
        assert "pending" in str(events[-1])
        job.end("succeeded")
        sweep.wait(10)

    def test_the_scheduler_s_reason_is_the_cause_of_an_end(self, tmp_path):
        scheduler = Scheduler()
        sweep = Sweep([task(tmp_path, "a")], tmp_path).in_jobs(scheduler, leased=False)
        until(lambda: "a" in scheduler.jobs)
        job = scheduler.jobs["a"]
        job.reason, job.ended_by_scheduler, job.state = "PREEMPTED", True, "failed"
        assert sweep.wait(10).states() == {"a": "failed"}
        assert sweep.runs[0].failure()["cause"] == "scheduler"

    def test_devices_stay_taken_while_the_agent_lives(self, tmp_path, leases):
        sweep, jobs = begin([task(tmp_path, "a")], tmp_path)
        until(lambda: "a" in jobs)
        jobs["a"].run.note(agent={"pid": 7, "create_time": 1.5})
        until(lambda: leases["noted"])
        assert leases["noted"] == [(7, 1.5)]
        jobs["a"].end("succeeded")
        sweep.wait(10)


class TestEnds:
    def test_a_job_that_cannot_start_stops_nothing_and_gives_its_devices_back(self, tmp_path, leases):
        sweep, jobs = begin([task(tmp_path, "broken", 2), task(tmp_path, "good", 2)], tmp_path)
        until(lambda: "good" in jobs)
        jobs["good"].end("succeeded")
        assert sweep.wait(10).states() == {"broken": "failed", "good": "succeeded"}
        assert sweep.runs[0].failure()["cause"] == "start"
        assert sorted(leases["core"]) == ["0", "1"]

    @pytest.mark.usefixtures("leases")
    def test_cancelling_ends_running_and_waiting_runs(self, tmp_path):
        events = []
        sweep, jobs = begin([task(tmp_path, "a", 2), task(tmp_path, "b", 2), task(tmp_path, "c", 2)], tmp_path)
        until(lambda: "a" in jobs)
        sweep.cancel("a", "c")
        until(lambda: "b" in jobs)
        jobs["b"].end("succeeded")
        sweep.follow(events.append)
        assert sweep.states() == {"a": "cancelled", "b": "succeeded", "c": "cancelled"}
        assert {event.name: event.state for event in events if event.number} == sweep.states()
        sweep.cancel()
        assert sweep.states()["b"] == "succeeded"

    @pytest.mark.usefixtures("leases")
    def test_an_unknown_name_cancels_nothing(self, tmp_path):
        sweep, jobs = begin([task(tmp_path, "a")], tmp_path)
        with pytest.raises(LaunchError, match="cancel b"):
            sweep.cancel("a", "b")
        until(lambda: "a" in jobs)
        assert not sweep.runs[0].cancel_requested
        jobs["a"].end("succeeded")
        sweep.wait(10)

    @pytest.mark.usefixtures("leases")
    def test_waiting_times_out_and_names_running_runs(self, tmp_path):
        sweep, jobs = begin([task(tmp_path, "a")], tmp_path)
        with pytest.raises(LaunchError, match=r"wait 0\.2 s.*\n.*a"):
            sweep.wait(0.2)
        until(lambda: "a" in jobs)
        jobs["a"].end("succeeded")
        assert sweep.wait(10).done

    @pytest.mark.usefixtures("leases")
    def test_interpreter_exit_leaves_no_job_and_no_unstarted_folder(self, tmp_path):
        sweep, jobs = begin([task(tmp_path, "a", 2), task(tmp_path, "b", 2)], tmp_path)
        until(lambda: "a" in jobs)
        sweep._leave()
        assert sweep.done
        assert jobs["a"].state == "cancelled"
        assert {path.name.split("-")[0] for path in (tmp_path / "runs").iterdir()} == {"a"}

    @pytest.mark.usefixtures("leases")
    def test_interpreter_exit_leaves_cluster_jobs_alone(self, tmp_path):
        scheduler = Scheduler()
        sweep = Sweep([task(tmp_path, "a", 2), task(tmp_path, "b", 2)], tmp_path).in_jobs(scheduler, leased=False)
        until(lambda: set(scheduler.jobs) == {"a", "b"})
        sweep._leave()
        assert sweep.done
        assert {name: job.state for name, job in scheduler.jobs.items()} == {"a": "running", "b": "running"}
        assert sweep.states() == {"a": "running", "b": "running"}

    @pytest.mark.usefixtures("leases")
    def test_a_removed_folder_does_not_stop_the_others(self, tmp_path):
        sweep, jobs = begin([task(tmp_path, name) for name in "abc"], tmp_path)
        until(lambda: set(jobs) == {"a", "b"})
        for run in (sweep.runs[0], sweep.runs[2]):  # one that runs, one that waits
            run.path.rename(tmp_path / f"removed-{run.path.name}")
        jobs["a"].state = "failed"
        until(lambda: sweep.states()["a"] == "lost")
        jobs["b"].end("succeeded")
        with pytest.raises(RecordError, match=r"state\.json"):
            sweep.wait(10)
        assert sweep.states() == {"a": "lost", "b": "succeeded", "c": "lost"}
        assert "lost" in repr(sweep)
        sweep.cancel()

    @pytest.mark.usefixtures("leases")
    def test_a_disk_that_takes_no_more_ends_the_run_and_not_the_waiting(self, tmp_path, monkeypatch):
        def full(self, **fields):
            if self.name == "a":
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(RunDirectory, "note", full)
        sweep, jobs = begin([task(tmp_path, "a"), task(tmp_path, "b")], tmp_path)
        until(lambda: set(jobs) == {"a", "b"})
        until(lambda: jobs["a"].state == "cancelled")
        jobs["b"].end("succeeded")
        with pytest.raises(OSError, match="No space left"):
            sweep.wait(10)
        assert sweep.states() == {"a": "cancelled", "b": "succeeded"}

    @pytest.mark.usefixtures("leases")
    def test_an_uncancellable_job_does_not_block(self, tmp_path):
        def refuse():
            raise LaunchError("cancel pretended", found="no answer")

        sweep, jobs = begin([task(tmp_path, "a"), task(tmp_path, "b")], tmp_path)
        until(lambda: set(jobs) == {"a", "b"})
        jobs["a"].cancel = refuse
        sweep._leave()
        assert jobs["b"].state == "cancelled"
        with pytest.raises(LaunchError, match="cancel pretended"):
            sweep.wait(10)

    @pytest.mark.usefixtures("leases")
    def test_a_watcher_error_is_raised_to_the_waiter_and_nothing_stays_open(self, tmp_path):
        def on_event(event):
            raise RuntimeError("the listener broke")

        sweep, jobs = begin([task(tmp_path, "a")], tmp_path, on_event=on_event)
        with pytest.raises(RuntimeError, match="the listener broke"):
            sweep.wait(10)
        assert jobs["a"].state == "cancelled"
        assert sweep.runs[0].status == "cancelled"


@pytest.mark.usefixtures("leases")
def test_a_removed_folder_ends_only_its_run_and_is_reported(tmp_path):
    sweep, jobs = begin([task(tmp_path, "a"), task(tmp_path, "b")], tmp_path)
    until(lambda: set(jobs) == {"a", "b"})
    sweep.runs[0].path.rename(tmp_path / "elsewhere")  # at once: a folder that is emptied is written to meanwhile
    until(lambda: jobs["a"].state == "cancelled")
    assert jobs["b"].state == "running"
    jobs["b"].end("succeeded")
    with pytest.raises(RecordError, match=r"state\.json"):
        sweep.wait(10)
    assert sweep.done
    assert sweep.runs[1].status == "succeeded"


@pytest.mark.usefixtures("leases")
def test_events_arrive_on_the_followers_thread(tmp_path):
    threads, events = set(), []

    def listen(event):
        threads.add(threading.current_thread())
        events.append(event)
        if event.name == "a" and event.state == "running" and event.steps_done == 0:
            jobs["a"].run.append_step({"step": 0})
        if event.steps_done == 1:
            jobs["a"].end("succeeded")

    sweep, jobs = begin([task(tmp_path, "a")], tmp_path)
    until(lambda: "a" in jobs)
    sweep.follow(listen)
    assert threads == {threading.current_thread()}
    assert [(event.state, event.steps_done) for event in events] == [("running", 0), ("running", 1), ("succeeded", 1)]
    assert str(sweep).splitlines()[1].split() == ["a", "succeeded", "1/2", "steps"]


@pytest.mark.usefixtures("leases")
def test_a_second_follow_returns_at_once(tmp_path):
    sweep, jobs = begin([task(tmp_path, "a")], tmp_path)
    until(lambda: "a" in jobs)
    jobs["a"].end("succeeded")
    again, heard = threading.Event(), []

    def follow_twice():
        sweep.follow(lambda event: None).follow(heard.append)
        again.set()

    threading.Thread(target=follow_twice, daemon=True).start()
    assert again.wait(10)
    assert heard == []


@pytest.mark.usefixtures("leases")
def test_time_left_uses_the_pace_of_recent_steps(tmp_path):
    reports = []

    def listen(event):
        reports.append(event)
        done = event.steps_done
        if event.state == "running" and done < 2:
            jobs["a"].run.append_step({"step": done, "time/ended_ns": 30 * 10**9 * done})
        elif event.state == "running":
            jobs["a"].end("succeeded")

    sweep, jobs = begin([task(tmp_path, "a", steps=5)], tmp_path)
    until(lambda: "a" in jobs)
    sweep.follow(listen)
    assert [(event.steps_done, event.seconds_left) for event in reports] == [(0, None), (1, None), (2, 90.0), (2, None)]
    assert str(reports[2]).endswith(" s, 90 s left")


def begin_shared(tasks, folder, per_job=None, **options):
    scheduler = Scheduler()
    _begun.append(Sweep(tasks, folder, **options))
    return _begun[-1].in_jobs(scheduler, gpus=["4", "5"], per_job=per_job), scheduler.jobs


def execute(run, *, ok=True):
    """What the ranks of a job do for one run."""
    run.set_state("running")
    for rank in range(run.spec.layout.world_size):
        run.write_exit(rank, {}, None if ok else ValueError("no"))
    run.set_state("succeeded" if ok else "failed")


@pytest.mark.usefixtures("leases")
class TestSharedJobs:
    def test_runs_of_one_world_size_share_a_job_and_end_one_by_one(self, tmp_path):
        tasks = [task(tmp_path, "a", 2), task(tmp_path, "single"), task(tmp_path, "b", 2), task(tmp_path, "c", 2)]
        events = []
        sweep, jobs = begin_shared(tasks, tmp_path, on_event=events.append)
        until(lambda: "a" in jobs)
        assert [run.name for run in jobs["a"].runs] == ["a", "b", "c"]
        for run in jobs["a"].runs[:2]:
            execute(run)
        until(lambda: [event.name for event in events if event.number] == ["a", "b"])
        assert sweep.states() == {"a": "succeeded", "single": "pending", "b": "succeeded", "c": "pending"}
        execute(jobs["a"].runs[2])
        jobs["a"].state = "succeeded"
        until(lambda: "single" in jobs)
        execute(jobs["single"].run)
        jobs["single"].state = "succeeded"
        assert set(sweep.wait(10).states().values()) == {"succeeded"}
        lefts = [event.all_seconds_left for event in events if event.number]
        assert all(left is not None for left in lefts[:-1])
        assert lefts[-1] is None

    def test_after_a_failure_the_remaining_runs_get_another_job(self, tmp_path, leases):
        sweep, jobs = begin_shared([task(tmp_path, name, 2) for name in "abcd"], tmp_path)
        until(lambda: "a" in jobs)
        execute(jobs["a"].runs[0])
        execute(jobs["a"].runs[1], ok=False)
        jobs["a"].state = "failed"
        until(lambda: "c" in jobs)
        assert [run.name for run in jobs["c"].runs] == ["c", "d"]
        for run in jobs["c"].runs:
            execute(run)
        jobs["c"].state = "succeeded"
        assert sweep.wait(10).states() == {"a": "succeeded", "b": "failed", "c": "succeeded", "d": "succeeded"}
        assert sorted(leases["core"]) == ["0", "1"]

    def test_a_crash_between_two_runs_is_that_of_the_next_one(self, tmp_path):
        sweep, jobs = begin_shared([task(tmp_path, name, 2) for name in "abc"], tmp_path)
        until(lambda: "a" in jobs)
        execute(jobs["a"].runs[0])
        jobs["a"].state = "failed"
        until(lambda: "c" in jobs)
        execute(jobs["c"].run)
        jobs["c"].state = "succeeded"
        assert sweep.wait(10).states() == {"a": "succeeded", "b": "failed", "c": "succeeded"}

    def test_a_cancelled_run_that_waits_for_its_turn_does_not_end_the_job(self, tmp_path):
        sweep, jobs = begin_shared([task(tmp_path, name, 2) for name in "abc"], tmp_path)
        until(lambda: "a" in jobs)
        sweep.cancel("b")
        until(lambda: sweep.states()["b"] == "cancelled")
        assert jobs["a"].state == "running"
        for run in (jobs["a"].runs[0], jobs["a"].runs[2]):
            execute(run)
        jobs["a"].state = "succeeded"
        assert sweep.wait(10).states() == {"a": "succeeded", "b": "cancelled", "c": "succeeded"}

    def test_the_end_of_the_executed_run_gives_the_others_another_job(self, tmp_path):
        sweep, jobs = begin_shared([task(tmp_path, name, 2) for name in "abc"], tmp_path)
        until(lambda: "a" in jobs)
        sweep.cancel("a")
        until(lambda: "b" in jobs)
        assert (jobs["a"].state, [run.name for run in jobs["b"].runs]) == ("cancelled", ["b", "c"])
        sweep.cancel()
        assert set(sweep.wait(10).states().values()) == {"cancelled"}

    def test_a_job_that_somebody_else_cancelled_is_not_started_again(self, tmp_path):
        sweep, jobs = begin_shared([task(tmp_path, name, 2) for name in "abc"], tmp_path)
        until(lambda: "a" in jobs)
        jobs["a"].state = "cancelled"
        assert set(sweep.wait(10).states().values()) == {"cancelled"}
        assert set(jobs) == {"a"}

    def test_a_run_comes_after_the_source_of_its_clip_decisions_in_the_same_job(self, tmp_path):
        tasks = [
            task(tmp_path, "b", 2, frozen_clip="a"),
            task(tmp_path, "a", 2),
            task(tmp_path, "c", 2, frozen_clip="a"),
        ]
        sweep, jobs = begin_shared(tasks, tmp_path)
        until(lambda: "a" in jobs)
        assert [run.name for run in jobs["a"].runs] == ["a", "c"]
        sweep.cancel()
        sweep.wait(10)

    def test_jobs_of_one_kind_run_next_to_each_other(self, tmp_path):
        tasks = [task(tmp_path, "a"), task(tmp_path, "wide", 2), task(tmp_path, "b"), task(tmp_path, "c")]
        sweep, jobs = begin_shared(tasks, tmp_path, per_job=2)
        until(lambda: set(jobs) == {"a", "c"})
        assert [[run.name for run in job.runs] for job in jobs.values()] == [["a", "b"], ["c"]]
        sweep.cancel()
        sweep.wait(10)
