"""Epsilon is the lower bound of the ratio, and not its distance from 1."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.losses.terms import Term


def _broken(clip_ratio: Callable[..., Term]) -> Callable[..., Term]:
    def clip_from_epsilon(*values: object, clip_low: float, **bounds: object) -> Term:
        return clip_ratio(*values, clip_low=1 - clip_low, **bounds)

    return clip_from_epsilon


FAULT = Fault(
    family="G",
    what="the ratio is clipped to [epsilon, 1 + epsilon]: tokens that were made unlikelier are pushed on",
    origin="ChenmienTan/RL2#21",
    signature="tokens of a negative advantage that lie below 1 - epsilon keep their gradient, and their loss is "
    "smaller in size; all others right, and log-probabilities, ratios and the penalty with them",
    seam="workbench.losses.surrogates.clipped:clip_ratio",
    broken=_broken,
    shows_in={"loss": {"surrogate": {"clip_low": 0.02}}},
    hidden_in={"loss": {"surrogate": {"clip_low": 0.5}}},
    detected_by="tests/faults/test_unseen.py::test_a_lower_bound_at_epsilon_frees_tokens_of_negative_advantage",
)
