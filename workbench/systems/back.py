"""Check of options derived from a spec: they must translate back to the same spec."""

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
    """Return the options if they translate to the spec's loss in every layout, with the same penalty in the reward.

    Two specs are the same loss if their canonical forms are equal (`workbench.losses.canonical`).

    Args:
        title: the system's title, for the message.
        spec: the spec to express in the system's options.
        model: model of its options.
        translate: from its options to a spec.
        settings: the closest options.

    Raises:
        SpecError: the system has no such loss; the message names what would differ.
    """
    round_trip = translate(parse_settings(model, settings, where=title)).spec
    same_step = spec.scaling.powers == round_trip.scaling.powers and spec.scaling.counts == round_trip.scaling.counts
    same_reward = _in_reward(spec) == _in_reward(round_trip)
    same = same_step and same_reward and canonical(spec) == canonical(round_trip)
    mismatches = [] if same else list(differences(spec, round_trip))
    if mismatches:
        entries = "; ".join(f"{path} = {value!r} ({title}: {other!r})" for path, value, other in mismatches[:5])
        raise SpecError(
            f"options of {title} for this loss",
            found=entries,
            rule=f"{title} has no option for this",
            fix="change the spec, or choose another system",
        )
    return dict(settings)


def differences(spec: BaseModel, other: BaseModel, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return (path, value, the other's value) of every setting on which two specs differ.

    Names of presets are ignored, and so are the factors of a scaling contract if their product is the same.
    """
    entries = []
    for name in type(spec).model_fields:
        left, right = getattr(spec, name), getattr(other, name, None)  # another surrogate has other settings
        if isinstance(left, ScalingSpec) and isinstance(right, ScalingSpec) and left.powers == right.powers:
            right = right.model_copy(update={factor: getattr(left, factor) for factor in FACTORS})
        if isinstance(left, BaseModel) and isinstance(right, BaseModel):
            entries += differences(left, right, f"{path}{name}.")
        elif left != right and not (name == "name" or (name == "kind" and path == "correction.")):
            entries.append((f"{path}{name}", left, right))
    return entries


def _in_reward(spec: LossSpec) -> KLSpec | None:
    return spec.kl if spec.kl.coefficient and spec.kl.placement == "reward" else None


def unsupported(title: str, subject: str, rule: str) -> SpecError:
    """Return the error for a loss that a system does not have."""
    return SpecError(f"options of {title} for {subject}", rule=rule, fix="change the spec, or choose another system")
