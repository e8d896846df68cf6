"""A rank without trained tokens brings 0 to a maximum or minimum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from workbench.faults import Fault
from workbench.metrics.values import Maximum, Minimum, Value


def _broken(finish_metrics: Callable) -> Callable:
    def finish_with_zeros(micro_batches: Sequence[Mapping[str, Value]], axis: object) -> dict[str, float]:
        empty = {
            key
            for key, value in micro_batches[0].items()
            if isinstance(value.reducer, Maximum | Minimum)
            if all(metrics[key].maxima[0].isneginf() for metrics in micro_batches)
        }
        return finish_metrics(
            [
                {key: _zero(value) if key in empty else value for key, value in metrics.items()}
                for metrics in micro_batches
            ],
            axis,
        )

    return finish_with_zeros


def _zero(value: Value) -> Value:
    return replace(value, maxima=tuple(part.new_zeros(()) for part in value.maxima))


FAULT = Fault(
    family="D",
    what="0 stands for nothing where the extreme of no token is infinite",
    origin="ServiceNow/Fast-LLM#520 (minima and maxima of ranks that compute no loss)",
    signature="gradient, loss and means right; minima of positive and maxima of negative numbers are 0 as soon as one "
    "rank holds no trained token",
    seam="finish_metrics",
    broken=_broken,
    shows_in={"layout": {"cp": 2}, "data": {"multiple_of": 160}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_zero_for_nothing_enters_extremes_alone",
    changes_gradient=False,
)
