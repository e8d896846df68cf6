"""Settings of surrogates with a trust region, hard or soft. Formulas: `workbench.losses.trust_region`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from workbench.specs.losses.base import Anchored, Surrogate


class FromSampler(Surrogate):
    """A surrogate whose ratio is against the sampler by default."""

    anchor: Literal["old", "sampler"] = "sampler"
    """The policy in the denominator of the ratio."""


class DPPOTV(FromSampler):
    """The ratio of tokens whose change of probability is within the threshold."""

    kind: Literal["dppo_tv"] = "dppo_tv"
    threshold_low: float = Field(0.15, ge=0)
    """Largest decrease of the probability of a token whose advantage is not positive."""
    threshold_high: float = Field(0.15, ge=0)
    """Largest increase of the probability of a token with positive advantage."""
    ratio_cap: float | None = Field(None, gt=0)
    """Upper bound of the ratio inside the gradient coefficient; None: none."""
    log_clamp: float | None = Field(None, gt=0)
    """Bound of |log ratio|; the weight of a token beyond it is the bound's. None: none."""


class DPPOKL(FromSampler):
    """The ratio of tokens whose binary KL divergence is within the threshold."""

    kind: Literal["dppo_kl"] = "dppo_kl"
    threshold_low: float = Field(0.05, ge=0)
    """Largest decrease, in nats of KL, of a token whose advantage is not positive."""
    threshold_high: float = Field(0.05, ge=0)
    """Largest increase, in nats of KL, of a token with positive advantage."""
    ratio_cap: float | None = Field(None, gt=0)
    """Upper bound of the ratio inside the gradient coefficient; None: none."""
    log_clamp: float | None = Field(None, gt=0)
    """Bound of |log ratio|; the weight of a token beyond it is the bound's. None: none."""


class IPO(FromSampler):
    """The ratio of tokens whose change of probability, in either direction, is within the threshold."""

    kind: Literal["ipo"] = "ipo"
    threshold: float = Field(0.1, ge=0)
    """Largest distance of the token's probability from the anchor's, in either direction."""


class RefKL(FromSampler):
    """On-policy distillation from the reference."""

    reads_advantages: ClassVar[bool] = False

    kind: Literal["ref_kl"] = "ref_kl"
    threshold_low: float = Field(0.2, ge=0)
    """Largest decrease of the probability of any token."""


class SAPO(Anchored):
    """The ratio through a sigmoid gate."""

    kind: Literal["sapo"] = "sapo"
    level: Literal["token", "document", "segment"] = "token"
    """Unit of the ratio: the token, or the geometric mean over the document or over each unbroken run of its trained
    tokens."""
    advantage_level: Literal["token", "document"] = "token"
    """Each token keeps its advantage, or takes the mean over its document."""
    tau_positive: float = Field(1.0, gt=0)
    """Steepness where the advantage is positive."""
    tau_negative: float = Field(1.05, gt=0)
    """Steepness elsewhere."""
    log_clamp: float | None = Field(None, gt=0)
    """Bound of |log ratio|; a token beyond it has no gradient. None: none."""


class DRO(Anchored):
    """The log-probability with a quadratic pull to the anchor."""

    kind: Literal["dro"] = "dro"
    beta: float = Field(0.1, ge=0)
    """Strength of the quadratic pull to the anchor."""
