"""The weight against the sampler compares it with the live policy instead of the old one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.faults import Fault
from workbench.losses.terms import LossInputs, Term
from workbench.specs.losses import CorrectionSpec


def _broken(apply_correction: Callable[..., Term]) -> Callable[..., Term]:
    def with_live_policy(term: Term, inputs: LossInputs, spec: CorrectionSpec) -> Term:
        return apply_correction(term, replace(inputs, old_logprobs_T=inputs.policy_logprobs_T.detach()), spec)

    return with_live_policy


FAULT = Fault(
    family="G",
    what="policy / sampler multiplies a term that holds policy / old already, where old / sampler belongs",
    origin="THUDM/slime#179",
    signature="the weight of each token is its ratio policy / old times too big: policy term and its gradient off by "
    "no constant, penalties right; nothing on-policy",
    seam="workbench.losses.build:apply_correction",
    broken=_broken,
    shows_in={"loss": {"correction": {"kind": "importance_sampling"}}},
    hidden_in={"loss": {"old_policy": "current"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_weight_of_the_live_policy_spares_the_penalty",
)
