"""One followed run: every step is sent once, then the end."""

from __future__ import annotations

import time

from tests.helpers.hand_made import make_run, step_record
from tests.helpers.stand_in import stand_in
from tests.unit.report.exporters.test_follow import end_run
from workbench.report.exporters import live
from workbench.report.exporters.live import Followed


class Recorder:
    """A tracker that remembers."""

    def __init__(self):
        self.heard = []

    def live(self, run):
        self.heard.append(("begin", run.id))
        return self

    def log_step(self, step):
        self.heard.append(step.number)

    def end(self, run):
        self.heard.append(("end", run.state))


def test_every_step_once_and_then_the_end(tmp_path):
    run, tracker = make_run(tmp_path / "parity", "a", state="running", done=2), Recorder()
    followed = Followed(run.path, tracker)
    followed.poll()
    followed.poll()
    run.append_step(step_record(2))
    followed.poll()
    assert not followed.done
    end_run(run, "failed")
    followed.poll()
    assert tracker.heard == [("begin", run.path.name), 0, 1, 2, ("end", "failed")]
    assert followed.done


def test_a_pending_run_is_waited_for(tmp_path):
    tracker = Recorder()
    Followed(make_run(tmp_path / "parity", "a", state="pending", done=0).path, tracker).poll()
    assert tracker.heard == []


def test_a_damaged_record_is_said_once_and_ends_nothing(tmp_path, capsys):
    run, tracker = make_run(tmp_path / "parity", "a", state="running", done=4), Recorder()
    metrics = run.path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().replace(b'"step": 1', b'"step": 9'))
    followed = Followed(run.path, tracker)
    followed.poll()
    followed.poll()
    assert capsys.readouterr().out.count("damaged") == 1
    assert tracker.heard == []


def test_the_start_of_a_tracker_is_no_time_of_reading(tmp_path, monkeypatch):
    """The pause after it was twenty times the start, of a second: the next steps arrived half a minute late."""
    run, now_s, read = make_run(tmp_path / "parity", "a", state="running", done=2), [0.0], live.tracked
    monkeypatch.setattr(live, "time", stand_in(time, monotonic=lambda: now_s[0]))

    def reading(run):
        now_s[0] += 2.0
        return read(run)

    class Slow(Recorder):
        def live(self, run):
            now_s[0] += 100.0
            return super().live(run)

    monkeypatch.setattr(live, "tracked", reading)
    followed = Followed(run.path, Slow())
    followed.poll()
    assert followed.reading_s == 2.0
