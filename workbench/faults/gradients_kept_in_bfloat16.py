"""What micro-batches add up to is kept in bfloat16 between them."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.policy.model import Policy


def _broken(hidden_states: Callable) -> Callable:
    def round_before_the_next(policy: Policy, *args: object) -> object:
        for parameter in policy.model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.bfloat16())
        return hidden_states(policy, *args)

    return round_before_the_next


FAULT = Fault(
    family="J",
    what="the buffer into which micro-batches accumulate has the dtype of bfloat16 weights",
    origin="deepspeedai/DeepSpeed#1800, hiyouga/LlamaFactory#9769, pytorch/pytorch#194628",
    signature="loss, metrics and log-probabilities right; every gradient off by some 1e-3 of itself, the more the more "
    "micro-batches; nothing with one",
    seam="workbench.policy.model:Policy.hidden_states",
    broken=_broken,
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen.py::test_sums_in_bfloat16_are_off_by_thousandths_in_the_gradient_alone",
    changes_metrics=False,
)
