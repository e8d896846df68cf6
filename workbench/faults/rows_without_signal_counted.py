"""Documents in which nothing trains are counted among those over which the mean runs."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.specs.losses import LossSpec


def _broken(step_weights: Callable) -> Callable:
    def count_all(rows: list, spec: LossSpec, **how: object) -> tuple:
        return step_weights(rows, spec.model_copy(update={"documents_counted": "all"}), **how)

    return count_all


FAULT = Fault(
    family="A",
    what="answers that say nothing are taken out of the numerator and left in the number of rows",
    origin="huggingface/trl#6365 and #7068",
    signature="loss and every gradient exactly M / N of the right ones, cosine 1: M documents that train, N documents; "
    "nothing under a mean over tokens",
    seam="step_weights",
    broken=_broken,
    shows_in={"loss": {"denominator": "document"}},
    hidden_in={"loss": {"denominator": "token"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_rows_without_signal_shrink_a_mean_over_documents",
)
