"""A sum over a document that straddles cp ranks is completed forward, and each rank back-propagates for itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.faults import Fault
from workbench.sharding.collectives import sum_identity


def _broken(split_row: Callable) -> Callable:
    def split_with_identity_backward(*args: object) -> object:
        local = split_row(*args)
        return replace(local, sums=replace(local.sums, complete=sum_identity))

    return split_with_identity_backward


FAULT = Fault(
    family="S",
    what="the all-reduce of a sequence statistic has the identity for its adjoint: a rank's tokens hear only what the "
    "rank's own part of the loss wants from the statistic",
    origin="OpenRLHF GPTLMLoss and THUDM/slime#1383 (all-reduce outside autograd), deepspeedai/DeepSpeed#6841",
    signature="loss right; the gradient of a loss on whole documents up to cp times too small, exactly 1 / cp where a "
    "document's trained tokens are spread evenly; nothing at all under a token-level loss",
    seam="split_row",
    broken=_broken,
    shows_in={"layout": {"cp": 2}, "loss": {"name": "gspo"}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/parity/test_faults.py::"
    "test_a_document_sum_without_its_adjoint_is_seen_by_losses_on_whole_documents_only",
    changes_metrics=False,
)
