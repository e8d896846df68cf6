"""Tokens that a correction rejects leave the numerator and stay in the denominator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.faults import Fault


def _broken(step_weights: Callable) -> Callable:
    def count_rejected_too(rows: list, spec: Any, **how: object) -> tuple:
        all_counted = spec.correction.model_copy(update={"denominator": "original"})
        return step_weights(rows, spec.model_copy(update={"correction": all_counted}), **how)

    return count_rejected_too


FAULT = Fault(
    family="A",
    what="a loss that is a mean over surviving tokens is divided by all that were there before the rejection",
    origin="THUDM/slime#657, NVIDIA-NeMo/RL#4242, mlcommons/training#905",
    signature="the policy term and its gradient exactly kept / trained tokens of the right ones, cosine 1 without a "
    "penalty; a KL or entropy term is right; nothing where no token is rejected",
    seam="step_weights",
    broken=_broken,
    shows_in={
        "loss": {
            "kl": {"coefficient": 0.0},
            "correction": {"kind": "icepop", "denominator": "survivors", "ratio_low": 0.9, "ratio_high": 1.1},
        }
    },
    hidden_in={"loss": {"correction": {"ratio_low": 0.01, "ratio_high": 100.0}}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_rejected_tokens_shrink_the_policy_term",
)
