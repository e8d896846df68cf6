"""A loss that multiplies by a document's length is averaged over tokens, so that length counts twice."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.specs.losses import LossSpec


def _broken(step_weights: Callable) -> Callable:
    def average_over_tokens(rows: list, spec: LossSpec, **how: object) -> tuple:
        asked = {"denominator": "token"} if spec.surrogate.kind == "luspo" else {}
        return step_weights(rows, spec.model_copy(update=asked), **how)

    return average_over_tokens


FAULT = Fault(
    family="A",
    what="LUSPO's value of a document, its length times its ratio, stands on each of its tokens, and their sum is "
    "divided by the tokens of the step instead of by length and documents",
    origin="huggingface/trl#6654 (length squared over tokens), unslothai/unsloth-zoo#1282",
    signature="a document weighs its length times documents / tokens of the step too much: no factor, another "
    "direction, long documents win; right with documents of one length, and under other surrogates",
    seam="step_weights",
    broken=_broken,
    shows_in={"loss": {"name": "luspo"}},
    hidden_in={"loss": {"denominator": "token"}},
    detected_by="tests/faults/test_unseen.py::test_weights_of_documents_are_what_each_fault_says",
)
