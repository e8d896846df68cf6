"""Translation of a system's options to a spec and back where possible, and scaling contracts.

Options derived from a spec must translate back to the same spec. A scaling contract says what a system sums, divides
and multiplies from the tokens of a micro-batch to the optimizer: one `ScalingSpec` per backend or mode, in
``CONTRACTS`` of its `translate` module. `workbench.reduction` executes it: as ``loss.compat.scaling`` it is an axis of
an ablation, and a run shows its effect on every gradient. Versions are those of the systems' modules; comments at each
contract say what was read of gathers and schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from workbench.errors import SpecError
from workbench.specs.losses import CorrectionSpec, KLSpec, LossSpec, ScalingSpec
from workbench.systems.registry import SYSTEMS, Settings, Translation, load_system, parse_settings, translate_settings

if TYPE_CHECKING:
    import pandas as pd

FACTORS = ("multiplied_by", "divided_by", "replicated", "engine_multiplies", "engine_divides")
"""Settings of a scaling contract that are factors."""


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


# ---- the way back ------------------------------------------------------------------------------------------------


def checked_back(
    title: str,
    spec: LossSpec,
    model: type[Settings],
    translate: Callable[[Any], Translation],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the closest options if they translate to the spec's loss in every layout, with the same reward penalty.

    Two specs are the same loss if their canonical forms are equal (`workbench.losses.canonical`).

    Raises:
        SpecError: the system has no such loss; the message names what would differ.
    """
    from workbench.losses.canonical import canonical  # torch; a misspelt name is told without it

    round_trip = translate(parse_settings(model, settings, where=title)).spec
    scaling, other = spec.compat.scaling, round_trip.compat.scaling
    same_step = scaling.powers == other.powers and scaling.counts == other.counts
    same_reward = _in_reward(spec) == _in_reward(round_trip)
    same = same_step and same_reward and canonical(spec) == canonical(round_trip)
    if not same and (mismatches := differences(spec, round_trip)):
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


# ---- corrections that NeMo-RL and OpenRLHF have in common ---------------------------------------------------------


def bounded_correction(kind: str | None, low: float | None, high: float | None, ratio: str = "token") -> dict[str, Any]:
    """Return the correction by old / sampler of a type, as settings of a `CorrectionSpec`.

    "tis" truncates weights outside the bounds, "icepop" zeroes them, "seq-mask-tis" drops rows by their geometric mean;
    None has no bounds.
    """
    if kind == "seq-mask-tis":
        return {"kind": "geometric_gate", "gate_low": low, "gate_high": high}
    bounds = {} if kind is None else {"ratio_low": low, "ratio_high": high}
    outside = "zero" if kind == "icepop" else "truncate"
    return {"kind": "importance_sampling", "ratio": ratio, **bounds, "outside": outside}


def bounds_of(correction: CorrectionSpec) -> tuple[str, float | None, float | None]:
    """Return type and bounds of the correction that is closest to a spec's."""
    if correction.gate != "none":
        return "seq-mask-tis", correction.gate_low, correction.gate_high
    return "icepop" if correction.outside == "zero" else "tis", correction.ratio_low, correction.ratio_high


# ---- scaling contracts -------------------------------------------------------------------------------------------


def scaling_contract(system: str, mode: str | None = None) -> ScalingSpec:
    """Return the contract of a system, for ``loss.compat.scaling``, in a backend or mode; None: the first one.

    Raises:
        SpecError: unknown system or mode.
    """
    modes = load_system(system).scaling
    if mode is None:
        return next(iter(modes.values()))
    if mode not in modes:
        raise SpecError(
            f"scaling contract {mode!r} of {system}",
            rule=f"one of {', '.join(map(repr, modes))}",
            fix="choose one of them",
        )
    return modes[mode]


def contract_table(dp: int = 2, cp: int = 2, micro_batches: int = 4, accumulation: int = 1) -> pd.DataFrame:
    """Tabulate every system's contract and the factor that it leaves on a gradient, one row per system and mode.

    Args:
        dp: data-parallel ranks.
        cp: context-parallel ranks that share a row.
        micro_batches: forward and backward passes of a rank in one call of its engine's schedule.
        accumulation: such calls in an optimizer step; for most systems one of these two numbers is 1.

    Returns:
        ``counts``: scope of the denominator. ``multiplies``, ``divides``: by the trainer, with numbers. ``engine``: its
        operations on gradients. ``factor``: gradient over exact gradient if every micro-batch has as many tokens;
        ``breaks``: invariants that it breaks.

    Raises:
        SpecError: a number below 1.
    """
    import pandas as pd

    given = {"dp": dp, "cp": cp, "micro_batches": micro_batches, "accumulation": accumulation}
    if min(given.values()) < 1:
        raise SpecError(
            "contract_table",
            found=", ".join(f"{name} = {size}" for name, size in given.items()),
            rule="ranks and passes are at least 1",
            fix="correct the number",
        )
    from workbench.reduction.weights import scaling_factor

    passes = micro_batches * accumulation
    sizes = {"dp": dp, "cp": cp, "dp_cp": dp * cp, "micro_batches": passes}

    def factors(names: tuple[str, ...]) -> str:
        return " x ".join(f"{name} ({sizes[name]})" for name in names)

    lines = []
    for system in SYSTEMS:
        for mode, scaling in load_system(system).scaling.items():
            factor = scaling_factor(scaling, dp=dp, cp=cp, micro_batches=passes)
            parts = {"step": 1, "pass": passes, "micro_batch": dp * passes}[scaling.counts]
            above, below = factors(scaling.engine_multiplies), factors(scaling.engine_divides)
            lines.append(
                {
                    "system": system,
                    "mode": mode,
                    "sums": "whole rows on every cp rank" if scaling.replicated else "its own tokens",
                    "counts": scaling.counts.replace("_", "-"),
                    "multiplies": factors(scaling.multiplied_by),
                    "divides": factors(scaling.divided_by),
                    "engine": ", ".join(filter(None, ["sum", above and f"times {above}", below and f"over {below}"])),
                    "factor": factor * parts,
                    "breaks": ", ".join(scaling.breaks),
                }
            )
    return pd.DataFrame(lines).set_index(["system", "mode"])
