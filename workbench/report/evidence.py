"""Facts next to a verdict: the size of the error, where a run diverged, what changed, and what it could have seen.

Every function takes data of a comparison and returns a number or text; figures, page and `show` place it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, overload

from workbench.compare.comparison import Comparison, Configuration, declared_note, flatten
from workbench.report.numbers import GRADIENT_NORM, LOSS, NONE, significant

AGREEING = ("equal", "within budget")
"""Verdicts of configurations that keep the gradient of their reference."""

SHOWN_ELSEWHERE = ("faults", "frozen_clip", "layout", "name", "precision")
"""Settings that a configuration's line states already, or that only name another run."""
MOST_SETTINGS = 3
SHARES = (
    ("trained_share", "of target tokens are trained"),
    ("gradient_token_share", "of trained tokens have a gradient"),
    ("gradient_document_share", "of documents have a gradient"),
    ("clipped_share", "of trained tokens are clipped"),
)
"""Key of `Configuration.evidence` -> what the share is of."""


def is_finite(value: Any) -> bool:
    """True if the value is a number that is neither NaN nor infinite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def relative_error(configuration: Configuration) -> float | None:
    """Return the largest relative error of the whole gradient against the reference's, over steps.

    None where nothing was compared; infinite where a gradient is not finite.
    """
    errors = [w["relative_l2"] for w in configuration.whole_gradient if w.get("relative_l2") is not None]
    return max((error if error == error else math.inf for error in errors), default=None)


def diverged_step(configuration: Configuration) -> int | None:
    """Return the first step whose recorded loss or gradient norm is not finite; None if all are."""
    for record in configuration.steps:
        if not all(is_finite(record[key]) for key in (LOSS, GRADIENT_NORM) if record.get(key) is not None):
            return int(record["step"])
    return configuration.diverged_step


def divergence(configuration: Configuration) -> str:
    """Return at which step a run diverged, as text; "" if it did not."""
    step = diverged_step(configuration)
    return "" if step is None else f"diverged at step {step}"


def which_steps(steps: Sequence[int], of: Sequence[int]) -> str:
    """Return as text which of all steps some are, both ascending.

    Example:
        >>> which_steps([2, 3], [0, 1, 2, 3]), which_steps([1], [0, 1, 2]), which_steps([0, 2], [0, 1, 2, 3])
        ('from step 2', 'at step 1', 'at 2 of 4 steps, first at step 0')
    """
    if list(steps) == list(of)[-len(steps) :]:
        return f"from step {steps[0]}"
    return f"at step {steps[0]}" if len(steps) == 1 else f"at {len(steps)} of {len(of)} steps, first at step {steps[0]}"


def could_have_seen(configuration: Configuration) -> str:
    """Return what share of the tokens and documents a verdict rests on, as text; "" where that was not recorded."""
    evidence = configuration.evidence or {}
    return ", ".join(f"{percent(evidence[key])} {what}" for key, what in SHARES if is_finite(evidence.get(key)))


def warnings(configuration: Configuration) -> list[str]:
    """Return the warnings about what the verdict could not have seen."""
    return list(map(str, (configuration.evidence or {}).get("warnings") or []))


def limits(configuration: Configuration) -> list[str]:
    """Return what limits a verdict, as texts: divergence, declared breaks, what it could have seen, warnings."""
    seen = could_have_seen(configuration)
    texts = (divergence(configuration), declared_note(configuration.settings), seen and f"could have seen: {seen}")
    return [*filter(None, texts), *warnings(configuration)]


def differing_settings(comparison: Comparison) -> dict[str, str]:
    """Return for every configuration the settings in which it differs from others, in short.

    A value that more than half of the configurations share is left out, as are layout, precision and faults, which are
    stated elsewhere: what is left tells any two configurations apart. A setting that leaves the reference's comes
    first; more than `MOST_SETTINGS` are counted.
    """
    keys = [key for key in comparison.settings_that_differ().columns if key.split(".")[0] not in SHOWN_ELSEWHERE]
    flat = {c.name: flatten(c.settings) for c in comparison.configurations}
    short = {key: key.rpartition(".")[2] for key in keys}
    repeated = {"name", "kind"} | {name for name, times in Counter(short.values()).items() if times > 1}
    count = Counter((key, repr(settings.get(key))) for settings in flat.values() for key in keys)
    listed = {}
    for c in comparison.configurations:
        settings, base = flat[c.name], flat.get(c.against, flat[c.name])
        own = [key for key in keys if key in settings and 2 * count[key, repr(settings[key])] <= len(flat)]
        own.sort(key=lambda key: repr(settings[key]) == repr(base.get(key)))
        texts = [f"{key if short[key] in repeated else short[key]} {setting_text(settings[key])}" for key in own]
        more = [f"{len(texts) - MOST_SETTINGS} more"] if len(texts) > MOST_SETTINGS else []
        listed[c.name] = " · ".join([*texts[:MOST_SETTINGS], *more])
    return listed


def setting_text(value: Any) -> str:
    """Return a setting as text; infinity as its sign.

    Example:
        >>> setting_text(float("inf")), setting_text(0.28), setting_text(None), setting_text([1, 2]), setting_text(True)
        ('∞', '0.28', '–', '1 2', 'yes')
    """
    if value is None or value in ("", [], ()):
        return NONE
    if isinstance(value, (list, tuple)):
        return " ".join(setting_text(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else significant(value)
    return str(value)


def relative_text(value: float | None) -> str:
    """Return a relative error as text: in per cent where that is readable, else as a power of ten.

    Example:
        >>> relative_text(0.009), relative_text(2e-15), relative_text(0.0), relative_text(float("inf"))
        ('0.90 %', '2.0 × 10⁻¹⁵', '0', '∞')
    """
    if value is None or not math.isfinite(value) or value == 0 or abs(value) < 1e-5:
        return significant(value, 2)
    return f"{significant(100 * value, 2)} %" if abs(value) < 10 else f"{significant(value, 2)} times"


def percent(share: float) -> str:
    """Return a share in per cent; never 0 for something, nor 100 for not everything.

    Example:
        >>> percent(0.5), percent(0.00012), percent(1.0), percent(0.99999)
        ('50 %', '0.012 %', '100 %', '99.9 %')
    """
    if 0 < share < 0.01:
        return f"{significant(100 * share, 2)} %"
    return "99.9 %" if 0.995 <= share < 1 else f"{100 * share:.0f} %"


def worst_share(configuration: Configuration) -> float | None:
    """Return the largest distance in units of its budget, over steps, parameters and the whole gradient.

    Above 1 something is out of budget. None where nothing was judged.
    """
    pairs = [(w.get("distance"), w.get("budget")) for w in configuration.whole_gradient]
    pairs += [(p.distance, p.budget) for p in configuration.parameters]
    return max((s for pair in pairs if (s := share_of_budget(*pair)) is not None), default=None)


@overload
def share_of_budget(distance: float, budget: float) -> float: ...


@overload
def share_of_budget(distance: float | None, budget: float | None) -> float | None: ...


def share_of_budget(distance: float | None, budget: float | None) -> float | None:
    """Return a distance in units of its budget; infinite where either is not finite, or where a budget of 0 is left.

    Example:
        >>> share_of_budget(3.0, 2.0), share_of_budget(0.0, 0.0), share_of_budget(1.0, 0.0)
        (1.5, 0.0, inf)
    """
    if distance is None or budget is None:
        return None
    if not (math.isfinite(distance) and math.isfinite(budget)):
        return math.inf
    if budget == 0:
        return math.inf if distance else 0.0
    return distance / budget


def changed_settings(comparison: Comparison, configuration: Configuration) -> dict[str, Any]:
    """Return the settings in which a configuration differs from its reference, flat; of a reference, none."""
    if not configuration.against:
        return {}
    base, own = flatten(comparison[configuration.against].settings), flatten(configuration.settings)
    return {key: own[key] for key in own if key != "frozen_clip" and (key not in base or base[key] != own[key])}


def groups(comparison: Comparison) -> dict[str, list[Configuration]]:
    """Group configurations by the reference that they are compared with, the reference first."""
    members: dict[str, list[Configuration]] = {c.name: [c] for c in comparison.configurations if not c.against}
    for configuration in comparison.configurations:
        if configuration.against:
            members.setdefault(configuration.against, []).append(configuration)
    return members
