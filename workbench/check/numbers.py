"""The numbers of a step under its settings as they are: recorded, recomputed, and how far they may be apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.check.reading import Reading
from workbench.check.recompute import Quantities, can_evaluate, recompute_advantages, recompute_loss
from workbench.check.stages import (
    ROUNDING,
    STAGES,
    Mismatch,
    compare,
    recorded_quantities,
    tolerances,
)
from workbench.dumps.step import StepDump


@dataclass(frozen=True)
class Numbers:
    """Numbers of a step.

    Attributes:
        reading: the step, and its settings as they are.
        recorded: by the trainer.
        expected: recomputed in float64.
        bounds: how far a recorded quantity may lie from the expected one.
        differing: quantity that is in both -> its mismatch, None if it agrees.
        missing: stage -> what would be needed to recompute it.
    """

    reading: Reading
    recorded: Quantities
    expected: Quantities
    bounds: Mapping[str, Tensor | float]
    differing: Mapping[str, Mismatch | None]
    missing: Mapping[str, str]


def recompute_numbers(reading: Reading) -> Numbers:
    """Recompute a step under its settings as they are, and compare what it recorded."""
    dump = reading.dump
    recorded = recorded_quantities(dump)
    expected, moved, missing = dict[str, Tensor | float](), list[dict[str, Tensor | float]](), dict[str, str]()
    advantages_T = recompute_advantages(reading)
    if advantages_T is None:
        missing["advantages"] = _missing_of_advantages(reading)
    else:
        expected["advantages"] = advantages_T
    if can_evaluate(dump):
        metrics = bool(dump.metrics)
        expected |= recompute_loss(reading, by_term=True, metrics=metrics)
        shift = ROUNDING[dump.dtype]
        moved = [recompute_loss(reading, shift=sign * shift, metrics=metrics) for sign in (1.0, -1.0)]
    else:
        missing |= dict.fromkeys(list(STAGES)[1:], _missing_of_loss(dump))
        expected["counts/tokens"] = float(dump.loss_mask_T.sum())
        expected["counts/documents"] = float(dump.document_ids_T[dump.loss_mask_T].unique().numel())
    bounds = tolerances(expected, tuple(moved), dump.dtype)
    if advantages_T is not None:
        bounds["advantages"] = _bound_of_advantages(reading, advantages_T)
    return Numbers(reading, recorded, expected, bounds, compare(dump, recorded, expected, bounds), missing)


EPSILON = {"float64": 2.3e-16, "float32": 1.2e-7, "bfloat16": 7.9e-3}
"""Distance of 1 from the next number of a precision (IEEE 754; bfloat16: 8 bits of significand)."""
ROUNDINGS = 16
"""Roundings of an estimator that may add up: of sums, a mean, a deviation, a quotient; a convention."""


def _bound_of_advantages(reading: Reading, advantages_T: Tensor) -> Tensor:
    """[T] roundings of the result, and the effect of rounded rewards, whose deviation may be nothing else."""
    dump, epsilon = reading.dump, EPSILON[reading.dump.dtype]
    bound_T = ROUNDINGS * epsilon * (advantages_T.abs() + 1e-3 * advantages_T.abs().max())
    if dump.dtype == "bfloat16":
        bound_T = bound_T / 4  # few operations stay in it; 4 roundings are 3 %
    for seed in (0, 1):
        moved_T = recompute_advantages(_moved(reading, epsilon, seed))
        assert moved_T is not None, "as the advantages"
        bound_T = bound_T + (moved_T - advantages_T).abs() * 4
    return bound_T


def _moved(reading: Reading, epsilon: float, seed: int) -> Reading:
    """The reading with rewards and values that are off by a rounding, up or down."""
    dump, generator = reading.dump, torch.Generator().manual_seed(seed)

    def moved(value: Tensor) -> Tensor:
        signs = torch.randint(2, value.shape, generator=generator).double() * 2 - 1
        return value.double() * (1 + epsilon * signs)

    documents = {name: moved(value) if name == "rewards" else value for name, value in dump.documents.items()}
    tokens = {name: moved(dump.tokens[name]) for name in ("token_rewards", "values") if name in dump.tokens}
    return reading.with_tokens(**tokens).with_documents(**documents)


def _missing_of_advantages(reading: Reading) -> str:
    dump = reading.dump
    if reading.estimator is None:
        return "no settings of the estimator (advantages=)"
    if not {"rewards"} & {*dump.documents} | {"token_rewards"} & {*dump.tokens}:
        return "no rewards"
    return "no group_ids"


def _missing_of_loss(dump: StepDump) -> str:
    if dump.advantages_T is None:
        return "no advantages"
    return "no policy_logprobs (on_policy=True if the loss was computed on the old policy itself)"
