"""What a fused head returns is a leaf: backward ends there."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.model import Policy


def _broken(token_logprobs: Callable[..., TokenLogprobs]) -> Callable[..., TokenLogprobs]:
    def as_leaves(self: Policy, *args: object, **how: object) -> TokenLogprobs:
        said = token_logprobs(self, *args, **how)
        if self.implementation != "chunked":
            return said
        return TokenLogprobs(*(None if x_T is None else x_T.detach().requires_grad_() for x_T in said))

    return as_leaves


FAULT = Fault(
    family="H",
    what="the output of a fused head is detached and then told to require a gradient, so that backward does not "
    "complain",
    origin="verl-project/verl#6913",
    signature="loss and metrics right, every gradient exactly 0",
    seam="workbench.policy.model:Policy.token_logprobs",
    broken=_broken,
    shows_in={"policy": {"logprobs": "chunked"}},
    hidden_in={"policy": {"logprobs": "reference"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_detached_head_output_trains_nothing",
    changes_metrics=False,
)
