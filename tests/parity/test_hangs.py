"""The planted hang in the real worker: which rank, which collective, where it stood, within half a minute.

`tests/unit/launch/test_agent.py` and `test_watchdog.py` have the other ways to wait, with ranks that only pretend.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.stand_in import stand_in
from workbench.faults import masks, planted
from workbench.launch.ablation import AblationSpec
from workbench.launch.run import launch
from workbench.records.directory import RunDirectory
from workbench.sharding import flight
from workbench.sharding.mesh import Axis, single_process_mesh
from workbench.specs.run import RunSpec
from workbench.train import step
from workbench.train.watched import flight_path
from workbench.train.worker import run_here

PROJECT = Path(__file__).parents[2]
SMALL = {
    "steps": 3,
    "device": "cpu",
    "model": {"source": "tiny-qwen3"},
    "data": {"documents_per_step": 4},
    "record": {"gradients": "none", "tokens": False},
}


@pytest.mark.parametrize("where", ["torchx", "processes"])
def test_the_rank_that_skipped_a_collective_is_named(where, tmp_path):
    ablation = AblationSpec(
        reference="hang",
        base=SMALL | {"layout": {"cp": 2}, "faults": ["skipped_collective"]},
        configurations={"hang": {}},
    )
    [run] = launch(ablation, tmp_path, where=where, project=PROJECT).wait(timeout_s=120)
    ended_s = time.time()
    assert run.status == "failed"
    # gloo may abort a rank at once, or let both wait: then the last thing that rank 0 did was to come to it
    assert ended_s - flight.read(flight_path(run, 0)).entries[-1].entered_ns / 1e9 < 30
    failure = run.failure()
    assert (failure["rank"], failure["cause"]) == (1, "hang")
    assert failure["coordinates"] == {"dp": 0, "cp": 1, "tp": 0}
    assert failure["message"].startswith("rank 1 has not come to all_sum_ over dp_cp [#")
    assert "sharding/gradients.py:" in failure["message"]
    assert "it skipped that all_sum_ of " in failure["message"]
    assert "in run_step" in failure["stack"], "past the sum that it left out"
    assert failure["also_failed"] == [0]
    assert failure["also"][0].startswith("all_sum_ over dp_cp [#")
    assert [record["step"] for record in run.steps()] == [0]


def test_a_run_of_one_rank_here_keeps_no_record_of_collectives(tmp_path):
    run = RunDirectory.create(tmp_path, "one", RunSpec.model_validate(SMALL | {"steps": 1}))
    run_here(run, PROJECT)
    assert not flight_path(run, 0).exists()


def test_the_straggler_arrives_late_once(monkeypatch):
    """In its second step, also where all ranks are simulated in one process and share the fault."""
    slept, calls = [], []
    monkeypatch.setattr(masks, "time", stand_in(time, sleep=lambda seconds: slept.append((len(calls), seconds))))
    monkeypatch.setattr(step, "sum_gradients", lambda *arguments: calls.append(arguments))
    meshes = [
        replace(
            single_process_mesh(),
            axes=single_process_mesh().axes | {name: Axis(name, 3, rank) for name in ("dp", "dp_cp")},
        )
        for rank in range(3)
    ]
    with planted(["straggler"]):
        for mesh in meshes * 3:
            step.sum_gradients("model", "shards", mesh)
    assert slept == [(4, masks.LATE_S)]
    assert len(calls) == 9
    assert masks.LATE_S > 20, "later than ranks are named by default"
