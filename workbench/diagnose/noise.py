"""How far two correct records may lie apart: rounding, by precision, growing with the optimizer steps behind it.

Two runs that sum in another order differ by rounding in the first step. From the second on their weights differ too,
and an optimizer that divides by a gradient's size turns rounding of near-zero elements into whole steps. Bars here
are for the whole gradient's relative distance; other numbers have theirs as a multiple of it.

Where both policies say bit for bit the same of every token, nothing was rounded otherwise on the way forward: what is
made of it in float32 (loss, metrics) agrees to float32, and only the backward pass rounds, a few times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_FIRST = {"float64": 1e-10, "float32": 2e-4, "float16": 0.02, "bfloat16": 0.1}
_LATER = {"float64": 1e-6, "float32": 5e-3, "float16": 0.1, "bfloat16": 0.4}
_METRIC_FLOOR = {"float64": 1e-2, "float32": 1e-2, "float16": 0.1, "bfloat16": 0.3}
_SAME_FORWARD = {"float64": 1e-6, "float32": 1e-5, "float16": 5e-3, "bfloat16": 0.03}
_OF_FLOAT32 = 1e-5
"""Relative, for sums in float32 of the same numbers in another order."""
_COARSE = tuple(_FIRST)
_UNKNOWN = "float32"
_CLIP_NATS = 0.01
"""Ranges of a ratio are as narrow as this: beyond, log-probabilities' noise decides what is clipped."""


@dataclass(frozen=True)
class Noise:
    """How far numbers of two correct records may lie apart in one step.

    Attributes:
        gradient: relative distance of gradients, or of their norms.
        loss: difference of losses, in parts of the loss or of the gradient's norm, whichever is more.
        metric: difference of metrics, in parts of the metric or of ``metric_floor``, whichever is more.
        metric_floor: below this a metric is next to nothing.
        logprob_nats: difference of a token's log-probability, in parts of 1 + its size.
        outliers: share of the tokens that may lie further apart.
        same_forward: both policies say bit for bit the same of every token.
    """

    gradient: float
    loss: float
    metric: float
    metric_floor: float
    logprob_nats: float
    outliers: float
    same_forward: bool = False

    @classmethod
    def between(
        cls, first: Mapping[str, Any], second: Mapping[str, Any], step: int, *, same_forward: bool = False
    ) -> Noise:
        """What is allowed between records of these contexts, ``step`` optimizer steps after the same weights.

        The lower precision of the two decides; a record that does not say is taken for float32.

        Args:
            first: context of one.
            second: of the other.
            step: how many optimizer steps lie before it.
            same_forward: both policies say bit for bit the same of every token.
        """
        said = [str(context.get("precision", _UNKNOWN)) for context in (first, second)]
        name = max((each if each in _COARSE else _UNKNOWN for each in said), key=_COARSE.index)
        bar = (_LATER if step else _FIRST)[name]
        if same_forward:
            rest = min(bar, _OF_FLOAT32)
            return cls(
                gradient=min(bar, _SAME_FORWARD[name]),
                loss=rest,
                metric=10 * rest,
                metric_floor=_METRIC_FLOOR["float32"],
                logprob_nats=10 * rest,
                outliers=0.0,
                same_forward=True,
            )
        return cls(
            gradient=bar,
            loss=bar,
            metric=bar,
            metric_floor=_METRIC_FLOOR[name],
            logprob_nats=bar,
            outliers=0.05 if step and name != "float64" else 0.0,
        )

    def of_metric(self, key: str) -> float:
        """What is allowed of one metric.

        Norms of gradients are as noisy as those; how much is clipped says nothing where rounding decides it.
        """
        if key.startswith("gradient/"):
            return max(self.metric, self.gradient)
        return math.inf if key.startswith("clip/") and self.logprob_nats > _CLIP_NATS else self.metric

    def as_tokens_cancel(self, times: float) -> Noise:
        """What is allowed where the gradient is so many times smaller than it has been.

        Gradients of tokens cancel as training goes on; what rounding did to each of them does not.
        """
        return replace(self, gradient=self.gradient * max(times, 1.0)) if math.isfinite(times) else self

    def with_flips(self, share: float) -> Noise:
        """What is allowed where rounding has turned clip decisions: of so many tokens for each that is not clipped.

        A clipped loss has no jump there; its gradient has. Of n like tokens, s n that come or go move it by about
        sqrt(s) of itself, and a few heavy ones by more.
        """
        return self if not share else replace(self, gradient=max(self.gradient, 5 * share**0.5))
