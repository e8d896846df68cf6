"""Differences confined to one of several modules, such as an encoder next to a policy.

Modules that share their ranks and not their layout complete their gradients over ranks of their own, and gradients
cross between them once. A mistake in either leaves the other module, loss and log-probabilities right. Features that
cross wrongly in the forward pass change the policy's log-probabilities behind them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from typing import Any

from workbench.diagnose.denominators import names_of, sizes
from workbench.diagnose.facts import Facts
from workbench.metrics.gradients import LAYERS, parameter_layer

NEXT_TO_NOTHING = 1e-4
"""Share of the whole gradient: a parameter with less (a bias that a softmax cancels) is no evidence for its module."""


def differing_module(facts: Facts) -> str | None:
    """The module with layers of its own, all of whose gradients differ, while other layers and the loss agree.

    A parameter outside its layers may agree: the last bias gets the same sum from rows that were permuted.
    """
    if facts.loss_same is False or facts.forward_same is False or facts.mask_same is False or not facts.clear:
        return None
    paths = zip(*(name.split(".")[:-1] for name in facts.off), strict=False)
    common = [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, paths)]
    module = ".".join(common[:-1] if common and common[-1] in LAYERS else common)
    if not module:
        return None
    begin = f"{module}."
    in_layers = [
        p.share
        for name, p in facts.right.items()
        if name.startswith(begin) and parameter_layer(name.removeprefix(begin)) is not None
    ]
    layers_inside = any(parameter_layer(name.removeprefix(begin)) is not None for name in facts.off)
    layers_outside = any(parameter_layer(name) is not None for name in facts.right if not name.startswith(begin))
    whole = layers_inside and layers_outside and max(in_layers, default=0.0) < NEXT_TO_NOTHING
    return module if whole else None


def module_scaled(facts: Facts) -> tuple[float, list[str]]:
    """Score of one common factor on every gradient of one module."""
    module = differing_module(facts)
    if module is None:
        return 0.0, []
    telling = [p for p in facts.off.values() if p.share > NEXT_TO_NOTHING]
    if not telling:
        return 0.0, []
    ratio = statistics.median(p.ratio for p in telling)
    straight = all(p.cosine is None or p.cosine > 1 - facts.bar for p in telling)
    if not ratio or not straight or any(abs(p.ratio / ratio - 1) > facts.bar for p in telling):
        return 0.0, []
    names = _names(ratio, module, facts)
    meaning = f", which is {names[0]}" if names else ", which equals no size on record"
    return 0.96 if names else 0.92, [
        f"every gradient of {module} is {ratio:.6g} times the trusted one{meaning}; the loss and all others are right"
    ]


def module_reached_wrongly(facts: Facts) -> tuple[float, list[str]]:
    """Score of another gradient in all of one module."""
    module = differing_module(facts)
    if module is None or module_scaled(facts)[0]:
        return 0.0, []
    ratios = sorted(p.ratio for p in facts.off.values())
    return 0.94, [
        f"all of {module} has another gradient, {ratios[0]:.3g} to {ratios[-1]:.3g} times as large; loss and "
        "all other gradients are right: what comes back to it across its boundary is wrong"
    ]


def other_features(facts: Facts) -> tuple[float, list[str]]:
    """Score of forward differences behind tokens replaced by a feature: in all documents that read one, or in some.

    Some documents are weaker evidence, since in most documents little trains before a feature.
    """
    place, off = "behind features", facts.off_tokens("policy_logprobs")
    if off is None or facts.trained is None or place not in facts.places or not (off & facts.trained).any():
        return 0.0, []
    if (agreed := facts.agree(place, "policy_logprobs")) >= 0.2:
        return 0.95 * min(1.0, agreed + 0.15), [f"what differs lies {place} (agreement {agreed:.2f} of 1)"]
    if (off & facts.trained & ~facts.places[place]).any():
        return 0.0, []
    return 0.4, [f"all {int((off & facts.trained).sum())} tokens that differ lie {place}, in some documents of several"]


def _names(ratio: float, module: str, facts: Facts) -> list[str]:
    """Names of a factor: sizes of the module's own layout, if that was recorded, and of the run's."""
    own: Mapping[str, Any] = facts.context.get("modules", {}).get(module, {})
    return [f"{named.description} of {module}" for named in names_of(ratio, sizes(own, {}), facts.bar)] + [
        named.description for named in names_of(ratio, facts.sizes, facts.bar)
    ]
