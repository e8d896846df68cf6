"""The numbers of a step under its settings as they are: recorded, recomputed, and how far they may be apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from workbench.check.recompute import Quantities, Reading, can_evaluate, recompute_advantages, recompute_loss
from workbench.check.stages import (
    RELATIVE,
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
        expected |= recompute_loss(reading)
        shift = ROUNDING[dump.dtype]
        moved = [recompute_loss(reading, shift=sign * shift) for sign in (1.0, -1.0)]
    else:
        missing |= dict.fromkeys(list(STAGES)[1:], _missing_of_loss(dump))
        expected["counts/tokens"] = float(dump.loss_mask_T.sum())
        expected["counts/documents"] = float(dump.document_ids_T[dump.loss_mask_T].unique().numel())
    bounds = tolerances(expected, tuple(moved), dump.dtype)
    if advantages_T is not None:
        # A deviation of nearly equal rewards amplifies rounding: float32 of a reward over that deviation.
        bounds["advantages"] = 10 * RELATIVE[dump.dtype] * (1 + advantages_T.abs())
    return Numbers(reading, recorded, expected, bounds, compare(dump, recorded, expected, bounds), missing)


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
