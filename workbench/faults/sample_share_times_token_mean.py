"""The token mean of a micro-batch is weighed with its share of the samples."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.specs.losses import LossSpec


def _broken(step_weights: Callable) -> Callable:
    def weigh_with_samples(rows: list, spec: LossSpec, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, **how)
        if spec.denominator != "token":
            return weights, totals
        samples = [int(row.document_ids_T.max()) + 1 for row in rows]
        for row, named, held in zip(rows, weights, samples, strict=True):
            alone, share = step_weights([row], spec)[0][0], held / sum(samples)
            for name in ("policy", "penalty", "token"):
                named[name] = alone[name].map(lambda w_T, share=share: w_T * share)
        return weights, totals

    return weigh_with_samples


FAULT = Fault(
    family="A",
    what="micro-batches of many sizes, made by length, are added up by their share of the samples, where a mean over "
    "tokens wants their share of the tokens",
    origin="verl-project/verl#906, #5625 and #5641",
    signature="no factor, another direction: tokens of micro-batches with short answers weigh more; nothing with one "
    "micro-batch",
    seam="step_weights",
    broken=_broken,
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen_at_first.py::test_other_means_are_the_sums_that_their_weights_say",
)
