"""Versions of the weights that sampled each token, and what of a batch is too old to train on.

A version is the number of optimizer steps that made the weights. The staleness of a token is that of the weights which
the first update on its batch trains, minus its own; 0 if trainer and sampler take turns. A document whose sampler was
updated while it was sampled has several versions.

Letters: T packed tokens | N documents.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.rollouts.batch import Extension, RolloutBatch

VERSION = "version"
"""Token-level extension of a batch: optimizer steps that made the weights which sampled the token."""
STALENESS = "staleness"
"""Token-level extension of a batch: optimizer steps from these weights to those of the first update on the token."""


def with_versions(batch: RolloutBatch, version_T: Tensor, trained: int) -> RolloutBatch:
    """Return a batch whose tokens have the version that sampled each; prompts have that of their first sampled token.

    ``trained`` is the version that the first update on the batch trains.

    Shapes: version_T [T] int64.
    Raises: SpecError: a token of a later version than that, which no sampler can have had.
    """
    newest = int(version_T.max()) if len(version_T) else trained
    if newest > trained:
        raise SpecError(
            f"a batch for the update of version {trained}",
            found=f"a token of version {newest}",
            rule="a token is sampled before it is trained on, by weights that exist",
            fix="count optimizer steps of the trainer, from 0, in both",
        )
    further = {
        VERSION: Extension(version_T, "token", "optimizer steps", "weights that sampled the token"),
        STALENESS: Extension(
            trained - version_T, "token", "optimizer steps", "age of the weights that sampled the token"
        ),
    }
    return replace(batch, extensions={**batch.extensions, **further})


def staleness_of(batch: RolloutBatch, *, requested: str) -> Tensor:
    """[T] int64 age of each token; a SpecError if the batch does not know it."""
    extension = batch.extensions.get(STALENESS)
    if extension is None:
        raise SpecError(
            requested,
            found="a batch without the versions of its tokens",
            rule="the age of a token is that of the weights that sampled it",
            fix=f"add the token extension {STALENESS!r} (`workbench.rollouts.versions.with_versions`)",
        )
    return extension.values


def without_stale(batch: RolloutBatch, max_staleness: int) -> RolloutBatch:
    """Return a batch in which no document with a trained token older than this is trained on.

    Documents stay, and so do their rewards: baselines of groups are those of all that was sampled, as verl keeps them
    for documents that a rejection leaves out.

    Raises: SpecError: the batch does not know the age of its tokens.
    """
    stale_T = (staleness_of(batch, requested=f"max_staleness = {max_staleness}") > max_staleness) & batch.loss_mask_T
    stale_N = torch.zeros(batch.num_documents, dtype=torch.bool)
    stale_N[batch.document_ids_T[stale_T]] = True
    kept_T = ~stale_N[batch.document_ids_T.clamp_min(0)]
    return replace(batch, loss_mask_T=batch.loss_mask_T & kept_T)
