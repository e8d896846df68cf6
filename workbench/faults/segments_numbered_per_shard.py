"""Each rank counts the documents that it holds from 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from workbench.faults import Fault


def _broken(of_mine: Callable) -> Callable:
    def number_what_is_here(self: Any, parts: Any) -> Any:
        mine = of_mine(self, parts)
        return replace(mine, ids_T=mine.ids_T.unique(return_inverse=True)[1])

    return number_what_is_here


FAULT = Fault(
    family="E",
    what="sums over documents are added up over ranks by the number of a document, and each rank numbers its own",
    origin="ServiceNow/Fast-LLM e0d8c4d4 (segment ids of sequence-data parallelism)",
    signature="a sequence ratio is that of another document's tokens besides, or instead: policy term and gradient "
    "wrong by no constant; losses on tokens right",
    seam="workbench.reduction.document_sums:ShardedSums._of_mine",
    broken=_broken,
    shows_in={"layout": {"cp": 2}, "loss": {"name": "gspo"}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_unseen.py::test_numbers_of_a_shard_spare_losses_on_tokens",
)
