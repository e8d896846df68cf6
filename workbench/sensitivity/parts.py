"""Effect on a loss of a ratio that each rank takes of its own part of a document, at a clean run's log-probabilities.

The loss is a pure function, so its gradient with respect to log-probabilities can be evaluated twice: with sums over
whole documents, and with each rank's sums over the tokens that it has. The two are equal where no document lies on
several ranks, where every part has the ratio of its document (1 in the first step of an update), and where the clip
removes a document's gradient under the ratio of the whole and under that of each part.

Letters: T packed tokens | S tokens of the source batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from workbench.losses.build import NEED_MORE, build_loss
from workbench.losses.corrections import step_statistics, whole_row
from workbench.losses.terms import Loss, LossInputs
from workbench.records.directory import RunDirectory
from workbench.reduction.weights import compute_advantages
from workbench.rollouts.batch import PADDING, RolloutBatch
from workbench.rollouts.targets import TrainingRow, shift_targets
from workbench.specs.losses.own import OwnLoss
from workbench.specs.run import RunSpec
from workbench.train.rows import in_order, pack_step, plan_row


def change_by_ratios_of_parts(run: RunDirectory, batch: RolloutBatch, spec: RunSpec, project: Path) -> float:
    """Return the largest relative change of a token's gradient, over all steps of a clean run.

    Formula:  max_t |g'_t - g_t| / max_t |g_t| of a step, g = d loss / d log-probability, g' with the sums of one rank
    Units:    relative; 0 on one cp rank and for a user's own loss, whose sums are not known.
    """
    if spec.layout.cp == 1 or isinstance(spec.loss.surrogate, OwnLoss):
        return 0.0
    loss = build_loss(spec.loss.model_copy(update=dict.fromkeys(NEED_MORE, 0.0)), project)
    steps = islice(in_order(batch, spec.data.documents_per_step), spec.steps)
    return max(
        _of_step(loss, compute_advantages(step, spec), run.read_tensors(f"step{number:04d}.tokens"), spec)
        for number, step in enumerate(steps)
    )


def _of_step(loss: Loss, batch: RolloutBatch, tokens: Mapping[str, Tensor], spec: RunSpec) -> float:
    packed = pack_step(batch, spec)
    rows = [shift_targets(row).to(torch.device("cpu"), torch.float64) for row in packed]
    statistics = step_statistics([whole_row(row) for row in rows], spec.loss.correction)
    changes, gradients = [0.0], [0.0]
    for row, plain in zip(rows, packed, strict=True):
        plan = plan_row(plain.document_ids_T, spec.layout)
        whole_T = _gradient(loss, row, tokens, statistics, spec)
        gradients.append(float(whole_T.abs().max()))
        for rank in range(spec.layout.cp):
            places = plan.positions(rank)
            part_T = _gradient(loss, _part(row, places), tokens, statistics, spec)
            changes.append(float((part_T - whole_T[places]).abs().max()) if len(places) else 0.0)
    return max(changes) / max(gradients) if any(gradients) else 0.0


def _part(row: TrainingRow, places: Tensor) -> TrainingRow:
    """Tokens of a rank, as a row of their own: lengths are those that it has of each document."""
    part = row.map(lambda values_T: values_T[places])
    documents_T = part.document_ids_T - PADDING  # counted from 0: padding is a document
    lengths_T = torch.bincount(documents_T, weights=part.loss_mask_T.double())[documents_T].clamp_min(1)
    return replace(part, lengths_T=lengths_T)


def _gradient(
    loss: Loss, row: TrainingRow, tokens: Mapping[str, Tensor], statistics: Mapping[str, float], spec: RunSpec
) -> Tensor:
    """[T] gradient of all terms with respect to the log-probabilities of a clean run; 0 where nothing trains."""
    source_T = row.source_T.clamp_min(0)
    policy_T = tokens["policy_logprobs"][source_T].double().requires_grad_()
    inputs: LossInputs = replace(
        whole_row(row, statistics),
        policy_logprobs_T=policy_T,
        old_logprobs_T=tokens["old_logprobs"][source_T].double(),
        ref_logprobs_T=row.ref_logprobs_T,
        frozen_clip_T=tokens["clipped"][source_T] & row.loss_mask_T if spec.frozen_clip else None,
        rewards_T=row.rewards_T,
        group_ids_T=row.group_ids_T,
        lengths_T=row.lengths_T,
        source_T=row.source_T,
    )
    terms: Sequence[Tensor] = [term.coefficient * term.values_T for term in loss(inputs).values()]
    total = sum((torch.where(row.loss_mask_T, values_T, 0.0).sum() for values_T in terms), policy_T.new_zeros(()))
    if not total.requires_grad:
        return torch.zeros_like(policy_T)
    return torch.autograd.grad(total, policy_T)[0]
