"""Options of AReaL, by its names and with its defaults."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, ConfigDict, Field, model_validator

from workbench.systems.registry import Settings


class RejectionSettings(Settings):
    """`RejectionSamplingConfig` (areal/api/cli_args.py, cbff54d6): of proximal against behaviour policy."""

    level: Literal["token", "sequence"] = "token"
    """Unit of the decision."""
    action: Literal["mask", "clamp"] = "mask"
    """Reject, or bound the weight."""
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"] = "ratio"
    """Statistic; binary_kl is not in 1.0.4. kl_k1 is log(proximal / behave); kl_k3 is k3 of behave / proximal."""
    agg: Literal["sum", "mean", "max"] = "mean"
    """Aggregate over a sequence; for the ratio, of its log."""
    upper: float = 5.0
    """Greatest value that is kept."""
    lower: float | None = None
    """Smallest value that is kept; None: any."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> RejectionSettings:
        if self.lower is not None and self.lower > self.upper:
            raise ValueError("lower is above upper")
        if self.action == "clamp" and (self.upper <= 0 or (self.lower is not None and self.lower < 0)):
            raise ValueError("clamp bounds a weight: upper must be above 0, and lower not below 0")
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
    """Correction of the sampler's mismatch; None: none."""
    use_sapo_loss: bool = False
    """A soft gate in place of the clip."""
    sapo_tau_pos: float = Field(1.0, gt=0, validation_alias=AliasChoices("sapo_tau_pos", "tau_pos"))
    """Its steepness where the advantage is positive."""
    sapo_tau_neg: float = Field(1.05, gt=0, validation_alias=AliasChoices("sapo_tau_neg", "tau_neg"))
    """Its steepness elsewhere."""
    use_cispo_loss: bool = False
    """A truncated weight in place of the clip; not in 1.0.4."""
    m2_threshold: float | None = Field(None, ge=0)
    """Second-moment filter; None: none."""


class CriticSettings(Settings):
    """`ppo_critic_loss_fn` (areal/utils/functional/functional.py, cbff54d6)."""

    value_eps_clip: float = Field(0.5, gt=0)
    """Greatest distance of a value from the old one."""
    loss_fn_type: Literal["mse", "huber"] = "mse"
    """The shape of the error."""
    huber_delta: float = Field(10.0, gt=0)
    """Error above which the loss is linear; 10 in the code."""


class NormalizationSettings(Settings):
    """`masked_normalization` (areal/utils/functional/functional.py, cbff54d6)."""

    unbiased: bool = False
    """Divide the sum of squares by one less than the count."""
    eps: float = Field(1e-5, ge=0)
    """Added to the standard deviation."""
    dim: int | list[int] | None = None
    """Dims that are normalised together; None: all."""
    high_precision: bool = True
    """Compute in float64; affects rounding only."""
    all_reduce: bool = True
    """Sums over ranks; one rank here."""
