"""The KL that is logged is the one that was multiplied by its coefficient in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from workbench.faults import Fault
from workbench.losses.terms import LossInputs, Term
from workbench.metrics.values import Mean, Value
from workbench.specs.losses import LossSpec


def _broken(policy_metrics: Callable[..., dict[str, Value]]) -> Callable[..., dict[str, Value]]:
    def measure_what_is_left(
        inputs: LossInputs,
        terms: Mapping[str, Term],
        loss_mask_T: Tensor,
        level: str = "basic",
        loss_spec: LossSpec | None = None,
        *more: object,
    ) -> dict[str, Value]:
        found = policy_metrics(inputs, terms, loss_mask_T, level, loss_spec, *more)
        if "kl" not in terms:
            return found
        logged = f"kl/policy_{loss_spec.kl.against}/{loss_spec.kl.estimator}_" if loss_spec else "kl/policy_ref/k3_"
        return {
            key: _scaled(value, terms["kl"].coefficient) if key.startswith(logged) else value
            for key, value in found.items()
        }

    return measure_what_is_left


def _scaled(value: Value, factor: float) -> Value:
    """A mean, with its total and not its weight multiplied."""
    if not isinstance(value.reducer, Mean):
        return value
    return replace(value, sums=(value.sums[0] * factor, *value.sums[1:]))


FAULT = Fault(
    family="D",
    what="the tensor of the penalty is changed in place after it was handed to the log",
    origin="THUDM/slime#2114",
    signature="gradient and loss right; the metric of the KL that the loss penalises exactly coefficient times the "
    "right one, other estimators and pairs right; nothing without a penalty",
    seam="policy_metrics",
    broken=_broken,
    hidden_in={"loss": {"kl": {"coefficient": 0.0}}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_kl_changed_in_place_is_its_coefficient_too_small",
    changes_gradient=False,
)
