"""The benchmark runs its declared workloads, pairs its measurements, and reports a missed bar."""

from __future__ import annotations

import json
import sys

import pytest

from experiments.benchmarks import launch_overhead
from experiments.benchmarks.launch_overhead import BARS, format_record, measure, ranks_ready
from tests.helpers import warm
from workbench.atomic import from_json, to_json
from workbench.errors import LaunchError
from workbench.launch import component, processes
from workbench.records.provenance import process_alive


def test_a_torchx_job_and_the_bare_command_both_run_the_ranks(tmp_path, monkeypatch):
    warm.start_from(monkeypatch, launch_overhead, component)
    for seconds in (launch_overhead._torchx_s, launch_overhead._bare_s):
        run = launch_overhead._run(tmp_path)
        assert 0.0 < seconds(run) < 120.0
        assert sorted(file.name for file in run.path.glob("ready*")) == ["ready0", "ready1"]


def test_ranks_of_the_pool_are_timed_and_the_server_is_gone_afterwards(monkeypatch):
    servers = []
    start = processes.start

    def noting(*arguments, **more):
        job = start(*arguments, **more)
        servers.append(processes.server_process())
        return job

    monkeypatch.setattr(processes, "start", noting)
    monkeypatch.setattr(processes, "sys", sys)
    monkeypatch.setattr(processes, "PRELOAD", ("numpy", "torch", "torch.distributed"))
    measured = ranks_ready(ranks=(2, 3), later=2)
    assert set(measured) == {"first_s", "2", "3"}
    assert len(measured["3"]["later_s"]) == 2
    assert 0.0 < measured["2"]["later_median_s"] < measured["first_s"]  # the first one loads torch
    assert servers == [servers[0]] * 5
    assert not process_alive(**servers[0])


def fake_times(monkeypatch, *, torchx, bare, ready):
    torchx, bare = iter(torchx), iter(bare)
    monkeypatch.setattr(launch_overhead, "_torchx_s", lambda run: next(torchx))
    monkeypatch.setattr(launch_overhead, "_bare_s", lambda run: next(bare))
    place = {
        "first_s": 4.0,
        "2": {"later_s": [ready], "later_median_s": ready},
        "4": {"later_s": [9.0], "later_median_s": 9.0},
    }
    monkeypatch.setattr(launch_overhead, "ranks_ready", lambda later: place)
    slower = place | {"2": {"later_s": [ready + 0.125], "later_median_s": ready + 0.125}}
    monkeypatch.setattr(launch_overhead, "_in_a_kernel", lambda later: slower)


def test_the_overhead_is_taken_pair_by_pair_without_the_first(monkeypatch):
    fake_times(monkeypatch, torchx=[100.0, 3.0, 9.5, 4.25], bare=[1.0, 2.75, 9.0, 3.25], ready=0.125)
    reports = []
    record = measure(pairs=3, report_progress=reports.append)
    assert record["torchx_job"]["torchx_s"] == [3.0, 9.5, 4.25]
    assert record["torchx_job"]["overhead_s"] == [0.25, 0.5, 1.0]
    assert record["torchx_job"]["overhead_median_s"] == 0.5
    assert record["bars"] == {
        "torchx_overhead_s": {"bar": 0.5, "median": 0.5, "holds": True},
        "ranks_ready_s": {"bar": 0.3, "median": 0.25, "holds": True},
    }  # the slower place counts
    assert len(reports) == 6
    assert from_json(to_json(record)) == record


@pytest.mark.parametrize(("torchx", "ready", "missed"), [(2.51, 0.1, "torchx_overhead_s"), (2.0, 0.2, "ranks_ready_s")])
def test_a_missed_bar_is_reported(monkeypatch, torchx, ready, missed):
    fake_times(monkeypatch, torchx=[2.0, torchx], bare=[2.0, 2.0], ready=ready)
    record = measure(pairs=1)
    assert {name: bar["holds"] for name, bar in record["bars"].items()} == {name: name != missed for name in BARS}
    text = format_record(record)
    [line] = [line for line in text.splitlines() if "MISSED" in line]
    assert line.startswith(missed)
    assert "ranks ready in a kernel: 2 ranks" in text


def test_the_record_names_no_machine(monkeypatch):
    fake_times(monkeypatch, torchx=[2.0, 2.0], bare=[2.0, 2.0], ready=0.1)
    text = json.dumps(measure(pairs=1))
    assert '"torch"' in text
    assert "/home" not in text
    assert "/tmp" not in text


def test_ranks_that_fail_are_no_measurement(tmp_path, monkeypatch):
    warm.start_from(monkeypatch, launch_overhead)
    monkeypatch.setattr(launch_overhead, "TRIVIAL", "tests.helpers.no_such_worker")
    with pytest.raises(LaunchError, match="No module named"):
        launch_overhead._bare_s(launch_overhead._run(tmp_path))
