"""The spec of a loss: which terms, with which parameters, divided by what. Data only; importing it costs no torch.

A name picks a preset, keys given beside it win over the preset's, and what comes out is explicit: a stored spec
says every parameter that decides a number, and reads back as itself whatever a later version's presets say.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from workbench.errors import SpecError
from workbench.specs.presets import PRESETS


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="constants")


# -- surrogates ------------------------------------------------------------------------------------------------

PARAMETERS: dict[str, dict[str, Any]] = {
    "ppo": {"anchor": "old", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "delta": None, "log_clamp": None},
    "importance_sampling": {"anchor": "old"},
    "reinforce": {},
    "on_policy": {},
    "cispo": {
        "anchor": "old",
        "bounds": "relative",
        "clip_low": None,
        "clip_high": 4.0,
        "level": "token",
        "log_clamp": None,
    },
    "gspo": {
        "anchor": "old",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": None,
        "delta": None,
        "level": "document",
        "advantage_level": "token",
    },
    "gspo_token": {
        "anchor": "old",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": None,
        "level": "document",
        "log_cap": None,
    },
    "luspo": {
        "anchor": "old",
        "clip_low": 2e-3,
        "clip_high": 2.5e-3,
        "dual_clip": None,
        "delta": None,
        "advantage_level": "token",
    },
    "gmpo": {"anchor": "old", "clip_low": 0.4, "clip_high": 0.4},
    "sapo": {
        "anchor": "old",
        "level": "token",
        "advantage_level": "token",
        "tau_positive": 1.0,
        "tau_negative": 1.05,
        "log_clamp": None,
    },
    "vespo": {"anchor": "old", "k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0},
    "gpg": {},
    "dppo_tv": {
        "anchor": "sampler",
        "threshold_low": 0.15,
        "threshold_high": 0.15,
        "ratio_cap": None,
        "log_clamp": None,
    },
    "dppo_kl": {
        "anchor": "sampler",
        "threshold_low": 0.05,
        "threshold_high": 0.05,
        "ratio_cap": None,
        "log_clamp": None,
    },
    "ipo": {"anchor": "sampler", "threshold": 0.1},
    "ref_kl": {"anchor": "sampler", "threshold_low": 0.2},
    "dro": {"anchor": "old", "beta": 0.1},
    "clip_cov": {
        "anchor": "old",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "cov_fraction": 2e-4,
        "cov_low": 1.0,
        "cov_high": 5.0,
    },
    "kl_cov": {"anchor": "old", "cov_fraction": 2e-4, "cov_coefficient": 1.0},
    "sft": {},
    "dpo": {"beta": 0.1, "label_smoothing": 0.0},
}
"""Kind of surrogate -> the parameters that it uses, with their defaults."""

LOCAL_STATISTICS = ("micro_batch", "packing", "dp", "cp")
"""What no longer leaves the loss unchanged once a number is taken over the tokens that one rank happens to hold."""

SURROGATE_BREAKS: dict[str, tuple[str, ...]] = {"clip_cov": LOCAL_STATISTICS, "kl_cov": LOCAL_STATISTICS}
"""Kind of surrogate -> the invariance laws that it breaks by definition."""


class SurrogateSpec(_Model):
    """The policy term. A parameter that the kind does not use is None, and refused if it is given."""

    kind: Literal[
        "ppo",
        "importance_sampling",
        "reinforce",
        "on_policy",
        "cispo",
        "gspo",
        "gspo_token",
        "luspo",
        "gmpo",
        "sapo",
        "vespo",
        "gpg",
        "dppo_tv",
        "dppo_kl",
        "ipo",
        "ref_kl",
        "dro",
        "clip_cov",
        "kl_cov",
        "sft",
        "dpo",
    ] = "ppo"
    """Which surrogate; `workbench/losses/README.md` has the formulas."""
    coefficient: float = 1.0
    """Multiplies the policy term."""
    anchor: Literal["old", "sampler"] | None = None
    """Whose log-probabilities stand in the denominator of the ratio."""
    clip_low: float | None = Field(None, ge=0)
    """Length from 1 down to the lower clip bound of the ratio (gmpo: of the log ratio from 0); for cispo None means
    no lower bound, and with absolute bounds it is the bound itself."""
    clip_high: float | None = Field(None, ge=0)
    """Length from 1 up to the upper clip bound of the ratio (gmpo: of the log ratio from 0); for cispo with absolute
    bounds the bound itself."""
    dual_clip: float | None = Field(None, gt=1)
    """Ratio above which a token with negative advantage loses its gradient; None: never."""
    delta: float | None = Field(None, gt=0)
    """The two-sided bound: min(ratio, delta) in the unclipped branch; None: none."""
    log_clamp: float | None = Field(None, gt=0)
    """Bound of |log ratio|. ppo, sapo: a token beyond it has no gradient; cispo, dppo: its weight is the bound's. None:
    none."""
    log_cap: float | None = Field(None, gt=0)
    """gspo_token: greatest log of the ratio; a token above it has no gradient. None: none."""
    bounds: Literal["relative", "absolute"] | None = None
    """cispo: whether clip_low and clip_high are lengths from 1 or the bounds themselves."""
    level: Literal["token", "document", "segment"] | None = None
    """Over what the ratio is a geometric mean: the document, or each unbroken run of its trained tokens. sapo, cispo:
    or the token's own."""
    advantage_level: Literal["token", "document"] | None = None
    """Whether each token keeps its advantage, or takes the mean over its document."""
    tau_positive: float | None = Field(None, gt=0)
    """sapo: steepness where the advantage is positive."""
    tau_negative: float | None = Field(None, gt=0)
    """sapo: steepness elsewhere."""
    k_positive: float | None = Field(None, ge=0)
    """vespo: power of the sequence weight where the advantage is not negative."""
    lambda_positive: float | None = Field(None, ge=0)
    """vespo: decay of the sequence weight where the advantage is not negative."""
    k_negative: float | None = Field(None, ge=0)
    """vespo: power of the sequence weight elsewhere."""
    lambda_negative: float | None = Field(None, ge=0)
    """vespo: decay of the sequence weight elsewhere."""
    threshold: float | None = Field(None, ge=0)
    """ipo: how far the token's probability may have moved from the anchor's, either way."""
    threshold_low: float | None = Field(None, ge=0)
    """dppo: how far a token with an advantage that is not positive may have moved down (probability, or nats of KL);
    ref_kl: any token (probability)."""
    threshold_high: float | None = Field(None, ge=0)
    """dppo: how far a token with positive advantage may have moved up (probability, or nats of KL)."""
    ratio_cap: float | None = Field(None, gt=0)
    """dppo: upper bound of the ratio inside the gradient coefficient; None: none."""
    beta: float | None = Field(None, ge=0)
    """dro: strength of the quadratic pull to the anchor; dpo: inverse temperature of the implied reward."""
    label_smoothing: float | None = Field(None, ge=0, lt=0.5)
    """dpo: probability that a preference is recorded the wrong way round."""
    cov_fraction: float | None = Field(None, ge=0, le=1)
    """clip_cov, kl_cov: share of this micro-batch's tokens that is selected."""
    cov_low: float | None = None
    """clip_cov: only tokens whose covariance is above this are candidates."""
    cov_high: float | None = None
    """clip_cov: only tokens whose covariance is below this are candidates."""
    cov_coefficient: float | None = Field(None, ge=0)
    """kl_cov: weight of the penalty on selected tokens."""

    @model_validator(mode="before")
    @classmethod
    def _parameters_of_the_kind(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        kind = value.get("kind", "ppo")
        if kind not in PARAMETERS:
            return value  # the field itself says which kinds there are
        used = PARAMETERS[kind]
        for name in set(value) - {"kind", "coefficient"} - set(used):
            users = [other for other, parameters in PARAMETERS.items() if name in parameters]
            if value[name] is not None and users:
                raise ValueError(f"{name} is not used by the surrogate {kind!r}; it belongs to {', '.join(users)}")
        if value.get("level") == "token" and used.get("level") != "token":
            raise ValueError(
                f"level 'token' is not used by the surrogate {kind!r}, whose ratio is that of a document; "
                "'ppo' is its like for tokens"
            )
        emptied = [
            name for name, default in used.items() if name in value and value[name] is None and default is not None
        ]
        if emptied:
            raise ValueError(
                f"{', '.join(emptied)} of the surrogate {kind!r} cannot be None; leave it out for the "
                f"default ({', '.join(str(used[name]) for name in emptied)})"
            )
        filled = {name: default for name, default in used.items() if value.get(name) is None}
        return {**value, **filled}

    @model_validator(mode="after")
    def _bounds_in_order(self) -> SurrogateSpec:
        if self.bounds == "absolute" and _above(self.clip_low, self.clip_high):
            raise ValueError("clip_low is above clip_high, and with absolute bounds they are the bounds themselves")
        if _above(self.cov_low, self.cov_high):
            raise ValueError("cov_low is above cov_high: no token is between them")
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that the kind uses."""
        return {name: getattr(self, name) for name in PARAMETERS[self.kind]}

    @property
    def breaks(self) -> tuple[str, ...]:
        """Invariance laws that the surrogate breaks by definition."""
        return SURROGATE_BREAKS.get(self.kind, ())


# -- corrections and KL --------------------------------------------------------------------------------------

CORRECTIONS: dict[str, dict[str, Any]] = {
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
"""Kind of correction -> the settings that it stands for; every setting given beside the kind wins."""

GateStatistic = Literal["ratio", "k1", "k2", "k3", "inverse_k3", "binary_kl"]
GateLevel = Literal["token", "document_mean", "document_sum", "document_max", "document_min"]


class GateSpec(_Model):
    """Which tokens stay: those for which a statistic of old against sampler lies between two values."""

    statistic: GateStatistic
    """See `CorrectionSpec.gate`."""
    level: GateLevel = "token"
    """See `CorrectionSpec.gate_level`."""
    low: float | None = None
    """Smallest value that is kept; None: any."""
    high: float | None = None
    """Greatest value that is kept; None: any."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> GateSpec:
        if self.low is None and self.high is None:
            raise ValueError("a gate needs low or high")
        if _above(self.low, self.high):
            raise ValueError("low is above high")
        return self


class CorrectionSpec(_Model):
    """What is done about tokens that the sampler and the old policy rate differently.

    A detached weight on the policy term, and gates that take tokens out of it. The kind fills in settings; what is
    stored is all of them. Formulas: `workbench.losses.corrections`.
    """

    kind: Literal[
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
    ] = "none"
    """Settings by their name in the field; those given beside it win."""
    ratio: Literal["none", "token", "segment_mean", "document_mean", "document_sum", "given", "given_document_mean"] = (
        "none"
    )
    """Over what log(old / sampler) is gathered in the weight. The sum is the likelihood ratio of the document, the
    mean its geometric mean: two numbers that differ by e^length, both called sequence-level elsewhere. given: the
    weight came with the batch; given_document_mean: the geometric mean of those over the document."""
    given_epsilon: float = Field(0.0, ge=0)
    """given_document_mean: added to a weight before its log."""
    ratio_low: float | None = Field(None, ge=0)
    """Lower bound of the weight; None: none."""
    ratio_high: float | None = Field(None, gt=0)
    """Upper bound of the weight; None: none."""
    outside: Literal["truncate", "zero"] = "truncate"
    """What a weight outside its bounds becomes: the bound, or 0 (the token is rejected)."""
    log_clamp: float | None = Field(None, gt=0)
    """Bound of the weight's absolute log, as gathered, before it is a weight, and of a token's |log(old / sampler)| in
    a gate; None: none."""
    normalize: bool = False
    """Divide weights by their mean: over trained tokens, or over documents for a ratio of documents."""
    mean_epsilon: float = Field(0.0, ge=0)
    """normalize: added to the trained tokens that a mean divides by."""
    gate: Literal["none", "ratio", "k1", "k2", "k3", "inverse_k3", "binary_kl"] = "none"
    """By which statistic of old against sampler tokens are rejected; none: no gate. ratio: old / sampler; k1: its
    negative log; k2: half the squared log; k3: ratio - 1 - log ratio; inverse_k3: that of sampler / old; binary_kl:
    KL divergence between "this token" and "another token", the greater of both directions."""
    gate_level: GateLevel = "token"
    """Over what the statistic is gathered; the ratio's in logs. A document is kept or rejected whole."""
    gate_low: float | None = None
    """Smallest value that is kept; None: any."""
    gate_high: float | None = None
    """Greatest value that is kept; None: any."""
    further_gates: tuple[GateSpec, ...] = ()
    """Gates beside the first; a token must pass all."""
    gate_action: Literal["reject", "truncate"] = "reject"
    """What happens beyond the gate: the token is rejected, or its weight is put within ratio_low and ratio_high, which
    then bound no other token's."""
    surrogate_over: Literal["trained", "kept"] = "trained"
    """Over which tokens of a document the surrogate's own ratio and advantage are means: all that train, or those that
    are kept."""
    unsampled: Literal["as_given", "drop"] = "as_given"
    """What a sampler log-probability above 0 means: itself, or that the sampler did not draw the token, which is then
    rejected and enters no ratio of a document."""
    enters: Literal["value", "sequence_weight"] = "value"
    """Where the weight acts: it multiplies the token's value, or its log is added to that of vespo's sequence weight, a
    document's weight once and the weights of tokens each."""
    unscored: Literal["spread", "neutral"] = "spread"
    """What a sampler log-probability that is NaN does: it makes the loss NaN, where it is seen, or the token has the
    weight 1 and is no distance from the sampler in opsm_threshold."""
    opsm_threshold: float | None = None
    """Reject tokens with negative advantage in documents whose mean of (anchor - policy) is above this; None: none."""
    opsm_anchor: Literal["sampler", "old"] = "sampler"
    """Whose log-probabilities opsm_threshold compares the live policy with."""
    m2_threshold: float | None = Field(None, ge=0)
    """Reject the tokens with the greatest squared log(old / sampler) until the mean of the others is at most this;
    None: none."""
    population: Literal["step", "micro_batch"] = "step"
    """Over which tokens normalize and m2_threshold look: the whole optimizer step, or what a rank holds at a time."""
    denominator: Literal["original", "survivors", "gated"] = "original"
    """Whether rejected tokens still count in the denominator of the loss: all, none, or, with gated, those that pass
    the gates though their weight is 0."""

    @model_validator(mode="before")
    @classmethod
    def _settings_of_the_kind(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or value.get("kind", "none") not in CORRECTIONS:
            return value  # the field itself says which kinds there are
        return {**CORRECTIONS[value.get("kind", "none")], **value}

    @model_validator(mode="after")
    def _settings_are_used(self) -> CorrectionSpec:
        bounds = self.ratio_low is not None or self.ratio_high is not None
        gates = self.gate_low is not None or self.gate_high is not None
        local = self.population == "micro_batch"
        broken = (
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
            (_above(self.ratio_low, self.ratio_high), "ratio_low is above ratio_high"),
            (
                self.log_clamp is not None and self.ratio in ("none", "given") and self.gate == "none",
                "log_clamp is about a weight or a gate; name its ratio or its statistic",
            ),
            (
                bool(self.given_epsilon) and self.ratio != "given_document_mean",
                "given_epsilon is about the ratio given_document_mean",
            ),
            (bool(self.mean_epsilon) and not self.normalize, "mean_epsilon is about normalize"),
            (
                bool(self.further_gates) and self.gate == "none",
                "further_gates stand beside a first one; name it in gate",
            ),
            (
                self.denominator == "gated" and (self.gate == "none" or self.gate_action != "reject"),
                "denominator: gated, but no gate rejects a token",
            ),
            (
                self.gate == "none" and (gates or self.gate_level != "token" or self.gate_action != "reject"),
                "gate_level, gate_low, gate_high and gate_action are about a gate; name its statistic (ratio, k1, k2, "
                "k3, binary_kl)",
            ),
            (
                self.gate_action == "truncate" and not (bounds and self.outside == "truncate"),
                "gate_action: truncate puts a weight within ratio_low and ratio_high; give one, and leave outside "
                "alone",
            ),
            (self.surrogate_over == "kept" and not self.rejects, "surrogate_over: kept, but nothing rejects a token"),
            (self.gate != "none" and not gates, "a gate needs gate_low or gate_high"),
            (_above(self.gate_low, self.gate_high), "gate_low is above gate_high"),
            (self.opsm_threshold is None and self.opsm_anchor != "sampler", "opsm_anchor needs opsm_threshold"),
            (local and not self._has_statistics, "population: micro_batch is about normalize and m2_threshold"),
            (
                self.denominator == "survivors" and not self.rejects,
                "denominator: survivors, but nothing rejects a token",
            ),
            (
                self.denominator == "survivors" and self.opsm_threshold is not None,
                "denominator: survivors with opsm_threshold: survivors are counted on the whole step before it is "
                "split, and opsm looks at the live policy, which says nothing before the forward pass; use original",
            ),
            (
                self.denominator == "survivors" and local and self.m2_threshold is not None,
                "denominator: survivors with m2_threshold: survivors of a micro-batch are not known on the whole step; "
                "use population: step",
            ),
        )
        for wrong, rule in broken:
            if wrong:
                raise ValueError(rule)
        return self

    @property
    def rejects(self) -> bool:
        """Whether a token may be taken out altogether."""
        return (
            self.outside == "zero"
            or (self.gate != "none" and self.gate_action == "reject")
            or self.opsm_threshold is not None
            or self.m2_threshold is not None
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
        """Whether there is anything to do."""
        return self.ratio != "none" or self.gate != "none" or self.rejects

    @property
    def _has_statistics(self) -> bool:
        return self.normalize or self.m2_threshold is not None

    @property
    def needs_step_statistics(self) -> bool:
        """Whether `workbench.losses.corrections.step_statistics` must be handed to the loss."""
        return self._has_statistics and self.population == "step"

    @property
    def breaks(self) -> tuple[str, ...]:
        """Invariance laws that the correction breaks by definition."""
        return LOCAL_STATISTICS if self._has_statistics and self.population == "micro_batch" else ()


def _above(low: float | None, high: float | None) -> bool:
    return low is not None and high is not None and low > high


class KLSpec(_Model):
    """A KL penalty, estimated on the sampled token. Formulas: `workbench.losses.kl`."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the penalty; 0: none."""
    estimator: Literal["k1", "k2", "k3", "abs", "squared"] = "k3"
    """With d = other - policy: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d, abs = |d|, squared = d^2 (no half)."""
    against: Literal["ref", "sampler", "old"] = "ref"
    """The other policy."""
    gradient: Literal["path", "score", "straight_through"] = "path"
    """path: of the estimate itself; score: with the gradient of sampling in it, too (that of an expectation under the
    policy); straight_through: that of k2, whatever the estimate."""
    importance: Literal["none", "old", "sampler"] = "none"
    """Multiply the estimate with policy / old or policy / sampler, because that policy drew the tokens."""
    importance_level: Literal["token", "document"] = "token"
    """Whether that ratio is the token's own, or the geometric mean over the trained tokens of its document."""
    input_clamp: float | None = Field(None, gt=0)
    """Bound of |d|; a token beyond it has no gradient (straight_through keeps its own). None: none."""
    output_clamp: float | None = Field(None, gt=0)
    """Bound of the weighted estimate's absolute value; a token beyond it has no gradient (straight_through keeps its
    own). None: none."""
    placement: Literal["loss", "reward"] = "loss"
    """Whether the penalty is a term of the loss or is taken off the reward when advantages are made."""

    @model_validator(mode="after")
    def _settings_are_used(self) -> KLSpec:
        if self.placement == "reward" and (self.gradient != "path" or self.importance != "none"):
            raise ValueError("gradient and importance are about a term of the loss; in the reward the penalty is data")
        if self.importance_level == "document" and self.importance == "none":
            raise ValueError("importance_level is about the ratio that importance names (old, sampler)")
        if self.placement == "reward" and self.against != "ref":
            raise ValueError(
                "in the reward the penalty is of the old policy against ref; the other policies are where "
                "the tokens come from"
            )
        return self


# -- scaling ---------------------------------------------------------------------------------------------------


Size = Literal["dp", "cp", "dp_cp", "micro_batches"]
"""A number that a trainer multiplies or divides a loss by: ranks, or micro-batches of a rank in an optimizer step
(gradient accumulation steps, elsewhere)."""


class ScalingSpec(_Model):
    """How a trainer makes one number out of token sums; the defaults are the exact contract.

    The workbench adds over micro-batches and ranks. What another trainer does instead is written here and multiplied
    into the weights (`workbench.reduction.scaling`), so that its gradient comes out of the same sum.
    """

    counts: Literal["step", "pass", "micro_batch"] = "step"
    """Over which rows the denominator counts: all of the optimizer step, the micro-batches that all data-parallel ranks
    train on at a time, or each micro-batch for itself."""
    multiplied_by: tuple[Size, ...] = ()
    """What the trainer multiplies the loss of a micro-batch by."""
    divided_by: tuple[Size, ...] = ()
    """What the trainer divides it by, beside the denominator."""
    replicated: bool = False
    """Every cp rank computes the loss of the whole row, and what gathered its log-probabilities adds the gradients up:
    the gradient is cp times that of the row."""
    engine_multiplies: tuple[Size, ...] = ()
    """What the engine multiplies loss or gradient by (Megatron's schedule: cp)."""
    engine_divides: tuple[Size, ...] = ()
    """What the engine divides them by: dp_cp where gradients are averaged over ranks, micro_batches where it
    accumulates means."""
    least_tokens: int = Field(0, ge=0)
    """Tokens that a document adds at least to the count of the denominator `token`, whether anything counts in it."""
    count_epsilon: float = Field(0.0, ge=0)
    """Added to a count of the step (tokens, documents, prompts) before it divides."""
    length_epsilon: float = Field(0.0, ge=0)
    """Added to a document's length before it divides, in the denominator `document`."""
    mean_epsilon: float = Field(0.0, ge=0)
    """Added to a document's length in means that the loss itself takes over it (the ratio of a document, a gate)."""

    @property
    def powers(self) -> dict[str, int]:
        """Size -> its power in the factor by which the gradient differs from the plain sum's; exact: 0 everywhere."""
        found = dict.fromkeys(("dp", "cp", "micro_batches"), 0)
        for names, sign in (
            ((*self.multiplied_by, *self.engine_multiplies), 1),
            ((*self.divided_by, *self.engine_divides), -1),
        ):
            for name in names:
                for size in ("dp", "cp") if name == "dp_cp" else (name,):
                    found[size] += sign
        found["cp"] += self.replicated
        return found

    @property
    def breaks(self) -> tuple[str, ...]:
        """Invariance laws that the contract breaks by definition."""
        powers = self.powers
        local = () if self.counts == "step" else ("micro_batch", "packing", "dp")
        factors = (("dp", powers["dp"]), ("cp", powers["cp"]), ("micro_batch", powers["micro_batches"]))
        empty = ("masked_rows",) if self.least_tokens else ()
        return tuple(dict.fromkeys((*local, *(law for law, power in factors if power), *empty)))


# -- the loss --------------------------------------------------------------------------------------------------

GROUPS = ("surrogate", "correction", "kl", "scaling")
KINDS = {"surrogate": "ppo", "correction": "none"}
"""Groups of settings whose kind decides what the others mean, and their kind where none is said."""

DENOMINATOR_BREAKS: dict[str, tuple[str, ...]] = {"local_token": ("micro_batch", "packing", "dp")}
"""Denominator -> the invariance laws that it breaks by definition. (cp ranks share a micro-batch and its count.)"""


class LossSpec(_Model):
    """The policy loss: a preset by name, and what differs from it.

    Example:
        >>> LossSpec(name="dapo").surrogate.clip_high
        0.28
        >>> LossSpec(name="gspo", denominator="token").denominator
        'token'
    """

    name: str = "grpo"
    """The preset that the other keys start from; `workbench.specs.presets.PRESETS` lists them."""
    surrogate: SurrogateSpec = SurrogateSpec()
    """The policy term."""
    correction: CorrectionSpec = CorrectionSpec()
    """What is done about the mismatch between sampler and trainer."""
    kl: KLSpec = KLSpec()
    """The KL penalty."""
    signal: Literal["advantages", "rewards"] = "advantages"
    """What the surrogate's ratio is multiplied with."""
    signal_floor: float | None = None
    """Lower bound of the signal; 0 leaves tokens with a negative one silent. None: none."""
    truncated: Literal["train", "silent"] = "train"
    """Documents that the sampler cut off (a document's extension "truncated"): whether they train like others, or weigh
    nothing though they stay in every count."""
    old_policy: Literal["recorded", "current"] = "recorded"
    """Who the old policy is: the one that was recorded, or, as if nothing had moved since, the policy itself without
    gradient."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus: it is subtracted, so a positive one raises the entropy."""
    entropy_denominator: Literal["penalty", "local_token"] = "penalty"
    """What the entropy bonus is divided by: what the other penalties are, or, as a mean over micro-batches of their own
    means, the tokens of the micro-batch that get it."""
    top_entropy_share: float = Field(1.0, ge=0, le=1)
    """Share of the tokens that a rank holds of a micro-batch, those of highest entropy, to which policy term and
    entropy bonus are confined; penalties act on all. Of 0 the highest is left."""
    squared_logit_coefficient: float = Field(0.0, ge=0)
    """Weight of the squared log normaliser of the logits (z-loss)."""
    mean_squared_logit_coefficient: float = Field(0.0, ge=0)
    """Weight of the mean over the vocabulary of the squared logits (over temperature)."""
    positive_nll_coefficient: float = Field(0.0, ge=0)
    """Weight of the mean negative log-likelihood of documents whose reward is positive."""

    denominator: Literal[
        "token", "document", "document_sum", "constant", "prompt_group", "rollout", "group_length", "raw", "local_token"
    ] = "token"
    """What the sum over tokens is divided by, counted over the whole optimizer step."""
    denominator_constant: float | None = Field(None, gt=0)
    """constant: the C of 1 / (documents of the step * C)."""
    documents_counted: Literal["trained", "all"] = "trained"
    """Which documents are counted where documents, prompts or rollouts are: those in which a token counts, or all."""
    gradient_divisor: float = Field(1.0, gt=0)
    """Divides the gradient, not the loss that is reported: what an engine does that averages where it should add."""
    normalize_by_documents: bool = False
    """Divide the gradient, and not the loss that is reported, by the documents of the step once more."""
    scaling: ScalingSpec = ScalingSpec()
    """What a trainer and its engine do between the token sums and the optimizer."""

    @model_validator(mode="after")
    def _old_policy_is_known_in_time(self) -> LossSpec:
        if self.old_policy == "current" and self.correction.needs_step_statistics:
            raise ValueError(
                "old_policy: current is not known before the forward pass, and statistics of the step are "
                "found with the old policy before it; use population: micro_batch"
            )
        return self

    @model_validator(mode="after")
    def _weights_enter_where_they_can(self) -> LossSpec:
        if self.correction.enters == "sequence_weight" and self.surrogate.kind != "vespo":
            raise ValueError(
                "correction.enters: sequence_weight is about the surrogate vespo; "
                f"{self.surrogate.kind!r} has no sequence weight"
            )
        return self

    @model_validator(mode="after")
    def _denominator_has_its_settings(self) -> LossSpec:
        if self.denominator_constant is not None and self.denominator != "constant":
            raise ValueError(
                f"denominator_constant is not used by the denominator {self.denominator!r}; it belongs to constant"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _preset_under_what_is_given(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        name = value.get("name", "grpo")
        if name not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(PRESETS)}"
            raise ValueError(f"no preset {name!r} ({hint})")
        return {"name": name, **_laid_over(PRESETS[name], value)}

    @property
    def breaks(self) -> tuple[str, ...]:
        """Invariance laws that this loss breaks by definition; () for almost all."""
        weights = DENOMINATOR_BREAKS.get(self.denominator, ())
        counts = self.normalize_by_documents or self.denominator not in ("token", "raw", "local_token")
        empty = ("masked_rows",) if self.documents_counted == "all" and counts else ()
        bonus = DENOMINATOR_BREAKS[self.entropy_denominator] if self._bonus_is_local else ()
        chosen = LOCAL_STATISTICS if self.top_entropy_share < 1 else ()
        return tuple(
            dict.fromkeys(
                (
                    *self.surrogate.breaks,
                    *self.correction.breaks,
                    *weights,
                    *self.scaling.breaks,
                    *empty,
                    *bonus,
                    *chosen,
                )
            )
        )

    @property
    def _bonus_is_local(self) -> bool:
        return bool(self.entropy_coefficient) and self.entropy_denominator == "local_token"

    @property
    def counts_live(self) -> bool:
        """Whether a denominator counts what the live policy keeps.

        A run cannot: its weights are data from before the forward pass. Who holds one batch and what the policy says
        of it can.
        """
        return self.old_policy == "current" and self.correction.denominator != "original"

    @property
    def head_outputs(self) -> tuple[str, ...]:
        """What the output head says besides log-probabilities: for metrics always, and what a penalty is made of."""
        return ("entropy", "logsumexp", *(["mean_squared_logit"] if self.mean_squared_logit_coefficient else []))

    @property
    def needs_pairs(self) -> bool:
        """Whether the loss compares the two documents of a group, which must then lie in one row."""
        return self.surrogate.kind == "dpo"

    def overrides(self) -> dict[str, Any]:
        """The name, and only what differs from its preset: what another name can be put over.

        `LossSpec(**spec.overrides())` is the spec again.
        """
        preset = LossSpec(name=self.name)
        changed: dict[str, Any] = {"name": self.name}
        for key, value in self:
            if key not in GROUPS:
                changed |= {key: value} if value != getattr(preset, key) else {}
                continue
            start, kind = getattr(preset, key), getattr(value, "kind", None)
            other = kind != getattr(start, "kind", None)
            start = type(value)(kind=kind) if other else start
            group = {k: v for k, v in value if v != getattr(start, k) or (other and k == "kind")}
            changed |= {key: group} if group else {}
        return changed


def check_carried(base: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Refuse to lay a loss of another kind over settings that were meant for the first one's.

    A clip length of 0.28 for a token's ratio, taken over by a loss that clips a document's at 0.0004, would be no
    error and no clip.

    Args:
        base: settings of a loss, as far as they are given.
        changes: settings that are laid over them.

    Raises:
        SpecError: the kind of surrogate or of correction changes, and a setting of the first kind would stay.
    """
    for group in KINDS:
        mine, theirs = _given(base, group), _given(changes, group)
        before, after = _kind(base, group), _kind({**base, **changes, group: {**mine, **theirs}}, group)
        stay = {
            name: value
            for name, value in mine.items()
            if before != after and value is not None and name not in ("kind", "coefficient", *theirs)
        }
        if stay:
            said = ", ".join(f"{name} = {value}" for name, value in stay.items())
            raise SpecError(
                f"the {group} {after!r} over {before!r}",
                found=f"{said}, said for {before!r}",
                rule=f"settings of a {group} belong to its kind",
                fix=f"say them where {before!r} is named, and give {after!r} its own beside its name",
            )


def _given(loss: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    settings = loss.get(group)
    return settings if isinstance(settings, Mapping) else {}


def _kind(loss: Mapping[str, Any], group: str) -> str:
    preset = PRESETS.get(loss.get("name", "grpo"), {})
    return _given(loss, group).get("kind") or _given(preset, group).get("kind", KINDS[group])


def _laid_over(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that are given win; a group of another kind than the preset's takes nothing from the preset."""
    out = {**preset, **given}
    for group in GROUPS:
        mine, theirs = given.get(group), preset.get(group)
        if isinstance(mine, Mapping) and theirs and mine.get("kind", theirs.get("kind")) == theirs.get("kind"):
            out[group] = {**theirs, **mine}
    return out
