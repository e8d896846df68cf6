"""Accumulated gradients are summed over ranks after every micro-batch."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.policy.model import Policy
from workbench.sharding.gradients import sum_gradients


def _broken(hidden_states: Callable) -> Callable:
    def sum_before_the_next(policy: Policy, *args: object) -> object:
        if any(parameter.grad is not None for parameter in policy.model.parameters()):
            sum_gradients(policy.model, policy.shards, policy.mesh)
        return hidden_states(policy, *args)

    return sum_before_the_next


FAULT = Fault(
    family="C",
    what="the sum over ranks runs once a micro-batch on a buffer that accumulates, so early micro-batches are summed "
    "again and again",
    origin="NVIDIA-NeMo/RL#3660 (a reduction for every chunk of a split step)",
    signature="micro-batch k of K counts N^(K-1-k) times over N ranks of dp x cp: between 1 and N^(K-1) times too big "
    "and turned towards the first micro-batch; loss right",
    seam="workbench.policy.model:Policy.hidden_states",
    broken=_broken,
    shows_in={"layout": {"dp": 2}, "data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_early_micro_batches_are_summed_again",
    changes_metrics=False,
)
