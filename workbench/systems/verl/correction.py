"""verl's rollout correction: importance weights and rejections, as settings of our correction and back.

Names and defaults are those of ``trainer/ppo/rollout_corr_helper.py`` and `RolloutCorrectionConfig` (1dda039b).

Letters: T packed tokens.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from workbench.errors import SpecError
from workbench.specs.losses import CorrectionSpec
from workbench.systems.registry import Settings
from workbench.systems.translate import unsupported

TITLE = "verl"
EPSILON = 1e-8
"""Added by verl to a number of tokens that it divides by."""
SAFETY = 20.0
"""Bound of |log ratio| before it goes through exp."""


class RolloutCorrection(Settings):
    """Correction of the gap between rollout and trainer (`RolloutCorrectionConfig`, 1dda039b).

    Defaults are those of the configuration file and of the function; the dataclass has rollout_is "sequence".
    """

    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights of tokens, or products over sequences; None: none."""
    rollout_is_threshold: float | str | None = 2.0
    """A number truncates weights above it; "low_high" zeroes those outside."""
    rollout_is_batch_normalize: bool = False
    """Divide weights by their mean."""
    rollout_rs: str | None = None
    """Statistics that reject tokens or sequences, comma-separated; None: none."""
    rollout_rs_threshold: float | str | None = None
    """One bound for each of them, or one for all; "low_high", or a number and its reciprocal, for those named k1."""
    bypass_mode: bool = False
    """The rollout policy stands in for the old one."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """bypass_mode: PPO against the rollout policy without importance weights, or REINFORCE with them."""


def weights_of(settings: RolloutCorrection) -> dict[str, Any]:
    """Return the importance weights of a rollout correction, as settings of a `CorrectionSpec`."""
    if settings.rollout_is is None or settings.rollout_is_threshold is None:
        return {}
    low, high = _bounds(settings.rollout_is_threshold, "rollout_is_threshold")
    ratio = "token" if settings.rollout_is == "token" else "document_sum"
    fields: dict[str, Any] = {"ratio": ratio, "ratio_high": high, "log_clamp": SAFETY}
    if low is not None:
        fields |= {"ratio_low": low, "outside": "zero"}
    if settings.rollout_is_batch_normalize:
        fields |= {"normalize": True, "mean_epsilon": EPSILON}
    return fields


def live_weights_of(settings: RolloutCorrection) -> dict[str, Any]:
    """Return the weights of bypass_mode, which normalises them inside the loss, in each micro-batch."""
    weights = weights_of(settings)
    return weights | ({"population": "micro_batch"} if "normalize" in weights else {})


def gates_of(settings: RolloutCorrection) -> dict[str, Any]:
    """Return the rejections of a rollout correction, as settings of a `CorrectionSpec`."""
    if settings.rollout_rs is None:
        return {}
    options = list(dict.fromkeys(part.strip() for part in settings.rollout_rs.split(",") if part.strip()))
    if settings.rollout_rs_threshold is None or not options:
        raise SpecError(
            f"verl's rollout_rs = {settings.rollout_rs!r}",
            found=f"rollout_rs_threshold = {settings.rollout_rs_threshold!r}",
            rule="each statistic has a bound",
            fix="set both",
        )
    limits = [part.strip() for part in str(settings.rollout_rs_threshold).split(",") if part.strip()]
    if len(limits) not in (1, len(options)):
        raise SpecError(
            f"verl's rollout_rs_threshold = {settings.rollout_rs_threshold!r}",
            rule=f"one bound for all, or one for each of {', '.join(options)}",
            fix="correct the option",
        )
    limits = limits * len(options) if len(limits) == 1 else limits
    first, *further = [_gate(option, limit) for option, limit in zip(options, limits, strict=True)]
    gate = {"gate": first.pop("statistic"), **{f"gate_{name}": value for name, value in first.items()}}
    return {**gate, "further_gates": tuple(further), "denominator": "gated", "log_clamp": SAFETY}


RS_LEVELS = {"token": "token", "seq_sum": "document_sum", "seq_mean": "document_mean", "seq_max": "document_max"}
"""Prefix of a rollout_rs option -> level of a `GateSpec`."""
LEVELS = {level: name for name, level in RS_LEVELS.items()}
"""Level of a gate -> verl's name of it."""


def _gate(option: str, limit: str) -> dict[str, Any]:
    level, _, statistic = option.rpartition("_")
    if level not in RS_LEVELS or statistic not in ("k1", "k2", "k3") or option == "seq_max_k1":
        raise SpecError(
            f"verl's rollout_rs option {option!r}",
            rule="token, seq_sum or seq_mean with _k1, _k2 or _k3; seq_max with _k2 or _k3",
            fix="correct the option",
        )
    low, high = _bounds(limit, f"the bound of {option}")
    if statistic == "k1":
        low, high = math.log(1 / high if low is None else low), math.log(high)
    elif low is not None:
        raise SpecError(
            f"verl's bound {limit!r} of {option}", rule="k2 and k3 have one bound, above", fix="give one number"
        )
    return {"statistic": statistic, "level": RS_LEVELS[level], "low": low, "high": high}


def _bounds(threshold: float | str, name: str) -> tuple[float | None, float]:
    """Return (low or None, high) of "high" or "low_high"."""
    try:
        numbers = [float(part) for part in str(threshold).strip().split("_", 1)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) <= 0 or numbers != sorted(numbers):
        raise SpecError(
            f"verl's {name} = {threshold!r}",
            rule='a positive number, or two in order as "low_high"',
            fix="correct the option",
        )
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]


def correction_back(spec: CorrectionSpec) -> dict[str, Any]:
    """Return the options of the rollout correction that are closest to a correction."""
    settings: dict[str, Any] = {}
    if spec.ratio in ("token", "document_sum") and spec.ratio_high is not None:
        low = "" if spec.ratio_low is None else f"{spec.ratio_low!r}_"
        settings |= {
            "rollout_is": "token" if spec.ratio == "token" else "sequence",
            "rollout_is_threshold": f"{low}{spec.ratio_high!r}",
            "rollout_is_batch_normalize": spec.normalize,
        }
    options, limits = [], []
    for gate in spec.gates:
        if gate.level not in LEVELS or gate.high is None:
            raise unsupported(
                TITLE,
                f"a gate on {gate.level} with an upper bound {gate.high}",
                f"its gates are on {', '.join(LEVELS)}, with an upper bound",
            )
        options.append(f"{LEVELS[gate.level]}_{gate.statistic}")
        limits.append(_as_ratios(gate.low, gate.high) if gate.statistic == "k1" else repr(gate.high))
    if options:
        settings |= {"rollout_rs": ",".join(options), "rollout_rs_threshold": ",".join(limits)}
    return settings


def _as_ratios(low: float | None, high: float) -> str:
    """Return bounds of k1 in verl's format: one number for a reciprocal pair; fifteen digits, as in a configuration."""
    upper = float(f"{math.exp(high):.15g}")
    if low == math.log(1 / upper):
        return repr(upper)
    return f"{0.0 if low is None else math.exp(low):.15g}_{upper!r}"
