"""The loss of a micro-batch is divided by their number, though its weights are those of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.faults import Fault
from workbench.reduction.weights import TokenWeights


def _broken(prepare_rows: Callable) -> Callable:
    def prepare_and_average(*args: object) -> tuple:
        rows, totals = prepare_rows(*args)
        averaged = [
            replace(
                local,
                weights={
                    name: TokenWeights(weights.loss_T, weights.gradient_T / len(rows))
                    for name, weights in local.weights.items()
                },
            )
            for local in rows
        ]
        return averaged, totals

    return prepare_and_average


FAULT = Fault(
    family="C",
    what="the trainer divides each loss by the number of accumulated micro-batches before backward, and the loss was "
    "divided by the tokens of the whole step already",
    origin="modelscope/ms-swift#10096, verl-project/verl#3332 and #3994, PrimeIntellect-ai/prime-rl#2424",
    signature="every gradient exactly 1 / micro-batches of the right one, cosine 1; the reported loss is right",
    seam="prepare_rows",
    broken=_broken,
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_averaging_over_micro_batches_is_one_factor",
    changes_metrics=False,
)
