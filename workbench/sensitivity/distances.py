"""Distances between a faulty and a clean run in the numbers that public gates compare.

Loss, gradient norm, log-probabilities of trained tokens, and weights after the last step; per step, so that a gate may
look at the first ones only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from workbench.atomic import read_tensors
from workbench.records.directory import RunDirectory


@dataclass(frozen=True)
class Change:
    """A number of the clean run, and of the faulty run."""

    clean: float
    faulty: float

    @property
    def absolute(self) -> float:
        """Absolute difference; infinite if the faulty number is not finite."""
        return abs(self.faulty - self.clean) if math.isfinite(self.faulty) else math.inf


@dataclass(frozen=True)
class Apart:
    """Difference of two tensors.

    Attributes:
        largest: largest absolute difference of an element.
        mean: mean absolute difference.
        norm: L2 norm of the difference, and ``clean_norm`` that of the clean tensor.
        largest_clean: largest absolute value of the clean tensor.
    """

    largest: float
    mean: float
    norm: float
    clean_norm: float
    largest_clean: float


@dataclass(frozen=True)
class Distances:
    """Distances of a faulty run from the clean run of the same configuration.

    Attributes:
        loss: total loss, per step.
        gradient_norm: global gradient norm as reported, per step.
        logprobs: the policy's log-probabilities of trained tokens, nats, per step; of the tokens that both runs train.
        weights: all weights after the last step; None if the faulty run has none, as its gradient is not finite.
    """

    loss: tuple[Change, ...]
    gradient_norm: tuple[Change, ...]
    logprobs: tuple[Apart, ...]
    weights: Apart | None


def measure_distances(faulty: RunDirectory, clean: RunDirectory) -> Distances:
    """Return the distances of a finished run from the clean run of its configuration."""
    steps = list(zip(clean.steps(), faulty.steps(), strict=True))
    pairs = {
        key: tuple(Change(*(_number(record.get(key)) for record in pair)) for pair in steps)
        for key in ("loss/total/sum", "gradient/norm/global")
    }
    return Distances(
        pairs["loss/total/sum"],
        pairs["gradient/norm/global"],
        tuple(_logprobs(faulty, clean, number) for number in range(len(steps))),
        _weights(faulty, clean),
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, float | int) else math.nan


def _logprobs(faulty: RunDirectory, clean: RunDirectory, step: int) -> Apart:
    tokens, baseline = (run.read_tensors(f"step{step:04d}.tokens") for run in (faulty, clean))
    both = tokens["trained"] & baseline["trained"]
    return _apart(tokens["policy_logprobs"][both], baseline["policy_logprobs"][both])


def _weights(faulty: RunDirectory, clean: RunDirectory) -> Apart | None:
    files = [list((run.path / "checkpoints").glob("*/weights.safetensors")) for run in (faulty, clean)]
    if not all(files):
        return None
    weights, baseline = (read_tensors(of_run[-1], requested="read weights", fix="measure again") for of_run in files)
    names = list(baseline)
    return _apart(*(torch.cat([of_run[name].flatten() for name in names]) for of_run in (weights, baseline)))


def _apart(values: torch.Tensor, baseline: torch.Tensor) -> Apart:
    if not values.numel():
        return Apart(0.0, 0.0, 0.0, 0.0, 0.0)
    clean = baseline.double()
    distance = (values.double() - clean).abs()
    distance = torch.where(distance.isnan(), math.inf, distance)
    numbers = distance.max(), distance.mean(), distance.norm(), clean.norm(), clean.abs().max()
    return Apart(*(float(number) for number in numbers))
