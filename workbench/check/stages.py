"""Stages of a loss, in the order of computation, and the comparison of what a step recorded with what is recomputed.

A tolerance is the rounding of the trainer's precision, carried through the loss: everything is computed again with
log-probabilities moved by that rounding, so that a clip decision which rounding could flip is no difference.

Letters: T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.check.recompute import Quantities
from workbench.dumps.step import StepDump

STAGES: Mapping[str, tuple[str, ...]] = {
    "advantages": ("advantages",),
    "mask and denominator": ("counts/", "loss_weights"),
    "ratios": ("ratios",),
    "corrections": ("correction_weights",),
    "clip decisions": ("clipped",),
    "coefficients": ("coefficients",),
    "loss": ("losses/",),
    "metrics": ("metrics/",),
}
"""Stage -> its quantities; with "/" a group of numbers."""
ROUNDING = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 2e-2}
"""Nats by which a log-probability may differ from the recorded one inside the trainer: 16 ulp of 1, a convention."""
RELATIVE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 3e-2}
"""Relative rounding of a result: of sums of thousands of tokens in that precision, a convention."""
EVERYWHERE = ("coefficients", "loss_weights")
"""Quantities that are compared on tokens that do not train, too, where they are 0."""


@dataclass(frozen=True)
class Mismatch:
    """A recorded quantity that differs.

    Attributes:
        quantity: its name.
        recorded, expected, tolerance: of the number, or of the token where they are furthest apart.
        token: that token; None for a number.
        tokens: how many tokens differ.
        of: how many were compared.
    """

    quantity: str
    recorded: float
    expected: float
    tolerance: float
    token: int | None = None
    tokens: int = 0
    of: int = 0


def stage_of(quantity: str) -> str:
    """Return the stage of a quantity."""
    return next(
        stage
        for stage, names in STAGES.items()
        if any(quantity.startswith(name) if name.endswith("/") else quantity == name for name in names)
    )


def recorded_quantities(dump: StepDump) -> dict[str, Tensor | float]:
    """Return what a step recorded of its results, by the names of `recompute_loss`."""
    recorded: dict[str, Tensor | float] = {}
    if (advantages_T := dump.advantages_T) is not None:
        recorded["advantages"] = torch.where(dump.loss_mask_T, advantages_T, 0.0)
    for names in STAGES.values():
        for name in names:
            if name in dump.tokens and name != "advantages":
                recorded[name] = dump.tokens[name].double()
    for group, numbers in (("counts", dump.counts), ("losses", dump.losses), ("metrics", dump.metrics)):
        recorded |= {f"{group}/{name}": float(value) for name, value in numbers.items()}
    return recorded


def tolerances(
    expected: Quantities, moved: tuple[Quantities, ...], dtype: str, names: Iterable[str] | None = None
) -> dict[str, Tensor | float]:
    """Return how far recorded quantities may lie from the expected ones, from their values after moved inputs.

    ``names`` are those of the quantities that are asked for; None: all.
    """
    relative = RELATIVE[dtype]
    bounds: dict[str, Tensor | float] = {}
    for name in expected if names is None else names:
        value = expected[name]
        if isinstance(value, Tensor):
            largest = float(value.abs().max()) if len(value) else 0.0
            parts = [part for key, part in expected.items() if key.startswith("parts/")]
            sizes = [torch.as_tensor(part).abs() for part in parts if name == "coefficients"]
            bound_T = relative * sum(sizes, start=value.abs()) + 1e-3 * relative * largest
            for other in moved:
                other_T = torch.as_tensor(other.get(name, value))
                bound_T = bound_T + (1 + 4 * relative) * (other_T - value).abs() + relative * other_T.abs()
            bounds[name] = bound_T
        else:
            scale = abs(value)
            if name.startswith("losses/"):
                term = name[7:].removesuffix("_without_coefficient")
                scale = max(scale, float(expected.get(f"magnitudes/{term}", 0.0)))
            bound = relative * (scale if name.startswith(("losses/", "counts/")) else max(scale, 0.5))
            around = [float(other[name]) for other in moved if name in other]
            bounds[name] = bound + sum(abs(number - value) for number in around if math.isfinite(number))
    return bounds


def distances(recorded: Quantities, expected: Quantities, names: Iterable[str]) -> dict[str, float]:
    """Return how far recorded quantities are from expected ones, relative to their size: means over tokens."""
    results = dict[str, float]()
    for name in names:
        recorded_T, expected_T = torch.as_tensor(recorded[name]), torch.as_tensor(expected[name])
        distance = float((recorded_T - expected_T).abs().double().mean())
        results[name] = distance / (float(recorded_T.abs().double().mean()) or 1.0)
    return results


def compare(
    dump: StepDump, recorded: Quantities, expected: Quantities, bounds: Mapping[str, Tensor | float]
) -> dict[str, Mismatch | None]:
    """Compare every quantity that is in both; None where they agree."""
    results: dict[str, Mismatch | None] = {}
    for name, value in recorded.items():
        if name not in expected:
            continue
        other, bound = expected[name], bounds[name]
        if isinstance(value, Tensor):
            where_T = torch.ones_like(dump.loss_mask_T) if name in EVERYWHERE else dump.loss_mask_T
            results[name] = _tokens(name, value, torch.as_tensor(other), torch.as_tensor(bound), where_T)
        else:
            mean = expected.get(f"means/{name.removeprefix('metrics/')}", other)
            numbers = [float(other), float(mean)]
            results[name] = _number(name, float(value), numbers, float(bound))
    return results


def _tokens(name: str, recorded_T: Tensor, expected_T: Tensor, bound_T: Tensor, where_T: Tensor) -> Mismatch | None:
    distance_T = torch.where(where_T, (recorded_T - expected_T).abs(), 0.0).nan_to_num(nan=math.inf)
    differ_T = distance_T > bound_T
    if not bool(differ_T.any()):
        return None
    at = int(torch.where(differ_T, distance_T, -1.0).argmax())
    recorded, expected, bound = (float(value_T[at]) for value_T in (recorded_T, expected_T, bound_T))
    return Mismatch(name, recorded, expected, bound, at, int(differ_T.sum()), int(where_T.sum()))


def _number(name: str, recorded: float, expected: list[float], bound: float) -> Mismatch | None:
    if any(abs(recorded - number) <= bound or (math.isnan(recorded) and math.isnan(number)) for number in expected):
        return None
    return Mismatch(name, recorded, expected[0], bound)
