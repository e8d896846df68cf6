"""Known bugs: label shift, packing, boundaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.faults import fault
from workbench.rollouts.batch import PADDING, RolloutBatch
from workbench.rollouts.targets import TrainingRow
from workbench.sharding.plan import ShardPlan

_VALUES = ("advantages_T", "old_logprobs_T", "sampler_logprobs_T", "ref_logprobs_T")


@fault(
    seam="split_row",
    origin="NVIDIA-NeMo/RL#4167",
    signature="log-probabilities wrong in all documents of a row but its first, and with them every gradient; depends "
    "on which documents share a row; no effect if each has a row of its own",
    hidden_in={"data": {"micro_batches": 10}},
)
def attention_across_documents(split_row: Callable, *args: object) -> object:
    """Attention is causal over the whole packed row, regardless of document boundaries."""
    local = split_row(*args)
    one_T = torch.zeros_like(local.attention.documents_T)
    return replace(local, attention=replace(local.attention, documents_T=one_T))


@fault(
    seam="split_row",
    origin="huggingface/transformers 5.23, find_packed_sequence_indices (read, not run); "
    "PrimeIntellect-ai/prime-rl#2392 (documents of a shard read off its positions)",
    signature="a document that crosses a seam of the zigzag becomes two: tokens after the seam do not attend to those "
    "before it; all else right, and everything if shards are contiguous",
    shows_in={"layout": {"cp": 4, "order": "zigzag"}},
    hidden_in={"layout": {"order": "contiguous"}},
    detected_by="tests/faults/test_unseen.py::test_documents_read_off_positions_end_at_the_seams",
)
def documents_from_shard_positions(
    split_row: Callable, row: Any, weights: Any, documents: Any, plan: ShardPlan, *more: Any
) -> Any:
    """Attention derives documents from positions, which jump inside a zigzag shard: each jump begins a new one."""
    local = split_row(row, weights, documents, plan, *more)
    documents_T, places_T = local.attention.documents_T, plan.inverse_T.cpu()
    begins_T = documents_T != documents_T.roll(1)
    begins_T[1:] |= places_T[1:] != places_T[:-1] + 1
    return replace(local, attention=replace(local.attention, documents_T=torch.cumsum(begins_T, 0)))


@fault(
    seam="shift_targets",
    origin="pytorch/torchtitan#4075, the roll of the flat mask in verl-project/verl's SFT (1dda039b: read, not run)",
    signature="one target too many for each document that is not the last of its row, at its last position; the count "
    "of trained tokens grows by as many. No effect if every document has a row of its own",
    hidden_in={"data": {"micro_batches": 10}},
)
def label_roll_across_documents(shift_targets: Callable, row: RolloutBatch) -> TrainingRow:
    """Targets are rolled over the whole packed row, and document ends are not masked."""
    right, ids_T = shift_targets(row), row.document_ids_T
    ends_T = torch.zeros_like(row.loss_mask_T)
    ends_T[:-1] = (ids_T[1:] != ids_T[:-1]) & (ids_T[1:] != PADDING)
    ends_T &= row.loss_mask_T
    mask_T = right.loss_mask_T | ends_T
    lengths_T = torch.bincount(ids_T - PADDING, weights=mask_T.double())[ids_T - PADDING].clamp_min(1)
    # The other fields of the extra target are those of the document's last token.
    values = {
        name: torch.where(ends_T, getattr(row, name), values_T)
        for name in _VALUES
        if (values_T := getattr(right, name)) is not None
    }
    return replace(
        right,
        **values,
        loss_mask_T=mask_T,
        lengths_T=lengths_T,
        targets_T=torch.where(ends_T, row.tokens_T.roll(-1), right.targets_T),
        source_T=torch.where(ends_T, row.source_T.roll(-1), right.source_T),
    )


@fault(
    seam="shift_targets",
    origin="verl-project/verl#3287",
    signature="each unbroken run of trained tokens loses its first and gains the token after it, if its document has "
    "one; log-probabilities of the others right; loss and gradient wrong by no constant",
    detected_by="tests/faults/test_unseen_at_first.py::test_a_mask_one_late_trains_the_token_after_each_trained_one",
)
def loss_mask_one_late(shift_targets: Callable, row: RolloutBatch) -> TrainingRow:
    """The mask is shifted with the inputs, not with the targets: a target has the mask of the token before it."""
    inside_T = row.document_ids_T == row.document_ids_T.roll(1)
    inside_T[0] = False
    return shift_targets(replace(row, loss_mask_T=row.loss_mask_T.roll(1) & inside_T))


@fault(
    seam="shift_targets",
    origin="ServiceNow/PipelineRL (old_logprobs under interleaved labels: read, not run)",
    signature="right for documents that train to their end without a hole; in others early trained tokens have the "
    "probability 1 and later ones another token's, so ratios are far from 1 in the first step already; the "
    "policy's own log-probabilities right",
    hidden_in={"loss": {"old_policy": "current"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_prefix_of_zeros_spares_documents_without_holes",
)
def old_logprobs_as_prefix(shift_targets: Callable, row: RolloutBatch) -> TrainingRow:
    """Old log-probabilities are left-padded with zeros, although untrained turns separate the trained ones."""
    old_T = torch.zeros_like(row.old_logprobs_T)
    for number in range(row.num_documents):
        places = torch.nonzero(row.document_ids_T == number).squeeze(1)
        trained = places[row.loss_mask_T[places]]
        old_T[places[len(places) - len(trained) :]] = row.old_logprobs_T[trained]
    return shift_targets(replace(row, old_logprobs_T=old_T))


@fault(
    seam="shift_targets",
    origin="PrimeIntellect-ai/prime-rl#606, radixark/miles#1754",
    signature="ratios far from 1 in the first step already, most tokens clipped; the policy's own log-probabilities, "
    "and losses without a ratio, right",
    hidden_in={"loss": {"old_policy": "current"}},
)
def old_logprobs_not_shifted(shift_targets: Callable, row: RolloutBatch) -> TrainingRow:
    """The old policy's log-probability of the previous token is used for the target."""
    right = shift_targets(row)
    return replace(right, old_logprobs_T=torch.where(right.loss_mask_T, row.old_logprobs_T, 0.0))


@fault(
    seam="shift_targets",
    origin="modelscope/ms-swift#8196 (rollout_per_token_logps against old_per_token_logps)",
    signature="weights against the sampler far from 1, many at their bound, and with them the policy term; ratios "
    "against the old policy, the penalty and log-probabilities right",
    shows_in={"loss": {"correction": {"kind": "tis"}}},
    hidden_in={"loss": {"correction": {"kind": "none"}}, "record": {"metrics": "none"}},
    detected_by="tests/faults/test_unseen.py::test_other_logprobs_of_the_sampler_move_weights_and_the_policy_term",
)
def sampler_logprobs_one_late(shift_targets: Callable, row: RolloutBatch) -> TrainingRow:
    """Log-probabilities of the sampler are aligned one token later than those of the trainer."""
    right = shift_targets(row)
    if row.sampler_logprobs_T is None:
        return right
    return replace(right, sampler_logprobs_T=torch.where(right.loss_mask_T, row.sampler_logprobs_T, 0.0))


@fault(
    seam="workbench.losses.document_sums:DocumentSums._local_part",
    origin="ServiceNow/Fast-LLM e0d8c4d4 (segment ids of sequence-data parallelism)",
    signature="a sequence ratio includes, or is that of, another document's tokens: policy term and gradient wrong by "
    "no constant; losses on tokens right",
    shows_in={"layout": {"cp": 2}, "loss": {"name": "gspo"}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_unseen.py::test_numbers_of_a_shard_spare_losses_on_tokens",
)
def segments_numbered_per_shard(of_mine: Callable, self: Any, parts: Any) -> Any:
    """Sums over documents are added up over ranks by document number, but each rank numbers only its own documents."""
    local = of_mine(self, parts)
    return replace(local, ids_T=local.ids_T.unique(return_inverse=True)[1])


@fault(
    seam="split_row",
    origin="pytorch/torchtitan#4544, NVIDIA-NeMo/Automodel#3544, OpenRLHF GPTLMLoss",
    signature="a wrong or lost target at every shard edge: cp - 1 of them contiguous, 2 cp - 2 zigzag; a small "
    "change of the loss, unless a k3 term meets a wrong target: exp(reference - policy) then dwarfs all",
    shows_in={"layout": {"cp": 4, "order": "zigzag"}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/parity/test_faults.py::test_shift_after_shard_loses_or_changes_the_targets_at_shard_edges_only",
)
def shift_after_shard(split_row: Callable, *args: object) -> object:
    """Targets are shifted inside each shard instead of on the whole row."""
    local = split_row(*args)
    row = local.row
    targets_T, loss_mask_T = row.tokens_T.roll(-1), row.loss_mask_T.clone()
    targets_T[-1], loss_mask_T[-1] = 0, False  # the last position of a shard has no next token here
    return replace(local, row=replace(row, targets_T=targets_T, loss_mask_T=loss_mask_T))


@fault(
    seam="shift_targets",
    origin="huggingface/transformers#47394 and #46898, radixark/miles#2215 (multi-token prediction)",
    signature="log-probabilities of all tokens wrong, by 0.3 nats in the mean here, and ratios far from 1; the "
    "second token of a document no longer trains; no constant",
    detected_by="tests/faults/test_unseen.py::test_targets_shifted_twice_are_those_after_the_next",
)
def targets_shifted_twice(shift_targets: Callable, row: RolloutBatch) -> TrainingRow:
    """Shifted targets go through a loss that shifts too: a position predicts the token after the next."""
    right, ids_T = shift_targets(row), row.document_ids_T
    inside_T = torch.zeros_like(row.loss_mask_T)
    inside_T[:-1] = ids_T[1:] == ids_T[:-1]

    def again(values_T: Tensor | None, fill: float = 0) -> Tensor | None:
        return None if values_T is None else torch.where(inside_T, values_T.roll(-1), values_T.new_tensor(fill))

    shifted = {name: again(getattr(right, name)) for name in ("targets_T", "loss_mask_T", *_VALUES)}
    return replace(right, **shifted, source_T=again(right.source_T, PADDING))


@fault(
    seam="split_row",
    origin="modelscope/ms-swift#10182 (cu_seqlens without the padding of a ring), NVIDIA/TransformerEngine#3331",
    signature="the first document right; nearly all others attend to the end of the previous one and miss a part of "
    "themselves; log-probabilities, loss and gradients wrong; no effect if documents need no padding",
    shows_in={"layout": {"cp": 2, "order": "document_zigzag"}},
    hidden_in={"layout": {"order": "contiguous"}},
    detected_by="tests/faults/test_unseen.py::test_borders_without_padding_spare_the_first_document",
)
def unpadded_borders_on_padded_row(split_row: Callable, row: Any, *more: Any) -> Any:
    """Attention gets cumulative sums of real lengths, for a row in which each document was padded for its shards."""
    local = split_row(row, *more)
    ids_T = row.document_ids_T.cpu()
    ends_N = torch.bincount(ids_T[ids_T >= 0]).cumsum(0)
    numbers_T = torch.searchsorted(ends_N, torch.arange(len(ids_T)), right=True)
    return replace(local, attention=replace(local.attention, documents_T=numbers_T))
