"""A mean over prompts of token means stands where a mean over tokens was asked for."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.specs.losses import LossSpec


def _broken(step_weights: Callable) -> Callable:
    def average_over_prompts(rows: list, spec: LossSpec, **how: object) -> tuple:
        asked = {"denominator": "prompt_group"} if spec.denominator == "token" else {}
        return step_weights(rows, spec.model_copy(update=asked), **how)

    return average_over_prompts


FAULT = Fault(
    family="A",
    what="token-mean is taken over the answers to each prompt, and its mean over prompts, instead of over the batch",
    origin="verl-project/verl#593 and #2776",
    signature="no factor, another direction: tokens weigh more the fewer their prompt has; right with one prompt, and "
    "under a mean over documents",
    seam="step_weights",
    broken=_broken,
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_other_means_are_the_sums_that_their_weights_say",
)
