"""What differs between two outcomes of one step, by how much, and by which factor.

Bars, in float64, where a right layout stays near 1e-15: a parameter's gradient within 1e-10 of the plain one's norm, or
of a floor where that is next to nothing; the loss within 1e-12 of itself or of the whole gradient's norm; a metric
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
"""Of the root mean square of the whole gradient: a parameter whose gradient is smaller is held to this."""
NOTHING = 1e-12
"""A metric below this may as well be 0, and a whole gradient shorter than this, or than this part of the plain one,
trains nothing."""
PARALLEL = 0.999
"""Cosine from which a gradient is another one's multiple."""

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """What differs.

    Attributes:
        worst: greatest relative difference of any number.
        what: "gradient", "loss", "metric KEY", "not a number" or "error"; () if all is within its bar.
        words: the same in a sentence.
        factor: what the gradient is multiplied with, or the loss where the gradient is right; None if it is another.
        factor_name: what that equals; "" if nothing simple.
    """

    worst: float
    what: tuple[str, ...] = ()
    words: str = ""
    factor: float | None = None
    factor_name: str = ""

    @property
    def signature(self) -> tuple[str, bool, str]:
        """What stays the same while a counterexample is cut down."""
        return "".join(self.what[:1]), self.factor is None, self.factor_name


def difference(plain: Outcome, changed: Outcome, arrangements: tuple[Arrangement, Arrangement]) -> Difference:
    """Hold the outcome of a changed arrangement against that of the plain one, which has numbers, and a gradient.

    Args:
        plain: what is taken for right.
        changed: the other.
        arrangements: theirs, for the sizes that a factor may come from.
    """
    if changed.error is not None:
        said = str(changed.error).splitlines() or [""]
        found = [line.strip() for line in said if line.strip().startswith("found: ")]
        return Difference(math.inf, ("error",), "; ".join([f"{type(changed.error).__name__}: {said[0]}", *found]))
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
    what: list[str] = []
    words: list[str] = []
    factor: float | None = None
    sizes = _sizes(*arrangements)
    if gradient > GRADIENT_BAR:
        factor, said = _gradient_in_words(plain.gradients, changed.gradients, name)
        what.append("gradient")
        words.append(said + _in_brackets(factor, sizes))
    if loss > LOSS_BAR:
        said = f"the loss is {_apart(changed.loss, plain.loss)}"
        if not what and plain.loss:
            factor = changed.loss / plain.loss
            said += f": {_times(factor)} times{_in_brackets(factor, sizes)}"
        what.append("loss")
        words.append(said)
    off = [key for key, far in metrics.items() if far > METRIC_BAR and not _follows(key, what)]
    if off:
        first, before = changed.metrics.get(off[0], math.nan), plain.metrics[off[0]]
        if not what and before:
            factor = first / before
        words.append(
            f"{off[0]} is {_apart(first, before)}"
            + (f", and {len(off) - 1} more metrics differ" if len(off) > 1 else "")
        )
    what += [f"metric {key}" for key in off]
    return Difference(worst, tuple(what), "; ".join(words), factor, "" if factor is None else meaning(factor, sizes))


def _apart(changed: float, plain: float) -> str:
    """Two numbers with as many digits as tell them apart, at least 4."""
    digits = next((digits for digits in range(4, 17) if f"{changed:.{digits}g}" != f"{plain:.{digits}g}"), 17)
    return f"{changed:.{digits}g}, not {plain:.{digits}g}"


def _times(factor: float) -> str:
    """A factor; close to 1 by its distance from 1."""
    rest = factor - 1
    if not rest or abs(rest) >= 5e-4:
        return f"{factor:.4g}"
    return f"1 {'+' if rest > 0 else '-'} {abs(rest):.1e}"


def _in_brackets(factor: float | None, sizes: Mapping[str, float]) -> str:
    named = "" if factor is None else meaning(factor, sizes)
    return f" ({named})" if named else ""


def _sizes(plain: Arrangement, changed: Arrangement) -> dict[str, float]:
    """What a factor may come from, simplest first: how many times more there is of something than in the plain one."""
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
    """Tokens that count, where a document in which none does counts as one."""
    return sum(max(1, document.trained) for document in arrangement.documents)


def _farthest(plain: Gradients, changed: Gradients) -> tuple[float, str]:
    """The greatest distance of a parameter's gradient, in parts of its norm or of the floor, and which it is."""
    elements = sum(values.numel() for values in plain.values())
    floor = FLOOR * norm_of(plain) / math.sqrt(elements)
    far = {}
    for name, values in plain.items():
        scale = max(float(values.norm()), floor * math.sqrt(values.numel()))
        far[name] = float((changed[name] - values).norm()) / scale
    name = max(far, key=lambda each: far[each])
    return far[name], name


def _gradient_in_words(plain: Gradients, changed: Gradients, farthest: str) -> tuple[float | None, str]:
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
    """Whether a metric is what differs already: a norm of the gradient, a term of the loss."""
    return (metric.startswith("gradient/") and "gradient" in what) or (metric.startswith("loss/") and "loss" in what)
