"""A run from spec to record, on one rank in this process: the effect of each setting on the record."""

from types import SimpleNamespace

import pytest
import torch

from tests.helpers.batches import nasty_documents
from workbench.errors import RecordError
from workbench.records.directory import RunDirectory
from workbench.rollouts import files
from workbench.rollouts.batch import RolloutBatch
from workbench.sharding.mesh import single_process_mesh
from workbench.specs.run import RunSpec
from workbench.train import checkpoint, worker
from workbench.train.optimizer import build_optimizer

BATCH = RolloutBatch.from_documents(nasty_documents(4), temperature=0.7)
SGD = {"name": "sgd", "learning_rate": 0.05}


def created(project, name, **settings):
    if not (project / "rollouts").exists():
        files.save(BATCH, project / "rollouts")
    spec = {
        "model": {"source": "tiny-qwen3"},
        "precision": "float64",
        "device": "cpu",
        "data": {"path": "rollouts"},
        "optimizer": SGD,
    }
    return RunDirectory.create(project / "runs", name, RunSpec.model_validate(spec).merged(settings))


def done(project, name, **settings):
    run = created(project, name, **settings)
    worker.run_here(run, project)
    assert run.status == "succeeded"
    return run


def tokens(run, step, name):
    return run.read_tensors(f"step{step:04d}.tokens")[name]


def gradients(run, step):
    return torch.cat([g.flatten() for g in run.read_tensors(f"step{step:04d}.gradients").values()])


def test_the_temperature_is_that_of_the_rollouts_unless_given(tmp_path):
    unset = tokens(done(tmp_path, "unset"), 0, "policy_logprobs")
    same = tokens(done(tmp_path, "same", policy={"temperature": 0.7}), 0, "policy_logprobs")
    other = tokens(done(tmp_path, "other", policy={"temperature": 1.0}), 0, "policy_logprobs")
    assert torch.equal(unset, same)
    assert (unset - other).abs().max() > 0.01


def as_one_of_many(run, project):
    worker._rank(run, project, rank=0, join_job=False)


@pytest.mark.parametrize("do", [worker.run_here, as_one_of_many])
def test_all_of_a_layout_reaches_the_mesh_and_the_policy(do, monkeypatch, tmp_path):
    """Numbers are the same without most of it, so no number would show it."""
    layout = {
        "dp": 3,
        "cp": 4,
        "tp": 2,
        "attention": "hybrid",
        "ulysses": 2,
        "sequence_parallel": True,
        "shard_parameters": True,
        "reshard_after_forward": False,
        "unit_layers": 3,
        "checkpointing": True,
    }
    asked = {"attention": "hybrid"}

    def make_mesh(*, device, alone, **sizes):
        asked.update(sizes)
        return single_process_mesh(device)

    def simulate(rank, *, device, timeout_s, **sizes):
        rank(make_mesh(device=device, alone=True, **sizes))

    def load_policy(source, *, mesh, **settings):
        asked.update(settings)
        raise RecordError("load_policy", rule="far enough", fix="ask for less")

    for module, seam in ((worker, make_mesh), (worker, simulate), (checkpoint, load_policy)):
        monkeypatch.setattr(module, seam.__name__, seam)
    with pytest.raises(RecordError, match="far enough"):
        do(created(tmp_path, "asked", layout=layout), tmp_path)
    assert {name: asked[name] for name in layout} == layout


def test_documents_are_taken_in_order_and_around(tmp_path):
    run = done(tmp_path, "around", steps=3, data={"documents_per_step": 4})
    assert BATCH.num_documents == 9
    for step, documents in enumerate(([0, 1, 2, 3], [4, 5, 6, 7], [8, 0, 1, 2])):
        expected = BATCH.loss_mask_T & torch.isin(BATCH.document_ids_T, torch.tensor(documents))
        assert expected.any()
        assert torch.equal(tokens(run, step, "trained"), expected)


def test_the_weights_move_by_the_clipped_gradient(tmp_path):
    free = done(tmp_path, "free", steps=2)
    held = done(tmp_path, "held", steps=2, optimizer={"max_grad_norm": 1e-9})
    start = gradients(free, 0)
    assert torch.equal(gradients(held, 0), start)  # the recorded gradient is the one before clipping
    assert held.steps()[0]["gradient/norm/global"] == pytest.approx(float(start.norm()), rel=1e-12)
    assert held.steps()[0]["gradient/clip/coefficient"] == pytest.approx(1e-9 / float(start.norm()), rel=1e-12)
    assert free.steps()[0]["gradient/clip/coefficient"] == 1.0
    assert float((gradients(free, 1) - start).norm() / start.norm()) > 1e-3
    assert 0 < float((gradients(held, 1) - start).norm() / start.norm()) < 1e-6


@pytest.mark.parametrize(("name", "moved"), [("sgd", -0.3), ("adamw", -0.1)])
def test_each_optimizer_matches_its_name(name, moved):
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    model.weight.grad = torch.full_like(model.weight, 3.0)
    spec = RunSpec(optimizer={"name": name, "learning_rate": 0.1})
    policy = SimpleNamespace(model=model, mesh=single_process_mesh())
    build_optimizer(policy, spec).step()
    assert model.weight.item() == pytest.approx(moved, rel=1e-6)  # the first step of AdamW knows the sign only


def test_clip_decisions_of_another_run_act_step_by_step(tmp_path):
    first = done(tmp_path, "first", steps=2, data={"documents_per_step": 4})
    settings = {
        "steps": 2,
        "data": {"documents_per_step": 4},
        "loss": {"surrogate": {"clip_low": 0.9, "clip_high": 9.0}},
    }
    frozen = done(tmp_path, "frozen", frozen_clip="first", **settings)
    decided = [tokens(first, step, "clipped") for step in range(2)]
    assert not torch.equal(*decided)
    for step, clipped in enumerate(decided):
        assert clipped.any()
        assert torch.equal(tokens(frozen, step, "clipped"), clipped)
        assert not torch.equal(tokens(frozen, step, "would_clip"), clipped)


@pytest.mark.parametrize("started", [True, False])
def test_clip_decisions_of_a_run_that_did_not_finish_are_refused(started, tmp_path):
    if started:
        unfinished = created(tmp_path, "first")
        unfinished.write_tensors("step0000.tokens", {"clipped": torch.zeros(BATCH.num_tokens, dtype=torch.bool)})
    run = created(tmp_path, "frozen", frozen_clip="first")
    with pytest.raises(RecordError, match="first"):
        worker.run_here(run, tmp_path)
    assert run.status == "failed"
    assert run.failure()["exception"] == "RecordError"
