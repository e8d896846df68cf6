"""Metrics of Liger's fused GRPO loss, by its definitions. See `workbench.systems.metrics`."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from workbench.metrics.quantities import Advantage, Clip, LogRatio, TermValue
from workbench.metrics.values import Mean
from workbench.systems.metrics import Alias, PeerSettings, document_metric, outside_clip_of, token_mean, token_metric

MEAN = Mean(least=1.0)
"""A mean over tokens; 0 over none."""


def names(s: PeerSettings) -> Iterable[Alias]:
    """Yield both metrics of Liger with their definitions, for a loss."""
    key, meaning = "clip_fraction", "share of tokens beyond the bound that the sign of the advantage pushes towards"
    same = "clip/sign_aware/fraction"
    if s.clip is not None and s.of_documents:
        yield document_metric(
            key,
            f"{meaning}, by the document's ratio",
            "1",
            (LogRatio("policy", "old"), Advantage()),
            functools.partial(token_mean, functools.partial(outside_clip_of, "cut", s.clip), epsilon=0.0, least=1.0),
            canonical=same,
            by_length=True,
        )
    elif s.clip is not None:
        note = "looks at the ratio before delta bounds it"
        yield token_metric(key, meaning, "1", Clip("cut", s.clip.anchor), MEAN, canonical=same, note=note)
    meaning = "mean of the KL penalty without its coefficient, with its importance ratio"
    yield token_metric("kl", meaning, "nats", TermValue("kl"), MEAN)
