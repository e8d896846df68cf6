"""One small step with and without a fault, on simulated ranks in float64, and the differences."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.helpers.bars import distances
from workbench.faults import load_fault, planted
from workbench.policy.model import Policy, load_policy
from workbench.prove.documents import draw_documents, to_batch
from workbench.rollouts.batch import RolloutBatch
from workbench.sharding.gradients import weight_norms
from workbench.sharding.mesh import Mesh
from workbench.sharding.simulated import simulate
from workbench.specs.reading import merge
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.routes import with_routes

BASE = {
    "model": {"source": "tiny-qwen3", "seed": 3},
    "precision": "float64",
    "loss": {"name": "dapo", "kl": {"coefficient": 0.07}},
    "layout": {"block_tokens": 2},
    "record": {"metrics": "full"},
}
"""What the settings of a fault are laid over."""

SAME = 1e-12


@dataclass(frozen=True)
class Found:
    """Result of a step.

    Attributes:
        gradients: whole, by parameter.
        numbers: what is reported: terms of the loss, metrics, the norm before the clip.
        norms: by parameter, as reported.
        tokens: per-token values in the order of the batch, [S].
        counts: trained tokens and documents of the step.
        weights: norm of each weight before the step.
    """

    gradients: dict[str, Tensor]
    numbers: dict[str, float]
    norms: dict[str, float]
    tokens: dict[str, Tensor]
    counts: dict[str, int]
    weights: dict[str, float]


@dataclass(frozen=True)
class Pair:
    """The right step and the wrong one."""

    right: Found
    wrong: Found

    @property
    def wrong_gradients(self) -> list[str]:
        """Return the parameters with a wrong gradient."""
        far = distances(self.wrong.gradients, self.right.gradients)
        return [name for name, distance in far.items() if not distance <= SAME]

    @property
    def wrong_numbers(self) -> list[str]:
        """Return the wrong reported numbers: the loss, metrics, norms that do not match the step's own gradient."""
        right, wrong = self.right.numbers, self.wrong.numbers
        assert right.keys() == wrong.keys(), "a fault changes numbers, not which there are"
        results = [key for key in right if not key.startswith("gradient/") and not _same(wrong[key], right[key])]
        own = {name: float(gradient.norm()) for name, gradient in self.wrong.gradients.items()}
        return results + [f"norm of {name}" for name, norm in self.wrong.norms.items() if not _same(norm, own[name])]

    @property
    def factor(self) -> float:
        """Norm of the wrong gradient over that of the right one."""
        return float(whole(self.wrong).norm() / whole(self.right).norm())

    @property
    def cosine(self) -> float:
        """Between both gradients."""
        return float(torch.nn.functional.cosine_similarity(whole(self.wrong), whole(self.right), dim=0))

    def factor_of(self, name: str) -> float:
        """The same factor for one parameter, by its whole name or the end of it."""
        chosen = [key for key in self.right.gradients if key.endswith(name)]
        wrong, right = (
            torch.cat([result.gradients[key].flatten() for key in chosen]) for result in (self.wrong, self.right)
        )
        return float(wrong.norm() / right.norm())

    def ratio(self, number: str) -> float:
        """Return a reported number over the correct one."""
        return self.wrong.numbers[number] / self.right.numbers[number]


def shown(name: str, **more: object) -> Pair:
    """Both steps where a fault shows, under its settings and further ones."""
    settings = merge(merge(BASE, load_fault(name).shows_in), more)
    return _pair(name, settings)


def hidden(name: str) -> Pair:
    """Both steps where it hides."""
    fault = load_fault(name)
    return _pair(name, merge(merge(BASE, fault.shows_in), fault.hidden_in or {}))


def whole(found: Found) -> Tensor:
    """All gradients as one vector."""
    return torch.cat([gradient.flatten() for gradient in found.gradients.values()])


def _pair(name: str, settings: dict) -> Pair:
    text = RunSpec.model_validate(settings).model_dump_json()  # with its defaults: the same step is taken once
    return Pair(_step(text), _step(text, name))


@functools.cache
def _step(settings: str, fault: str | None = None) -> Found:
    spec = RunSpec.model_validate_json(settings)
    layout, batch = spec.layout, documents(spec)

    def rank(mesh: Mesh) -> Found:
        policy = _policy(mesh, spec)
        weights = weight_norms(policy.model, policy.shards, mesh)
        rows, totals = flow.prepare_rows(batch, spec, mesh)
        result = flow.run_step(
            policy,
            flow.build_loss(spec.loss),
            rows,
            totals,
            num_source=batch.num_tokens,
            keep_gradients=True,
            level=spec.record.metrics,
            loss_spec=spec.loss,
            fused=spec.policy.fused_loss,
            routing=spec.routing,
            prediction=spec.prediction,
        )
        norm = flow.clip_gradients(policy, result.norms, None)
        numbers = {f"loss/{name}": float(scalar) for name, scalar in result.loss.items()} | dict(result.metrics)
        return Found(
            dict(result.gradients),
            numbers | {"gradient/norm/global": norm},
            dict(result.norms),
            dict(result.tokens),
            {"tokens": result.totals.tokens, "documents": result.totals.documents},
            weights,
        )

    with planted([fault] if fault else []):
        return simulate(rank, **layout.mesh_sizes)[0]


def documents(spec: RunSpec) -> RolloutBatch:
    """Return ten documents near the policy at its temperature, with every field that a loss may read.

    They are preference pairs where the loss needs them, and have drawn routes where these are replayed.
    """
    batch = _documents(spec.policy.temperature or 1.0, spec.loss.needs_pairs)
    return with_routes(batch, drawn_routes(batch.num_tokens)) if spec.routing.replays else batch


def drawn_routes(tokens: int) -> Tensor:
    """[S, L, k] routes of a sampler whose routers choose otherwise, of the tiny mixture: 2 of 4 experts, 2 layers."""
    draw = torch.Generator().manual_seed(5)
    return torch.rand(tokens, 2, 4, generator=draw).argsort(dim=-1)[..., :2]


@functools.cache
def _documents(temperature: float, pairs: bool) -> RolloutBatch:
    return to_batch(draw_documents("faults", replace(_model(0), temperature=temperature), pairs=pairs))


def _policy(mesh: Mesh, spec: RunSpec) -> Policy:
    asked, layout = spec.policy, spec.layout
    temperature = asked.temperature or 1.0
    special = (
        layout.checkpointing or max(layout.tp, layout.pp) > 1 or spec.prediction.on or spec.routing.on or spec.lora.on
    )
    if special or spec.model.model_dump() != RunSpec.model_validate(BASE).model.model_dump():
        return load_policy(
            spec.model.source,
            mesh=mesh,
            precision="float64",
            temperature=temperature,
            implementation=asked.logprobs,
            chunk_tokens=asked.chunk_tokens,
            tied=spec.model.tied,
            seed=spec.model.seed,
            sequence_parallel=layout.sequence_parallel,
            checkpointing=layout.checkpointing,
            routing=spec.routing.on,
            depths=spec.prediction.depths,
            lora=spec.lora,
        )
    whole_policy = _model(mesh["dp_cp"].rank)
    implementation = whole_policy.implementation if asked.logprobs == "auto" else asked.logprobs
    return replace(
        whole_policy, mesh=mesh, temperature=temperature, implementation=implementation, chunk_tokens=asked.chunk_tokens
    )


@functools.cache
def _model(number: int) -> Policy:
    """A copy of the decoder for each simulated rank."""
    return load_policy("tiny-qwen3", precision="float64", seed=3)


def _same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)
