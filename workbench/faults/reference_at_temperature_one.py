"""The reference is asked without the temperature of the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.faults import Fault
from workbench.faults.sampler_logprobs_before_temperature import without_temperature
from workbench.policy.model import Policy


def _broken(run_step: Callable) -> Callable:
    def run_with_raw(policy: Policy, loss: object, rows: list, *more: object, **how: object) -> object:
        rows = [
            replace(
                local,
                row=replace(local.row, ref_logprobs_T=local.row.ref_logprobs_T + without_temperature(policy, local)),
            )
            for local in rows
        ]
        return run_step(policy, loss, rows, *more, **how)

    return run_with_raw


FAULT = Fault(
    family="G",
    what="log-probabilities for the penalty come from a path that knows no temperature: the policy is drawn towards "
    "a reference that is flatter than it",
    origin="OpenRLHF/OpenRLHF#853, databricks/compose-rl#105, huggingface/trl#3029",
    signature="the penalty alone wrong, not 0 where policy and reference are the same, and its gradient by no "
    "constant; log-probabilities, ratios and the policy term right",
    seam="run_step",
    broken=_broken,
    shows_in={"policy": {"temperature": 0.7}, "loss": {"kl": {"coefficient": 0.3}}},
    hidden_in={"policy": {"temperature": 1.0}},
    detected_by="tests/faults/test_unseen.py::test_a_reference_without_temperature_moves_the_penalty_alone",
)
