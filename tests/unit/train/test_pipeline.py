"""A step in stages: the gradients of torch's own runtime, and whole runs whose records are those of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import run_ranks
from workbench.policy.model import load_policy
from workbench.records.certificate import read_certificate
from workbench.records.directory import RunDirectory
from workbench.rollouts.batch import RolloutBatch
from workbench.sharding.gradients import full_gradients, sum_gradients
from workbench.sharding.mesh import make_mesh
from workbench.specs.run import RunSpec
from workbench.train.pipeline import run_stages
from workbench.train.step import prepare_rows
from workbench.train.worker import run_here

PROJECT = Path(__file__).parents[3]
ROWS, TOKENS = 4, 8


def equal_rows():
    """One document of eight tokens in each row, so that torch's runtime, of one shape, can run them."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 19, (ROWS, TOKENS), generator=draw).tolist()
    documents = [
        {
            "tokens": each,
            "loss_mask": [0, *[1] * (TOKENS - 1)],
            "advantages": [1.0] * TOKENS,
            "old_logprobs": [-1.0] * TOKENS,
        }
        for each in tokens
    ]
    return RolloutBatch.from_documents(documents)


class Part(torch.nn.Module):
    """One stage, as torch's runtime calls it."""

    def __init__(self, policy, stage, attention):
        super().__init__()
        self.model, self.stages, self.stage, self.attention = policy.model, policy.stages, stage, attention

    def forward(self, value, positions):
        name = "input_ids" if self.stage == 0 else "inputs_embeds"
        return self.stages.forward(
            self.stage, **{name: value}, position_ids=positions, use_cache=False, shard=self.attention
        )


def both_runtimes(schedule):
    """Gradients of a plain sum of log-probabilities, by torch's runtime and by ours, on every rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    mesh = make_mesh(pp=2)
    spec = RunSpec.model_validate(
        {"precision": "float64", "layout": {"pp": 2}, "data": {"micro_batches": ROWS}, "loss": {"name": "grpo"}}
    )
    rows, _ = prepare_rows(equal_rows(), spec, mesh)

    def fresh():
        return load_policy("tiny-qwen3", mesh=mesh, precision="float64", tied=False, pipeline_schedule=schedule)

    def loss(policy, hidden_TD, targets_T):
        return policy.token_logprobs(hidden_TD, targets_T, outputs=("entropy",)).logprobs_T.sum()

    theirs, own, at = fresh(), fresh(), mesh["pp"].rank
    tokens, positions, targets = (
        torch.stack([getattr(local.row, name) for local in rows]) for name in ("tokens_T", "positions_T", "targets_T")
    )
    stage = PipelineStage(Part(theirs, at, rows[0].attention), at, 2, mesh.device, group=mesh["pp"].group)
    runtime = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule](
        stage, ROWS, loss_fn=lambda out, target: loss(theirs, out[0], target[0]), scale_grads=False
    )
    runtime.step(*([tokens] if at == 0 else []), positions=positions, target=targets if at else None)

    run_stages(own, rows, lambda local, hidden_TD: (loss(own, hidden_TD, local.row.targets_T), lambda: None))
    for policy in (theirs, own):
        sum_gradients(policy.model, policy.shards, mesh)
    return [full_gradients(policy.model, policy.shards, mesh) for policy in (theirs, own)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gradients_are_those_of_torchs_runtime(schedule, tmp_path):
    for theirs, own in run_ranks(both_runtimes, 2, tmp_path, schedule):
        assert theirs.keys() == own.keys()
        for name, gradient in theirs.items():
            assert float(gradient.norm()) > 0, name
            torch.testing.assert_close(own[name], gradient, rtol=1e-13, atol=1e-13, msg=name)


LOSS = {"surrogate": {"clip_low": 0.2, "clip_high": 0.28}, "kl": {"coefficient": 0.05}}


def run_of(folder, layout, **more):
    spec = {
        "model": {"source": "tiny-qwen3"},
        "precision": "float64",
        "loss": LOSS,
        "data": {"documents_per_step": 24, "micro_batches": 4 // layout.get("dp", 1)},
        "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.01, "weight_decay": 0.1},
        "record": {"metrics": "full", "checkpoint_every": 2, "certificate": True},
        "layout": layout,
        "steps": 2,
    }
    run = RunDirectory.create(folder, "run", RunSpec.model_validate(spec | more))
    run_here(run, PROJECT)
    return run


LAYOUTS = {
    "pp2": {"pp": 2},
    "gpipe": {"pp": 2, "pipeline_schedule": "gpipe"},
    "interleaved": {"pp": 2, "pipeline_schedule": "interleaved_1f1b", "stages_per_rank": 2},
    "pp3_dp2_cp2": {"pp": 3, "dp": 2, "cp": 2, "order": "zigzag"},
}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("one"), {})


def numbers(run):
    skipped = ("time/", "memory/", "certificate", "gradient_norms")
    return [{k: v for k, v in line.items() if not k.startswith(skipped)} for line in run.steps()]


def checkpoint_of(run):
    from safetensors.torch import load_file

    [folder] = run.checkpoints().values()
    return {
        f"{kind}/{key}": value
        for kind in ("weights", "optimizer")
        for key, value in load_file(folder / f"{kind}.safetensors").items()
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_record_of_a_run_is_that_of_one_rank(name, one, tmp_path):
    """Metrics, clip, every gradient, tokens, weights and moments after two clipped updates, and the certificate."""
    run = run_of(tmp_path, LAYOUTS[name])
    for own, expected in zip(numbers(run), numbers(one), strict=True):
        assert own.keys() == expected.keys()
        assert own["gradient/clip/coefficient"] < 1
        for key, value in expected.items():
            assert own[key] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), key
    for own, expected in zip(run.steps(), one.steps(), strict=True):
        assert own["gradient_norms"].keys() == expected["gradient_norms"].keys()
    for kind in ("gradients", "tokens"):
        own, expected = (each.read_tensors(f"step0001.{kind}") for each in (run, one))
        assert own.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(own[key], value, rtol=1e-9, atol=1e-12, msg=key)
    own, expected = checkpoint_of(run), checkpoint_of(one)
    assert own.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(own[key], value, rtol=1e-9, atol=1e-12, msg=key)
    own, expected = (read_certificate(each, 1) for each in (run, one))
    assert list(own.fingerprints) == list(expected.fingerprints)
    assert own.differing_replicas == ()
    assert run.exits()[0]["coordinates"]["pp"] == 0


def test_a_checkpoint_of_one_rank_is_read_and_written_by_stages(one, tmp_path):
    """Each stage takes its parameters and moments, and all are written under the names of the whole model."""
    from workbench.sharding.simulated import simulate
    from workbench.train.checkpoint import build_policy, load_checkpoint, save_checkpoint
    from workbench.train.optimizer import build_optimizer

    [folder] = one.checkpoints().values()
    again = RunDirectory.create(tmp_path, "again", one.spec)

    def rank(mesh):
        policy = build_policy(one.spec, mesh, PROJECT, temperature=1.0)
        optimizer = build_optimizer(policy, one.spec)
        load_checkpoint(folder, policy, optimizer)
        save_checkpoint(again, 2, policy, optimizer)

    simulate(rank, pp=3)
    own, expected = checkpoint_of(again), checkpoint_of(one)
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[key], value) for key, value in expected.items())
