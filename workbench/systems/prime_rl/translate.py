"""From options of PrimeIntellect-ai/prime-rl to a spec, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import SpecError
from workbench.reduction.denominators import GivenCounts
from workbench.specs.losses import LossSpec, ScalingSpec
from workbench.systems.prime_rl.settings import PrimeSettings
from workbench.systems.registry import Translation
from workbench.systems.translate import checked_back

CONTRACTS: Mapping[str, ScalingSpec] = {
    # Every cp rank counts the whole row, and the gather's backward adds over them: both cancel. FSDP's division is
    # undone.
    "fsdp": ScalingSpec(replicated=True, divided_by=("cp",), engine_multiplies=("dp_cp",), engine_divides=("dp_cp",)),
}


def translate(settings: PrimeSettings) -> Translation:
    """Translate the component rl: an importance-weighted policy gradient that drops tokens that moved too far."""
    if settings.type == "custom":
        raise SpecError(
            "prime-rl: type = 'custom'",
            found="a function of the user's own",
            rule="only prime-rl's own losses can be translated",
            fix="pass the function to train.step.run_step as a loss",
        )
    notes = [
        "the ratio is against the sampler, and is never clipped",
        "the squared log ratio has no half, and acts on dropped tokens, too",
    ]
    surrogate: dict[str, Any] = {"kind": "ipo", "threshold": settings.ipo_threshold}
    if settings.type == "default":
        thresholds = {"threshold_low": settings.dppo_mask_low, "threshold_high": settings.dppo_mask_high}
        surrogate = {"kind": "dppo_tv", **thresholds}
        notes.append("an advantage of 0 counts as a negative one")
    spec = LossSpec(
        name="ipo" if settings.type == "ipo" else "prime_rl",
        surrogate={**surrogate, "coefficient": settings.adv_tau},
        kl={"coefficient": settings.kl_tau},
        compat={"scaling": CONTRACTS["fsdp"]},
    )
    return Translation(spec, tuple(notes), ("rl_scale", "ce_scale", "ref_kl_scale"))


def back(spec: LossSpec) -> dict[str, Any]:
    """Return the options of the component rl for a spec."""
    surrogate = spec.surrogate
    settings: dict[str, Any] = {"adv_tau": surrogate.coefficient, "kl_tau": spec.kl.coefficient}
    if surrogate.kind == "dppo_tv":
        settings |= {"dppo_mask_low": surrogate.threshold_low, "dppo_mask_high": surrogate.threshold_high}
    elif surrogate.kind == "ipo":
        settings |= {"type": "ipo", "ipo_threshold": surrogate.threshold}
    else:
        raise SpecError(
            f"options of prime-rl for the surrogate {surrogate.kind!r}",
            rule="its losses are dppo_tv (default) and ipo",
            fix="choose one of them, or another system",
        )
    return checked_back("prime-rl", spec, PrimeSettings, translate, settings)


def counts(settings: PrimeSettings) -> GivenCounts:
    """Return the component's tokens."""
    return GivenCounts(tokens=settings.rl_scale)
