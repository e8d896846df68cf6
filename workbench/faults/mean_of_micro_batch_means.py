"""Each micro-batch divides by its own tokens, and the step by its micro-batches."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault


def _broken(step_weights: Callable) -> Callable:
    def average_means(rows: list, spec: object, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, **how)
        for row, named in zip(rows, weights, strict=True):
            alone = step_weights([row], spec)[0][0]
            for name in ("policy", "penalty", "token"):
                named[name] = alone[name].map(lambda weights_T: weights_T / len(rows))
        return weights, totals

    return average_means


FAULT = Fault(
    family="A",
    what="a micro-batch is divided by its own tokens, and their mean is taken over the step's micro-batches of all "
    "ranks: a mean of means",
    origin="NVIDIA-NeMo/RL#266 and #373, NovaSky-AI/SkyRL#925 and #1296, TRL's loss type bnpo",
    signature="no factor, another direction: tokens of micro-batches with few trained tokens weigh more; cosine below "
    "1, size near 1. With equal counts it is right",
    seam="step_weights",
    broken=_broken,
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_mean_of_means_turns_the_gradient",
)
