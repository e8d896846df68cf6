"""Each rank shifts the targets of its own shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.faults import Fault


def _broken(split_row: Callable) -> Callable:
    def split_then_shift(*args: object) -> object:
        local = split_row(*args)
        row = local.row
        targets_T, loss_mask_T = row.tokens_T.roll(-1), row.loss_mask_T.clone()
        targets_T[-1], loss_mask_T[-1] = 0, False  # the last position of a shard has no next token here
        return replace(local, row=replace(row, targets_T=targets_T, loss_mask_T=loss_mask_T))

    return split_then_shift


FAULT = Fault(
    family="E",
    what="targets are shifted inside each shard instead of on the whole row",
    origin="pytorch/torchtitan#4544, NVIDIA-NeMo/Automodel#3544, OpenRLHF GPTLMLoss",
    signature="a wrong or lost target at every shard edge: cp - 1 of them contiguous, 2 cp - 2 zigzag; a small "
    "change of the loss, unless a k3 term meets a wrong target: exp(reference - policy) then dwarfs all",
    seam="split_row",
    broken=_broken,
    shows_in={"layout": {"cp": 4, "order": "zigzag"}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/parity/test_faults.py::test_shift_after_shard_loses_or_changes_the_targets_at_shard_edges_only",
)
