"""From options of radixark/miles to a spec, and back: slime's, with bounds of log ratios."""

from __future__ import annotations

from typing import Any

from workbench.specs.losses import LossSpec
from workbench.systems.miles.settings import MilesSettings
from workbench.systems.registry import Translation
from workbench.systems.slime.translate import back as slime_back
from workbench.systems.slime.translate import translate as slime_translate
from workbench.systems.translate import checked_back, unsupported

LOG_CLAMP = 20.0
"""Bound of a log ratio (miles/backends/training_utils/loss_hub/math_utils.py, `_LOG_RATIO_EXP_CLAMP`, 31f1ca96)."""


def translate(settings: MilesSettings) -> Translation:
    """Translate its policy loss on a whole step."""
    translated = slime_translate(settings)
    spec, notes = translated.spec, list(translated.notes)
    changes: dict[str, Any] = {}
    if spec.surrogate.kind == "ppo":
        changes["surrogate"] = {**spec.surrogate.model_dump(), "log_clamp": LOG_CLAMP}
    else:
        notes.append(f"the log ratio of a sample is cut at {LOG_CLAMP:g}; here it is not")
    if spec.kl.output_clamp is not None:
        changes["kl"] = {**spec.kl.model_dump(), "input_clamp": LOG_CLAMP}
    return Translation(LossSpec.model_validate({**spec.model_dump(), **changes}), tuple(notes))


def back(spec: LossSpec) -> dict[str, Any]:
    """Return the options of its policy loss for a spec."""
    if spec.surrogate.kind == "cispo":
        raise unsupported("miles", "the surrogate 'cispo'", "its losses are ppo and gspo")
    changes: dict[str, Any] = {}
    if spec.surrogate.get("log_clamp") == LOG_CLAMP:
        changes["surrogate"] = {**spec.surrogate.model_dump(), "log_clamp": None}
    if spec.kl.input_clamp == LOG_CLAMP:
        changes["kl"] = {**spec.kl.model_dump(), "input_clamp": None}
    plain = LossSpec.model_validate({**spec.model_dump(), **changes})
    return checked_back("miles", spec, MilesSettings, translate, slime_back(plain))
