"""The estimate of the KL is given the log ratio the wrong way round."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workbench.faults import Fault


def _broken(kl_estimate: Callable[[Tensor, str], Tensor]) -> Callable[[Tensor, str], Tensor]:
    def of_the_inverse(d_T: Tensor, estimator: str) -> Tensor:
        return kl_estimate(-d_T, estimator)

    return of_the_inverse


FAULT = Fault(
    family="K",
    what="e^d - 1 - d is taken of policy over reference instead of reference over policy: tokens that the policy made "
    "likelier cost the exponential of what they should",
    origin="walkinglabs/hands-on-modern-rl#27",
    signature="the penalty alone wrong, by the third power of the distance from the reference: about right near it; "
    "the reported KL right; nothing under k2, which is even",
    seam="workbench.losses.kl:kl_estimate",
    broken=_broken,
    shows_in={"loss": {"kl": {"coefficient": 0.5}}},
    hidden_in={"loss": {"kl": {"estimator": "k2"}}},
    detected_by="tests/faults/test_unseen.py::test_a_reversed_kl_is_the_only_wrong_term",
)
