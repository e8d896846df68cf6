"""Documents are dealt into micro-batches by length, their advantages in the order in which they came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from workbench.faults import Fault
from workbench.rollouts.batch import PADDING, RolloutBatch


def _broken(pack_step: Callable) -> Callable:
    def pack_tokens_only(batch: RolloutBatch, *args: object) -> list[RolloutBatch]:
        own_N = _of_documents(batch)
        rows = pack_step(batch, *args)
        return [
            replace(row, advantages_T=advantages_T)
            for row, advantages_T in zip(rows, _in_order_of_arrival(batch, own_N, rows), strict=True)
        ]

    return pack_tokens_only


def _of_documents(batch: RolloutBatch) -> Tensor:
    """[N] the advantage of each document's last trained token; 0 if it has none."""
    own_N = batch.advantages_T.new_zeros(batch.num_documents)
    own_N[batch.document_ids_T[batch.loss_mask_T]] = batch.advantages_T[batch.loss_mask_T]
    return own_N


def _in_order_of_arrival(batch: RolloutBatch, own_N: Tensor, rows: Sequence[RolloutBatch]) -> list[Tensor]:
    """[T] for each row: what stands there, except on documents that are not where they arrived."""
    document_S = torch.full((int(batch.source_T.max()) + 1,), PADDING)
    document_S[batch.source_T] = batch.document_ids_T
    found, packed = [], 0
    for row in rows:
        advantages_T = row.advantages_T.clone()
        for number in range(row.num_documents):
            mine_T = row.document_ids_T == number
            if int(document_S[row.source_T[mine_T][0]]) != packed:
                advantages_T[mine_T] = own_N[packed]
            packed += 1
        found.append(advantages_T)
    return found


FAULT = Fault(
    family="C",
    what="tokens and advantages are cut into micro-batches along different orders: a document trains on the advantage "
    "of another",
    origin="tenstorrent/tt-metal#46412 and #46548",
    signature="a gradient of about the right size in another direction, right log-probabilities and ratios, a wrong "
    "loss; nothing where one micro-batch takes the documents as they come",
    seam="pack_step",
    broken=_broken,
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_advantages_of_others_keep_the_size_and_turn",
)
