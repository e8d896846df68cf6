"""A user's own loss in a run: the interface of a trainer's function, and the file in the record.

Letters: T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.own import TrainerLoss, own_file
from workbench.policy.logprobs import TokenLogprobs
from workbench.reduction.evaluate import PARTIAL
from workbench.reduction.partial import Scalar
from workbench.reduction.weights import StepTotals
from workbench.rollouts.targets import TrainingRow
from workbench.sharding.mesh import Mesh
from workbench.specs.losses import LossSpec
from workbench.specs.losses.own import OwnLoss
from workbench.train.rows import LocalRow


@dataclass(frozen=True)
class Outputs:
    """The policy's outputs for each of this rank's tokens; both carry a gradient.

    They are not masked: untrained tokens and padding have values too.

    Attributes:
        policy_logprobs_T: [T] nats, of the target.
        entropy_T: [T] nats, of the distribution.
    """

    policy_logprobs_T: Tensor
    entropy_T: Tensor


@dataclass(frozen=True)
class Totals:
    """Totals that a trainer knows apart from its micro-batch: counts of the whole optimizer step, layout, and mesh.

    Attributes:
        tokens: trained targets of the step, over all ranks and micro-batches.
        documents: documents of the step with at least one such target.
        all_documents: documents of the step, including those without trained tokens.
        micro_batches: of each rank, in the step.
        dp: data-parallel ranks.
        cp: context-parallel ranks that share the tokens of a micro-batch.
        tp: tensor-parallel ranks that compute the same.
        mesh: the axes, for the functions of `workbench.sharding.collectives`, each of which states its adjoint:
            ``sum_sum(value, totals.mesh["cp"])``. On one rank each is the identity.
    """

    tokens: int
    documents: int
    all_documents: int
    micro_batches: int
    dp: int
    cp: int
    tp: int
    mesh: Mesh


MicrobatchLoss = Callable[[TrainingRow, Outputs, Totals], Tensor]
"""A trainer's loss: ``microbatch_loss(batch, outputs, totals) -> scalar``.

The batch is this rank's part of the micro-batch: mask, advantages, old, sampler and reference log-probabilities,
rewards and groups, all aligned with their token. Its ``document_ids_T`` number the documents of the whole
micro-batch and are below ``totals.all_documents``; padding has -1. Its ``lengths_T`` are those of whole documents.
"""


def step_totals(totals: StepTotals, local: LocalRow, mesh: Mesh, micro_batches: int) -> Totals:
    """Return what a trainer knows apart from its micro-batch."""
    dp, cp, tp = (mesh[axis].size for axis in ("dp", "cp", "tp"))
    return Totals(totals.tokens, totals.documents, local.documents.number, micro_batches, dp, cp, tp, mesh)


def evaluate_trainer_loss(
    loss: TrainerLoss, row: TrainingRow, head_output: TokenLogprobs, totals: Totals
) -> Mapping[str, Scalar]:
    """Evaluate a trainer's function on this rank's micro-batch.

    The step adds gradients over dp x cp; an engine that averages them is a division of the number by dp * cp.

    Backward: the function's own; its outputs are not masked.
    Raises:   SpecError: it returns no number with a gradient.
    """
    assert head_output.entropy_T is not None, "among the head outputs of every loss"
    outputs = Outputs(head_output.logprobs_T, head_output.entropy_T)
    number = checked_number(loss.microbatch_loss(row, outputs, totals), totals.mesh)
    divisor = totals.mesh["dp_cp"].size if loss.engine == "mean" else 1
    scalar = Scalar(number / divisor, PARTIAL)
    return {"policy": scalar, "total": scalar}


def checked_number(returned: Any, mesh: Mesh, function: str = "microbatch_loss(batch, outputs, totals)") -> Tensor:
    """Return a trainer's number; raises unless it is a scalar tensor with a gradient.

    Raises:
        SpecError: it is not; the rank is named.
    """
    if not isinstance(returned, Tensor) or returned.dim():
        found = f"a tensor of shape {list(returned.shape)}" if isinstance(returned, Tensor) else repr(returned)
        rule, fix = "it returns one number: a tensor without dimensions", "sum over the tokens"
    elif not returned.requires_grad:
        found, fix = "a constant", "return outputs.policy_logprobs_T.sum() * 0 there, or sum over no token"
        rule = (
            "every rank runs backward on every micro-batch, even if it has nothing to train: "
            "the others wait for it in their collectives"
        )
    else:
        return returned
    where = ", ".join(f"{axis}={place}" for axis, place in mesh.coordinates.items())
    raise SpecError(function, found=f"{found}, on rank {where}", rule=rule, fix=fix)


def loss_file(spec: LossSpec, project: Path) -> dict[str, Any]:
    """Return the provenance of a loss in a user's file: its name, hash and text; {} for a preset."""
    if not isinstance(spec.surrogate, OwnLoss):
        return {}
    text = own_file(spec.surrogate, project).read_bytes()
    content = {"sha256": hashlib.sha256(text).hexdigest(), "text": text.decode("utf8", errors="replace")}
    return {"loss_file": {"name": spec.surrogate.function} | content}
