"""A KL penalty is differentiated on the path alone."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.losses.terms import LossInputs, Term
from workbench.specs.losses import KLSpec


def _broken(kl_term: Callable[..., Term]) -> Callable[..., Term]:
    def along_the_path(inputs: LossInputs, spec: KLSpec) -> Term:
        return kl_term(inputs, spec.model_copy(update={"gradient": "path"}))

    return along_the_path


FAULT = Fault(
    family="H",
    what="the estimate is differentiated as if tokens were given, though the policy draws them: k' without k",
    origin="NVIDIA-NeMo/RL#2506",
    signature="loss right; a token's part from the penalty is k' instead of k' + k, for k1 the same 1 on every token "
    "(0 in expectation) instead of 1 - d: the nearer the reference the less is wrong, and nothing of the "
    "policy term",
    seam="workbench.losses.build:kl_term",
    broken=_broken,
    shows_in={"loss": {"kl": {"coefficient": 0.3, "gradient": "score", "estimator": "k1"}}},
    hidden_in={"loss": {"kl": {"gradient": "path"}}},
    detected_by="tests/faults/test_unseen_at_first.py::test_without_the_score_a_penalty_has_the_gradient_of_its_path",
    changes_metrics=False,
)
