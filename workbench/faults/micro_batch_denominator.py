"""Micro-batches are taken until the step has its documents, and each divides by its own tokens."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault


def _broken(step_weights: Callable) -> Callable:
    def count_tokens_by_micro_batch(rows: list, spec: object, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, **how)
        for row, named in zip(rows, weights, strict=True):
            alone = step_weights([row], spec)[0][0]
            # Documents were counted over the whole step, tokens were forgotten.
            for name in ("policy", "penalty", "token"):
                if name == "token" or spec.denominator == "token":
                    named[name] = alone[name]
        return weights, totals

    return count_tokens_by_micro_batch


FAULT = Fault(
    family="A",
    what="the token count of a micro-batch stands where that of the whole step belongs; the document count is right",
    origin="ServiceNow/Fast-LLM#520, docs_per_step: one of two counters is reset to the step's total",
    signature="a mean of means where one mean belongs: loss and gradient about as many times too big as the step has "
    "micro-batches, tilted towards those with few trained tokens; invisible with one micro-batch and with "
    "denominators that count documents only",
    seam="step_weights",
    broken=_broken,
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/parity/test_faults.py::test_token_counts_of_micro_batches_make_a_mean_of_means",
)
