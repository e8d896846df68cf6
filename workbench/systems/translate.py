"""From a system's options to our spec, and back where there is a way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems.registry import Translation, load_system, parse_settings, translated


def loss_spec(system: str, settings: Mapping[str, Any]) -> LossSpec:
    """Our spec of a policy loss that another system's options describe.

    Options that are not said have the system's own defaults. `translation` says beside it what the system does
    silently, and which of its options are counts of a batch.

    Args:
        system: one of `SYSTEMS`.
        settings: options by the system's names.

    Raises:
        SpecError: another system; an option that it does not have, with the nearest that it has; what cannot be
            expressed, and why.

    Example:
        >>> loss_spec("verl", {"clip_ratio": 0.2}).surrogate.dual_clip
        3.0
    """
    return translation(system, settings).spec


def translation(system: str, settings: Mapping[str, Any]) -> Translation:
    """The spec with notes: what the system does without saying so."""
    found = load_system(system)
    return translated(found, parse_settings(found.settings, settings, where=system))


def settings_for(system: str, spec: LossSpec) -> dict[str, Any]:
    """A system's options for our spec: `loss_spec` of them is the spec again, up to names of presets.

    Raises:
        SpecError: the system has no such loss, and which part of it.
    """
    found = load_system(system)
    if found.back is None:
        raise SpecError(
            f"options of {found.title} for a spec",
            rule="none of its options is a loss of ours",
            fix="take another system",
        )
    return found.back(spec)
