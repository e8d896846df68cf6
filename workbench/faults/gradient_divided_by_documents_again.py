"""The loss is divided by the documents of the step, and its gradient a second time."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.reduction.weights import TokenWeights


def _broken(step_weights: Callable) -> Callable:
    def weights_divided_twice(*args: object, **how: object) -> tuple:
        weights, totals = step_weights(*args, **how)
        documents = max(totals.documents, 1)
        return [
            {name: TokenWeights(pair.loss_T, pair.gradient_T / documents) for name, pair in named.items()}
            for named in weights
        ], totals

    return weights_divided_twice


FAULT = Fault(
    family="B",
    what="backward divides by the number of documents what forward has divided already",
    origin="ServiceNow/Fast-LLM#502 (loss 1 / M, gradient 1 / M^2; removed in #517 and #520)",
    signature="every gradient exactly 1 / documents of the right one, cosine 1, loss and metrics of tokens right; a "
    "threshold for the gradient norm no longer clips",
    seam="step_weights",
    broken=_broken,
    changes_metrics=False,
)
