"""A step of positions that is not 1 is taken for the beginning of a document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from workbench.faults import Fault
from workbench.sharding.plan import ShardPlan


def _broken(split_row: Callable) -> Callable:
    def split_at_jumps(row: Any, weights: Any, documents: Any, plan: ShardPlan, *more: Any) -> Any:
        local = split_row(row, weights, documents, plan, *more)
        known_T, held_T = local.attention.documents_T, plan.inverse_T.cpu()
        begins_T = known_T != known_T.roll(1)
        begins_T[1:] |= held_T[1:] != held_T[:-1] + 1
        return replace(local, attention=replace(local.attention, documents_T=torch.cumsum(begins_T, 0)))

    return split_at_jumps


FAULT = Fault(
    family="E",
    what="a packed row says nothing of its documents, and attention reads them off positions: those of a zigzag shard "
    "jump where its tail begins",
    origin="huggingface/transformers 5.23, find_packed_sequence_indices (read, not run); "
    "PrimeIntellect-ai/prime-rl#2392 (documents of a shard read off its positions)",
    signature="a document that runs over a seam of the zigzag is two: what comes behind the seam does not see what "
    "stands before it; all else right, and everything where shards are stretches",
    seam="split_row",
    broken=_broken,
    shows_in={"layout": {"cp": 4, "order": "zigzag"}},
    hidden_in={"layout": {"order": "contiguous"}},
    detected_by="tests/faults/test_unseen.py::test_documents_read_off_positions_end_at_the_seams",
)
