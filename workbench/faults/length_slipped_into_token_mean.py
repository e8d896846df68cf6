"""A sum that is divided by all tokens is divided by each document's own as well."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.specs.losses import LossSpec


def _broken(step_weights: Callable) -> Callable:
    def divide_by_lengths_too(rows: list, spec: LossSpec, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, **how)
        if spec.denominator == "token":
            for row, named in zip(rows, weights, strict=True):
                for name in ("policy", "penalty", "token"):
                    named[name] = named[name].map(lambda w_T, row=row: w_T / row.lengths_T.double())
        return weights, totals

    return divide_by_lengths_too


FAULT = Fault(
    family="A",
    what="the mean over a document's tokens of GRPO stays inside the mean over all tokens of DAPO",
    origin="marin-community/marin#2376",
    signature="loss and gradient too small by about the mean length and turned: long documents weigh no more than "
    "short ones; with documents of one length that length is the factor",
    seam="step_weights",
    broken=_broken,
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_other_means_are_the_sums_that_their_weights_say",
)
