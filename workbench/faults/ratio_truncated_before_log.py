"""The name of the ratio is given to its truncated value before statistics of it are taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from workbench.faults import Fault
from workbench.losses.terms import LossInputs
from workbench.metrics.values import Value
from workbench.specs.losses import LossSpec


def _broken(policy_metrics: Callable[..., dict[str, Value]]) -> Callable[..., dict[str, Value]]:
    def measure_truncated(
        inputs: LossInputs,
        terms: object,
        loss_mask_T: object,
        level: str = "basic",
        loss_spec: LossSpec | None = None,
        *more: object,
    ) -> dict[str, Value]:
        found = policy_metrics(inputs, terms, loss_mask_T, level, loss_spec, *more)
        if loss_spec is None or loss_spec.surrogate.kind != "cispo":
            return found
        held_T = inputs.log_ratio().clamp(max=math.log1p(loss_spec.surrogate.clip_high))
        truncated = replace(inputs, policy_logprobs_T=inputs.old_logprobs_T + held_T)
        other = policy_metrics(truncated, terms, loss_mask_T, level, loss_spec, *more)
        return {key: other[key] if key.startswith("ratio/policy_old/") else value for key, value in found.items()}

    return measure_truncated


FAULT = Fault(
    family="D",
    what="the truncated ratio that weighs a token is stored over the ratio itself, of which mean, sum, sum of squares "
    "and effective samples are reported",
    origin="ServiceNow/PipelineRL, loss reinforce (read, not run)",
    signature="gradient, loss and log-probabilities right; no reported ratio is above the bound, mean and sums too "
    "small, effective samples too many; nothing under a loss that does not truncate",
    seam="policy_metrics",
    broken=_broken,
    shows_in={"loss": {"name": "truncated_reinforce"}},
    hidden_in={"loss": {"name": "reinforce"}},
    detected_by="tests/faults/test_unseen.py::test_truncated_ratios_are_reported_as_ratios",
    changes_gradient=False,
)
