"""Whether a ratio is beyond its bounds is asked after it was put within them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.faults import Fault
from workbench.metrics.values import Mean, Value


def _broken(policy_metrics: Callable[..., dict[str, Value]]) -> Callable[..., dict[str, Value]]:
    def find_none_outside(*args: object) -> dict[str, Value]:
        return {
            key: _of_none(value) if key.startswith(("clip/policy/", "clip/region/")) else value
            for key, value in policy_metrics(*args).items()
        }

    return find_none_outside


def _of_none(value: Value) -> Value:
    """A share of which no token is a part."""
    if not isinstance(value.reducer, Mean):
        return value
    return replace(value, sums=(torch.zeros_like(value.sums[0]), *value.sums[1:]))


FAULT = Fault(
    family="D",
    what="the share of clipped tokens compares the clipped ratio with the bounds of the clip",
    origin="RLinf/RLinf#1529",
    signature="gradient and loss right; every share of clipped tokens is exactly 0, all other metrics right; nothing "
    "under a loss without a clip",
    seam="policy_metrics",
    broken=_broken,
    hidden_in={"loss": {"name": "reinforce"}},
    detected_by="tests/faults/test_unseen.py::test_after_the_clip_no_ratio_is_outside",
    changes_gradient=False,
)
