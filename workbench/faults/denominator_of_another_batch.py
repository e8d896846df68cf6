"""The tokens that divide a step are those of the batch that was generated for several steps."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.specs.losses import LossSpec

STEPS_PER_GENERATION = 2
"""Optimizer steps, as large as each other, for which documents are sampled at a time."""


def _broken(step_weights: Callable) -> Callable:
    def divide_by_generated(rows: list, spec: LossSpec, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, **how)
        if spec.denominator == "token":
            for named in weights:
                for name in ("policy", "penalty", "token"):
                    named[name] = named[name].map(lambda w_T: w_T / STEPS_PER_GENERATION)
        return weights, totals

    return divide_by_generated


FAULT = Fault(
    family="A",
    what="documents are sampled for several optimizer steps at once, and each step is divided by the tokens of all of "
    "them",
    origin="huggingface/trl#5619, #5890 and #6024",
    signature="loss and every gradient exactly 1 / steps per generation of the right ones, cosine 1, whatever the "
    "layout and the micro-batches; nothing under a mean over documents",
    seam="step_weights",
    broken=_broken,
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_tokens_of_another_batch_are_one_factor_in_every_layout",
)
