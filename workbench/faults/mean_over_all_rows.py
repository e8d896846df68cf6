"""A mean over the rows of a micro-batch, those in which nothing trains among them."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.reduction.scaling import Cut
from workbench.specs.losses import LossSpec


def _broken(step_weights: Callable) -> Callable:
    def average_over_rows(rows: list, spec: LossSpec, cut: Cut | None = None, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, cut=cut, **how)
        if spec.surrogate.kind != "gmpo":
            return weights, totals
        here = spec.model_copy(update={"denominator": "document", "documents_counted": "all"})
        dp = 1 if cut is None else cut.dp
        for row, named in zip(rows, weights, strict=True):
            alone = step_weights([row], here)[0][0]["policy"]
            named["policy"] = alone.map(lambda w_T: w_T / dp)
        return weights, totals

    return average_over_rows


FAULT = Fault(
    family="A",
    what="GMPO ends in a plain mean over the answers of a micro-batch, masked ones too, where every other loss is "
    "divided by the answers of the step",
    origin="verl-project/verl#7913 and #5614",
    signature="micro-batches of a rank times too big, less the share of masked answers, and turned: answers of "
    "micro-batches with few others weigh more; the penalty right; nothing under other surrogates",
    seam="step_weights",
    broken=_broken,
    shows_in={"data": {"micro_batches": 3}, "loss": {"name": "gmpo", "kl": {"coefficient": 0.0}}},
    hidden_in={"loss": {"name": "gspo"}},
    detected_by="tests/faults/test_unseen.py::test_weights_of_documents_are_what_each_fault_says",
)
