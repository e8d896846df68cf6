"""Differences between two outcomes of one step: quantities, sizes, and factor.

Tolerances, in float64, where a correct layout stays near 1e-15: a parameter's gradient within 1e-10 of the plain one's
norm, or of a floor if that norm is smaller; the loss within 1e-12 of itself or of the whole gradient's norm; a metric
within 1e-10.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from workbench.compare.factors import SAME, meaning
from workbench.prove.arrangement import Arrangement, Outcome, norm_of

GRADIENT_BAR = 1e-10
LOSS_BAR = 1e-12
METRIC_BAR = 1e-10
FLOOR = 1e-3
"""Of the root mean square of the whole gradient: a parameter whose gradient is smaller is judged by this."""
NOTHING = 1e-12
"""A metric below this counts as 0, and a whole gradient shorter than this, or than this part of the plain one,
trains nothing."""
PARALLEL = 0.999
"""Cosine above which a gradient is a multiple of another one."""

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """Difference between two outcomes.

    Attributes:
        worst: greatest relative difference of any number.
        differing: "gradient", "loss", "metric KEY", "not a number" or "error"; () if all are within tolerance.
        description: description, one sentence.
        factor: multiplier of the gradient, or of the loss if the gradient is right; None if it is no multiple.
        factor_name: expression that equals it; "" if nothing simple.
    """

    worst: float
    differing: tuple[str, ...] = ()
    description: str = ""
    factor: float | None = None
    factor_name: str = ""

    @property
    def signature(self) -> tuple[str, bool, str]:
        """The properties that stay the same while a counterexample is shrunk."""
        return "".join(self.differing[:1]), self.factor is None, self.factor_name


def difference(plain: Outcome, changed: Outcome, arrangements: tuple[Arrangement, Arrangement]) -> Difference:
    """Compare the outcome of a changed arrangement with that of the plain one, which is finite and has a gradient.

    Args:
        plain: the outcome taken for right.
        changed: the other.
        arrangements: of both, for the sizes that a factor may equal.
    """
    if changed.error is not None:
        lines = str(changed.error).splitlines() or [""]
        details = [line.strip() for line in lines if line.strip().startswith("found: ")]
        return Difference(math.inf, ("error",), "; ".join([f"{type(changed.error).__name__}: {lines[0]}", *details]))
    broken = [name for name, values in changed.gradients.items() if not bool(values.isfinite().all())]
    if broken or not math.isfinite(changed.loss):
        where = f"the gradient of {len(broken)} parameter(s), {broken[0]} first" if broken else "the loss"
        return Difference(math.inf, ("not a number",), f"{where} is not a number")
    gradient, name = _farthest(plain.gradients, changed.gradients)
    loss = _relative(plain.loss, changed.loss, floor=plain.norm)
    metrics = {
        key: _relative(value, changed.metrics.get(key, math.nan), floor=NOTHING / METRIC_BAR)
        for key, value in plain.metrics.items()
    }
    worst = max([gradient, loss, *metrics.values()])
    differing: list[str] = []
    messages: list[str] = []
    factor: float | None = None
    sizes = _sizes(*arrangements)
    if gradient > GRADIENT_BAR:
        factor, message = _gradient_message(plain.gradients, changed.gradients, name)
        differing.append("gradient")
        messages.append(message + _in_brackets(factor, sizes))
    if loss > LOSS_BAR:
        message = f"the loss is {_apart(changed.loss, plain.loss)}"
        if not differing and plain.loss:
            factor = changed.loss / plain.loss
            message += f": {_times(factor)} times{_in_brackets(factor, sizes)}"
        differing.append("loss")
        messages.append(message)
    off = [key for key, far in metrics.items() if far > METRIC_BAR and not _follows(key, differing)]
    if off:
        first, before = changed.metrics.get(off[0], math.nan), plain.metrics[off[0]]
        if not differing and before:
            factor = first / before
        messages.append(
            f"{off[0]} is {_apart(first, before)}"
            + (f", and {len(off) - 1} more metrics differ" if len(off) > 1 else "")
        )
    differing += [f"metric {key}" for key in off]
    return Difference(
        worst, tuple(differing), "; ".join(messages), factor, "" if factor is None else meaning(factor, sizes)
    )


def _apart(changed: float, plain: float) -> str:
    """Two numbers with enough digits to distinguish them, at least 4."""
    digits = next((digits for digits in range(4, 17) if f"{changed:.{digits}g}" != f"{plain:.{digits}g}"), 17)
    return f"{changed:.{digits}g}, not {plain:.{digits}g}"


def _times(factor: float) -> str:
    """A factor as text; close to 1 as its distance from 1."""
    rest = factor - 1
    if not rest or abs(rest) >= 5e-4:
        return f"{factor:.4g}"
    return f"1 {'+' if rest > 0 else '-'} {abs(rest):.1e}"


def _in_brackets(factor: float | None, sizes: Mapping[str, float]) -> str:
    named = "" if factor is None else meaning(factor, sizes)
    return f" ({named})" if named else ""


def _sizes(plain: Arrangement, changed: Arrangement) -> dict[str, float]:
    """Sizes that a factor may equal, simplest first: ratios of changed to plain."""
    axes = {name: getattr(changed, name) / getattr(plain, name) for name in ("cp", "dp", "tp", "micro_batches")}
    grown = [name for name, size in axes.items() if size != 1]
    pairs = {f"{a} * {b}": axes[a] * axes[b] for at, a in enumerate(grown) for b in grown[at:]}
    shares = {
        "padded tokens / tokens": changed.tokens / plain.tokens,
        "all documents / documents": len(changed.documents) / len(plain.documents),
        "(tokens + silent documents) / tokens": _one_at_least(changed) / _one_at_least(plain),
    }
    return {**axes, **pairs, **shares}


def _one_at_least(arrangement: Arrangement) -> int:
    """Trained tokens, where a document without any counts as one."""
    return sum(max(1, document.trained) for document in arrangement.documents)


def _farthest(plain: Gradients, changed: Gradients) -> tuple[float, str]:
    """The greatest distance of a parameter's gradient, relative to its norm or the floor, and the parameter."""
    elements = sum(values.numel() for values in plain.values())
    floor = FLOOR * norm_of(plain) / math.sqrt(elements)
    far = {}
    for name, values in plain.items():
        scale = max(float(values.norm()), floor * math.sqrt(values.numel()))
        far[name] = float((changed[name] - values).norm()) / scale
    name = max(far, key=lambda each: far[each])
    return far[name], name


def _gradient_message(plain: Gradients, changed: Gradients, farthest: str) -> tuple[float | None, str]:
    """The factor between two gradients, if there is one, and a sentence."""
    product = sum(float((changed[name] * values).sum()) for name, values in plain.items())
    norm, other = norm_of(plain), norm_of(changed)
    if other <= NOTHING * norm:
        return 0.0, "the gradient is 0"
    cosine, factor = product / (norm * other), product / norm**2
    if abs(cosine) < PARALLEL:
        return None, (
            f"the gradient is another one: cosine {cosine:.3f}, {other / norm:.3g} times as long, "
            f"farthest in {farthest}"
        )
    rest = math.sqrt(sum(float((changed[name] - factor * values).square().sum()) for name, values in plain.items()))
    if rest > SAME * other:
        return None, f"the gradient is nearly {_times(factor)} times the plain one, farthest in {farthest}"
    return factor, f"the gradient is {_times(factor)} times the plain one"


def _relative(plain: float, changed: float, *, floor: float) -> float:
    if plain == changed or (math.isnan(plain) and math.isnan(changed)):
        return 0.0
    far = abs(changed - plain) / max(abs(plain), floor)
    return math.inf if math.isnan(far) else far


def _follows(metric: str, what: list[str]) -> bool:
    """True if a metric follows from a difference already listed: a norm of the gradient, a term of the loss."""
    return (metric.startswith("gradient/") and "gradient" in what) or (metric.startswith("loss/") and "loss" in what)
