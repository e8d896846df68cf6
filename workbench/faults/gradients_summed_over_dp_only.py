"""Gradients are summed over data-parallel ranks, and cp is forgotten."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.sharding.mesh import Mesh


def _broken(sum_gradients: Callable) -> Callable:
    def sum_over_dp(model: object, shards: object, mesh: Mesh) -> None:
        sum_gradients(model, shards, {"dp_cp": mesh["dp"], "tp": mesh["tp"]})

    return sum_over_dp


FAULT = Fault(
    family="S",
    what="the group over which gradients are reduced has the data-parallel ranks in it and not the context-parallel "
    "ones",
    origin="ByteDance-Seed/VeOmni#1115 and #1086",
    signature="each rank steps with the gradient of its own tokens: cosine below 1, weights of cp ranks drift apart; "
    "loss right, as it has a reduction of its own",
    seam="sum_gradients",
    broken=_broken,
    shows_in={"layout": {"cp": 2}},
    hidden_in={"layout": {"cp": 1}},
    changes_metrics=False,
)
