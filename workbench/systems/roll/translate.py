"""From options of alibaba/ROLL to a spec, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import SpecError
from workbench.specs.losses import LossSpec, ScalingSpec
from workbench.systems.registry import Translation
from workbench.systems.roll.settings import OUTPUT_CLAMP, ActorSettings
from workbench.systems.translate import checked_back, unsupported

TITLE = "ROLL"
EPSILON = 1e-8
"""Added to counts of rows, and to their lengths (`agg_loss`, `masked_mean`)."""

CONTRACTS: Mapping[str, ScalingSpec] = {
    # `loss_scale` of megatron_strategy.py; counts are those of all ranks and micro-batches.
    "megatron": ScalingSpec(multiplied_by=("dp", "micro_batches"), engine_divides=("micro_batches", "dp")),
}

DENOMINATORS = {"token-mean": "token", "seq-mean-token-sum": "document_sum", "seq-mean-token-mean": "document"}
"""loss_agg_mode -> `LossSpec.denominator`."""


def translate(settings: ActorSettings) -> Translation:
    """Translate the actor's loss."""
    _check(settings)
    ranged = settings.use_pg_clip_range
    low = settings.pg_clip_low if ranged else settings.pg_clip
    high = settings.pg_clip_high if ranged else settings.pg_clip
    dual = 1 + 2 * settings.pg_clip if settings.dual_clip_loss else None
    kind = "gspo" if settings.importance_sampling == "seq" else "ppo"
    by_row = settings.loss_agg_mode != "token-mean"
    epsilons = {
        "count_epsilon": EPSILON if by_row else 0.0,
        "length_epsilon": EPSILON if settings.loss_agg_mode == "seq-mean-token-mean" else 0.0,
        "mean_epsilon": EPSILON if kind == "gspo" else 0.0,
    }
    surrogate = {"kind": kind, "clip_low": low, "clip_high": high, "dual_clip": dual}
    kl: dict[str, Any] = {}
    if settings.use_kl_loss and settings.kl_loss_coef:
        coefficient = settings.kl_loss_coef * settings.rl_loss_coef
        kl = {"coefficient": coefficient, "estimator": "k3", "output_clamp": OUTPUT_CLAMP}
    spec = LossSpec(
        name="ppo",
        surrogate={**surrogate, "coefficient": settings.rl_loss_coef},
        denominator=DENOMINATORS[settings.loss_agg_mode],
        kl=kl,
        entropy_coefficient=settings.entropy_loss_coef,
        compat={"scaling": CONTRACTS["megatron"].model_copy(update=epsilons)},
    )
    return Translation(spec, tuple(_notes(settings)))


def _check(settings: ActorSettings) -> None:
    weights = settings.difficulty_loss_weight or settings.length_loss_weight
    problems = (
        (
            settings.loss_agg_mode not in DENOMINATORS,
            f"loss_agg_mode {settings.loss_agg_mode}",
            "ROLL divides by the padded width of a micro-batch, which is no setting",
            "choose another mode",
        ),
        (
            weights,
            "difficulty_loss_weight or length_loss_weight",
            "weights of rows are scaled within a micro-batch by what it has, which no spec has",
            "leave them out",
        ),
        (
            bool(settings.train_infer_correction),
            "train_infer_correction",
            "its weights and filters are not translated",
            "leave it out, and give the settings of a loss of the workbench",
        ),
        (
            settings.entropy_loss_coef > 0 and settings.loss_agg_mode == "token-mean",
            "entropy_loss_coef with token-mean",
            "ROLL adds the entropy of all positions, padding included, and divides by the trained tokens",
            "leave the bonus out",
        ),
    )
    for found, subject, rule, fix in problems:
        if found:
            raise SpecError(f"{TITLE}'s {subject}", rule=rule, fix=fix)


def _notes(settings: ActorSettings) -> list[str]:
    notes = []
    if settings.loss_agg_mode == "token-mean":
        notes.append("token-mean takes no mask: tokens that do not train have an advantage of 0 there")
    if settings.dual_clip_loss:
        notes.append(f"the dual clip is at 1 + 2 pg_clip = {1 + 2 * settings.pg_clip:g}")
    return notes


def back(spec: LossSpec) -> dict[str, Any]:
    """Return the options of the actor for a spec."""
    surrogate = spec.surrogate
    kinds = {"ppo": "token", "gspo": "seq"}
    if surrogate.kind not in kinds:
        raise unsupported(TITLE, f"the surrogate {surrogate.kind!r}", f"its losses are {', '.join(kinds)}")
    modes = {name: mode for mode, name in DENOMINATORS.items()}
    if spec.denominator not in modes:
        raise unsupported(TITLE, f"the denominator {spec.denominator!r}", f"its modes are {', '.join(DENOMINATORS)}")
    dual = surrogate.get("dual_clip")
    settings: dict[str, Any] = {
        "importance_sampling": kinds[surrogate.kind],
        "use_pg_clip_range": True,
        "pg_clip_low": surrogate.get("clip_low"),
        "pg_clip_high": surrogate.get("clip_high"),
        "loss_agg_mode": modes[spec.denominator],
        "rl_loss_coef": surrogate.coefficient,
        "entropy_loss_coef": spec.entropy_coefficient,
    }
    if dual is not None:
        settings |= {"dual_clip_loss": True, "pg_clip": (dual - 1) / 2}
    if spec.kl.coefficient:
        settings |= {"use_kl_loss": True, "kl_loss_coef": spec.kl.coefficient / surrogate.coefficient}
    epsilons = {"count_epsilon", "length_epsilon", "mean_epsilon"}
    own = translate(ActorSettings(**settings)).spec.compat.scaling
    changes = {name: getattr(own, name) for name in epsilons if getattr(spec.compat.scaling, name) <= EPSILON}
    scaling = spec.compat.scaling.model_copy(update=changes)
    requested = spec.model_copy(update={"compat": spec.compat.model_copy(update={"scaling": scaling})})
    return checked_back(TITLE, requested, ActorSettings, translate, settings)
