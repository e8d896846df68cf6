"""Counts of the whole step are on every rank already, and are summed over ranks once more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from workbench.faults import Fault
from workbench.metrics.values import Count, Sum, Value
from workbench.sharding.mesh import Axis


def _broken(finish_metrics: Callable) -> Callable:
    def finish_and_sum_again(micro_batches: Sequence[Mapping[str, Value]], axis: Axis) -> dict[str, float]:
        counted = [key for key, value in micro_batches[0].items() if isinstance(value.reducer, Sum | Count)]
        whole = finish_metrics(micro_batches, axis)
        return whole | {key: whole[key] * axis.size for key in counted}

    return finish_and_sum_again


FAULT = Fault(
    family="D",
    what="every rank is handed the finished metrics of the step, and what counts things is added up over ranks",
    origin="allenai/open-instruct#1808 (1.143e6 tokens for 285,750)",
    signature="gradient, loss, means and extremes right; every sum and count exactly dp * cp times too big",
    seam="finish_metrics",
    broken=_broken,
    shows_in={"layout": {"dp": 2}},
    hidden_in={"layout": {"dp": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_counts_are_too_big_by_the_ranks",
    changes_gradient=False,
)
