"""`workbench logs`: every line once, by rank, until the run ends; Ctrl-C detaches with a message."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import workbench
from tests.helpers.hand_made import make_project, make_run
from tests.helpers.interruptible import INTERRUPTIBLE
from tests.helpers.stand_in import stand_in
from workbench.cli import logs, main
from workbench.cli.logs import follow_lines, tail_lines
from workbench.errors import RecordError


@pytest.fixture
def project(tmp_path, monkeypatch):
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(project):
    return make_run(
        project / "experiments" / "parity",
        "cp2",
        state="running",
        layout={"cp": 2},
        logs={0: "a\nb\nc\n", 1: "d\n\nunfinished"},
    )


class TestTail:
    @pytest.mark.parametrize(
        ("lines", "expected"),
        [
            (-1, ["0 a", "0 b", "0 c", "1 d", "1 ", "1 unfinished"]),
            (2, ["0 b", "0 c", "1 ", "1 unfinished"]),
            (1, ["0 c", "1 unfinished"]),
            (3, ["0 a", "0 b", "0 c", "1 d", "1 ", "1 unfinished"]),
            (0, []),
        ],
    )
    def test_the_last_lines_of_each_rank(self, run, lines, expected):
        assert [f"{rank} {line}" for rank, line in tail_lines(run, lines=lines)] == expected

    def test_one_long_line_costs_no_more_than_many_short_ones(self, run, monkeypatch):
        """A progress bar writes megabytes without a line break; blocks were once joined again for each new one."""
        monkeypatch.setattr(logs, "_BLOCK", 256)  # 4,096 blocks: joined each time they would be 2 GB

        def cpu_s(text):
            run.log_path(0).write_text(text)
            began = time.process_time()
            [(_, first), *_] = tail_lines(run, ranks=[0])
            return time.process_time() - began, first

        (many, short), (one, long) = cpu_s(("x" * 99 + "\n") * 10_000), cpu_s("\r" + "x" * 999_999)
        assert (len(short), len(long)) == (99, 1_000_000)
        assert one < 5 * many

    @pytest.mark.parametrize("block", [1, 2, 3, 7])
    def test_block_boundaries_do_not_matter(self, run, block, monkeypatch):
        monkeypatch.setattr(logs, "_BLOCK", block)
        run.log_path(0).write_text("first\nsecond\n\nfourth\n")
        for lines in range(6):
            expected = ["first", "second", "", "fourth"][-lines:] if lines else []
            assert [line for _, line in tail_lines(run, ranks=[0], lines=lines)] == expected

    def test_of_one_rank(self, run):
        assert {rank for rank, _ in tail_lines(run, ranks=[1])} == {1}

    def test_a_rank_without_a_log_is_refused(self, run):
        with pytest.raises(RecordError, match=r"rank 7[\s\S]*ranks with a log: 0, 1; the run is running"):
            tail_lines(run, ranks=[7])

    def test_bytes_that_are_no_letters_are_shown_as_numbers(self, run):
        run.log_path(0).write_bytes(b"caf\xe9\n")
        assert tail_lines(run, ranks=[0]) == [(0, "caf\\xe9")]


class TestFollow:
    def test_every_line_is_printed_exactly_once_until_the_run_ends(self, run, monkeypatch):
        monkeypatch.setattr(logs, "_POLL_S", 0.001)
        with run.log_path(0).open("a") as log, run.log_path(1).open("a") as other:
            seen, lines = [], follow_lines(run, lines=1)
            seen += [next(lines)]
            log.write("hal")
            log.flush()
            other.write(" line\n")
            other.flush()
            seen += [next(lines)]
            log.write("ves\n")
            log.flush()
            seen += [next(lines)]
            log.write("without a break")
            log.flush()
            run.set_state("succeeded")
            seen += list(lines)
        assert seen == [(0, "c"), (1, "unfinished line"), (0, "halves"), (0, "without a break")]

    def test_a_rank_that_comes_later_is_read_from_its_beginning(self, run, monkeypatch):
        monkeypatch.setattr(logs, "_POLL_S", 0.001)
        run.log_path(1).unlink()
        lines = follow_lines(run, lines=1)
        assert next(lines) == (0, "c")
        run.log_path(1).write_text("x\ny\n")
        run.set_state("failed")
        assert list(lines) == [(1, "x"), (1, "y")]

    def test_a_restarted_log_is_read_from_the_start(self, run, monkeypatch):
        monkeypatch.setattr(logs, "_POLL_S", 0.001)
        lines = follow_lines(run, ranks=[0], lines=1)
        assert next(lines) == (0, "c")
        run.log_path(0).write_text("new\n")
        assert next(lines) == (0, "new")

    def test_of_a_run_that_is_lost_it_ends(self, project):
        lost = make_run(project / "experiments" / "parity", "gone", state="lost", logs={0: "last words"})
        assert list(follow_lines(lost)) == [(0, "last words")]

    def test_a_rank_that_never_came_is_refused_at_the_end(self, run):
        run.set_state("failed")
        with pytest.raises(RecordError, match="ranks with a log: 0, 1; the run is failed"):
            list(follow_lines(run, ranks=[5]))


class TestVerb:
    def test_lines_have_rank_prefixes_with_several_ranks(self, run, capsys):
        assert main(["logs", "cp2", "--lines", "1"]) == 0
        assert capsys.readouterr().out == "[rank 0] c\n[rank 1] unfinished\n"

    def test_and_do_not_where_one_was_chosen(self, run, capsys):
        main(["logs", "cp2", "--rank", "0", "--lines", "-1"])
        assert capsys.readouterr().out == "a\nb\nc\n"

    def test_elsewhere_than_on_a_terminal_lines_come_as_they_are(self, run, capsys):
        run.log_path(0).write_text("\x1b[31mred\x1b[0m 10%\r20%\x07\r\n")
        main(["logs", "cp2", "--rank", "0"])
        assert capsys.readouterr().out == "\x1b[31mred\x1b[0m 10%\r20%\x07\r\n"

    def test_control_sequences_are_escaped_on_a_terminal(self, run, capsys, monkeypatch):
        run.log_path(0).write_text("\x1b[31mred\x1b]0;owned\x07 10%\r20%\r\n")
        monkeypatch.setattr(logs, "sys", stand_in(sys, stdout=stand_in(sys.stdout, isatty=lambda: True)))
        main(["logs", "cp2", "--rank", "0"])
        assert capsys.readouterr().out == r"\x1b[31mred\x1b]0;owned\x07 10%\r20%" + "\n"

    def test_follows_until_the_end_and_reports_the_outcome(self, run, capsys):
        ending = threading.Timer(0.3, run.set_state, ["succeeded"])
        ending.start()
        assert main(["logs", "cp2", "-f", "--rank", "0", "--lines", "1"]) == 0
        ending.join()
        out, err = capsys.readouterr()
        assert (out, err) == ("c\n", f"{run.path.name} has ended: succeeded\n")

    def test_reports_that_no_rank_has_started(self, project, capsys):
        waiting = make_run(project / "experiments" / "parity", "later", state="pending")
        assert main(["logs", "later"]) == 0
        assert capsys.readouterr().err == f"no rank of {waiting.path.name} has started; it is pending\n"

    def test_of_an_experiment_of_several_runs_is_refused_with_their_names(self, run, project, capsys):
        make_run(project / "experiments" / "parity", "tp2", at_s=1)
        assert main(["logs", "parity"]) == 2
        assert "name one of its runs: cp2, tp2" in capsys.readouterr().err

    @pytest.mark.parametrize("rank", ["one", "-1"])
    def test_a_rank_is_a_number(self, run, rank, capsys):
        assert main(["logs", "cp2", f"--rank={rank}"]) == 2
        assert "the number of a rank, or all" in capsys.readouterr().err


def test_ctrl_c_detaches_and_leaves_the_run_alone(run, project):
    source = str(Path(workbench.__file__).parents[1])
    command = [*INTERRUPTIBLE, sys.executable, "-m", "workbench", "logs", "cp2", "-f"]
    with subprocess.Popen(
        command,
        cwd=project,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": source},
    ) as follower:
        try:
            assert follower.stdout.readline() == "[rank 0] a\n"
            follower.send_signal(signal.SIGINT)
            _, err = follower.communicate(timeout=60)
        finally:
            follower.kill()
    assert err.strip() == f"detached; the run continues; `workbench cancel parity/{run.path.name}` stops it"
    assert follower.returncode == 130
    assert run.status == "running"
    assert not run.cancel_requested
