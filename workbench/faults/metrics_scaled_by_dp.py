"""The factor that undoes a mean over data-parallel ranks is also in what is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from workbench.faults import Fault
from workbench.policy.model import Policy


def _broken(run_step: Callable) -> Callable:
    def report_scaled(policy: Policy, *args: object, **how: object) -> Any:
        result, dp = run_step(policy, *args, **how), policy.mesh["dp"].size
        scaled = {
            key: value * dp if key.endswith(("/mean", "/fraction", "_mean")) else value
            for key, value in result.metrics.items()
        }
        return replace(result, metrics=scaled)

    return report_scaled


FAULT = Fault(
    family="D",
    what="means are scaled for an engine that averages over dp as the loss is, and nothing averages them",
    origin="verl-project/verl#4711, #4778 and #5203",
    signature="gradient and loss right; every reported mean and share exactly dp times too big, so that shares pass "
    "1; sums, counts and extremes right",
    seam="run_step",
    broken=_broken,
    shows_in={"layout": {"dp": 2}},
    hidden_in={"layout": {"dp": 1}},
    detected_by="tests/faults/test_unseen_at_first.py::test_scaled_means_are_too_big_by_dp",
    changes_gradient=False,
)
