"""The mean over documents of sums over their tokens is a mean of means."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.specs.losses import LossSpec


def _broken(step_weights: Callable) -> Callable:
    def divide_by_lengths(rows: list, spec: LossSpec, **how: object) -> tuple:
        asked = {"denominator": "document"} if spec.denominator == "document_sum" else {}
        return step_weights(rows, spec.model_copy(update=asked), **how)

    return divide_by_lengths


FAULT = Fault(
    family="A",
    what="two ways to aggregate have the same lines: what was to be summed over a document's tokens is averaged",
    origin="verl-project/verl#911 and #1233 (mended in #931)",
    signature="loss and gradient too small by about the mean length and turned: long documents weigh no more than "
    "short ones; right where a mean over documents was asked for",
    seam="step_weights",
    broken=_broken,
    shows_in={"loss": {"denominator": "document_sum"}},
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_unseen.py::test_weights_of_documents_are_what_each_fault_says",
)
