"""Metrics of a step are those of its last micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.faults import Fault


def _broken(finish_metrics: Callable) -> Callable:
    def finish_last(micro_batches: Sequence[object], axis: object) -> dict[str, float]:
        return finish_metrics(micro_batches[-1:], axis)

    return finish_last


FAULT = Fault(
    family="D",
    what="metrics are kept by name, and each micro-batch overwrites those of the one before",
    origin="verl-project/verl#2259",
    signature="gradient and loss right; counts of tokens and documents too small, means of another population; nothing "
    "with one micro-batch",
    seam="finish_metrics",
    broken=_broken,
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_metrics_of_the_last_micro_batch_count_fewer_tokens",
    changes_gradient=False,
)
