"""The constant length of Dr. GRPO is the width to which a micro-batch happens to be padded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workbench.faults import Fault


def _broken(step_weights: Callable) -> Callable:
    def divide_by_width(rows: list, spec: Any, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, **how)
        if spec.denominator == "constant":
            for row, named in zip(rows, weights, strict=True):
                ids_T = row.document_ids_T[row.document_ids_T >= 0]
                width = int(torch.bincount(ids_T, minlength=1).max()) or 1
                for name in ("policy", "penalty"):
                    named[name] = named[name].map(lambda w_T, width=width: w_T * spec.denominator_constant / width)
        return weights, totals

    return divide_by_width


FAULT = Fault(
    family="A",
    what="documents * C divides a loss with a constant length C; here C is the longest document of the micro-batch",
    origin="verl's seq-mean-token-sum-norm without loss_scale_factor",
    signature="each micro-batch times C / its own width: one factor with one micro-batch, another direction with "
    "several",
    seam="step_weights",
    broken=_broken,
    shows_in={"data": {"micro_batches": 3}, "loss": {"name": "dr_grpo", "denominator_constant": 16.0}},
    hidden_in={"loss": {"denominator": "token", "denominator_constant": None}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_padded_width_is_a_factor_of_each_micro_batch",
)
