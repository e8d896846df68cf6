"""Metrics of AReaL, by its definitions. See `workbench.systems.metrics`.

Shares of the tokens that train, including rejected ones. Read from AReaL cbff54d6.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from workbench.metrics.policy import Quantities
from workbench.metrics.quantities import Column, Dropped, PolicyCut, Truncated
from workbench.systems.metrics import Alias, PeerSettings, token_metric


@dataclass(frozen=True)
class _TruncatedRatio(Column):
    """1 where the surrogate's ratio was truncated (CISPO) and the sampler correction kept the token."""

    def of(self, q: Quantities) -> Tensor | None:
        outside_T, kept_T = q.extra("ratio_truncated"), q.extra("kept")
        return outside_T if outside_T is None or kept_T is None else outside_T * kept_T


def names(s: PeerSettings) -> Iterable[Alias]:
    """Shares of tokens."""
    yield token_metric(
        "clip_fraction",
        "share of tokens where the clip acts by the sign of the advantage (CISPO: with a truncated ratio)",
        "1",
        _TruncatedRatio() if s.kind == "cispo" else PolicyCut(),
        note="the dual clip is counted separately",
    )
    yield token_metric("dual_clip_fraction", "share of tokens where the dual clip acts", "1", PolicyCut(dual=True))
    if s.spec is not None and s.spec.correction.rejects:
        yield token_metric("filtered_fraction", "share of tokens removed by rejection", "1", Dropped())
    elif s.spec is not None and s.spec.correction.acts:
        meaning = "share of tokens whose correction weight a bound changed"
        yield token_metric("filtered_fraction", meaning, "1", Truncated())
