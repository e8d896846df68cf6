"""AReaL: decoupled PPO, GSPO, SAPO and CISPO, and rejection of tokens that the sampler rates differently.

Its "proximal" log-probabilities are our old policy's, its "old" or "behave" ones the sampler's.

Letters: T packed tokens.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, ConfigDict, Field, model_validator
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.build import surrogate_ratio
from workbench.losses.value import value_loss
from workbench.reduction.weighted_sum import reduce_terms
from workbench.reduction.weights import step_weights
from workbench.rollouts.advantages.tokens import standardize
from workbench.specs.losses import LossSpec
from workbench.systems.back import checked_back, refuse
from workbench.systems.case import Case
from workbench.systems.contracts import CONTRACTS
from workbench.systems.registry import Settings, System, Translation, parse_settings
from workbench.systems.replays import Replayed


class RejectionSettings(Settings):
    """`RejectionSamplingConfig` (areal/api/cli_args.py, cbff54d6): of proximal against behaviour policy."""

    level: Literal["token", "sequence"] = "token"
    """What is judged."""
    action: Literal["mask", "clamp"] = "mask"
    """Reject, or bound the weight."""
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"] = "ratio"
    """By what. kl_k1 is log(proximal / behave); kl_k3 is k3 of behave / proximal."""
    agg: Literal["sum", "mean", "max"] = "mean"
    """Over a sequence; of the ratio in logs."""
    upper: float = 5.0
    """Greatest value that is kept."""
    lower: float | None = None
    """Smallest value that is kept; None: any."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> RejectionSettings:
        if self.lower is not None and self.lower > self.upper:
            raise ValueError("lower is above upper")
        if self.action == "clamp" and (self.upper <= 0 or (self.lower is not None and self.lower < 0)):
            raise ValueError("clamp bounds a weight: upper is above 0, and lower not below")
        return self


class ArealSettings(Settings):
    """Options of the actor's loss (`PPOActorConfig`, areal/api/cli_args.py, cbff54d6)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, populate_by_name=True)

    eps_clip: float = Field(0.2, ge=0)
    """Length of the clip below 1."""
    eps_clip_higher: float | None = Field(None, ge=0)
    """Length of the clip above 1; None: eps_clip."""
    c_clip: float | None = Field(None, gt=1)
    """Dual clip: bound of the ratio for negative advantages; None: none."""
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token", validation_alias=AliasChoices("importance_sampling_level", "level")
    )
    """Ratio of tokens, or of sequences (GSPO)."""
    rejection_sampling: RejectionSettings | None = None
    """What is done about the sampler's mismatch; None: nothing."""
    use_sapo_loss: bool = False
    """A soft gate in place of the clip."""
    sapo_tau_pos: float = Field(1.0, gt=0, validation_alias=AliasChoices("sapo_tau_pos", "tau_pos"))
    """Its steepness where the advantage is positive."""
    sapo_tau_neg: float = Field(1.05, gt=0, validation_alias=AliasChoices("sapo_tau_neg", "tau_neg"))
    """Its steepness elsewhere."""
    use_cispo_loss: bool = False
    """A truncated weight in place of the clip."""
    m2_threshold: float | None = Field(None, ge=0)
    """Second-moment filter; None: none."""


GATES = {"ratio": "ratio", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "inverse_k3", "binary_kl": "binary_kl"}
"""Their metric -> our statistic. Ours of kl_k1 has the other sign."""


def translate(settings: ArealSettings) -> Translation:
    """The actor's loss: a sum over tokens, divided by the tokens that trained before anything was rejected."""
    sequence = settings.importance_sampling_level == "sequence"
    notes = ["rejected tokens stay in the denominator"] if settings.rejection_sampling else []
    rejection = settings.rejection_sampling
    if settings.m2_threshold is not None:
        raise SpecError(
            "AReaL: m2_threshold",
            found=settings.m2_threshold,
            rule="its filter changes the mask before the loss counts its tokens, and sorts a micro-batch; "
            "here a correction rejects and the count is of the whole step",
            fix="leave it out, and set correction.m2_threshold of our spec",
        )
    if settings.use_cispo_loss:
        surrogate = _cispo(settings)
    elif settings.use_sapo_loss:
        if rejection is not None:
            raise SpecError(
                "AReaL: use_sapo_loss with rejection_sampling",
                rule="its SAPO takes no correction",
                fix="drop one of them",
            )
        surrogate = {
            "kind": "sapo",
            "tau_positive": settings.sapo_tau_pos,
            "tau_negative": settings.sapo_tau_neg,
            "level": "document" if sequence else "token",
            "advantage_level": "document" if sequence else "token",
        }
    else:
        high = settings.eps_clip if settings.eps_clip_higher is None else settings.eps_clip_higher
        surrogate = {
            "kind": "gspo" if sequence else "ppo",
            "clip_low": settings.eps_clip,
            "clip_high": high,
            "dual_clip": settings.c_clip,
        }
        if sequence:
            surrogate["advantage_level"] = "document"
    if sequence and not settings.use_cispo_loss:
        notes += ["advantages are averaged over the sequence", "a sequence weighs by its length"]
    spec = LossSpec(
        name="grpo",
        surrogate=surrogate,
        denominator="token",
        scaling=CONTRACTS["areal"]["fsdp"],
        correction={} if rejection is None else correction(rejection, sequence),
    )
    return Translation(spec, tuple(notes))


def _cispo(settings: ArealSettings) -> dict[str, Any]:
    if settings.use_sapo_loss or settings.importance_sampling_level == "sequence":
        raise SpecError(
            "AReaL: use_cispo_loss",
            found="use_sapo_loss or a ratio of sequences",
            rule="CISPO is a loss of its own, of tokens",
            fix="drop one of them",
        )
    if settings.eps_clip_higher is None or settings.eps_clip_higher == 0:
        raise SpecError(
            "AReaL: use_cispo_loss",
            found=f"eps_clip_higher = {settings.eps_clip_higher}",
            rule="its upper bound has no default",
            fix="give eps_clip_higher",
        )
    return {"kind": "cispo", "clip_low": settings.eps_clip, "clip_high": settings.eps_clip_higher}


def correction(rejection: RejectionSettings, of_sequences: bool) -> dict[str, Any]:
    """Rejection in our words.

    Args:
        rejection: its settings.
        of_sequences: the surrogate's ratio is one of a sequence, over the tokens that are kept.
    """
    bounds = {"ratio_low": rejection.lower, "ratio_high": rejection.upper}
    if rejection.level == "token" and rejection.action == "clamp":
        return {"ratio": "token", **bounds}
    low, high = rejection.lower, rejection.upper
    level = "token" if rejection.level == "token" else f"document_{rejection.agg}"
    if rejection.metric == "kl_k1":
        low, high = -rejection.upper, None if rejection.lower is None else -rejection.lower
        level = {"document_max": "document_min"}.get(level, level)
    whole = rejection.level == "sequence" and rejection.metric == "ratio"
    found = {
        "ratio": "document_mean" if whole else "token",
        "gate": GATES[rejection.metric],
        "gate_level": level,
        "gate_low": low,
        "gate_high": high,
    }
    if rejection.action == "clamp":
        return {**found, "gate_action": "truncate", **bounds}
    return {**found, "surrogate_over": "kept"} if of_sequences else found


def back(spec: LossSpec) -> dict[str, Any]:
    """Options of the actor's loss."""
    surrogate = spec.surrogate
    if surrogate.kind not in ("ppo", "gspo", "sapo", "cispo"):
        raise refuse("AReaL", f"the surrogate {surrogate.kind!r}", "its losses are PPO, GSPO, SAPO and CISPO")
    settings: dict[str, Any] = {
        "importance_sampling_level": "sequence" if surrogate.level == "document" else "token",
        "use_sapo_loss": surrogate.kind == "sapo",
        "use_cispo_loss": surrogate.kind == "cispo",
        "rejection_sampling": rejection_of(spec),
    }
    if surrogate.kind == "sapo":
        settings |= {"sapo_tau_pos": surrogate.tau_positive, "sapo_tau_neg": surrogate.tau_negative}
    else:
        settings |= {
            "eps_clip": 1.0 if surrogate.clip_low is None else surrogate.clip_low,
            "eps_clip_higher": surrogate.clip_high,
            "c_clip": surrogate.dual_clip,
        }
    return checked_back("AReaL", spec, ArealSettings, translate, settings)


def rejection_of(spec: LossSpec) -> dict[str, Any] | None:
    """Options of rejection that come nearest to a correction; None: there is none."""
    ours = spec.correction
    if not ours.acts:
        return None
    if ours.gate == "none":
        return {
            "action": "clamp",
            "upper": 5.0 if ours.ratio_high is None else ours.ratio_high,
            "lower": ours.ratio_low,
        }
    metric = next((theirs for theirs, name in GATES.items() if name == ours.gate), "ratio")
    low, high, level = ours.gate_low, ours.gate_high, ours.gate_level
    if metric == "kl_k1":
        low, high = None if high is None else -high, None if low is None else -low
        level = {"document_min": "document_max"}.get(level, level)
    return {
        "level": "token" if level == "token" else "sequence",
        "agg": "mean" if level == "token" else level.removeprefix("document_"),
        "action": "clamp" if ours.gate_action == "truncate" else "mask",
        "metric": metric,
        "upper": 5.0 if high is None else high,
        "lower": low,
    }


def case_settings(case: Case) -> dict[str, Any]:
    """Functions say which loss is meant."""
    return {"use_sapo_loss": "sapo" in case.function, "use_cispo_loss": "cispo" in case.function, **case.config}


def outputs(replayed: Replayed) -> dict[str, Tensor]:
    """The ratio, and what rejection made of each token."""
    extras = replayed.evaluated.terms["policy"].extras
    found = {"importance_weight": surrogate_ratio(replayed.inputs, replayed.translation.spec)}
    if replayed.settings.rejection_sampling is not None:
        found |= {"behave_is_weight": extras["applied_weight"], "kept_mask": extras["kept"].double()}
    return found


# ---- what is no policy loss ------------------------------------------------------------------------------------


class CriticSettings(Settings):
    """`ppo_critic_loss_fn` (areal/utils/functional/functional.py, cbff54d6)."""

    value_eps_clip: float = Field(0.5, gt=0)
    """How far a value may move from the old one."""
    loss_fn_type: Literal["mse", "huber"] = "mse"
    """The shape of the error."""
    huber_delta: float = Field(10.0, gt=0)
    """Where the parabola ends; 10 in the code."""


class NormalizationSettings(Settings):
    """`masked_normalization` (areal/utils/functional/functional.py, cbff54d6)."""

    unbiased: bool = False
    """Divide the sum of squares by one less than the count."""
    eps: float = Field(1e-5, ge=0)
    """Added to the standard deviation."""
    dim: int | list[int] | None = None
    """Dims that are normalised together; None: all."""
    high_precision: bool = True
    """In float64; no number depends on it but for rounding."""
    all_reduce: bool = True
    """Sums over ranks; one rank here."""


def critic(case: Case) -> dict[str, Any]:
    """The critic's loss, a mean over tokens."""
    settings = parse_settings(CriticSettings, case.config, where="areal")
    leaf = case["values"].clone().requires_grad_()
    row = case.row()
    term = value_loss(
        leaf.reshape(-1),
        case["returns"].reshape(-1),
        row.loss_mask_T,
        old_values_T=case["old_values"].reshape(-1),
        clip=settings.value_eps_clip,
        kind=settings.loss_fn_type,
        delta=settings.huber_delta,
    )
    (weights,), _ = step_weights([row], LossSpec(name="grpo"))
    total = reduce_terms({"value": term}, weights, row.loss_mask_T)["total"].value
    total.backward()
    return {"loss": total.detach(), "grad_values": leaf.grad}


def normalization(case: Case) -> dict[str, Any]:
    """Values centred and scaled; where the mask is 0, what the value 0 becomes."""
    settings = parse_settings(NormalizationSettings, case.config, where="areal")
    return {
        "result": standardize(
            case["values"],
            None if case.get("mask") is None else case["mask"].bool(),
            dims=settings.dim,
            ddof=int(settings.unbiased),
            epsilon=settings.eps,
        )
    }


SYSTEM = System(
    name="areal",
    title="AReaL",
    version="cbff54d6",
    settings=ArealSettings,
    translate=translate,
    back=back,
    scaling=CONTRACTS["areal"],
    case_settings=case_settings,
    outputs=outputs,
    replays={"value_loss": critic, "normalization": normalization},
)
