"""Attention is told the lengths of documents, and the documents lie padded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from workbench.faults import Fault


def _broken(split_row: Callable) -> Callable:
    def split_with_real_lengths(row: Any, *more: Any) -> Any:
        local = split_row(row, *more)
        ids_T = row.document_ids_T.cpu()
        borders_N = torch.bincount(ids_T[ids_T >= 0]).cumsum(0)
        numbers_T = torch.searchsorted(borders_N, torch.arange(len(ids_T)), right=True)
        return replace(local, attention=replace(local.attention, documents_T=numbers_T))

    return split_with_real_lengths


FAULT = Fault(
    family="E",
    what="borders of documents are running sums of their real lengths, in a row in which each document was padded for "
    "its shards",
    origin="modelscope/ms-swift#10182 (cu_seqlens without the padding of a ring), NVIDIA/TransformerEngine#3331",
    signature="the first document right; nearly all others see the end of the one before and lose part of themselves; "
    "log-probabilities, loss and gradients wrong; nothing where documents need no padding",
    seam="split_row",
    broken=_broken,
    shows_in={"layout": {"cp": 2, "order": "document_zigzag"}},
    hidden_in={"layout": {"order": "contiguous"}},
    detected_by="tests/faults/test_unseen.py::test_borders_without_padding_spare_the_first_document",
)
