"""From the files of killed, hung and surviving ranks to the root cause; nothing runs here."""

from __future__ import annotations

import itertools
import json
import signal

import pytest
import torch

from workbench.errors import ShapeError
from workbench.launch.failure_analysis import coordinates_of, own_threads, place_of, record_end
from workbench.launch.watchdog import oom_kills
from workbench.records.directory import RunDirectory
from workbench.records.failures import error_lines, failure_summary
from workbench.sharding import flight
from workbench.specs.run import RunSpec
from workbench.train.watched import flight_path, last_stack_path

PEER = ConnectionError("Connection closed by peer [127.0.0.1]:4711")
STACK = """Thread 0x00007f0000000001 (most recent call first):
  File "/work/somewhere/workbench/runs/watched.py", line 80 in look
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "workbench/sharding/collectives.py", line 103 in _reduced
  File "workbench/sharding/gradients.py", line 28 in sum_gradients
  File "workbench/train/step.py", line 137 in run_step

Extension modules: numpy._core (total: 1)
"""
SUMMARY = """
workbench.train.worker FAILED
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
def run(tmp_path):
    """A run of four ranks that is still running."""
    run = RunDirectory.create(tmp_path, "x", RunSpec(layout={"cp": 2, "tp": 2}))
    run.set_state("running")
    yield run
    flight.stop()


def flew(run, rank, *names, stays=False, ended=False):
    """A rank entered these collectives of all four, and left all but the last, if it stays there."""
    flight.start(flight_path(run, rank), rank)
    for index, name in enumerate(names):
        entered = flight.entering(name, "dp_cp", range(4), "g", (8,), "float32", caller="train/step.py:9")
        if not (stays and index == len(names) - 1):
            with entered:
                pass
    flight.stop(ended=ended)


def codes(run, **by_rank):
    run.write_json("ranks/exit_codes.json", {rank[1:]: code for rank, code in by_rank.items()})


def agent_said(run, text):
    folder = run.path / "torchx/app/1/trainer/0"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text(text)


class TestNothingToSay:
    def test_a_run_that_ended_well(self, run):
        run.set_state("succeeded")
        assert record_end(run, "succeeded") == "succeeded"
        assert run.exits() == {}

    def test_a_run_that_was_cancelled(self, run):
        assert record_end(run, "cancelled") == "cancelled"
        assert run.exits() == {}
        assert record_end(run, "failed") == "cancelled", "an end is final"


class TestScheduler:
    LIMIT = "TIMEOUT (ran 00:01:05, limit 00:01:00)"

    def test_a_time_limit_explains_how_the_ranks_ended(self, run):
        for rank in range(4):
            flew(run, rank, "a", stays=rank < 3)
        codes(run, r1=-15, r0=-15)
        assert record_end(run, "failed", scheduler=self.LIMIT) == "failed"
        failure = run.failure()
        assert (failure["rank"], failure["cause"]) == (None, "scheduler")
        assert failure_summary(failure) == f"LaunchError (scheduler): the scheduler ended the job; found: {self.LIMIT}"
        assert "--scheduler time=" in failure["message"]
        assert "found: the scheduler ended the job" in run.exits()[0]["message"]

    def test_what_a_rank_recorded_before_is_the_cause(self, run):
        run.write_exit(1, {}, ShapeError("split 7 tokens"))
        record_end(run, "failed", scheduler="NODE_FAIL (node1)")
        assert run.failure()["exception"] == "ShapeError"

    def test_memory_is_a_cause_of_its_own(self, run):
        codes(run, r1=-9)
        record_end(run, "failed", scheduler="OUT_OF_MEMORY")
        assert run.failure()["cause"] == "out of memory"


class TestOutputOfAgents:
    TRACED = "warning\nTraceback (most recent call last):\n" + 9 * "  File x\n" + "ImportError: no torch\nsrun: error\n"

    def test_a_job_that_did_not_start_is_summarised_by_its_exception(self, run):
        agent_said(run, self.TRACED)
        record_end(run, "failed")
        assert failure_summary(run.failure()).endswith("; found: ImportError: no torch")

    def test_the_exception_comes_first_and_once(self):
        lines = error_lines(self.TRACED).splitlines()
        assert lines[0] == "ImportError: no torch"
        assert lines.count(lines[0]) == 1
        assert error_lines("a\n\nb\n") == "a\nb"


class TestException:
    def test_the_failing_rank_keeps_its_message_and_the_others_their_waits(self, run):
        run.write_exit(1, {}, ShapeError("split 7 tokens"))
        flew(run, 0, "a", stays=True)
        last_stack_path(run, 0).write_text(STACK)
        codes(run, r1=1, r0=-15)
        assert record_end(run, "failed") == "failed"
        failure = run.failure()
        assert (failure["rank"], failure["cause"], failure["exception"]) == (1, "exception", "ShapeError")
        assert failure["also"] == {0: "a over dp_cp [#1, train/step.py:9]"}
        stopped = run.exits()[0]
        assert (stopped["cause"], stopped["message"].splitlines()[:2]) == (
            "peer",
            ["rank 0 was stopped", "  found: rank 1 had failed"],
        )
        assert "in sum_gradients" in stopped["stack"]

    @pytest.mark.parametrize(
        "error",
        [
            torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
            MemoryError(),
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
                "you tried to allocate 99999 bytes"
            ),
        ],
    )
    def test_a_failed_allocation_of_a_rank(self, run, error):
        run.write_exit(2, {}, error)
        codes(run, r2=1)
        record_end(run, "failed")
        assert (run.failure()["rank"], run.failure()["cause"]) == (2, "out of memory")

    def test_a_rank_that_left_without_a_record(self, run):
        codes(run, r3=3)
        record_end(run, "failed")
        assert (run.failure()["cause"], run.failure()["message"].splitlines()[0]) == (
            "exception",
            "rank 3 ended with exit code 3",
        )


class TestKilled:
    def test_the_rank_that_was_killed_comes_before_those_that_were_stopped_or_lost_it(self, run):
        run.write_exit(0, {}, PEER)
        flew(run, 2, "a", "b", stays=True)
        run.log_path(2).write_text(f"step 3\n\nreading {run.path}/x.bin\n")
        codes(run, r1=-15, r2=-9, r0=1, r3=-15)
        record_end(run, "failed")
        failure = run.failure()
        assert (failure["rank"], failure["cause"], failure["waited_in"]) == (
            2,
            "killed",
            "b over dp_cp [#2, train/step.py:9]",
        )
        assert failure["coordinates"] == {"dp": 0, "cp": 1, "tp": 0}
        assert failure["message"].startswith("rank 2 was killed by SIGKILL\n  found: its last lines: step 3 | reading ")
        assert str(run.path) not in failure["message"]
        assert "does not report that it ran out of memory" in failure["message"]
        assert sorted(run.exits()) == [0, 1, 2, 3]

    def test_sigkill_while_the_machine_killed_for_memory(self, run):
        run.write_json("ranks/oom.json", {"oom_kills": 1})
        codes(run, r2=-9, r0=-15)
        record_end(run, "failed")
        assert run.failure()["cause"] == "out of memory"
        assert "rank 2 was killed by SIGKILL: out of memory" in run.failure()["message"]

    def test_another_signal_has_nothing_to_do_with_memory(self, run):
        run.write_json("ranks/oom.json", {"oom_kills": 1})
        codes(run, r2=-11)
        record_end(run, "failed")
        assert run.failure()["cause"] == "killed"
        assert "SIGSEGV" in run.failure()["message"]

    def test_sigterm_from_outside_came_first(self, run):
        codes(run, r1=-15, r0=-15)
        record_end(run, "failed")
        assert (run.failure()["rank"], run.failure()["cause"]) == (1, "killed")

    def test_without_exit_codes_the_summary_of_the_agent_is_read(self, run):
        run.write_exit(0, {}, PEER)
        agent_said(run, SUMMARY)
        record_end(run, "failed")
        assert run.failure()["rank"] == 3
        assert "SIGSEGV" in run.failure()["message"]
        assert run.exits()[2]["cause"] == "peer"

    def test_a_rank_that_spoke_for_itself_is_not_overwritten(self, run):
        run.write_exit(3, {}, ConnectionError("its own words"))
        agent_said(run, SUMMARY)
        record_end(run, "failed")
        assert run.exits()[3]["message"] == "its own words"


class TestHang:
    def test_after_a_time_out_the_missing_rank_is_named_with_its_stack(self, run):
        for rank in (0, 2, 3):
            run.write_exit(rank, {}, RuntimeError("Timed out waiting 5000ms for recv operation to complete"))
            flew(run, rank, "a", "b", stays=True)
        flew(run, 1, "a")
        run.write_json("ranks/waiting.json", {"looked_ns": 0, "waiting": [{"rank": 1, "stack": own_threads(STACK)}]})
        codes(run, r0=1, r2=1, r3=1, r1=-15)
        record_end(run, "failed")
        failure = run.failure()
        assert (failure["rank"], failure["cause"], failure["waited_in"]) == (1, "hang", "")
        assert failure["message"].startswith(
            "rank 1 has not come to b over dp_cp [#2, train/step.py:9], in which "
            "ranks 0, 2 and 3 have waited for 0 s; its last was a over dp_cp [#1"
        )
        assert "  found: it was at workbench/sharding/gradients.py:28 in sum_gradients" in failure["message"]
        assert "if it was only slow, raise timeout_s" in failure["message"]
        assert "in run_step" in failure["stack"]
        assert failure["also"] == {}, "these wrote their own records, and did not say"

    def skipped(self, run):
        habit = ("a", "b", "c") * 2
        for rank in (0, 2, 3):
            flew(run, rank, *habit, "a", "b", stays=True)
        flew(run, 1, *habit, "a", "c", stays=True)

    def test_a_rank_that_skipped_a_collective_is_blamed_for_the_abort(self, run):
        self.skipped(run)
        codes(run, r0=-6, r1=-15)
        last_stack_path(run, 1).write_text(STACK)
        record_end(run, "failed")
        failure = run.failure()
        assert (failure["rank"], failure["cause"]) == (1, "hang")
        assert "it skipped that b of 8 float32 and went on to c of 8 float32" in failure["message"]
        assert "in run_step" in failure["stack"]
        assert "look for a branch that ranks take differently" in failure["message"]
        assert "SIGABRT" in run.exits()[0]["message"]

    def test_an_error_inside_a_collective_is_an_echo_with_the_place(self, run):
        self.skipped(run)
        try:
            raise RuntimeError("Received data size doesn't match expected size")
        except RuntimeError as error:
            run.write_exit(1, {}, error, waited_in="c over dp_cp [#8, train/step.py:9]")
        record_end(run, "failed")
        assert (run.failure()["rank"], run.failure()["cause"]) == (1, "hang")
        assert "Traceback (most recent call last)" in run.failure()["stack"]
        assert "it was at tests/unit/launch/test_failure_analysis.py:" in run.failure()["message"]

    def test_an_error_outside_of_collectives_is_the_cause(self, run):
        self.skipped(run)
        run.write_exit(1, {}, ValueError("bad luck"))
        record_end(run, "failed")
        assert (run.failure()["cause"], run.failure()["message"]) == ("exception", "bad luck")

    def test_a_rank_that_died_while_others_waited_did_not_hang(self, run):
        flew(run, 0, "a", "b", stays=True)
        flew(run, 1, "a")
        run.write_exit(0, {}, PEER)
        codes(run, r1=-9, r0=1)
        record_end(run, "failed")
        assert (run.failure()["rank"], run.failure()["cause"]) == (1, "killed")

    def test_lost_connections_among_equally_advanced_ranks_blame_none(self, run):
        for rank in range(4):
            flew(run, rank, "a", "b", stays=True)
            run.write_exit(rank, {}, PEER)
        record_end(run, "failed")
        assert run.failure()["cause"] == "peer"

    def late(self, run, key="was"):
        run.write_json(
            "ranks/waiting.json",
            {
                "looked_ns": 0,
                "waiting": [],
                key: [{"rank": 1, "message": "rank 1 has not come to b", "stack": own_threads(STACK)}],
            },
        )
        for rank in range(4):
            flew(run, rank, "a", "b", stays=True)

    def test_a_late_rank_is_named_from_recorded_evidence(self, run):
        """It came when the others had given up, so that in the end all were equally far."""
        self.late(run)
        run.write_exit(0, {}, RuntimeError("Timed out waiting 5000ms for recv operation to complete"))
        record_end(run, "failed")
        assert (run.failure()["rank"], run.failure()["cause"]) == (1, "hang")
        assert run.failure()["message"].startswith("rank 1 has not come to b; it came, but too late\n")
        assert "rule: no rank is waited for longer than timeout_s = 120" in run.failure()["message"]
        assert "in run_step" in run.failure()["stack"]

    def test_an_earlier_straggler_is_not_blamed_for_a_lost_connection(self, run):
        self.late(run)
        run.write_exit(0, {}, PEER)
        record_end(run, "failed")
        assert (run.failure()["rank"], run.failure()["cause"]) == (0, "peer")

    def test_the_abort_of_a_rank_that_gave_up_waiting_is_an_echo(self, run):
        self.late(run)
        run.log_path(0).write_text(
            "[rank0]:[E ProcessGroupNCCL.cpp:690] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=67, OpType=ALLREDUCE)\nframe #0: c10::Error"
        )
        codes(run, r0=-6, r1=-15)
        record_end(run, "failed")
        assert (run.failure()["rank"], run.failure()["cause"]) == (1, "hang")
        assert run.exits()[0]["cause"] == "peer"
        assert (
            "when it had waited too long: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=67"
            in (run.exits()[0]["message"])
        )

    def test_on_the_device_a_rank_waits_though_its_host_has_gone_on(self, run):
        for rank in (0, 2, 3):
            flew(run, rank, "a", "b", "c")
        flew(run, 1, "a")
        run.write_exit(1, {}, ValueError("bad luck"))
        codes(run, r1=1, r0=-15)
        record_end(run, "failed")
        assert run.failure()["also"] == dict.fromkeys((0, 2, 3), "b over dp_cp [#2, train/step.py:9]")

    def test_the_verdict_of_the_watchdog_stays(self, run):
        self.skipped(run)
        run.write_exit(0, {}, RuntimeError("said by the watchdog"), cause="hang")
        codes(run, r1=-15, r2=-9, r3=-6, r0=-9)
        record_end(run, "failed")
        assert run.failure()["message"] == "said by the watchdog"
        assert {rank: record["cause"] for rank, record in run.exits().items()} == {
            0: "hang",
            1: "peer",
            2: "peer",
            3: "killed",
        }, "it stopped the others too"

    def test_a_rank_stopped_first_by_the_watchdog_was_not_killed_externally(self, run):
        self.skipped(run)
        run.write_exit(0, {}, RuntimeError("said by the watchdog"), cause="hang")
        codes(run, r1=-15, r2=-15, r3=-9)
        record_end(run, "failed")
        assert {rank: record["cause"] for rank, record in run.exits().items()} == {
            0: "hang",
            1: "peer",
            2: "peer",
            3: "peer",
        }


class TestStopped:
    """SIGSTOP: on the agent's SIGTERM nothing happens, and so the agent itself kills the rank in the end."""

    def stopped(self, run, *others, stays=True):
        for rank in others:
            run.write_exit(rank, {}, RuntimeError("Timed out waiting 8000ms for send operation to complete"))
            flew(run, rank, "a", "b", stays=stays)
        flew(run, 0, "a")
        run.write_json("ranks/stopped.json", {"0": 7})
        codes(run, r1=1, r2=1, r3=1, r0=-9)

    def test_the_stopped_rank_is_named_and_not_its_killer(self, run):
        self.stopped(run, 1, 2, 3)
        record_end(run, "failed")
        failure = run.failure()
        assert (failure["rank"], failure["cause"]) == (0, "hang")
        assert failure["message"].startswith("rank 0 was stopped: its process was in state T of /proc")
        assert (
            "rank 0 has not come to b over dp_cp [#2, train/step.py:9], in which ranks 1, 2 and 3 have waited"
            in (failure["message"])
        )
        assert "when the agent that started the ranks ended the job and killed rank 0" in failure["message"]
        assert "SIGKILL" not in failure["message"]
        assert [run.exits()[rank]["cause"] for rank in (1, 2, 3)] == ["peer"] * 3

    def test_without_the_file_of_the_watchdog_it_was_killed(self, run):
        self.stopped(run, 1, 2, 3)
        (run.path / "ranks/stopped.json").unlink()
        record_end(run, "failed")
        assert (run.failure()["rank"], run.failure()["cause"]) == (0, "killed")

    def test_a_rank_that_stopped_inside_a_collective_is_named_too(self, run):
        """All ranks are equally advanced then."""
        for rank in range(4):
            flew(run, rank, "a", stays=True)
        for rank in (0, 1, 3):
            run.write_exit(rank, {}, PEER)
        run.write_json("ranks/stopped.json", {"2": 7})
        codes(run, r0=1, r1=1, r3=1, r2=-9)
        record_end(run, "failed")
        assert (run.failure()["rank"], run.failure()["cause"]) == (2, "hang")
        assert run.failure()["waited_in"] == "a over dp_cp [#1, train/step.py:9]"

    def test_of_two_that_are_waited_for_the_stopped_one_is_to_blame(self, run):
        for rank in (2, 3):
            run.write_exit(rank, {}, PEER)
            flew(run, rank, "a", "b", stays=True)
        for rank in (0, 1):
            flew(run, rank, "a")
            last_stack_path(run, rank).write_text(STACK)
        run.write_json("ranks/stopped.json", {"1": 7})
        codes(run, r2=1, r3=1, r0=-15, r1=-9)
        record_end(run, "failed")
        assert run.failure()["rank"] == 1
        assert "state T" in run.failure()["message"]

    def test_an_error_of_another_rank_comes_before_it(self, run):
        self.stopped(run)
        run.write_exit(1, {}, ShapeError("split 7 tokens"))
        record_end(run, "failed")
        assert (run.failure()["rank"], run.failure()["cause"]) == (1, "exception")
        assert run.exits()[0]["cause"] == "peer"


class TestEarlyExit:
    @pytest.mark.parametrize("noted", [True, False], ids=["code 0", "codes of failed ranks only"])
    def test_an_early_exit_has_the_last_action_and_the_waiting_ranks(self, run, noted):
        for rank in (0, 2, 3):
            flew(run, rank, "a", "b", stays=True)
        run.write_exit(0, {}, PEER)
        for rank in (2, 3):
            last_stack_path(run, rank).write_text(STACK)
        flew(run, 1, "a")
        run.log_path(1).write_text("no more data\n")
        codes(run, **{"r1": 0} if noted else {}, r0=1)
        record_end(run, "failed")
        failure = run.failure()
        assert (failure["rank"], failure["cause"]) == (1, "early exit")
        assert failure["message"].startswith(
            "rank 1 left with exit code 0 after a over dp_cp [#1, train/step.py:9], while ranks 0, 2 and 3 waited for "
            "it in b over dp_cp [#2, train/step.py:9]; its process is gone\n"
        )
        assert (
            "found: it wrote no exit record, so it left before its end; its last lines: no more data"
            in (failure["message"])
        )
        assert "timeout_s" not in failure["message"]
        assert failure["also_failed"] == [0, 2, 3]

    def test_a_rank_that_reported_its_end(self, run):
        for rank in (0, 2, 3):
            flew(run, rank, "a", "b", stays=True)
            run.write_exit(rank, {}, PEER)
        flew(run, 1, "a", ended=True)
        run.write_exit(1, {}, None)
        codes(run, r1=0, r0=1, r2=1, r3=1)
        record_end(run, "failed")
        assert (run.failure()["rank"], run.failure()["cause"]) == (1, "early exit")
        assert "it reported that its part was done" in run.failure()["message"]

    def test_a_rank_that_received_sigterm_did_not_exit_early(self, run):
        """It left a stack, and has no code where only those of failed ranks are noted."""
        flew(run, 0, "a", "b", stays=True)
        run.write_exit(0, {}, RuntimeError("Timed out waiting 5000ms for recv operation to complete"))
        for rank in (1, 2, 3):
            flew(run, rank, "a")
            last_stack_path(run, rank).write_text(STACK)
        codes(run, r0=1)
        record_end(run, "failed")
        assert (run.failure()["rank"], run.failure()["cause"]) == (1, "hang")

    def test_an_error_of_another_rank_comes_before_it(self, run):
        flew(run, 0, "a", "b", stays=True)
        flew(run, 1, "a")
        run.write_exit(0, {}, ValueError("bad luck"))
        codes(run, r1=0, r0=1)
        record_end(run, "failed")
        assert (run.failure()["rank"], run.failure()["cause"]) == (0, "exception")


class TestNobodySpoke:
    def test_an_agent_that_never_started_ranks_is_quoted(self, run, tmp_path):
        run = RunDirectory.create(tmp_path, "y", RunSpec())
        agent_said(run, "Traceback\nImportError: no torch\n")
        record_end(run, "failed")
        assert (run.failure()["rank"], run.failure()["cause"]) == (None, "start")
        assert "ImportError: no torch" in run.failure()["message"]

    def test_an_agent_that_is_gone_while_ranks_ran_was_killed(self, run):
        flew(run, 0, "a", stays=True)
        record_end(run, "failed")
        failure = run.failure()
        assert (failure["rank"], failure["cause"]) == (None, "killed")
        assert "the process that started the ranks was gone" in failure["message"]
        assert "rank 0 was in a over dp_cp" in failure["message"]
        assert run.exits()[0]["message"].splitlines()[1] == "  found: the agent had failed"

    def test_a_job_that_ended_without_a_record_failed(self, run):
        assert record_end(run, "succeeded") == "failed"
        assert "none recorded that the run succeeded" in run.failure()["message"]
        assert run.status == "failed"


def test_a_rank_has_a_place_on_the_mesh(tmp_path):
    run = RunDirectory.create(tmp_path, "x", RunSpec(layout={"dp": 2, "cp": 3, "tp": 2}))
    places = [tuple(coordinates_of(run, rank).values()) for rank in range(12)]
    assert places == [(dp, cp, tp) for dp in range(2) for cp in range(3) for tp in range(2)]
    staged = RunDirectory.create(tmp_path, "staged", RunSpec(layout={"pp": 2, "dp": 2, "cp": 3, "tp": 2}))
    places = [coordinates_of(staged, rank) for rank in range(24)]
    assert [tuple(place) for place in places] == [("pp", "dp", "cp", "tp")] * 24
    assert [tuple(place.values()) for place in places] == list(
        itertools.product(range(2), range(2), range(3), range(2))
    )


def test_a_stack_names_its_location():
    assert place_of(STACK.replace("/usr/lib/python3.11/site-packages", "...")).startswith("/work/somewhere")
    assert place_of(own_threads(STACK).replace("/usr/lib/python3.11/site-packages", "...")) == (
        "workbench/sharding/gradients.py:28 in sum_gradients"
    )
    assert place_of('Traceback (most recent call last):\n  File "a.py", line 1, in f\n  File "b.py", line 2, in g') == (
        "b.py:2 in g"
    )
    assert place_of("nothing") == "an unknown place"


def test_only_active_stacks_are_reported():
    kept = own_threads(STACK)
    assert kept.startswith("Current thread")
    assert "watched.py" not in kept
    assert "Extension" not in kept
    assert own_threads("") == ""
    helper = 'Thread 0x00007f0000000003 (most recent call first):\n  File "elsewhere.py", line 1 in helper\n\n'
    assert place_of(own_threads(helper + STACK)).startswith(("/usr", "workbench")), "the main thread comes first"
    assert "in helper" in own_threads(helper + STACK)
    assert own_threads("Thread 0x00007f0000000003 (most recent call first):\n  <no Python frame>\n") == ""


@pytest.mark.parametrize(
    ("cgroup", "file", "content"),
    [
        ("0::/jobs/one\n", "sys/fs/cgroup/jobs/one/memory.events", "low 0\noom 9\noom_kill 4\noom_group_kill 0\n"),
        ("0::/\n", "sys/fs/cgroup/memory.events", "oom_kill 4\n"),
        ("9:x:/\n4:memory:/a\n0::/\n", "sys/fs/cgroup/memory/a/memory.oom_control", "under_oom 0\noom_kill 4\n"),
        ("0::/none\n", "proc/vmstat", "pgfault 12\noom_kill 4\n"),
    ],
)
def test_kills_for_memory_are_counted_where_the_system_counts_them(tmp_path, cgroup, file, content):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    assert oom_kills(tmp_path) == 0
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(content)
    assert oom_kills(tmp_path) == 4


def test_codes_are_read_in_the_order_in_which_ranks_ended(run):
    (run.path / "ranks/exit_codes.json").write_text(json.dumps({"3": -signal.SIGABRT, "0": -signal.SIGKILL}))
    record_end(run, "failed")
    assert run.failure()["rank"] == 3


@pytest.mark.parametrize(
    ("backend", "log"),
    [("processes", "ranks/agent.log"), ("slurm", "torchx/slurm-*.err"), ("torchx", "torchx/*/*/trainer/0/stderr.log")],
)
def test_silent_ranks_are_searched_in_the_backends_logs(tmp_path, backend, log):
    run = RunDirectory.create(tmp_path, "cp2", RunSpec(), backend=backend)
    assert record_end(run, "failed") == "failed"
    assert f"read {log} in" in run.failure()["message"]
