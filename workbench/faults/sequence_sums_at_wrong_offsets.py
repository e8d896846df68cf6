"""Which tokens of a document a rank holds is reckoned as if its tokens stood side by side in the row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from workbench.faults import Fault


def _broken(split_row: Callable) -> Callable:
    def split_with_other_offsets(row: Any, weights: Any, documents: Any, plan: Any, mesh: Any, layout: Any) -> Any:
        local = split_row(row, weights, documents, plan, mesh, layout)
        held = len(local.row.tokens_T)
        side_by_side_T = torch.arange(held) + mesh["cp"].rank * held
        return replace(local, sums=replace(local.sums, positions_T=side_by_side_T))

    return split_with_other_offsets


FAULT = Fault(
    family="B",
    what="a sequence ratio gathers a document's tokens from offsets that the zigzag cut did not put them at",
    origin="THUDM/slime#695 (e9e42e5e)",
    signature="documents take part of their ratio from others, and lose tokens: loss and policy gradient wrong by no "
    "constant; right under a loss on tokens, and where shards are contiguous",
    seam="split_row",
    broken=_broken,
    shows_in={"layout": {"cp": 2, "order": "zigzag"}, "loss": {"name": "gspo"}},
    hidden_in={"layout": {"order": "contiguous"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_wrong_offsets_of_sequence_sums_spare_losses_on_tokens",
)
