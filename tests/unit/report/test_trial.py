"""TrialReader: a running run, readable whatever the state of its directory."""

import json
import math
import shutil

import pytest

from tests.helpers.audited import files_opened
from tests.helpers.trials import make_run, write_steps
from workbench.records.provenance import is_process_alive
from workbench.report.numbers import duration
from workbench.report.rows import as_line
from workbench.report.trial import GONE, LogTail, Trial, TrialReader, elapsed_s


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "exp", steps=4)


def test_a_run_is_followed_from_pending_to_its_end(run):
    reader = TrialReader(run)
    assert (reader.read().state, reader.read().note, reader.read().seconds) == ("pending", "waits for its turn", None)
    run.set_state("running")
    write_steps(run, [0.5, math.nan])
    trial = reader.read()
    assert (trial.state, trial.steps_done, trial.steps, trial.note) == ("running", 2, 4, "")
    assert trial.loss[0] == 0.5
    assert math.isnan(trial.gradient_norm[1])
    assert trial.seconds == int(trial.seconds)
    write_steps(run, [0.25, 0.125], begin=2)
    run.set_state("succeeded")
    trial = reader.read()
    assert (trial.state, trial.steps_done, trial.ended) == ("succeeded", 4, True)
    assert trial.loss[2:] == (0.25, 0.125)


def test_reading_twice_gives_equal_trials(run):
    reader = TrialReader(run)
    write_steps(run, [0.5])
    assert reader.read() == reader.read()
    assert reader.read().loss is reader.read().loss


def test_of_a_run_that_ended_only_the_state_file_is_looked_at(run):
    run.set_state("succeeded")
    reader = TrialReader(run)
    reader.read()
    with files_opened(run.path) as opened:
        assert reader.read().state == "succeeded"
    assert opened == []


def test_a_success_that_turns_out_to_be_a_failure_is_seen(run):
    run.set_state("succeeded")
    reader = TrialReader(run)
    assert reader.read().state == "succeeded"
    run.write_exit(1, {"cp": 1}, ValueError("too much"))
    run.set_state("failed")
    assert (reader.read().state, reader.read().note) == ("failed", "rank 1 ValueError: too much")


def test_a_step_that_records_no_loss_keeps_its_place(run):
    run.append_step({"step": 0, "other": 1.0})
    write_steps(run, [0.5], begin=1)
    assert TrialReader(run).read().loss == (None, 0.5)


def test_a_requested_cancel_is_shown(run):
    run.set_state("running")
    run.request_cancel("a test")
    assert TrialReader(run).read().note == "cancellation requested"


def test_names_the_run_whose_clip_decisions_it_awaits(run, tmp_path):
    decides = make_run(tmp_path / "exp", "one_rank64")
    run.note(frozen_clip_run=decides.path.name)
    reader = TrialReader(run)
    assert reader.read().note == "waits for the clip decisions of one_rank64"
    decides.set_state("succeeded")
    assert reader.read().note == "waits for its turn"


def test_a_lost_run_has_a_fix(run):
    nobody = {"pid": 2**22 + 1, "create_time": 0.0}
    assert not is_process_alive(nobody)
    run.set_state("running")
    run.note(rank0=nobody, launcher=nobody)
    trial = TrialReader(run).read()
    assert (trial.state, trial.ended, trial.seconds) == ("lost", True, None)
    assert "launch again" in trial.note


def test_a_damaged_record_is_reported_and_the_state_is_still_followed(run):
    reader = TrialReader(run)
    (run.path / "metrics.jsonl").write_bytes(b"nonsense\nmore nonsense\nand more\n")
    trial = reader.read()
    assert (trial.state, trial.steps_done) == ("pending", 0)
    assert "metrics.jsonl" in trial.note
    assert "damaged" in trial.note
    run.set_state("cancelled")
    assert reader.read().state == "cancelled"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"state": "running"}', b'{"name": 3}'])
def test_a_state_that_cannot_be_read_raises_nothing(run, content):
    reader = TrialReader(run)
    reader.read()
    (run.path / "state.json").write_bytes(content)
    assert reader.read().note
    assert reader.read().name == "cp2"


def test_a_folder_that_is_removed_is_gone(run):
    reader = TrialReader(run)
    write_steps(run, [0.5])
    reader.read()
    shutil.rmtree(run.path)
    trial = reader.read()
    assert (trial.state, trial.ended, trial.note, trial.loss) == (GONE, True, "its folder was removed", (0.5,))


def test_a_line_has_everything_and_no_empty_columns():
    trial = Trial("cp2", "cp2-0badcafe", "running", 2, 4, 2, (0.5, 0.25), (1.0, math.nan), 3.0, note="a note")
    assert as_line(trial, names=6) == (
        "cp2     running    2/4 steps  3 s     loss █▁ 0.250  gradient norm ▅× not a number  a note"
    )
    assert as_line(Trial("b", "b-1", "pending", 0, 4, 1)) == "b  pending    0/4 steps  –"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "–"), (0.0, "0 s"), (3.25, "3.2 s"), (59.0, "59 s"), (60.0, "1 min 0 s"), (3600.0, "1 h 0 min")],
)
def test_durations(seconds, said):
    assert duration(seconds) == said


def test_elapsed_counts_from_the_launch_to_the_last_end():
    ended = [
        Trial("a", "a", "succeeded", 1, 1, 1, created_ns=10**9, ended_ns=4 * 10**9),
        Trial("b", "b", "failed", 1, 1, 1, created_ns=2 * 10**9, ended_ns=9 * 10**9),
    ]
    assert elapsed_s(ended) == 8.0
    assert elapsed_s(ended, began_ns=2 * 10**9) == 7.0
    assert elapsed_s([Trial("a", "a", "pending", 0, 1, 1)]) is None


def test_state_that_is_foreign_json_is_no_run(run):
    (run.path / "state.json").write_text(json.dumps({"state": "cancelled", "name": "<b>", "created_ns": 1}))
    assert TrialReader(run).read().name == "<b>"


def test_time_left_and_reward_of_a_run_that_samples(run):
    run.set_state("running")
    reader = TrialReader(run)
    for step in range(3):
        run.append_step(
            {
                "step": step,
                "loss/total/sum": 0.5,
                "gradient/norm/global": 1.0,
                "reward/all/mean": 0.1 * step,
                "time/ended_ns": 10 * 10**9 * step,
            }
        )
        assert reader.read().seconds_left == (10.0 * (3 - step) if step else None)
    assert reader.read().reward == (0.0, 0.1, 0.2)
    assert as_line(reader.read()).endswith("reward ▁▅█ 0.200  10 s left")
    run.set_state("succeeded")
    assert reader.read().seconds_left is None


# ---- LogTail: the last lines of a file that grows, is restarted, or is very long ----


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rank00000.log"


def append(path, content):
    with path.open("ab") as file:
        file.write(content)


def test_a_log_that_is_not_there_yet_has_nothing_new(path):
    tail = LogTail(path)
    assert not tail.read()
    append(path, b"one\n")
    assert tail.read()
    assert tail.text() == "one"


def test_each_read_returns_only_new_lines(path):
    tail = LogTail(path)
    append(path, b"one\ntw")
    assert tail.read()
    assert tail.text() == "one\ntw"
    assert not tail.read()
    append(path, b"o\nthree\n")
    assert tail.read()
    assert tail.text() == "one\ntwo\nthree"


def test_only_the_last_lines_are_returned(path):
    tail = LogTail(path, lines=3)
    append(path, b"".join(b"%d\n" % number for number in range(10)) + b"rest")
    tail.read()
    assert tail.text() == "8\n9\nrest"


def test_a_restarted_file_is_read_from_the_start(path):
    tail = LogTail(path)
    append(path, b"a long first line of an earlier attempt\n")
    tail.read()
    path.write_bytes(b"new\n")
    assert tail.read()
    assert tail.text() == "new"


def test_of_a_flood_the_beginning_is_passed_over_and_counted(path):
    tail = LogTail(path)
    append(path, b"first\n")
    tail.read()
    append(path, b"x" * 99 + b"\n" + b"y" * 200_000 + b"\nlast\n")
    tail.read()
    assert tail.text().splitlines()[0] == "first"
    assert tail.text().splitlines()[1].startswith("... yyy")
    assert tail.text().splitlines()[1].endswith(" ...")
    assert tail.text().splitlines()[2:] == ["last"]
    assert tail.passed_over == path.stat().st_size - 6 - 64 * 1024


def test_a_letter_cut_by_a_look_is_whole_in_the_end(path):
    tail = LogTail(path)
    euro = "€\n".encode()
    append(path, euro[:2])
    tail.read()
    append(path, euro[2:])
    tail.read()
    assert tail.text() == "€"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"\x1b[31mred\x1b[0m\n", "red"),
        (b"\x1b]0;title\x07words\n", "words"),
        (b" 10%\r 50%\r100%\n", "100%"),
        (b"windows\r\n", "windows"),
        (b"\xff\x00bell\x07\n", "\ufffd\ufffdbell\ufffd"),
        (b"tab\there\n", "tab\there"),
    ],
)
def test_shows_what_a_terminal_would_show(path, written, shown):
    tail = LogTail(path)
    append(path, written)
    tail.read()
    assert tail.text() == shown
