"""Each micro-batch overwrites the gradients of those before it."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.policy.model import Policy


def _broken(hidden_states: Callable) -> Callable:
    def start_anew(policy: Policy, *args: object) -> object:
        policy.model.zero_grad(set_to_none=True)
        return hidden_states(policy, *args)

    return start_anew


FAULT = Fault(
    family="C",
    what="gradients are copied into the buffer that they are to be added to",
    origin="ServiceNow/Fast-LLM#551 (shared buffers without sharding), a zero_grad inside the loop",
    signature="loss and metrics right; the gradient is that of the last micro-batch alone: smaller, in another "
    "direction",
    seam="workbench.policy.model:Policy.hidden_states",
    broken=_broken,
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_only_the_last_micro_batch_trains",
    changes_metrics=False,
)
