"""The pass that computes old log-probabilities, bit for bit as the optimizer steps that train on the same documents.

Letters: S tokens of a batch | L mixtures of experts | k experts of a token.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import Tensor

from workbench.policy.model import Policy
from workbench.rollouts.batch import RolloutBatch
from workbench.sharding.mesh import Mesh
from workbench.specs.groups import AdvantageSpec
from workbench.specs.mixtures import RoutingSpec
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.routes import NOTED, StepRoutes
from workbench.train.rows import in_order


def with_advantages(spec: RunSpec) -> RunSpec:
    """Return the spec for steps on documents with advantages already computed, from all that was sampled with them."""
    return spec.model_copy(update={"data": spec.data.model_copy(update={"advantages": AdvantageSpec()})})


def document_logprobs(
    policy: Policy, batch: RolloutBatch, spec: RunSpec, mesh: Mesh, *, project: Path | None = None
) -> Tensor:
    """Log-probabilities of the trained tokens of documents, bitwise equal to those of a run's own steps; 0 elsewhere.

    Documents are selected, packed, split and sent through the head as in the optimizer steps that train on them, so a
    policy with the weights of this call starts each step at a ratio of exactly 1. A document that `in_order` selects
    again keeps its first values.

    Collective. The same on every rank.

    Shapes: [S], in the order of the batch. Units: nats, at the temperature of each token, or of the policy.
    """
    return old_pass(policy, batch, spec, mesh, project=project)[0]


def old_pass(
    policy: Policy, batch: RolloutBatch, spec: RunSpec, mesh: Mesh, *, project: Path | None = None
) -> tuple[Tensor, Tensor | None]:
    """`document_logprobs`, and the routes of the same pass if the run replays them (`routing.replay: old`).

    Shapes: [S] and [S, mixtures, experts of a token], in the order of the batch.
    """
    replayed = RoutingSpec(replay="recorded") if spec.routing.replay == "recorded" else RoutingSpec()
    spec = spec.model_copy(update={"routing": NOTED if spec.routing.replay == "old" else replayed})
    spec, loss, per_step = with_advantages(spec), flow.build_loss(spec.loss, project), spec.data.documents_per_step
    steps = 1 if per_step is None else -(-batch.num_documents // per_step)
    logprobs_S: Tensor | None = None
    routes_SLk: Tensor | None = None
    missing_S = batch.loss_mask_T.clone()
    for documents in itertools.islice(in_order(batch.as_source(), per_step), steps):
        rows, totals = flow.prepare_rows(documents, spec, mesh)
        noting = StepRoutes(policy, rows, spec.routing, totals) if spec.routing.on else None
        of_step_S = flow.row_logprobs(
            policy,
            loss,
            rows,
            totals,
            num_source=batch.num_tokens,
            loss_spec=spec.loss,
            fused=spec.policy.fused_loss,
            noting=noting,
        )
        if noting is not None:
            of_step_SLk = noting.in_source_order(batch.num_tokens)
            if of_step_SLk is not None:
                routes_SLk = of_step_SLk if routes_SLk is None else torch.where(routes_SLk < 0, of_step_SLk, routes_SLk)
        logprobs_S = torch.where(missing_S, of_step_S, 0.0 if logprobs_S is None else logprobs_S)
        missing_S[documents.source_T] = False
    assert logprobs_S is not None, "a batch has documents, so there is a step"
    return logprobs_S, routes_SLk
