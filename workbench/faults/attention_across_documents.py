"""Documents that share a packed row see each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.faults import Fault


def _broken(split_row: Callable) -> Callable:
    def split_as_one_document(*args: object) -> object:
        local = split_row(*args)
        one_T = torch.zeros_like(local.attention.documents_T)
        return replace(local, attention=replace(local.attention, documents_T=one_T))

    return split_as_one_document


FAULT = Fault(
    family="E",
    what="attention is causal over the whole packed row: borders of documents do not reach it",
    origin="NVIDIA-NeMo/RL#4167",
    signature="log-probabilities wrong in all documents of a row but its first, and with them every gradient; depends "
    "on which documents share a row, and is invisible where each has one of its own",
    seam="split_row",
    broken=_broken,
    hidden_in={"data": {"micro_batches": 10}},
)
