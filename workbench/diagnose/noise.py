"""Tolerances between two correct records: rounding, by precision, larger after the first optimizer step.

Two runs that sum in another order differ by rounding in the first step. From the second on their weights differ too,
and an optimizer that divides by a gradient's size turns rounding of near-zero elements into whole steps. Tolerances
here are for the whole gradient's relative distance; those of other numbers are multiples of it.

Where log-probabilities of all tokens are bitwise identical, the forward pass rounded identically: float32 results
computed from them (loss, metrics) agree to float32, and only the backward pass rounds differently, a few times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from workbench.specs.precision import dtypes_of

_FIRST = {"float64": 1e-10, "float32": 2e-4, "float16": 0.02, "bfloat16": 0.1, "float8": 0.6}
"""At least 1.5 times the largest error of such a run from float64 in `experiments/precision/precision.json`."""
_LATER = {"float64": 1e-6, "float32": 5e-3, "float16": 0.1, "bfloat16": 0.4, "float8": 1.0}
_METRIC_FLOOR = {"float64": 1e-2, "float32": 1e-2, "float16": 0.1, "bfloat16": 0.3, "float8": 0.5}
_SAME_FORWARD = {"float64": 1e-6, "float32": 1e-5, "float16": 5e-3, "bfloat16": 0.03, "float8": 0.1}
_OF_FLOAT32 = 1e-5
"""Relative tolerance for sums in float32 of the same numbers in another order."""
_OF_INPUTS = 0.1
"""Of the tolerance of gradients, that of a loss whose inputs are rounded: a mean over tokens, whose errors average out.
Of 0.1 in bfloat16 the largest seen is 0.0033 (`experiments/diagnosis/rounding`)."""
SCATTER = 10
"""Rounding of log-probabilities is a tenth of its largest tolerance on average (root mean square) over tokens: of 0.01
in bfloat16 the largest seen is 0.0025 (`experiments/diagnosis/rounding`)."""
_COARSE = tuple(_FIRST)
_UNKNOWN = "float32"
_CLIP_NATS = 0.01
"""Narrowest clip range of a ratio: with noisier log-probabilities than this, noise decides what is clipped."""
_EXTREME = 4.0
"""Tolerance of the log-probability of -3 nats, in that of one near 0: it is relative to 1 + its absolute value."""


@dataclass(frozen=True)
class Noise:
    """Tolerances between two correct records in one step.

    Attributes:
        gradient: relative distance of gradients, or of their norms.
        loss: difference of losses, relative to the loss or to the gradient's norm, whichever is larger.
        metric: difference of metrics, relative to the metric or to ``metric_floor``, whichever is larger.
        metric_floor: a metric below this counts as zero.
        logprob_nats: difference of a token's log-probability, relative to 1 + its absolute value.
        outliers: share of the tokens that may lie further apart.
        same_forward: log-probabilities of all tokens are bitwise identical.
        unknown_inputs: relative tolerance of a loss, or a metric, whose other inputs (a reference, a critic) were not
            recorded.
        other_nats: like ``logprob_nats``, of log-probabilities that another forward pass gave, of an old policy, a
            reference or a sampler: their batches may be padded and divided otherwise than those that train.
    """

    gradient: float
    loss: float
    metric: float
    metric_floor: float
    logprob_nats: float
    outliers: float
    same_forward: bool = False
    unknown_inputs: float = 0.0
    other_nats: float = 0.0

    @classmethod
    def between(
        cls, first: Mapping[str, Any], second: Mapping[str, Any], step: int, *, same_forward: bool = False
    ) -> Noise:
        """Tolerances between records of these contexts, ``step`` optimizer steps after the same weights.

        The lower precision of the two decides, of mixed ones the dtype with the fewest bits; a record without one is
        taken for float32.
        """
        name = max(map(_dtype, (first, second)), key=_COARSE.index)
        bar = (_LATER if step else _FIRST)[name]
        if same_forward:
            rest = min(bar, _OF_FLOAT32)
            gradient = min(bar, _SAME_FORWARD[name])
            floor = _METRIC_FLOOR["float32"]
            return cls(
                *(gradient, rest, 10 * rest, floor, 10 * rest, 0.0),
                same_forward=True,
                unknown_inputs=_FIRST[name] * _OF_INPUTS,
                other_nats=_FIRST[name],
            )
        outliers = 0.05 if step and name != "float64" else 0.0
        return cls(bar, bar, bar, _METRIC_FLOOR[name], bar, outliers, other_nats=bar)

    def with_inputs_rounded(self, *, critic: bool) -> Noise:
        """Tolerances where values of the loss are apart by rounding of inputs that were not recorded.

        Policies agree bit for bit, and another forward pass does not: that of a reference hardly changes weights of
        predictions, a critic's has a gradient of its own.
        """
        rest = max(self.loss, self.unknown_inputs)
        gradient = max(self.gradient, self.other_nats) if critic else self.gradient
        return replace(self, gradient=gradient, loss=rest, metric=max(self.metric, rest))

    def of_metric(self, key: str) -> float:
        """Tolerance of one metric.

        Norms of gradients are as noisy as gradients; clip metrics are ignored where rounding decides what is clipped.
        The largest and smallest ratio are those of single tokens, with the rounding of a log-probability of a few nats.
        """
        if key.startswith("ratio/") and key.endswith(("/max", "/min")):
            return max(self.metric, math.expm1(_EXTREME * self.logprob_nats))
        if key.startswith("gradient/"):
            return max(self.metric, self.gradient)
        return math.inf if key.startswith("clip/") and self.logprob_nats > _CLIP_NATS else self.metric

    def as_tokens_cancel(self, times: float) -> Noise:
        """Tolerances for a gradient that is so many times smaller than it has been.

        Gradients of tokens cancel as training proceeds; their rounding errors do not.
        """
        return replace(self, gradient=self.gradient * max(times, 1.0)) if math.isfinite(times) else self

    def with_flips(self, share: float) -> Noise:
        """Tolerances where rounding has flipped clip decisions of this share of tokens, relative to those not clipped.

        A clipped loss is continuous there; its gradient is not. Of n similar tokens, s n that appear or vanish move it
        by about sqrt(s) of itself, and a few heavy ones by more.
        """
        return self if not share else replace(self, gradient=max(self.gradient, 5 * share**0.5))


def _dtype(context: Mapping[str, Any]) -> str:
    dtypes = dtypes_of(context)
    name = str(context.get("precision", _UNKNOWN)) if dtypes is None else dtypes.coarsest
    return name if name in _COARSE else _UNKNOWN
