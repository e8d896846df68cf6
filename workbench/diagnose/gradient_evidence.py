"""The gradients of one step in two records: factor, direction and remainder, and which parameters differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from workbench.diagnose.noise import Noise
from workbench.diagnose.record import RecordedStep

FLOOR = 1e-3
"""Of the root mean square of the whole gradient: a parameter whose gradient is smaller is judged by this."""
NOTHING = 1e-12
MEASURED = 1e-9
"""Gradients closer than this agree."""
GAP = 10.0
"""Ratio of distances by which a group of parameters must exceed all others to stand out."""


@dataclass(frozen=True)
class Parameter:
    """One parameter's gradient in the suspect, compared with the trusted one's.

    Attributes:
        ratio: of the norms.
        cosine: None where only norms were recorded.
        distance: ||g_b - g_a|| / ||g_a|| (or over the floor, if that norm is smaller), or |ratio - 1| from norms.
        share: of the trusted gradient's whole norm.
        same: within noise.
    """

    ratio: float
    cosine: float | None
    distance: float
    share: float
    same: bool


def whole_norm(step: RecordedStep) -> float:
    """The norm of a step's whole gradient, from those of its parameters."""
    return math.sqrt(sum(norm**2 for norm in step.gradient_norms.values()))


def typical_norm(step: RecordedStep) -> float:
    """The norm of a parameter, if all had the same."""
    return whole_norm(step) / math.sqrt(max(len(step.gradient_norms), 1))


def compare_gradients(
    gradients: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    a: RecordedStep,
    b: RecordedStep,
    norms: list[str],
    noise: Noise,
) -> dict | None:
    """Factor, cosine and parameters, from whole gradients if both have them, else from norms; None if all are 0."""
    trusted, suspect = ({name: values.double().flatten() for name, values in each.items()} for each in gradients)
    shared = [name for name in trusted if name in suspect and trusted[name].shape == suspect[name].shape]
    if not shared:
        return _from_norms(a, b, norms, noise)
    elements = sum(trusted[name].numel() for name in shared)
    norm, other = (_norm(each[name] for name in shared) for each in (trusted, suspect))
    if norm == other == 0:
        return None
    product = sum(float(trusted[name] @ suspect[name]) for name in shared)
    parameters = {}
    for name in shared:
        one, two = float(trusted[name].norm()), float(suspect[name].norm())
        typical = norm * math.sqrt(trusted[name].numel() / elements)
        scale = max(one, FLOOR * typical, NOTHING)
        far = float((suspect[name] - trusted[name]).norm()) / scale
        cosine = float(trusted[name] @ suspect[name]) / (one * two) if one * two else None
        parameters[name] = Parameter(
            two / one if one else math.nan,
            cosine,
            far,
            one / norm if norm else 0.0,
            far <= noise.gradient * max(1.0, 3 * typical / scale) * _of_few(trusted[name].numel()),
        )
    parameters = _stand_out(parameters, noise)
    factor = product / norm**2 if norm else None
    apart = _norm(suspect[name] - trusted[name] for name in shared)
    rest = None
    if factor is not None and other:
        rest = _norm(suspect[name] - factor * trusted[name] for name in shared) / other
    same = apart <= noise.gradient * norm and all(parameter.same for parameter in parameters.values())
    return {
        "parameters": parameters,
        "factor": factor,
        "cosine": product / (norm * other) if norm * other else None,
        "residue": rest,
        "gradient_same": same,
    }


def _of_few(elements: int) -> float:
    """Times that the distance of a gradient of few elements may exceed the usual one.

    A single one, as of a value head's bias, is a sum over all tokens that may cancel; of many some do not. The size 3
    is that of `typical`: noise is greater, too, where a gradient is small.
    """
    return 1 + 3 / max(elements, 1)


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(values.square().sum()) for values in tensors))


def _stand_out(parameters: dict[str, Parameter], noise: Noise) -> dict[str, Parameter]:
    """The parameters, judged relative to each other if a gap separates those that agree from those that do not.

    Parameters that agree far better than the noise model predicts show the actual rounding: one that is ten times
    farther off than any of those, together with some that are beyond noise, differs too.
    """
    ranked = sorted(parameters, key=lambda name: parameters[name].distance)
    far = [max(parameters[name].distance, MEASURED) for name in ranked]
    gaps = [(far[at] / far[at - 1], at) for at in range(1, len(ranked)) if far[at - 1] <= noise.gradient]
    if all(parameter.same for parameter in parameters.values()) or not gaps or max(gaps)[0] < GAP:
        return parameters
    above = set(ranked[max(gaps)[1] :])
    if any(not parameters[name].same for name in ranked if name not in above):
        return parameters
    return {name: replace(parameter, same=name not in above) for name, parameter in parameters.items()}


def _from_norms(a: RecordedStep, b: RecordedStep, norms: list[str], noise: Noise) -> dict | None:
    norm = math.sqrt(sum(a.gradient_norms[name] ** 2 for name in norms))
    if not norms:
        return {}
    if not norm:
        return {"factor": None, "gradient_same": False} if any(b.gradient_norms[name] for name in norms) else None
    typical = norm / math.sqrt(len(norms))
    parameters = {}
    for name in norms:
        one, two = a.gradient_norms[name], b.gradient_norms[name]
        far = abs(two - one) / max(one, FLOOR * typical)
        parameters[name] = Parameter(
            two / one if one else math.nan,
            None,
            far,
            one / norm,
            far <= noise.gradient * max(1.0, 0.3 * typical / max(one, FLOOR * typical)),
        )
    judged = [p.ratio for p in parameters.values() if p.share > FLOOR and not math.isnan(p.ratio)]
    factor = statistics.median(judged) if judged else None
    rest = max((abs(ratio / factor - 1) for ratio in judged), default=0.0) if factor else None
    return {
        "parameters": parameters,
        "factor": factor,
        "residue": rest,
        "gradient_same": all(parameter.same for parameter in parameters.values()),
    }
