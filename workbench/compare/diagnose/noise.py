"""How far two correct records may lie apart: rounding, by precision, growing with the optimizer steps behind it.

Two runs that sum in another order differ by rounding in the first step. From the second on their weights differ too,
and an optimizer that divides by a gradient's size turns rounding of near-zero elements into whole steps. Bars here
are for the whole gradient's relative distance; other numbers have theirs as a multiple of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FIRST = {"float64": 1e-10, "float32": 2e-4, "float16": 0.02, "bfloat16": 0.1}
_LATER = {"float64": 1e-6, "float32": 5e-3, "float16": 0.1, "bfloat16": 0.4}
_METRIC_FLOOR = {"float64": 1e-2, "float32": 1e-2, "float16": 0.1, "bfloat16": 0.3}
_COARSE = tuple(_FIRST)
_UNKNOWN = "float32"


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
    """

    gradient: float
    loss: float
    metric: float
    metric_floor: float
    logprob_nats: float
    outliers: float

    @classmethod
    def between(cls, first: Mapping[str, Any], second: Mapping[str, Any], step: int) -> Noise:
        """What is allowed between records of these contexts, ``step`` optimizer steps after the same weights.

        The lower precision of the two decides; a record that does not say is taken for float32.
        """
        said = [str(context.get("precision", _UNKNOWN)) for context in (first, second)]
        name = max((each if each in _COARSE else _UNKNOWN for each in said), key=_COARSE.index)
        bar = (_LATER if step else _FIRST)[name]
        return cls(gradient=bar, loss=bar, metric=bar, metric_floor=_METRIC_FLOOR[name], logprob_nats=bar,
                   outliers=0.05 if step and name != "float64" else 0.0)
