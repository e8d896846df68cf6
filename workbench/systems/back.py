"""The last step of every way back from a spec to a system's options: are they the spec again?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from workbench.errors import SpecError
from workbench.losses.canonical import canonical
from workbench.specs.losses import KLSpec, LossSpec, ScalingSpec
from workbench.systems.registry import Settings, Translation, parse_settings

FACTORS = ("multiplied_by", "divided_by", "replicated", "engine_multiplies", "engine_divides")
"""Settings of a scaling contract that are factors."""


def checked_back(
    title: str,
    spec: LossSpec,
    model: type[Settings],
    translate: Callable[[Any], Translation],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The options, if they translate to the spec's loss in every layout, and take the same penalty off the reward.

    Two specs are the same loss where they have one form (`workbench.losses.canonical`).

    Args:
        title: of the system, for the message.
        spec: what is to be said in the system's options.
        model: of its options.
        translate: from its options to a spec.
        settings: the options that come nearest.

    Raises:
        SpecError: the system has no such loss; the message names what would differ.
    """
    reached = translate(parse_settings(model, settings, where=title)).spec
    same_step = spec.scaling.powers == reached.scaling.powers and spec.scaling.counts == reached.scaling.counts
    same_reward = _in_reward(spec) == _in_reward(reached)
    same = same_step and same_reward and canonical(spec) == canonical(reached)
    apart = [] if same else list(differences(spec, reached))
    if apart:
        said = "; ".join(f"{path} = {mine!r} (there {theirs!r})" for path, mine, theirs in apart[:5])
        raise SpecError(
            f"options of {title} for this loss",
            found=said,
            rule=f"{title} has no option that makes this so",
            fix="change the spec there, or take another system",
        )
    return dict(settings)


def differences(spec: BaseModel, other: BaseModel, path: str = "") -> list[tuple[str, Any, Any]]:
    """(path, value, the other's value) of every setting that two specs do not share.

    Names of presets do not matter, nor by which factors a scaling contract comes to the same product.
    """
    found = []
    for name in type(spec).model_fields:
        mine, theirs = getattr(spec, name), getattr(other, name, None)  # another surrogate has other settings
        if isinstance(mine, ScalingSpec) and isinstance(theirs, ScalingSpec) and mine.powers == theirs.powers:
            theirs = theirs.model_copy(update={factor: getattr(mine, factor) for factor in FACTORS})
        if isinstance(mine, BaseModel) and isinstance(theirs, BaseModel):
            found += differences(mine, theirs, f"{path}{name}.")
        elif mine != theirs and not (name == "name" or (name == "kind" and path == "correction.")):
            found.append((f"{path}{name}", mine, theirs))
    return found


def _in_reward(spec: LossSpec) -> KLSpec | None:
    return spec.kl if spec.kl.coefficient and spec.kl.placement == "reward" else None


def refuse(title: str, what: str, rule: str) -> SpecError:
    """The error for a loss that a system does not have at all."""
    return SpecError(f"options of {title} for {what}", rule=rule, fix="change the spec there, or take another system")
