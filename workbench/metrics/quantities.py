"""The per-token quantities of metrics, each with the tokens at which it exists.

A column is data, such as `KL("k3", "policy", "ref")`, so that a metric can be declared, listed and computed from one
statement. All are in float64 without a gradient. `workbench.metrics.policy.Quantities` computes each at most once.

Log-probabilities may be -inf (a token outside a sampler's top-p support, say). A comparison of two policies exists
only at tokens where both are finite; the others are counted by `NonFinite` and never silently dropped.

Letters: T packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from workbench.specs.losses import LossSpec

if TYPE_CHECKING:
    from workbench.metrics.policy import Quantities

PolicyName = Literal["policy", "old", "sampler", "ref"]
"""A policy with log-probabilities."""
POLICY_NAMES: tuple[PolicyName, ...] = ("policy", "old", "sampler", "ref")


class ClipRule(NamedTuple):
    """The clip of a surrogate, as bounds of a ratio to an anchor, for metrics of the clip region.

    Attributes:
        dual: bound for negative advantages (dual clip), or None.
        of_documents: the ratio is that of a document (GSPO): exp of the mean log ratio of its trained tokens.
    """

    lower: float
    upper: float
    dual: float | None = None
    of_documents: bool = False
    anchor: PolicyName = "old"


def clip_rule(spec: LossSpec | None) -> ClipRule | None:
    """Return the clip of a loss's surrogate as bounds of the ratio; None if it has none of tokens or documents.

    A ratio of segments (turns) has none: neither a token nor a document is on one side of it.
    """
    if spec is None:
        return None
    surrogate = spec.surrogate
    kind, low, high = surrogate.kind, surrogate.get("clip_low"), surrogate.get("clip_high")
    anchor, level = surrogate.ratio_anchor, surrogate.ratio_level
    of_documents = kind in ("gspo", "gspo_token", "luspo")
    if kind in ("ppo", "clip_cov") or (of_documents and level != "segment"):
        delta = surrogate.get("delta")
        duals = [surrogate.get("dual_clip"), None if delta is None else max(delta, 1 + high)]
        dual = min((d for d in duals if d is not None), default=None)
        return ClipRule(1 - low, 1 + high, dual, of_documents, anchor)
    if surrogate.kind == "cispo" and level != "segment":
        lower, upper = (low, high) if surrogate.bounds == "absolute" else (None if low is None else 1 - low, 1 + high)
        return ClipRule(-math.inf if lower is None else lower, upper, None, level == "document", anchor)
    if kind == "gmpo":
        return ClipRule(math.exp(-low), math.exp(high), anchor=anchor)
    return None


class DocumentSlots(NamedTuple):
    """The numbers of this row's documents in the whole optimizer step, for tables of documents.

    Attributes:
        first: documents of the step in all rows before this one (of every dp rank and micro-batch), so that
            ``first + document_ids_T`` is a number that no other row uses.
        number: documents of the whole step, with or without trained tokens.
        segment_lengths_T: [T] trained tokens of the token's unbroken run of trained tokens, over all ranks; or None.
    """

    first: int
    number: int
    segment_lengths_T: Tensor | None = None


@dataclass(frozen=True)
class Column:
    """A per-token quantity."""

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """The policies whose log-probabilities it uses: where one of them is not finite it does not exist.

        Unless overridden, those that fields of type `PolicyName` name.
        """
        return tuple(getattr(self, each.name) for each in fields(self) if each.type == "PolicyName")

    def of(self, q: Quantities) -> Tensor | None:
        """[T] float64, arbitrary at tokens outside its population; None if this step does not have it."""
        raise NotImplementedError


@dataclass(frozen=True)
class One(Column):
    """1 on every token."""

    def of(self, q: Quantities) -> Tensor:
        """See `Column.of`."""
        return q.one_T


@dataclass(frozen=True)
class NonFinite(Column):
    """1 where a log-probability that the step has is not finite, else 0."""

    def of(self, q: Quantities) -> Tensor:
        """See `Column.of`."""
        return (~q.finite(tuple(name for name in POLICY_NAMES if q.logprob(name) is not None))).double()


@dataclass(frozen=True)
class LogProb(Column):
    """A log-probability, where it is finite."""

    policy: PolicyName

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        return q.logprob(self.policy)


@dataclass(frozen=True)
class LogRatio(Column):
    """log(above / below); its absolute value if ``absolute``; clamped to +-limit if given."""

    above: PolicyName
    below: PolicyName
    absolute: bool = False
    limit: float | None = None

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        value_T = q.log_ratio(self.above, self.below)
        if value_T is None:
            return None
        if self.limit is not None:
            value_T = value_T.clamp(-self.limit, self.limit)
        return value_T.abs() if self.absolute else value_T


@dataclass(frozen=True)
class Ratio(Column):
    """above / below; the larger over the smaller if ``symmetric``; within the bounds of the clip if ``clamped``."""

    above: PolicyName
    below: PolicyName
    symmetric: bool = False
    clamped: bool = False

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        if self.symmetric:
            log_T = q.log_ratio(self.above, self.below)
            return None if log_T is None else log_T.abs().exp()
        ratio_T = q.ratio(self.above, self.below)
        if ratio_T is None or not self.clamped:
            return ratio_T
        return None if q.clip is None else ratio_T.clamp(q.clip.lower, q.clip.upper)


Estimator = Literal["k1", "k2", "k3", "abs"]
_ESTIMATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": torch.neg,
    "k2": lambda d_T: d_T.square() / 2,
    "k3": lambda d_T: torch.expm1(d_T) - d_T,
    "abs": torch.abs,
}


@dataclass(frozen=True)
class KL(Column):
    """An estimate of KL(first || second) from a token that the first sampled.

    Formula: d = log second - log first;  k1 = -d,  k2 = d^2 / 2,  k3 = exp(d) - d - 1,  abs = |d|.
             d is clamped to +-input_limit and the estimate to +-output_limit, if given.
    Source:  Schulman, "Approximating KL Divergence" (2020).
    """

    estimator: Estimator
    first: PolicyName
    second: PolicyName
    input_limit: float | None = None
    output_limit: float | None = None

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        d_T = q.log_ratio(self.second, self.first)
        if d_T is None:
            return None
        if self.input_limit is not None:
            d_T = d_T.clamp(-self.input_limit, self.input_limit)
        value_T = _ESTIMATES[self.estimator](d_T)
        return value_T if self.output_limit is None else value_T.clamp(-self.output_limit, self.output_limit)


@dataclass(frozen=True)
class JensenShannon(Column):
    """Half k3 of each against the mixture of both, at the sampled token.

    Formula: m = log((p + q) / 2);  (k3(log p - m) + k3(log q - m)) / 2,  k3(d) = exp(d) - d - 1.
    """

    first: PolicyName
    second: PolicyName

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        d_T = q.log_ratio(self.second, self.first)
        if d_T is None:
            return None
        first_T = math.log(2) - torch.nn.functional.softplus(d_T)
        second_T = first_T + d_T
        return (torch.expm1(first_T) - first_T + torch.expm1(second_T) - second_T) / 2


@dataclass(frozen=True)
class SampledEntropy(Column):
    """An estimate of the policy's entropy from sampled tokens: -(policy / sampler) log policy."""

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """See `Column.needs`."""
        return "policy", "sampler"

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        ratio_T, logprobs_T = q.ratio("policy", "sampler"), q.logprob("policy")
        return None if ratio_T is None or logprobs_T is None else -ratio_T * logprobs_T


@dataclass(frozen=True)
class Entropy(Column):
    """Exact entropy of the policy's distribution over the whole vocabulary."""

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        return None if q.inputs.entropy_T is None else q.inputs.entropy_T.double()


@dataclass(frozen=True)
class Support(Column):
    """A value of the truncated supports over which log-probabilities are taken; None without them.

    mass: the policy's probability of the support. size: its tokens. outside: 1 if the token is not in the support that
    the sampler's settings give for the policy's own distribution.
    """

    name: Literal["mass", "size", "outside"]

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        inputs = q.inputs
        of = {"mass": inputs.support_mass_T, "size": inputs.support_size_T, "outside": inputs.outside_support_T}
        value_T = of[self.name]
        return None if value_T is None else value_T.double()


@dataclass(frozen=True)
class Advantage(Column):
    """The advantage; or 1 where it is exactly 0 and 0 elsewhere."""

    is_zero: bool = False

    def of(self, q: Quantities) -> Tensor:
        """See `Column.of`."""
        return (q.advantages_T == 0).double() if self.is_zero else q.advantages_T


Region = Literal["outside", "outside_low", "outside_high", "cut", "cut_low", "cut_high", "cut_dual"]


@dataclass(frozen=True)
class Clip(Column):
    """1 if a token's ratio is beyond the clip, else 0. Token ratios only.

    outside[_low, _high]: beyond a bound, for either sign of the advantage. cut[_low, _high]: where PPO's clip
    acts: above the upper bound with a positive advantage, below the lower one with a negative. cut_dual: above the
    dual bound with a negative advantage.
    """

    region: Region
    anchor: PolicyName = "old"

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """See `Column.needs`."""
        return "policy", self.anchor

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        ratio_T = q.ratio("policy", self.anchor)
        if q.clip is None or q.clip.of_documents or ratio_T is None:
            return None
        beyond_T = beyond(self.region, ratio_T, q.advantages_T, q.clip)
        return None if beyond_T is None else beyond_T.double()


def beyond(region: Region, ratio: Tensor, advantages: Tensor, clip: ClipRule) -> Tensor | None:
    """Return a mask of the ratios (of tokens or of documents) beyond the clip; see `Clip`. None: no such bound.

    Shapes: ratio and advantages alike -> bool, alike.
    """
    low, high = ratio < clip.lower, ratio > clip.upper
    if region.startswith("cut"):
        if region == "cut_dual":
            return None if clip.dual is None else (ratio > clip.dual) & (advantages < 0)
        low, high = low & (advantages < 0), high & (advantages > 0)
    return {"low": low, "high": high}.get(region.rpartition("_")[2], low | high)


@dataclass(frozen=True)
class Cut(Column):
    """1 where a term reports that its own clip zeroed its gradient."""

    term: str

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        term = q.terms.get(self.term)
        return None if term is None or term.clipped_T is None else term.clipped_T.double()


@dataclass(frozen=True)
class PolicyCut(Column):
    """1 where the policy term reports that its clip zeroed its gradient; 0 everywhere for a term without a clip.

    dual: by the bound that only negative advantages have above 1 (dual clip, delta); else: by the others.
    """

    dual: bool = False

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        term, none_T = q.terms.get("policy"), torch.zeros_like(q.mask_T)
        if term is None:
            return None
        cut_T = none_T if term.clipped_T is None else term.clipped_T
        dual_T = term.extras.get("dual_clipped", none_T)
        return (dual_T if self.dual else cut_T & ~dual_T).double()


@dataclass(frozen=True)
class NoGradient(Column):
    """1 where the policy term gives no gradient: clipped, silent, or a correction weight of 0.

    Silent tokens are those that the term reports; for a term that reports none, tokens with an advantage of 0.
    """

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        term = q.terms.get("policy")
        if term is None:
            return None
        silent_T = q.advantages_T == 0 if term.silent_T is None else term.silent_T
        if term.clipped_T is not None:
            silent_T = silent_T | term.clipped_T
        applied_T = term.extras.get("applied_weight")
        return (silent_T if applied_T is None else silent_T | (applied_T == 0)).double()


@dataclass(frozen=True)
class Extra(Column):
    """A per-token value that the policy term returned for metrics, by name."""

    name: str

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        return q.extra(self.name)


@dataclass(frozen=True)
class TermValue(Column):
    """The values of a term of the loss, without its coefficient; None if the loss has no such term."""

    term: str

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        term = q.terms.get(self.term)
        return None if term is None else term.values_T.detach().double()


@dataclass(frozen=True)
class Dropped(Column):
    """1 where the sampler correction rejected the token."""

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        kept_T = q.extra("kept")
        return None if kept_T is None else 1 - kept_T


@dataclass(frozen=True)
class Truncated(Column):
    """1 where the sampler correction kept the token but changed its weight."""

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        stated_T, kept_T, raw_T, applied_T = map(q.extra, ("truncated", "kept", "raw_weight", "applied_weight"))
        if stated_T is not None or raw_T is None or applied_T is None:
            return stated_T
        changed_T = (raw_T != applied_T).double()
        return changed_T if kept_T is None else changed_T * kept_T
