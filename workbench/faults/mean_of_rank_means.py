"""Each rank averages over its own tokens, and the means are averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from workbench.faults import Fault
from workbench.metrics.values import Mean, Value
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Axis


def _broken(finish_metrics: Callable) -> Callable:
    def finish_then_average(micro_batches: Sequence[Mapping[str, Value]], axis: Axis) -> dict[str, float]:
        means = {key: value for key, value in micro_batches[0].items() if isinstance(value.reducer, Mean)}
        here = finish_metrics(micro_batches, Axis(axis.name))
        whole = finish_metrics(micro_batches, axis)
        if means:
            some = next(iter(means.values())).sums[0]
            averaged = all_sum(some.new_tensor([here[key] for key in means]), axis) / axis.size
            whole |= dict(zip(means, averaged.tolist(), strict=True))
        return whole

    return finish_then_average


FAULT = Fault(
    family="D",
    what="a mean travels between ranks as a finished number instead of as sum and count",
    origin="huggingface/trl#6380 and #7047, OpenRLHF's clip_ratio and ppo_kl",
    signature="gradient and loss right, and sums, counts and extremes too; means tilted towards ranks with few trained "
    "tokens, NaN if a rank has none",
    seam="finish_metrics",
    broken=_broken,
    shows_in={"layout": {"dp": 2}},
    hidden_in={"layout": {"dp": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_means_of_means_leave_sums_and_extremes_alone",
    changes_gradient=False,
)
