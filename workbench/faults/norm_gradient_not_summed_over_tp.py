"""Weights that every tp rank holds whole keep the gradient of the rank's own heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from workbench.faults import Fault
from workbench.sharding.tensor_parallel import ParameterShard


def _broken(sum_gradients: Callable) -> Callable:
    def sum_over_dp_cp(model: object, shards: Mapping[str, ParameterShard], mesh: object) -> None:
        whole = {name: replace(shard, gradient_is_partial=False) for name, shard in shards.items()}
        sum_gradients(model, whole, mesh)

    return sum_over_dp_cp


FAULT = Fault(
    family="S",
    what="gradients of weights that are replicated over tp, and act on a rank's own heads (or, under sequence "
    "parallelism, tokens), are not summed over tp",
    origin="no single report: transformers has a style of its own for these weights, replicated_with_grad_allreduce",
    signature="only norm weights wrong: q_norm and k_norm (all norms under sequence parallelism) have their rank's "
    "part, another on every tp rank, whose copies drift apart; loss and everything else right",
    seam="sum_gradients",
    broken=_broken,
    shows_in={"layout": {"tp": 2}},
    hidden_in={"layout": {"tp": 1}},
    changes_metrics=False,
)
