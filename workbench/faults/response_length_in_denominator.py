"""The denominator counts the tokens of a response, its masked ones too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.faults import Fault
from workbench.rollouts.batch import PADDING
from workbench.rollouts.targets import TrainingRow


def _broken(step_weights: Callable) -> Callable:
    def count_whole_responses(rows: list[TrainingRow], spec: Any, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, **how)
        longer = totals.tokens / max(sum(map(_response_tokens, rows)), 1)
        if spec.denominator == "token":
            for named in weights:
                for name in ("policy", "penalty"):
                    named[name] = named[name].map(lambda weights_T: weights_T * longer)
        return weights, totals

    return count_whole_responses


def _response_tokens(row: TrainingRow) -> int:
    """Targets from the first trained one of each document on."""
    ids_T, found = row.document_ids_T, 0
    for document in ids_T[row.loss_mask_T].unique():
        mine_T = (ids_T == document) & (row.source_T != PADDING)
        found += int((row.loss_mask_T[mine_T].cumsum(0) > 0).sum())
    return found


FAULT = Fault(
    family="A",
    what="tokens are counted as lengths of responses instead of as the sum of the mask, so the answers of tools count",
    origin="THUDM/slime#365",
    signature="loss and every gradient exactly T / T' of the right ones, cosine 1: T trained tokens, T' tokens from "
    "the first trained one of each document to its end; nothing where masks have no holes",
    seam="step_weights",
    broken=_broken,
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_wrong_count_of_tokens_is_one_factor",
)
