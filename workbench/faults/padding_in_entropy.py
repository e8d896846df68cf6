"""The entropy is averaged over padding as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from workbench.faults import Fault
from workbench.losses.terms import LossInputs, Term
from workbench.metrics.values import Value
from workbench.rollouts.batch import PADDING

_KEYS = ("entropy/policy/mean", "entropy/policy/min", "entropy/policy/max")


def _broken(policy_metrics: Callable[..., dict[str, Value]]) -> Callable[..., dict[str, Value]]:
    def measure_padding_too(
        inputs: LossInputs, terms: Mapping[str, Term], loss_mask_T: Tensor, level: str, *more: object
    ) -> dict[str, Value]:
        right = policy_metrics(inputs, terms, loss_mask_T, level, *more)
        wide = policy_metrics(inputs, terms, loss_mask_T | (inputs.document_ids_T == PADDING), level)
        return right | {key: wide[key] for key in _KEYS if key in right}

    return measure_padding_too


FAULT = Fault(
    family="D",
    what="the distribution after a padding token is taken for one of the policy's",
    origin="NovaSky-AI/SkyRL#211",
    signature="gradient, loss and all other metrics right; the entropy's mean drawn towards what the policy says "
    "after padding, the more the more of it; nothing in rows without padding",
    seam="policy_metrics",
    broken=_broken,
    shows_in={"data": {"multiple_of": 160}},
    hidden_in={"data": {"multiple_of": None}},
    detected_by="tests/faults/test_unseen_at_first.py::test_padding_moves_the_entropy_alone",
    changes_gradient=False,
)
