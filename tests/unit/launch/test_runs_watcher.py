"""The thread that watches the runs of a job in turn; `test_agent` and `parity/test_shared_jobs` run it in real jobs."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from workbench.launch.runs_watcher import RunsWatcher, over, own_ranks
from workbench.records.directory import RunDirectory
from workbench.records.failures import EXIT_CODES
from workbench.records.provenance import process_alive, project_root, this_process
from workbench.sharding import flight
from workbench.specs.run import RunSpec
from workbench.train.watched import flight_path


def test_ranks_are_children_of_this_process_and_those_that_ended(tmp_path):
    run = RunDirectory.create(tmp_path, "x", RunSpec(layout={"cp": 3}))
    for rank in range(3):
        flight.start(flight_path(run, rank), rank)
        flight.stop()
    assert own_ranks(run) == {}, "this process is not its own child"
    script = (
        "import sys; from pathlib import Path; from workbench.sharding import flight; "
        "flight.start(Path(sys.argv[1]), 1); print(1, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(flight_path(run, 1))],
        text=True,
        cwd=project_root(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        child.stdout.readline()
        assert own_ranks(run) == {1: child.pid}
        child.stdin.close()
        child.wait()
        assert own_ranks(run) == {1: child.pid}


def two_runs(folder):
    return [RunDirectory.create(folder, name, RunSpec(layout={"cp": 2})) for name in ("first", "second")]


def test_exit_codes_belong_to_the_run_that_was_watched_last(tmp_path):
    first, second = two_runs(tmp_path)
    watcher = RunsWatcher([first.path, second.path], {0: 1, 1: 2})
    for rank in (0, 1):
        first.write_exit(rank, {}, None)
    until = time.monotonic() + 60
    while watcher._watchdog is None or watcher._watchdog.run.path != second.path:
        assert time.monotonic() < until
        time.sleep(0.01)
    watcher.end({1: -9, 0: 1})
    assert not (first.path / EXIT_CODES).exists()
    assert json.loads((second.path / EXIT_CODES).read_text()) == {"1": -9, "0": 1}
    for run in (first, second):
        assert process_alive(**{key: run.state["agent"][key] for key in ("pid", "create_time")})
        assert run.state["agent"]["pid"] == this_process()["pid"]


def test_a_run_is_over_when_all_ranks_have_recorded_their_exit_or_it_was_cancelled_before(tmp_path):
    first, second = two_runs(tmp_path)
    first.write_exit(0, {}, None)
    assert not over(first)
    first.write_exit(1, {}, None)
    assert over(first)
    assert not over(second)
    second.set_state("cancelled")
    assert over(second)
