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
from workbench.launch.waits import find_waits
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
        # every document is cut, so that every step has the same exchanges before the sum
        base=SMALL | {"layout": {"cp": 2, "order": "document_zigzag"}, "faults": ["skipped_collective"]},
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


STAGES = {"layout": {"pp": 2}, "data": {"documents_per_step": 4, "micro_batches": 3}}
STUCK = """
import time

import torch


def loss(inputs):
    stuck = CALLS.append(1) or len(CALLS) > 4
    time.sleep(1000 if stuck else 0)
    return torch.exp(inputs.policy_logprobs_T - inputs.old_logprobs_T) * -inputs.advantages_T


CALLS = []
"""


def test_a_stage_that_hangs_is_named_with_the_transfer_that_the_other_waits_for(tmp_path):
    """The loss of the second step's second micro-batch never ends; only the last stage evaluates it."""
    file = tmp_path / "stuck.py"
    file.write_text(STUCK)
    base = SMALL | STAGES | {"loss": {"name": f"{file}:loss"}, "timeout_s": 5.0}
    ablation = AblationSpec(reference="hang", base=base, configurations={"hang": {}})
    [run] = launch(ablation, tmp_path / "runs", where="processes", project=PROJECT).wait(timeout_s=120)
    assert run.status == "failed"
    failure = run.failure()
    assert failure["coordinates"]["pp"] == 1, failure["message"]
    assert failure["message"].startswith("rank 1 has not come to stage 1 > 0, micro-batch "), failure["message"]
    assert "train/pipeline.py:" in failure["message"]


def test_stages_record_each_transfer_under_one_number_on_both_ranks(tmp_path):
    ablation = AblationSpec(reference="pp", base=SMALL | STAGES, configurations={"pp": {}})
    [run] = launch(ablation, tmp_path, where="processes", project=PROJECT).wait(timeout_s=120)
    assert run.status == "succeeded"
    views = flight.read_all(run.path / "ranks")
    assert find_waits(views, range(2), ended=()) == []
    transfers = [
        [(entry.group, entry.seq, entry.name, entry.shape) for entry in view.entries if entry.sender is not None]
        for view in views.values()
    ]
    assert sorted(transfers[0]) == sorted(transfers[1])
    names = {name for _, _, name, _ in transfers[0]}
    assert names == {
        *(f"stage {way}, micro-batch {number}" for way in ("0 > 1", "1 > 0") for number in range(3)),
        "stage, shared weight 0",
    }
    assert len(transfers[0]) == 3 * (2 * 3 + 2), "three steps of three micro-batches, and the tied head"


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
