"""Conversion of tokens to prediction targets: shift, mask document ends, and only then split.

This is the only code in which "the value at the token" becomes "the value at the position that predicts the token".
A rank that shifts its own shard instead gets a wrong target at every shard edge (N-1 of them for a contiguous
order over N ranks, 2N-2 for zigzag), which the loss is too coarse to show.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from workbench.errors import ShapeError
from workbench.rollouts.batch import PADDING, RolloutBatch

Values = TypeVar("Values", Tensor, Tensor | None)

AHEAD, AHEAD_WEIGHTS = "tokens_ahead", "weights_ahead"
"""Extensions of a row for K depths of prediction: `tokens_ahead`, [T, K + 1], and the weight of each target, [T, K]."""


@dataclass(frozen=True)
class TrainingRow:
    """One training row: inputs at their positions, and the target of each position.

    Attributes:
        tokens_T: [T] input ids.
        positions_T: [T] positions in the whole document, never regenerated on a shard.
        document_ids_T: [T] of the input token; `PADDING` on padding.
        targets_T: [T] the next token of the same document; 0 where there is none (never trained).
        loss_mask_T: [T] bool, the target counts.
        advantages_T: [T] of the target.
        old_logprobs_T: [T] nats, of the target.
        sampler_logprobs_T: [T] nats, of the target, or None.
        ref_logprobs_T: [T] nats, of the target, or None.
        source_T: [T] index of the target in the source batch; `PADDING` where there is none.
        lengths_T: [T] float64, targets that count in the whole document; at least 1, so that dividing by it is
            harmless where nothing counts. A number of the document, not of a shard of it.
        rewards_T: [T] reward units, of the target's document, or None.
        group_ids_T: [T] prompt of the target's document, or None; `PADDING` on padding.
        rollout_ids_T: [T] rollout that the target's document is a sample of, from the document-level extension
            ``rollout_ids``, or None; `PADDING` on padding.
        extensions: token-level extension fields of the batch, at the target or the input (`Extension.at`).
    """

    tokens_T: Tensor
    positions_T: Tensor
    document_ids_T: Tensor
    targets_T: Tensor
    loss_mask_T: Tensor
    advantages_T: Tensor
    old_logprobs_T: Tensor
    sampler_logprobs_T: Tensor | None
    ref_logprobs_T: Tensor | None
    source_T: Tensor
    lengths_T: Tensor
    rewards_T: Tensor | None = None
    group_ids_T: Tensor | None = None
    rollout_ids_T: Tensor | None = None
    extensions: dict[str, Tensor] = field(default_factory=dict)

    def map(self, function: Callable[[Tensor], Tensor]) -> TrainingRow:
        """Apply one function to every tensor; a shard plan uses it to permute all of them."""
        changed = {f.name: function(value) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        return replace(self, **changed, extensions={k: function(v) for k, v in self.extensions.items()})

    def to(self, device: torch.device, dtype: torch.dtype) -> TrainingRow:
        """Move the row to a device, its real numbers to the precision of the run."""
        return self.map(lambda value: value.to(device, dtype if value.is_floating_point() else value.dtype))


def shift_targets(row: RolloutBatch) -> TrainingRow:
    """Align every target with the position that predicts it, on the whole row.

    Position t predicts token t + 1 if both belong to one document; otherwise (a document's last token, the
    last token of the row, padding) it predicts nothing: target 0, mask False, values 0. Real numbers are kept only
    where the target counts, so that NaN or infinity under the mask (0 * inf is NaN) cannot reach a gradient.

    Shapes:   row of T tokens -> tensors of [T].
    Backward: none; this is data.
    Source:   the order "shift, mask document ends, shard" is pytorch/torchtitan#4544 and
              NVIDIA-NeMo/Automodel#3544.
    """
    same = torch.zeros(row.num_tokens, dtype=torch.bool)
    ids = row.document_ids_T
    same[:-1] = (ids[1:] == ids[:-1]) & (ids[1:] != PADDING)
    trained = same & row.loss_mask_T.roll(-1)
    ids_from_0 = ids - PADDING  # padding is 0
    trained_in_document = torch.bincount(ids_from_0, weights=trained.double(), minlength=1)

    def next_token(value: Values, fill: float = 0, where: Tensor = same) -> Values:
        if value is None:
            return value
        across = where.view(-1, *[1] * (value.dim() - 1))
        return torch.where(across, value.roll(-1, dims=0), value.new_full((), fill))

    return TrainingRow(
        tokens_T=row.tokens_T,
        positions_T=row.positions_T,
        document_ids_T=ids,
        targets_T=next_token(row.tokens_T),
        loss_mask_T=next_token(row.loss_mask_T),
        advantages_T=next_token(row.advantages_T, where=trained),
        old_logprobs_T=next_token(row.old_logprobs_T, where=trained),
        sampler_logprobs_T=next_token(row.sampler_logprobs_T, where=trained),
        ref_logprobs_T=next_token(row.ref_logprobs_T, where=trained),
        source_T=next_token(row.source_T, PADDING),
        lengths_T=trained_in_document[ids_from_0].clamp_min(1),
        rewards_T=_of_document(row.rewards_N, ids, fill=0),
        group_ids_T=_of_document(row.group_ids_N, ids, fill=PADDING),
        rollout_ids_T=_of_document(_document_extension(row, "rollout_ids"), ids, fill=PADDING),
        extensions={
            name: e.values if e.at == "input" else next_token(e.values, e.pad)
            for name, e in row.extensions.items()
            if e.level == "token"
        },
    )


def tokens_ahead(row: TrainingRow, depths: int) -> tuple[Tensor, Tensor]:
    """Align the further tokens of each document with the position that predicts them, on the whole row.

    Column k of the first result, k = 0 to depths, is the token k + 1 ahead, `PADDING` where the position's document has
    none; column k - 1 of the second, k = 1 to depths, is True where that token counts. From targets, not by another
    shift of tokens, so that a document's end ends every depth.

    Shapes:   row of T tokens -> [T, depths + 1] ids and [T, depths] bool.
    Backward: none; this is data.
    Source:   targets that were shifted once more: huggingface/transformers#47394, #46898, radixark/miles#2215; across
              documents or shards: pytorch/torchtitan#4544, NVIDIA-NeMo/Automodel#3544.
    """
    places_T = torch.arange(len(row.tokens_T), device=row.tokens_T.device)
    ids_T, has_target_T = row.document_ids_T, row.source_T != PADDING
    tokens, counts = [], []
    for ahead in range(depths + 1):
        at_T = (places_T + ahead).clamp_max(len(places_T) - 1)
        same_T = (places_T + ahead < len(places_T)) & (ids_T[at_T] == ids_T) & (ids_T != PADDING)
        tokens.append(torch.where(same_T & has_target_T[at_T], row.targets_T[at_T], PADDING))
        counts.append(same_T & row.loss_mask_T[at_T])
    return torch.stack(tokens, dim=1), torch.stack(counts, dim=1)[:, 1:]


def _of_document(values_N: Tensor | None, document_ids_T: Tensor, *, fill: float) -> Tensor | None:
    """[T] the value of each position's document."""
    if values_N is None:
        return None
    return torch.cat([values_N, values_N.new_full((1,), fill)])[document_ids_T]  # padding, -1, takes the last


def _document_extension(row: RolloutBatch, name: str) -> Tensor | None:
    extension = row.extensions.get(name)
    if extension is None:
        return None
    if extension.level != "document" or extension.values.is_floating_point():
        raise ShapeError(
            f"extension {name!r}",
            found=f"level {extension.level}, dtype {extension.values.dtype}",
            rule="one whole number per document",
            fix="pass Extension(ids_N, 'document', ...) of int64",
        )
    return extension.values
