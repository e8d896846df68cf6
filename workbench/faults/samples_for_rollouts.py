"""Each sample of a rollout counts as a rollout."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.specs.losses import LossSpec


def _broken(step_weights: Callable) -> Callable:
    def average_over_samples(rows: list, spec: LossSpec, **how: object) -> tuple:
        asked = {"denominator": "document"} if spec.denominator == "rollout" else {}
        return step_weights(rows, spec.model_copy(update=asked), **how)

    return average_over_samples


FAULT = Fault(
    family="A",
    what="a rollout that was cut into several samples weighs as often as it was cut",
    origin="radixark/miles#2369",
    signature="no factor, another direction: rollouts of several samples weigh more; right where each rollout is one "
    "sample, and under other denominators",
    seam="step_weights",
    broken=_broken,
    shows_in={"loss": {"denominator": "rollout"}},
    hidden_in={"loss": {"denominator": "token"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_other_means_are_the_sums_that_their_weights_say",
)
