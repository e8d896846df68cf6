"""Translation of a system's options to a spec, and back where possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import SpecError
from workbench.specs.losses import LossSpec
from workbench.systems.registry import Translation, load_system, parse_settings, translate_settings


def loss_spec(system: str, settings: Mapping[str, Any]) -> LossSpec:
    """Return the spec of the policy loss that another system's options describe.

    Unset options have the system's own defaults. `translation` adds what the system does implicitly, and which of its
    options are counts of a batch.

    Args:
        system: one of `SYSTEMS`.
        settings: options by the system's names.

    Raises:
        SpecError: unknown system; unknown option, with the closest one; options that cannot be expressed, and why.

    Example:
        >>> loss_spec("verl", {"clip_ratio": 0.2}).surrogate.dual_clip
        3.0
    """
    return translation(system, settings).spec


def translation(system: str, settings: Mapping[str, Any]) -> Translation:
    """Return the spec with notes on what the system does implicitly."""
    declared = load_system(system)
    return translate_settings(declared, parse_settings(declared.settings, settings, where=system))


def settings_for(system: str, spec: LossSpec) -> dict[str, Any]:
    """Return a system's options for a spec: `loss_spec` of them is the spec again, up to names of presets.

    Raises:
        SpecError: the system has no such loss; the message names the part that it lacks.
    """
    declared = load_system(system)
    if declared.back is None:
        raise SpecError(
            f"options of {declared.title} for a spec",
            rule="no spec translates to its options",
            fix="choose another system",
        )
    return declared.back(spec)
