"""Metrics of AReaL, by its definitions. See the package docstring.

Shares of the tokens that train, including rejected ones. Read from AReaL cbff54d6.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from workbench.metrics.definitions import Metric
from workbench.metrics.quantities import Column, Dropped, PolicyCut, Quantities, Truncated
from workbench.metrics.values import Mean
from workbench.specs.losses import CorrectionSpec
from workbench.systems.alias import Alias, PeerSettings


@dataclass(frozen=True)
class TruncatedRatio(Column):
    """1 where the surrogate's ratio was truncated (CISPO) and the sampler correction kept the token."""

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        outside_T, kept_T = q.extra("ratio_truncated"), q.extra("kept")
        return outside_T if outside_T is None or kept_T is None else outside_T * kept_T


def names(s: PeerSettings) -> Iterable[Alias]:
    """Shares of tokens."""
    clip = TruncatedRatio() if s.kind == "cispo" else PolicyCut()
    yield Alias(
        Metric(
            "clip_fraction",
            "share of tokens where the clip acts by the sign of the advantage (CISPO: with a truncated ratio)",
            "1",
            clip,
            Mean(),
        ),
        note="the dual clip is counted separately",
    )
    yield Alias(
        Metric("dual_clip_fraction", "share of tokens where the dual clip acts", "1", PolicyCut(dual=True), Mean())
    )
    correction = CorrectionSpec() if s.spec is None else s.spec.correction
    if correction.rejects:
        yield Alias(Metric("filtered_fraction", "share of tokens removed by rejection", "1", Dropped(), Mean()))
    elif correction.acts:
        yield Alias(
            Metric(
                "filtered_fraction", "share of tokens whose correction weight a bound changed", "1", Truncated(), Mean()
            )
        )
