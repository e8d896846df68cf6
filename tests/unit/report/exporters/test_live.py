"""One followed run: every step is sent once, then the end."""

from __future__ import annotations

from tests.helpers.hand_made import make_run, step_record
from tests.unit.report.exporters.test_follow import end_run
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
