"""Gradients are summed over ranks after the first micro-batch, and those of later ones stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from workbench.faults import Fault
from workbench.policy.model import Policy


def _broken(run_step: Callable) -> Callable:
    def sum_the_first(policy: Policy, *args: object, **how: object) -> Any:
        first: dict[Tensor, Tensor] = {}

        def lose_later_ones(parameter: Tensor) -> None:
            if parameter in first:
                parameter.grad.copy_(first[parameter])
            else:
                first[parameter] = parameter.grad.clone()

        # The step that is looked at is the first rank's: all ranks' first gradients, and its own later ones.
        elsewhere = policy.mesh["dp_cp"].rank > 0
        hooks = [
            parameter.register_post_accumulate_grad_hook(lose_later_ones)
            for parameter in policy.model.parameters()
            if elsewhere
        ]
        try:
            return run_step(policy, *args, **how)
        finally:
            for hook in hooks:
                hook.remove()

    return sum_the_first


FAULT = Fault(
    family="C",
    what="the condition that leaves out the sum over ranks, but for the last micro-batch, is off by one: it is made "
    "after the first, and each rank steps with later gradients of its own",
    origin="modelscope/FunASR#3472",
    signature="loss and metrics right; ranks disagree, and each has what all found in the first micro-batch and only "
    "what it found itself in others: smaller, in another direction; nothing with one micro-batch",
    seam="run_step",
    broken=_broken,
    shows_in={"layout": {"dp": 2}, "data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen.py::test_later_micro_batches_of_other_ranks_are_lost",
    changes_metrics=False,
)
