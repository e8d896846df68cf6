"""The floor: the part of a gap that rounding alone makes, for this model, precision and length.

Both sides are perturbed around their own float64 ground truth: the weights of each rounded as it states, everything
else exact; then each operation is rounded at random (`workbench.mismatch.rounding`), independently on both sides and
in each draw. A draw's noise is the difference of the two sides' distances from their truths. A gap of that size is
what two right engines have that round at the same places and not alike; it is safe in that no cause but rounding is
needed for it. It says nothing about how much mismatch a loss tolerates.

The noise of a model depends on its weights: on how peaked its distributions and how large its activations are. The
floor on seeded weights does not transfer to a trained model.

Letters: K draws | T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.mismatch.computing import Computation
from workbench.mismatch.configuration import Configuration
from workbench.mismatch.rounding import NEAREST, RandomRounding
from workbench.policy.gemm_formats import emulating

DRAWS = 8
"""Draws of the noise of each side: they give 8 x 8 pairs of sides."""
SAMPLE = 2048
"""Tokens on which the floor is measured."""
BUDGET, LEAST = 2e9, 192
"""Parameters times tokens of a draw, some seconds of a CPU core; tokens at least."""


@dataclass(frozen=True)
class Floor:
    """Noise of the gap, drawn.

    Attributes:
        noise_KT: [K, T] nats, of the measured tokens.
        trainer_KT, sampler_KT: [K, T] of each side alone.
        document_T: [T] document of each measured token.
    """

    noise_KT: Tensor
    trainer_KT: Tensor
    sampler_KT: Tensor
    document_T: Tensor

    @property
    def mean(self) -> float:
        """Mean distance, nats."""
        return float(self.noise_KT.abs().mean())

    @property
    def rms(self) -> float:
        """Root mean square, nats."""
        return float(self.noise_KT.square().mean().sqrt())

    def quantile(self, share: float) -> float:
        """Distance below which this share of tokens lies, nats."""
        return float(self.noise_KT.abs().flatten().quantile(share))

    def with_draws(self, other: Floor) -> Floor:
        """Return a floor with the draws of another one of the same tokens as well."""
        return Floor(
            torch.cat([self.noise_KT, other.noise_KT]),
            torch.cat([self.trainer_KT, other.trainer_KT]),
            torch.cat([self.sampler_KT, other.sampler_KT]),
            self.document_T,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the floor's figures."""
        return {
            "mean": self.mean,
            "rms": self.rms,
            "p99": self.quantile(0.99),
            "largest": float(self.noise_KT.abs().max()),
            "trainer_rms": float(self.trainer_KT.square().mean().sqrt()),
            "sampler_rms": float(self.sampler_KT.square().mean().sqrt()),
            "tokens": self.noise_KT.shape[1],
            "draws": self.noise_KT.shape[0],
        }


def measure_floor(
    computation: Computation,
    trainer: Configuration,
    sampler: Configuration,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> Floor:
    """Draw the noise of a record's gap, on as many of its documents as have `SAMPLE` tokens, or the budget allows."""
    numbers, tokens = [], 0
    limit = min(SAMPLE, max(LEAST, BUDGET / sum(weight.numel() for weight in computation.base.parameters())))
    for number, document in enumerate(computation.documents):
        if tokens < limit:
            numbers.append(number)
            tokens += int(document.counted_C.sum())
    few = computation.part(numbers)
    own, other = (noise_of(few, one, draws=draws, seed=seed + 1000 * n) for n, one in enumerate((trainer, sampler)))
    measured = few.counted_T & (own + other).isfinite().all(0)
    return Floor(own[:, measured] - other[:, measured], own[:, measured], other[:, measured], few.document_T[measured])


def noise_of(computation: Computation, configuration: Configuration, *, draws: int, seed: int) -> Tensor:
    """Draw the rounding noise of one configuration's column. Shape: [K, T]; NaN where the column has no value."""
    truth_T = truth(computation, configuration)
    columns = []
    if configuration.precision == "float64":
        return torch.zeros(draws, len(truth_T), dtype=torch.float64)
    computation.head(configuration)  # built before: its weights are rounded to nearest
    for draw in range(draws):
        generator = torch.Generator(computation.device).manual_seed(seed + draw)
        fresh = computation.part(range(len(computation.documents)))
        with emulating(), RandomRounding(generator):  # FP8 products have operands that no rounding of outputs sees
            columns.append(fresh.column(configuration) - truth_T)
    return torch.stack(columns) / NEAREST


def truth(computation: Computation, configuration: Configuration) -> Tensor:
    """Column in float64 throughout, with the weights that the configuration rounds. Shape: [T]."""
    return computation.exact_column(configuration)
