"""Metrics of ROLL's actor, by its definitions. See `workbench.systems.metrics`. Read from alibaba/ROLL 8eb27cc2.

Names are those of its logs, without the reducer behind the @: sums over micro-batches and ranks of numbers that are
divided by the counts of the whole step. Means by `loss_agg_mode` are recomputed for token-mean.

Letters: N documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from workbench.metrics.quantities import KL, Ratio
from workbench.metrics.values import Mean
from workbench.systems.metrics import Alias, PeerSettings, document_metric, token_metric

_UNMASKED = "takes no mask: positions of prompts and of padding are counted, too, and divided by the trained tokens"
LEFT_OUT = {
    "actor/ppo_ratio_clipfrac": _UNMASKED,
    "actor/ppo_ratio_low_clipfrac": _UNMASKED,
    "actor/ppo_ratio_high_clipfrac": _UNMASKED,
}
"""Metric -> what it is there; not reported here."""


def names(s: PeerSettings) -> Iterable[Alias]:
    """Yield the mean ratio, and distances from the old policy."""
    meaning = "mean over rows with trained tokens of the row's mean of policy / old, tokens of their own"
    if not s.of_documents:
        yield document_metric("actor/ratio_mean", meaning, "1", (Ratio("policy", "old"),), _mean_of_means)
    if s.spec is None or s.spec.denominator == "token":
        yield token_metric(
            "actor/approxkl", "mean of (policy - old)^2 / 2", "nats^2", KL("k2", "policy", "old"), Mean()
        )
        yield token_metric("actor/policykl", "mean of policy - old", "nats", KL("k1", "policy", "old"), Mean())


def _mean_of_means(tokens_N: Tensor, sum_N: Tensor) -> float:
    return float((sum_N / tokens_N).mean()) if len(tokens_N) else math.nan
