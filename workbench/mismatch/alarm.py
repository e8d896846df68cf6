"""The alarm: three statistics of a batch's gap, each with a threshold from the floor's own draws.

    mean        mean distance of a token from 0
    shift       distance of the mean gap from 0: noise cancels in it, a cause with a sign does not
    documents   largest mean distance of one document: a cause may act in few

The threshold of each is the quantile 1 - `RATE` / 3 of the statistic over batches of the same number of documents,
drawn with replacement from the floor's noise, times `MARGIN` for what the floor itself is off by. That of one document
is at least the same quantile of a log-normal distribution of documents, fitted to those that were drawn.
`experiments/attribution` records the false alarms of 200 clean runs.

Letters: K draws | T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.mismatch.floor import Floor

RATE = 0.01
"""False alarms that are accepted, of batches."""
MARGIN = 1.25
"""The floor is reproduced by another method within 20 %: 1 / 0.8."""
BATCHES = 2000
"""Batches that are drawn for a threshold."""


@dataclass(frozen=True)
class Alarm:
    """Thresholds of a batch's statistics.

    Attributes:
        thresholds: statistic -> nats.
    """

    thresholds: Mapping[str, float]

    def raised(self, gap_T: Tensor, document_T: Tensor) -> dict[str, float]:
        """Statistics of a gap that are above their threshold, in multiples of it.

        Shapes: [T] nats, [T] document of each token.
        """
        of_gap = statistics(gap_T, document_T)
        return {
            name: value / self.thresholds[name] if self.thresholds[name] else float("inf")
            for name, value in of_gap.items()
            if value > self.thresholds[name]
        }


def statistics(gap_T: Tensor, document_T: Tensor) -> dict[str, float]:
    """Return the statistics of a batch's gap, in nats."""
    sums = torch.zeros(int(document_T.max()) + 1, dtype=torch.float64).index_add(0, document_T, gap_T.abs())
    counts = torch.bincount(document_T)
    return {
        "mean": float(gap_T.abs().mean()),
        "shift": float(gap_T.mean().abs()),
        "documents": float((sums[counts > 0] / counts[counts > 0]).max()),
    }


def calibrate(floor: Floor, documents: int, *, seed: int = 0) -> Alarm:
    """Return the alarm for batches of a number of documents like those of the floor."""
    noise_KT, document_T = floor.noise_KT, floor.document_T
    draws, own = len(noise_KT), int(document_T.max()) + 1
    lengths = torch.bincount(document_T, minlength=own)
    totals = torch.zeros(draws, own, dtype=torch.float64).index_add(1, document_T, noise_KT)
    distances = torch.zeros(draws, own, dtype=torch.float64).index_add(1, document_T, noise_KT.abs())
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(own, (BATCHES, documents), generator=generator)
    # One draw a batch: what a draw shares between documents, such as the rounding of positions, stays in it.
    draw = torch.randint(draws, (BATCHES, 1), generator=generator).expand(-1, documents)
    tokens = lengths[which].sum(1)
    found = {
        "mean": distances[draw, which].sum(1) / tokens,
        "shift": (totals[draw, which].sum(1) / tokens).abs(),
        "documents": (distances[draw, which] / lengths[which].clamp(min=1)).amax(1),
    }
    share = 1 - RATE / len(found)
    thresholds = {name: float(values.quantile(share)) for name, values in found.items()}
    # The largest of a batch lies beyond the few that were drawn: of mixtures, in which a route may flip, far beyond.
    of_one = (distances / lengths.clamp(min=1))[:, lengths > 0].flatten()
    of_one = of_one[of_one > 0].log()
    if len(of_one) > 1:
        deviations = float(torch.special.ndtri(torch.tensor(1 - RATE / len(found) / documents, dtype=torch.float64)))
        tail = float(torch.exp(of_one.mean() + deviations * of_one.std()))
        thresholds["documents"] = max(thresholds["documents"], tail)
    return Alarm({name: MARGIN * value for name, value in thresholds.items()})
