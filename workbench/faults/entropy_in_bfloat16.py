"""The entropy leaves the head in bfloat16."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.policy.logprobs import TokenLogprobs


def _broken(token_logprobs: Callable[..., TokenLogprobs]) -> Callable[..., TokenLogprobs]:
    def with_rounded_entropy(*args: object, **options: object) -> TokenLogprobs:
        said = token_logprobs(*args, **options)
        if said.entropy_T is None:
            return said
        return said._replace(entropy_T=said.entropy_T.bfloat16().to(said.entropy_T.dtype))

    return with_rounded_entropy


FAULT = Fault(
    family="J",
    what="a fused head computes log-probabilities in float32 and stores the entropy in the dtype of the hidden states",
    origin="verl-project/verl, its fused head (read, not run)",
    signature="gradient, loss and log-probabilities right, unless the loss has an entropy bonus; each entropy off by "
    "up to 1 in 256 of itself, so that many share few values",
    seam="workbench.policy.model:token_logprobs",
    broken=_broken,
    hidden_in={"record": {"metrics": "none", "tokens": False}},
    detected_by="tests/faults/test_unseen.py::test_a_rounded_entropy_is_the_only_wrong_quantity",
    changes_gradient=False,
)
