"""A document without trained tokens counts as one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.faults import Fault


def _broken(step_weights: Callable) -> Callable:
    def count_at_least_one(rows: list, spec: Any, **how: object) -> tuple:
        floored = spec.scaling.model_copy(update={"least_tokens": 1})
        return step_weights(rows, spec.model_copy(update={"scaling": floored}), **how)

    return count_at_least_one


FAULT = Fault(
    family="A",
    what="the guard against a division by 0, max(tokens, 1), is put on each document's count before these are added up",
    origin="radixark/miles#2796, redai-infra/Relax#205; the same expression in THUDM/slime",
    signature="loss and every gradient exactly T / (T + M) of the right ones, cosine 1: T trained tokens, M documents "
    "in which nothing trains; nothing under a denominator that does not count tokens",
    seam="step_weights",
    broken=_broken,
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_wrong_count_of_tokens_is_one_factor",
)
