"""Settings of the correction for the mismatch of sampler and trainer. Formulas: `workbench.losses.corrections`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from workbench.specs.losses.base import LOCAL_STATISTICS, Settings, above

CorrectionKind = Literal[
    "none",
    "importance_sampling",
    "tis",
    "icepop",
    "sequence_tis_sum",
    "sequence_tis_mean",
    "sequence_mask",
    "segment_tis",
    "batch_normalized",
    "geometric_gate",
    "opsm",
    "m2po",
]
CORRECTIONS: dict[CorrectionKind, dict[str, Any]] = {
    "none": {},
    "importance_sampling": {"ratio": "token"},
    "tis": {"ratio": "token", "ratio_high": 2.0},
    "icepop": {"ratio": "token", "ratio_low": 0.5, "ratio_high": 5.0, "outside": "zero"},
    "sequence_tis_sum": {"ratio": "document_sum", "ratio_high": 2.0},
    "sequence_tis_mean": {"ratio": "document_mean", "ratio_high": 2.0},
    "sequence_mask": {"ratio": "document_sum", "ratio_high": 3.0, "outside": "zero"},
    "segment_tis": {"ratio": "segment_mean", "ratio_high": 2.0},
    "batch_normalized": {"ratio": "token", "ratio_high": 2.0, "normalize": True},
    "geometric_gate": {
        "ratio": "token",
        "gate": "ratio",
        "gate_level": "document_mean",
        "gate_low": 0.999,
        "gate_high": 1.002,
    },
    "opsm": {"opsm_threshold": 1e-4},
    "m2po": {"m2_threshold": 0.04},
}
"""Kind of correction -> its settings, from the sources in `workbench.losses.corrections`; settings next to it win."""

GateStatistic = Literal["ratio", "k1", "k2", "k3", "inverse_k3", "binary_kl", "sampler_binary_kl", "total_variation"]
GateLevel = Literal["token", "document_mean", "document_sum", "document_max", "document_min"]


class GateSpec(Settings):
    """A gate: it keeps tokens for which a statistic of old against sampler is between two values."""

    statistic: GateStatistic
    """See `CorrectionSpec.gate`."""
    level: GateLevel = "token"
    """See `CorrectionSpec.gate_level`."""
    low: float | None = None
    """Smallest value that passes; None: any."""
    high: float | None = None
    """Greatest value that passes; None: any."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> GateSpec:
        if self.low is None and self.high is None:
            raise ValueError("a gate needs low or high")
        if above(self.low, self.high):
            raise ValueError("low is above high")
        return self


class CorrectionSpec(Settings):
    """The correction for tokens with different probabilities under the sampler and the old policy.

    A detached weight on the policy term, and gates that reject tokens. The kind fills in settings; all are stored.
    """

    kind: CorrectionKind = "none"
    """A named set of settings; those given next to it override them."""
    ratio: Literal["none", "token", "segment_mean", "document_mean", "document_sum", "given", "given_document_mean"] = (
        "none"
    )
    """The reduction of log(old / sampler) in the weight. The sum is the likelihood ratio of the document, the mean its
    geometric mean: two numbers that differ by e^length, both called sequence-level elsewhere. given: the weight is a
    field of the batch; given_document_mean: the geometric mean of those over the document."""
    given_epsilon: float = Field(0.0, ge=0)
    """given_document_mean: added to a weight before its log."""
    ratio_low: float | None = Field(None, ge=0)
    """Lower bound of the weight; None: none."""
    ratio_high: float | None = Field(None, gt=0)
    """Upper bound of the weight; None: none."""
    outside: Literal["truncate", "zero"] = "truncate"
    """A weight outside its bounds is set to the bound, or to 0 (the token is rejected)."""
    log_clamp: float | None = Field(None, gt=0)
    """Bound of the weight's absolute log, after its reduction, and of a token's |log(old / sampler)| in a gate; None:
    none."""
    normalize: bool = False
    """Divide weights by their mean: over trained tokens, or over documents for a ratio of documents."""
    mean_epsilon: float = Field(0.0, ge=0)
    """normalize: added to the trained tokens in the denominator of a mean."""
    gate: Literal["none", GateStatistic] = "none"
    """The statistic of old against sampler by which tokens are rejected; none: no gate. ratio: old / sampler; k1: its
    negative log; k2: half the squared log; k3: ratio - 1 - log ratio; inverse_k3: that of sampler / old; binary_kl:
    KL divergence between "this token" and "another token", the greater of both directions; sampler_binary_kl: that from
    the sampler to the old policy; total_variation: distance of the token's two probabilities."""
    gate_level: GateLevel = "token"
    """The reduction of the statistic; of a ratio in logs. Documents are kept or rejected as a whole."""
    gate_low: float | None = None
    """Smallest value that passes; None: any."""
    gate_high: float | None = None
    """Greatest value that passes; None: any."""
    further_gates: tuple[GateSpec, ...] = ()
    """Gates in addition to the first; a token must pass all."""
    gate_action: Literal["reject", "truncate"] = "reject"
    """Effect of a failed gate: the token is rejected, or its weight is clamped to ratio_low and ratio_high, which then
    bound no other token's."""
    surrogate_over: Literal["trained", "kept"] = "trained"
    """The tokens over which the surrogate's own document ratio and advantage are means: all trained ones, or those
    kept."""
    unsampled: Literal["as_given", "drop"] = "as_given"
    """Meaning of a sampler log-probability above 0: its value, or that the sampler did not draw the token, which is
    then rejected and left out of the ratio of its document."""
    enters: Literal["value", "sequence_weight"] = "value"
    """The weight multiplies the token's value, or its log is added to that of vespo's sequence weight: a document's
    weight once, the weights of tokens each."""
    unscored: Literal["spread", "neutral"] = "spread"
    """Effect of a sampler log-probability of NaN: the loss becomes NaN, which is visible, or the token has the weight 1
    and does not count as distant from the sampler in opsm_threshold."""
    opsm_threshold: float | None = None
    """Reject tokens with negative advantage in documents whose mean of (anchor - policy) is above this; None: none."""
    opsm_anchor: Literal["sampler", "old"] = "sampler"
    """The policy with which opsm_threshold compares the live policy."""
    m2_threshold: float | None = Field(None, ge=0)
    """Reject the tokens with the greatest squared log(old / sampler) until the mean of the others is at most this;
    None: none."""
    staleness_high: int | None = Field(None, ge=0)
    """Reject tokens whose weights are more optimizer steps older than those of the first update on them; None: none.
    The batch has the age of each token."""
    population: Literal["step", "micro_batch"] = "step"
    """The tokens of normalize and m2_threshold: the whole optimizer step, or a rank's tokens of one micro-batch."""
    denominator: Literal["original", "survivors", "gated"] = "original"
    """Rejected tokens in the denominator of the loss: all count, none, or, with gated, those that pass the gates but
    have a weight of 0."""

    @model_validator(mode="before")
    @classmethod
    def _apply_kind(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or value.get("kind", "none") not in list(CORRECTIONS):
            return value  # the error of the field itself lists the kinds
        return {**CORRECTIONS[value.get("kind", "none")], **value}

    @model_validator(mode="after")
    def _check_settings(self) -> CorrectionSpec:
        bounds = self.ratio_low is not None or self.ratio_high is not None
        gates = self.gate_low is not None or self.gate_high is not None
        local = self.population == "micro_batch"
        rules = (
            (
                self.ratio == "none" and (bounds or self.outside != "truncate" or self.normalize),
                "ratio_low, ratio_high, outside and normalize are about a weight; name its ratio (token, segment_mean, "
                "document_mean, document_sum)",
            ),
            (self.outside == "zero" and not bounds, "outside: zero needs ratio_low or ratio_high"),
            (
                self.enters == "sequence_weight" and self.ratio == "none",
                "enters: sequence_weight is about a weight; name its ratio",
            ),
            (
                above(self.ratio_low, self.ratio_high),
                f"ratio_low = {self.ratio_low} is above ratio_high = {self.ratio_high}",
            ),
            (
                self.log_clamp is not None and self.ratio in ("none", "given") and self.gate == "none",
                "log_clamp is about a weight or a gate; name its ratio or its statistic",
            ),
            (
                self.given_epsilon and self.ratio != "given_document_mean",
                "given_epsilon is about the ratio given_document_mean",
            ),
            (self.mean_epsilon and not self.normalize, "mean_epsilon is about normalize"),
            (self.further_gates and self.gate == "none", "further_gates need a first one; name it in gate"),
            (
                self.denominator == "gated" and (self.gate == "none" or self.gate_action != "reject"),
                "denominator: gated, but no gate rejects a token",
            ),
            (
                self.gate == "none" and (gates or self.gate_level != "token" or self.gate_action != "reject"),
                "gate_level, gate_low, gate_high and gate_action are about a gate; name its statistic (ratio, k1, k2, "
                "k3, binary_kl, total_variation)",
            ),
            (
                self.gate_action == "truncate" and not (bounds and self.outside == "truncate"),
                "gate_action: truncate clamps a weight to ratio_low and ratio_high; give one, and leave outside unset",
            ),
            (self.surrogate_over == "kept" and not self.rejects, "surrogate_over: kept, but nothing rejects a token"),
            (self.gate != "none" and not gates, "a gate needs gate_low or gate_high"),
            (above(self.gate_low, self.gate_high), f"gate_low = {self.gate_low} is above gate_high = {self.gate_high}"),
            (self.opsm_threshold is None and self.opsm_anchor != "sampler", "opsm_anchor needs opsm_threshold"),
            (local and not self._has_statistics, "population: micro_batch is about normalize and m2_threshold"),
            (
                self.denominator == "survivors" and not self.rejects,
                "denominator: survivors, but nothing rejects a token",
            ),
            (
                self.denominator == "survivors" and self.opsm_threshold is not None,
                "denominator: survivors with opsm_threshold: survivors are counted on the whole step before it is "
                "split, and opsm needs the live policy, which is not known before the forward pass; use original",
            ),
            (
                self.denominator == "survivors" and local and self.m2_threshold is not None,
                "denominator: survivors with m2_threshold: survivors of a micro-batch are not known on the whole step; "
                "use population: step",
            ),
        )
        for violated, rule in rules:
            if violated:
                raise ValueError(rule)
        return self

    @property
    def rejects(self) -> bool:
        """True if tokens may be rejected."""
        return (
            self.outside == "zero"
            or (self.gate != "none" and self.gate_action == "reject")
            or self.opsm_threshold is not None
            or self.m2_threshold is not None
            or self.staleness_high is not None
            or self.unsampled == "drop"
        )

    @property
    def gates(self) -> tuple[GateSpec, ...]:
        """All gates, the first one first."""
        if self.gate == "none":
            return ()
        first = GateSpec(statistic=self.gate, level=self.gate_level, low=self.gate_low, high=self.gate_high)
        return (first, *self.further_gates)

    @property
    def acts(self) -> bool:
        """True if the correction has any effect."""
        return self.ratio != "none" or self.gate != "none" or self.rejects

    @property
    def _has_statistics(self) -> bool:
        return self.normalize or self.m2_threshold is not None

    @property
    def needs_step_statistics(self) -> bool:
        """True if the loss needs `workbench.losses.corrections.step_statistics`."""
        return self._has_statistics and self.population == "step"

    @property
    def breaks(self) -> tuple[str, ...]:
        """Invariants that the correction breaks by definition."""
        return LOCAL_STATISTICS if self._has_statistics and self.population == "micro_batch" else ()
