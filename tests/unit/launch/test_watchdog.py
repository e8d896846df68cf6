"""The watchdog names, ends and spares the right ranks; with real processes that only pretend to compute."""

from __future__ import annotations

import json
import os
import signal
import time

import psutil
import pytest

from tests.helpers.pretended_ranks import pretended_ranks
from tests.helpers.stand_in import stand_in
from workbench.launch import watchdog as watching
from workbench.launch.failure_analysis import record_end
from workbench.launch.watchdog import Watchdog

STEPS = "a b c " * 3
LOOK_S = 0.2
"""A rank may be waiting when it has not moved for this long, and a wait is certain when it lasts as long again."""


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch):
    """These ranks have stopped moving before the first look; `test_agent.py` has the times of a real agent."""
    monkeypatch.setattr(watching, "_STILL_S", LOOK_S)
    monkeypatch.setattr(watching, "_SURE_S", LOOK_S)


def pids_of(ranks):
    return {rank: process.pid for rank, process in enumerate(ranks)}


def wait_until(true, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def waiting(run):
    path = run.path / "ranks/waiting.json"
    return json.loads(path.read_text())["waiting"] if path.exists() else None


def test_a_skipped_collective_ends_the_job_and_names_the_rank(tmp_path):
    with pretended_ranks(tmp_path, f"{STEPS} a (b", f"{STEPS} a (c") as (run, ranks):
        began = time.monotonic()
        dog = Watchdog(run, pids_of(ranks), poll_s=0.1).start()
        codes = [process.wait(timeout=120) for process in ranks]
        wait_until(lambda: 1 in run.exits())
        dog.stop()
    assert time.monotonic() - began < 100  # and not after the time-out of 120 s
    assert codes == [-signal.SIGTERM, -signal.SIGKILL]
    failure = run.failure()
    assert (failure["rank"], failure["cause"], failure["coordinates"]) == (1, "hang", {"dp": 0, "cp": 1, "tp": 0})
    message = failure["message"]
    assert message.startswith("rank 1 has not come to b over cp [#11, helpers/pretended_rank.py:")
    assert "in which rank 0 has waited for" in message
    assert "it skipped that b of 2 float32 and went on to c of 2 float32" in message
    assert "found: it was at tests/helpers/pretended_rank.py:" in message
    assert " in stay; its stack is stored with this message" in message
    assert failure["waited_in"].startswith("c over cp [#11, ")
    stack = failure["stack"]
    assert "(most recent call first)" in stack.splitlines()[0]
    assert " in stay\n" in stack
    assert " in main\n" in stack
    assert "watched.py" not in stack
    assert str(tmp_path.anchor + "work") not in stack.replace(os.sep + "workbench", "")


def test_a_rank_that_is_deaf_to_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "_GRACE_S", 0.5)
    with pretended_ranks(tmp_path, f"deaf {STEPS} a (b", f"{STEPS} a (c") as (run, ranks):
        dog = Watchdog(run, pids_of(ranks), poll_s=0.1).start()
        assert [process.wait(timeout=120) for process in ranks] == [-signal.SIGKILL] * 2
        dog.stop()


def test_a_rank_that_ended_early_is_named_over_its_own_report(tmp_path):
    with pretended_ranks(tmp_path, "a (b", "a end") as (run, ranks):
        ranks[1].wait(timeout=120)
        assert run.exits()[1]["ok"]
        dog = Watchdog(run, pids_of(ranks), poll_s=0.1).start()
        assert ranks[0].wait(timeout=120) == -signal.SIGTERM
        dog.stop()
    failure = run.failure()
    assert (failure["rank"], failure["cause"], failure["stack"]) == (1, "hang", "")
    assert failure["message"].startswith("rank 1 left with exit code 0 after a over cp [#1, helpers/pretended_rank")
    assert "while rank 0 waited for it in b over cp [#2, helpers/pretended_rank.py:" in failure["message"]
    assert "it has done its part and ended" in failure["message"]


def stopped(run):
    path = run.path / "ranks/stopped.json"
    return json.loads(path.read_text()) if path.exists() else None


def test_a_stopped_rank_is_named_as_such_and_the_agents_kill_is_not_blamed(tmp_path):
    """The effect of a backend's time-out: the peer fails, and the agent kills what does not end on SIGTERM."""
    with pretended_ranks(tmp_path, "a (b", "a |60") as (run, ranks):
        ranks[1].send_signal(signal.SIGSTOP)
        dog = Watchdog(run, pids_of(ranks), hang_s=0.5, poll_s=0.1).start()
        wait_until(lambda: waiting(run) and "state T" in waiting(run)[0]["message"])
        assert [*stopped(run)] == ["1"]
        ranks[0].kill()
        run.write_exit(0, {}, RuntimeError("Timed out waiting 8000ms for send operation to complete"))
        ranks[1].kill()
        assert [process.wait(timeout=20) for process in ranks] == [-signal.SIGKILL] * 2
        time.sleep(0.5)
        dog.stop()
    assert [*stopped(run)] == ["1"], "it was never seen to go on"
    run.write_json("ranks/exit_codes.json", {"0": 1, "1": -signal.SIGKILL})
    assert record_end(run, "failed") == "failed"
    failure = run.failure()
    assert (failure["rank"], failure["cause"]) == (1, "hang")
    assert failure["message"].startswith("rank 1 was stopped: its process was in state T of /proc")
    assert "rank 1 has not come to b over cp [#2, helpers/pretended_rank.py:" in failure["message"]


def test_a_stopped_rank_that_is_waited_for_too_long_is_ended_and_named_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "_BACKEND_S", 0.5)
    with pretended_ranks(tmp_path, "a (b", "a |60", timeout_s=1.0) as (run, ranks):
        ranks[1].send_signal(signal.SIGSTOP)
        dog = Watchdog(run, pids_of(ranks), poll_s=0.1).start()
        assert [process.wait(timeout=20) for process in ranks] == [-signal.SIGTERM, -signal.SIGKILL]
        wait_until(lambda: 1 in run.exits())
        dog.stop()
    assert run.failure()["rank"] == 1
    assert "state T of /proc" in run.failure()["message"]


def test_a_resumed_rank_is_no_longer_stopped(tmp_path):
    with pretended_ranks(tmp_path, "a (b", "a |60") as (run, ranks):
        dog = Watchdog(run, pids_of(ranks), poll_s=0.1).start()
        ranks[1].send_signal(signal.SIGSTOP)
        wait_until(lambda: stopped(run) and [*stopped(run)] == ["1"])
        ranks[1].send_signal(signal.SIGCONT)
        wait_until(lambda: stopped(run) == {})
        dog.stop()
    assert run.exits() == {}


def test_a_slow_rank_is_named_with_its_place_and_left_alone(tmp_path):
    with pretended_ranks(tmp_path, "a (b", "a |go (b") as (run, ranks):
        dog = Watchdog(run, pids_of(ranks), hang_s=1.0, poll_s=0.1).start()
        wait_until(lambda: waiting(run))
        [named] = waiting(run)
        assert (named["rank"], named["kind"], named["waiting"]) == (1, "behind", [0])
        assert named["message"].startswith("rank 1 has not come to b over cp [#2, helpers/pretended_rank.py:")
        assert "; it is at tests/helpers/pretended_rank.py:" in named["message"]
        assert named["at"].endswith(" in main")
        assert " in main\n" in named["stack"]
        (run.path / "go").touch()
        wait_until(lambda: waiting(run) == [])
        dog.stop()
        [was] = json.loads((run.path / "ranks/waiting.json").read_text())["was"]
        assert was["stack"] == named["stack"], "what was seen is kept, for a time-out that comes of it"
        assert [process.poll() for process in ranks] == [None, None]
    assert run.exits() == {}


def test_a_rank_that_is_waited_for_longer_than_the_spec_allows_is_ended(tmp_path, monkeypatch):
    """NCCL would take a minute more."""
    monkeypatch.setattr(watching, "_BACKEND_S", 0.5)
    with pretended_ranks(tmp_path, "a (b", "a |300", timeout_s=1.0) as (run, ranks):
        dog = Watchdog(run, pids_of(ranks), poll_s=0.1).start()
        assert [process.wait(timeout=120) for process in ranks] == [-signal.SIGTERM, -signal.SIGKILL]
        dog.stop()
    failure = run.failure()
    assert (failure["rank"], failure["cause"]) == (1, "hang")
    assert "rule: no rank is waited for longer than timeout_s = 1" in failure["message"]
    assert " in main\n" in failure["stack"]


def test_no_rank_is_named_too_early(tmp_path):
    with pretended_ranks(tmp_path, "a (b", "a |300") as (run, ranks):
        dog = Watchdog(run, pids_of(ranks), hang_s=300.0)
        for _ in range(4):
            assert dog.look() is False
            time.sleep(LOOK_S)
        assert waiting(run) is None


def test_a_rank_that_never_began_gets_no_signal(tmp_path):
    """It would die of it."""
    with pretended_ranks(tmp_path, "(a", "-") as (run, ranks):
        dog = Watchdog(run, pids_of(ranks), hang_s=0.5, poll_s=0.1).start()
        wait_until(lambda: waiting(run))
        dog.stop()
        [named] = waiting(run)
        assert (named["rank"], named["stack"]) == (1, "")
        assert named["message"].endswith("it has not begun")
        assert ranks[1].poll() is None


def test_a_record_of_another_process_does_not_count(tmp_path):
    """Rank 1's file is of an earlier process: the one that was started has not begun, and is not signalled."""
    with pretended_ranks(tmp_path, "(a", "(a", "-") as (run, ranks):
        dog = Watchdog(run, {0: ranks[0].pid, 1: ranks[2].pid}, hang_s=0.1, poll_s=0.1)
        wait_until(lambda: dog.look() or waiting(run))
        assert {named["rank"] for named in waiting(run)} == {1, 2}
        assert dog.stack_of(1) == ""
        assert ranks[2].poll() is None


def test_no_other_rank_is_blamed_if_one_reports_its_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "_GONE_S", LOOK_S)
    with pretended_ranks(tmp_path, "a (b", "a raise") as (run, ranks):
        dog = Watchdog(run, pids_of(ranks))
        for _ in range(5):
            assert dog.look() is False
            time.sleep(LOOK_S)
        assert ranks[0].poll() is None
    assert run.failure()["exception"] == "ValueError"


def test_a_rank_gets_time_to_report_its_failure(tmp_path):
    """gloo aborts the wrong collective of a rank that skipped one: its own message has the place, its stack has not."""
    with pretended_ranks(tmp_path, f"{STEPS} a (b", f"{STEPS} a c says") as (run, ranks):
        dog = Watchdog(run, pids_of(ranks))
        wait_until(lambda: dog.look() or "in write_exit" in dog.stack_of(1))
        for _ in range(5):
            assert dog.look() is False
            time.sleep(LOOK_S)
        assert run.exits() == {}
        assert [process.poll() for process in ranks] == [None, None]


@pytest.mark.parametrize(("patience_s", "ended"), [(LOOK_S, True), (60.0, False)])
def test_the_parent_of_a_silently_dead_process_reports_first(tmp_path, monkeypatch, patience_s, ended):
    monkeypatch.setattr(watching, "_GONE_S", patience_s)
    with pretended_ranks(tmp_path, "a (b", "a gone") as (run, ranks):
        dog, result = Watchdog(run, pids_of(ranks)), []
        for _ in range(6):
            result.append(dog.look())
            if result[-1]:
                break
            time.sleep(LOOK_S)
        assert any(result) is ended
        assert (run.failure() is not None) is ended


def test_ranks_that_move_are_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "find_waits", lambda *_: pytest.fail("it compared"))
    with pretended_ranks(tmp_path, "a |300", "a |300") as (run, ranks):
        monkeypatch.setattr(watching, "_STILL_S", 1000.0)
        assert Watchdog(run, pids_of(ranks)).look() is False


def test_a_failing_watchdog_continues(tmp_path, monkeypatch, capfd):
    with pretended_ranks(tmp_path, "a |300") as (run, ranks):
        calls = []

        def pids():
            calls.append(1)
            raise OSError("no more files")

        dog = Watchdog(run, pids, poll_s=0.02).start()
        wait_until(lambda: len(calls) > 2)
        dog.stop()
        assert ranks[0].poll() is None
    assert "no more files" in capfd.readouterr().err


@pytest.mark.parametrize(("after", "noted"), [(5, {"oom_kills": 2}), (3, None)])
def test_an_oom_kill_is_noted(tmp_path, monkeypatch, after, noted):
    counts = iter([3, after])
    monkeypatch.setattr(watching, "oom_kills", lambda: next(counts))
    with pretended_ranks(tmp_path, "-") as (run, ranks):
        Watchdog(run, pids_of(ranks)).start().stop()
    path = run.path / "ranks/oom.json"
    assert (json.loads(path.read_text()) if path.exists() else None) == noted


def test_only_processes_that_were_named_are_touched(tmp_path):
    """The guilty one and its peers are ended; a third process with a flight of its own in the folder is not."""
    with pretended_ranks(tmp_path, f"{STEPS} a (b", f"{STEPS} a (c", f"{STEPS} a (b") as (run, ranks):
        dog = Watchdog(run, {0: ranks[0].pid, 1: ranks[1].pid}, poll_s=0.1).start()
        assert ranks[1].wait(timeout=120) == -signal.SIGKILL
        ranks[0].wait(timeout=120)
        dog.stop()
        assert psutil.Process(ranks[2].pid).is_running()
        assert ranks[2].poll() is None


# ---- several nodes, and clocks -----------------------------------------------------------------------------


def dogs_of(run, ranks, **settings):
    """A watchdog for each rank, as if each were on a node of its own."""
    return [
        Watchdog(run, {rank: process.pid}, poll_s=0.1, node=rank, nodes=len(ranks), **settings)
        for rank, process in enumerate(ranks)
    ]


def test_the_agent_of_the_ranks_node_ends_it_and_the_others_end_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "_ECHO_S", 0.2)
    monkeypatch.setattr(watching, "_GRACE_S", 0.5)
    with pretended_ranks(tmp_path, f"{STEPS} a (b", f"{STEPS} a (c") as (run, ranks):
        first, second = (dog.start() for dog in dogs_of(run, ranks))
        codes = [process.wait(timeout=120) for process in ranks]
        wait_until(lambda: 1 in run.exits())
        for dog in (first, second):
            dog.stop()
    assert codes == [-signal.SIGTERM, -signal.SIGKILL]
    failure = run.failure()
    assert (failure["rank"], failure["cause"]) == (1, "hang")
    assert " in stay\n" in failure["stack"]


def test_the_agent_of_another_node_gives_no_verdict_while_that_of_the_rank_may(tmp_path):
    with pretended_ranks(tmp_path, f"{STEPS} a (b", f"{STEPS} a (c") as (run, ranks):
        first, _ = dogs_of(run, ranks)
        for _ in range(4):
            assert first.look() is False
            time.sleep(LOOK_S)
        assert run.exits() == {}
        assert [process.poll() for process in ranks] == [None, None]


def test_a_rank_whose_node_is_gone_is_named_by_the_agent_of_the_first_that_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "_BACKEND_S", 0.2)
    monkeypatch.setattr(watching, "_OTHER_AGENT_S", 0.2)
    with pretended_ranks(tmp_path, "a (b", "a |300", "a (b", timeout_s=1.0) as (run, ranks):
        first, _, last = dogs_of(run, ranks)
        wait_until(lambda: last.look() or first.look())
        assert ranks[0].wait(timeout=60) == -signal.SIGTERM
        assert ranks[1].poll() is None, "it is on a machine that this agent cannot reach"
        assert ranks[2].poll() is None
    failure = run.failure()
    assert (failure["rank"], failure["cause"], failure["stack"]) == (1, "hang", "")


def test_each_agent_has_files_of_its_own(tmp_path):
    with pretended_ranks(tmp_path, "a (b", "a |300") as (run, ranks):
        for dog in dogs_of(run, ranks, hang_s=0.1):
            wait_until(lambda dog=dog: dog.look() or dog._named)
        first, second = (json.loads((run.path / f"ranks/{n}.json").read_text()) for n in ("waiting", "waiting.node1"))
    assert first["waiting"][0]["stack"] == "", "the rank is on the other node"
    assert " in main\n" in second["waiting"][0]["stack"]


@pytest.mark.parametrize("jump_s", [-3600, 3600])
def test_a_clock_that_jumps_ends_nothing(tmp_path, monkeypatch, jump_s):
    with pretended_ranks(tmp_path, "a (b", "a |300") as (run, ranks):
        jumped = stand_in(time, time_ns=lambda: time.time_ns() + jump_s * 10**9)
        monkeypatch.setattr(watching, "time", jumped)
        dog = Watchdog(run, pids_of(ranks), hang_s=60.0)
        for _ in range(4):
            assert dog.look() is False
            time.sleep(LOOK_S)
        assert waiting(run) is None
        assert [process.poll() for process in ranks] == [None, None]
