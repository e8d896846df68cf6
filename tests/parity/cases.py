"""One rank of a parity test: the workbench's own step on given documents, results as plain data."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from tests.helpers.ranks import run_ranks
from workbench.faults import planted
from workbench.policy.model import load_policy
from workbench.rollouts.batch import Extension, RolloutBatch
from workbench.rollouts.sampling import Sampling
from workbench.rollouts.support import with_support
from workbench.sharding.mesh import Mesh, make_mesh
from workbench.specs.run import RunSpec
from workbench.train import step as flow


def one_step(settings: dict, documents: list[dict], frozen_clip=None) -> dict:
    """One step of the flow under a spec; gradients, loss, norms and per-token values, whole, from every rank."""
    spec = RunSpec.model_validate(settings)
    return _step(make_mesh(**spec.layout.mesh_sizes), spec, documents, frozen_clip)


def step_on(mesh: Mesh, settings: dict, documents: list[dict], frozen_clip=None) -> dict:
    """The same on a mesh that is there already."""
    return _step(mesh, RunSpec.model_validate(settings), documents, frozen_clip)


def _step(mesh: Mesh, spec: RunSpec, documents: list[dict], frozen_clip=None) -> dict:
    layout = spec.layout
    policy = load_policy(
        spec.model.source,
        mesh=mesh,
        precision=spec.dtypes,
        tied=spec.model.tied,
        seed=spec.model.seed,
        temperature=spec.policy.temperature or 1.0,
        implementation=spec.policy.logprobs,
        fp32_head=spec.policy.fp32_head,
        chunk_tokens=spec.policy.chunk_tokens,
        keep_bytes=spec.policy.keep_bytes,
        shard_parameters=layout.shard_parameters,
        reshard_after_forward=layout.reshard_after_forward,
        unit_layers=layout.unit_layers,
        checkpointing=layout.checkpointing,
        sequence_parallel=layout.sequence_parallel,
        fused_loss=spec.policy.fused_loss,
        pipeline_schedule=layout.pipeline_schedule,
        stages_per_rank=layout.stages_per_rank,
        routing=spec.routing.on,
        depths=spec.prediction.depths,
        lora=spec.lora,
    )
    batch = as_batch(documents)
    with planted(spec.faults) if spec.faults else contextlib.nullcontext():
        rows, totals = flow.prepare_rows(batch, spec, mesh)
        result = flow.run_step(
            policy,
            flow.build_loss(spec.loss),
            rows,
            totals,
            num_source=batch.num_tokens,
            frozen_clip_S=frozen_clip,
            keep_gradients=True,
            level=spec.record.metrics,
            loss_spec=spec.loss,
            fused=spec.policy.fused_loss,
            routing=spec.routing,
            prediction=spec.prediction,
        )
    return {
        "loss": float(result.loss["total"]),
        "gradients": {name: g.double() for name, g in result.gradients.items()},
        "norms": dict(result.norms),
        "tokens": dict(result.tokens),
        "metrics": dict(result.metrics),
        "fallbacks": result.fallbacks,
        "losses": {name: float(value) for name, value in result.loss.items()},
        "loads": result.loads,
        "routes": result.routes,
        "trained_here": sum(int(local.row.loss_mask_T.sum()) for local in rows),
    }


def as_batch(documents: list[dict]) -> RolloutBatch:
    """The batch of documents that may name the rollout that each is a sample of."""
    extra = ("rollout_id", "routes", "supports")
    plain = [{key: value for key, value in document.items() if key not in extra} for document in documents]
    batch = RolloutBatch.from_documents(plain)
    if "supports" in documents[0]:
        sampling = Sampling(top_p=0.9, sampler_logprobs="truncated", trainer_logprobs="truncated")
        batch = with_support(batch, [ids for document in documents for ids in document["supports"]], sampling=sampling)
    if "routes" in documents[0]:
        routes = torch.cat([torch.tensor(document["routes"]) for document in documents])
        of_tokens = Extension(routes, "token", "expert", "Its experts.", at="input")
        batch = replace(batch, extensions={**batch.extensions, "routes": of_tokens})
    if "rollout_id" not in documents[0]:
        return batch
    ids = Extension(torch.tensor([d["rollout_id"] for d in documents]), "document", "rollout index", "Whose sample.")
    return replace(batch, extensions={**batch.extensions, "rollout_ids": ids})


def many_steps(cases: list[tuple[dict, list[dict]]]) -> list[dict]:
    """Several steps in one set of processes; those with axes of the same sizes are on one mesh, as those of a run."""
    meshes, steps = Meshes(), []
    for settings, *more in cases:
        try:
            steps.append(step_on(meshes.of(settings), settings, *more))
        except Exception as error:
            error.add_note(f"in the case of layout {settings.get('layout')}")
            raise
    return steps


class Meshes:
    """Meshes of this job, each created once."""

    def __init__(self) -> None:
        self._known: dict[tuple, Mesh] = {}

    def of(self, settings: dict) -> Mesh:
        """The mesh of some settings of a run; every rank asks for the same ones in the same order."""
        sizes = RunSpec.model_validate(settings).layout.mesh_sizes
        key = tuple(sizes.items())
        if key not in self._known:
            self._known[key] = make_mesh(**sizes)
        return self._known[key]


def in_shared_processes(asked: dict[str, list[tuple]], folder: Path) -> dict[str, list[list[dict]]]:
    """Results of the cases of each name, by rank: names whose cases need as many ranks share one set of processes."""
    results: dict[str, list[list[dict]]] = {}
    worlds: dict[int, list[str]] = {}
    for name, cases in asked.items():
        worlds.setdefault(RunSpec.model_validate(cases[0][0]).layout.world_size, []).append(name)
    for world, names in worlds.items():
        per_rank = run_ranks(many_steps, world, folder / f"{world}", [case for name in names for case in asked[name]])
        steps = [iter(answers) for answers in per_rank]
        for name in names:
            results[name] = [list(islice(of_rank, len(asked[name]))) for of_rank in steps]
    return results
