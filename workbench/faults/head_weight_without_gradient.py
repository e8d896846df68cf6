"""The output head passes gradients on and keeps none for itself."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault


def _broken(head_arguments: Callable[..., dict]) -> Callable[..., dict]:
    def with_detached_weight(policy: object) -> dict:
        arguments = head_arguments(policy)
        return arguments | {"weight_VD": arguments["weight_VD"].detach()}

    return with_detached_weight


FAULT = Fault(
    family="H",
    what="the weight of the output head is lifted to float32 as a copy, and the copy's gradient goes nowhere",
    origin="ServiceNow/Fast-LLM 0f90f20b (fp32_lm_head)",
    signature="gradient of the head exactly 0 (a tied embedding keeps what it gets as an embedding), all others and "
    "the loss right",
    seam="workbench.policy.model:Policy.head_arguments",
    broken=_broken,
    shows_in={"model": {"tied": False}},
    changes_metrics=False,
)
