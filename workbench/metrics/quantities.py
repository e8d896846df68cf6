"""The per-token quantities that metrics are made of, each with the tokens at which it exists.

A column is data (`LogProb("policy")`, `KL("k3", "policy", "ref")`), so that a metric can be declared, listed and
computed from one statement. All are computed in float64 without a gradient, at most once a micro-batch.

Log-probabilities may be -inf (a token that a sampler's top-p had cut off, say). A comparison of two policies exists
only at tokens where both are finite; the others are counted by `NonFinite` and never silently lost.

Letters: T packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from workbench.losses.document_sums import LocalSums
from workbench.losses.terms import LossInputs, Term
from workbench.specs.losses import LossSpec

Who = Literal["policy", "old", "sampler", "ref"]
"""Whose log-probabilities."""
WHO: tuple[Who, ...] = ("policy", "old", "sampler", "ref")


class ClipRule(NamedTuple):
    """The clip of a surrogate, for metrics that ask where a ratio lies.

    Attributes:
        lower: lower bound of the ratio.
        upper: upper bound of the ratio.
        dual: bound of the ratio for negative advantages (dual clip), or None.
        of_documents: the ratio is one of a document (GSPO): exp of the mean log ratio of its trained tokens.
        anchor: whose log-probabilities stand in the denominator of the ratio.
    """

    lower: float
    upper: float
    dual: float | None = None
    of_documents: bool = False
    anchor: Who = "old"


def clip_rule(spec: LossSpec | None) -> ClipRule | None:
    """The clip of a loss's surrogate as bounds of the ratio; None if it has none that metrics can ask about.

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
    if kind == "cispo" and level != "segment":
        bounds = (low, high) if surrogate.bounds == "absolute" else (None if low is None else 1 - low, 1 + high)
        return ClipRule(
            -math.inf if bounds[0] is None else bounds[0],
            bounds[1],
            of_documents=level == "document",
            anchor=anchor,
        )
    if kind == "gmpo":
        return ClipRule(math.exp(-low), math.exp(high), anchor=anchor)
    return None


class DocumentSlots(NamedTuple):
    """The names of this row's documents in the whole optimizer step; what tables of documents are made with.

    Attributes:
        first: documents of the step in all rows before this one (of every dp rank and micro-batch), so that
            ``first + document_ids_T`` is a name that no other row uses.
        number: documents of the whole step, with or without trained tokens.
        segment_lengths_T: [T] trained tokens of the token's unbroken run of trained tokens, over all ranks; or None.
    """

    first: int
    number: int
    segment_lengths_T: Tensor | None = None


@dataclass(frozen=True)
class Column:
    """A per-token quantity.

    `needs` names whose log-probabilities it looks at: where one of them is not finite it does not exist.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        """Whose log-probabilities."""
        return ()

    def of(self, q: Quantities) -> Tensor | None:
        """[T] float64, anything at tokens outside its population; None if this step does not know it."""
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
        known = tuple(who for who in WHO if q.logprob(who) is not None)
        return (~q.finite(known)).double()


@dataclass(frozen=True)
class LogProb(Column):
    """A log-probability, where it is finite."""

    who: Who

    @property
    def needs(self) -> tuple[str, ...]:
        """Whose log-probabilities."""
        return (self.who,)

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        return q.logprob(self.who)


@dataclass(frozen=True)
class LogRatio(Column):
    """log(above / below), absolute if asked for, or held within +-limit."""

    above: Who
    below: Who
    absolute: bool = False
    limit: float | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """Whose log-probabilities."""
        return self.above, self.below

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
    """above / below; of their larger over their smaller if symmetric; held within the clip if clamped."""

    above: Who
    below: Who
    symmetric: bool = False
    clamped: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """Whose log-probabilities."""
        return self.above, self.below

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


@dataclass(frozen=True)
class KL(Column):
    """An estimate of KL(first || second) from a token that the first sampled.

    Formula: d = log second - log first;  k1 = -d,  k2 = d^2 / 2,  k3 = exp(d) - d - 1,  abs = |d|.
             d is held within +-input_limit and the estimate within +-output_limit, where given.
    Source:  Schulman, "Approximating KL Divergence" (2020).
    """

    estimator: Estimator
    first: Who
    second: Who
    input_limit: float | None = None
    output_limit: float | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """Whose log-probabilities."""
        return self.first, self.second

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        d_T = q.log_ratio(self.second, self.first)
        if d_T is None:
            return None
        if self.input_limit is not None:
            d_T = d_T.clamp(-self.input_limit, self.input_limit)
        if self.estimator == "k1":
            value_T = -d_T
        elif self.estimator == "k2":
            value_T = d_T.square() / 2
        elif self.estimator == "k3":
            value_T = torch.expm1(d_T) - d_T
        else:
            value_T = d_T.abs()
        return value_T if self.output_limit is None else value_T.clamp(-self.output_limit, self.output_limit)


@dataclass(frozen=True)
class JensenShannon(Column):
    """Half k3 of each against the mixture of both, at the sampled token.

    Formula: m = log((p + q) / 2);  (k3(log p - m) + k3(log q - m)) / 2,  k3(d) = exp(d) - d - 1.
    """

    first: Who
    second: Who

    @property
    def needs(self) -> tuple[str, ...]:
        """Whose log-probabilities."""
        return self.first, self.second

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

    @property
    def needs(self) -> tuple[str, ...]:
        """Whose log-probabilities."""
        return "policy", "sampler"

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        ratio_T = q.ratio("policy", "sampler")
        return None if ratio_T is None else -ratio_T * q.logprob("policy")


@dataclass(frozen=True)
class Entropy(Column):
    """Exact entropy of the policy's distribution over the whole vocabulary."""

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        return None if q.inputs.entropy_T is None else q.inputs.entropy_T.double()


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
    """Whether a token's ratio lies beyond the clip (1) or not (0). Token ratios only.

    outside[_low, _high]: beyond a bound, whatever the sign of the advantage. cut[_low, _high]: where PPO's clip
    acts: above the upper bound with a positive advantage, below the lower one with a negative. cut_dual: above the
    dual bound with a negative advantage.
    """

    region: Region
    anchor: Who = "old"

    @property
    def needs(self) -> tuple[str, ...]:
        """Whose log-probabilities."""
        return "policy", self.anchor

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        ratio_T = q.ratio("policy", self.anchor)
        if q.clip is None or q.clip.of_documents or ratio_T is None:
            return None
        found_T = beyond(self.region, ratio_T, q.advantages_T, q.clip)
        return None if found_T is None else found_T.double()


def beyond(region: Region, ratio: Tensor, advantages: Tensor, clip: ClipRule) -> Tensor | None:
    """Where a ratio (of tokens or of documents) lies beyond the clip; see `Clip`. None: no such bound.

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
    """1 where a term's own clip cut its gradient off, as the term says."""

    term: str

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        term = q.terms.get(self.term)
        return None if term is None or term.clipped_T is None else term.clipped_T.double()


@dataclass(frozen=True)
class PolicyCut(Column):
    """1 where the policy term's clip cut its gradient off, as the term says; 0 everywhere for a term that never cuts.

    dual: by the bound that only negative advantages have above 1 (dual clip, delta); else: by the others.
    """

    dual: bool = False

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        term = q.terms.get("policy")
        if term is None:
            return None
        none_T = torch.zeros_like(q.mask_T)
        cut_T = none_T if term.clipped_T is None else term.clipped_T
        dual_T = term.extras.get("dual_clipped", none_T)
        return (dual_T if self.dual else cut_T & ~dual_T).double()


@dataclass(frozen=True)
class NoGradient(Column):
    """1 where the policy term gives no gradient: clipped, silent, or a correction weight of 0.

    Silent is what the term says it is; of a term that says nothing, a token whose advantage is 0.
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
    """Something that the policy term kept for metrics, by name."""

    name: str

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        return q.extra(self.name)


@dataclass(frozen=True)
class TermValue(Column):
    """The values of a term of the loss, without its coefficient; unknown where the loss has no such term."""

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
        stated_T = q.extra("truncated")
        if stated_T is not None:
            return stated_T
        raw_T, applied_T, kept_T = q.extra("raw_weight"), q.extra("applied_weight"), q.extra("kept")
        if raw_T is None or applied_T is None:
            return None
        changed_T = (raw_T != applied_T).double()
        return changed_T if kept_T is None else changed_T * kept_T


class Quantities:
    """What is known of the tokens of one micro-batch on one rank, each thing computed at most once.

    Args:
        inputs: what the loss saw.
        terms: what the loss said.
        loss_mask_T: [T] bool, the tokens that count.
        clip: the surrogate's clip, if it has one.
        slots: the names of the row's documents in the whole step, if known.
    """

    def __init__(
        self,
        inputs: LossInputs,
        terms: Mapping[str, Term],
        loss_mask_T: Tensor,
        *,
        clip: ClipRule | None = None,
        slots: DocumentSlots | None = None,
    ) -> None:
        self.inputs, self.terms, self.mask_T = inputs, terms, loss_mask_T
        self.clip, self.slots = clip, slots
        self._known: dict[Any, Tensor | None] = {}

    @cached_property
    def one_T(self) -> Tensor:
        """[T] of 1."""
        return torch.ones_like(self.mask_T, dtype=torch.float64)

    @cached_property
    def step_documents_T(self) -> Tensor | None:
        """[T] long, the token's document in the whole step; anything where nothing counts. None if not known."""
        if self.slots is None:
            return None
        ids_T = self.inputs.document_ids_T
        if ids_T is None:
            ids_T = torch.zeros_like(self.mask_T, dtype=torch.long)
        return ids_T + self.slots.first

    @cached_property
    def advantages_T(self) -> Tensor:
        """[T] float64."""
        return self.inputs.advantages_T.double()

    def logprob(self, who: str) -> Tensor | None:
        """[T] float64 log-probabilities of one policy, or None."""
        values_T = getattr(self.inputs, f"{who}_logprobs_T")
        return None if values_T is None else self._once(who, lambda: values_T.detach().double())

    def log_ratio(self, above: str, below: str) -> Tensor | None:
        """[T] log(above / below), anything where one of them is not finite; or None."""
        first_T, second_T = self.logprob(above), self.logprob(below)
        if first_T is None or second_T is None:
            return None
        return self._once((above, below), lambda: first_T - second_T)

    def ratio(self, above: str, below: str) -> Tensor | None:
        """[T] above / below, anything where one of them is not finite; or None."""
        log_T = self.log_ratio(above, below)
        return None if log_T is None else self._once(("ratio", above, below), log_T.exp)

    def finite(self, who: tuple[str, ...]) -> Tensor:
        """[T] bool: these policies' log-probabilities are all finite."""
        first, *others = who
        if not others:
            return self._finite[first]
        return self._once(("finite", *sorted(who)), lambda: self.finite(tuple(others)) & self._finite[first])

    @cached_property
    def _finite(self) -> dict[str, Tensor]:
        """[T] bool of each policy; all in one test, because each small operation costs a launch."""
        known = [who for who in WHO if self.logprob(who) is not None]
        return dict(zip(known, torch.stack([self.logprob(who) for who in known]).isfinite().unbind(), strict=True))

    def population(self, column: Column) -> Tensor:
        """[T] bool: the tokens at which a column exists, among those that count."""
        return self.population_of(column.needs)

    def population_of(self, needs: tuple[str, ...]) -> Tensor:
        """[T] bool: the tokens that count and whose log-probabilities under all of these are finite."""
        needed = tuple(sorted(set(needs)))
        if not needed:
            return self.mask_T
        return self._once(("population", *needed), lambda: self.mask_T & self.finite(needed))

    def weights(self, name: str) -> Tensor | None:
        """[T] how much a token weighs: 1, or 1 / the trained tokens of its document or of its segment; or None."""
        if name == "token":
            return self.one_T
        lengths_T = self._once(("lengths", name), lambda: self._lengths(name))
        if lengths_T is None:
            return None
        return self._once(("weights", name), lambda: lengths_T.double().clamp_min(1).reciprocal())

    def _lengths(self, name: str) -> Tensor | None:
        """[T] trained tokens of the token's document or segment: as handed in, or counted where all is here."""
        inputs = self.inputs
        if name == "document":
            given_T = inputs.lengths_T
        else:
            given_T = None if self.slots is None else self.slots.segment_lengths_T
        if given_T is not None or inputs.sums is not None or inputs.document_ids_T is None:
            return given_T
        here = LocalSums(inputs.document_ids_T, self.mask_T)
        return here.document(self.one_T) if name == "document" else here.segment(self.one_T)

    def extra(self, name: str) -> Tensor | None:
        """[T] float64, kept by the policy term under a name, or None."""
        term = self.terms.get("policy")
        if term is None or term.extras.get(name) is None:
            return None
        return term.extras[name].detach().double()

    def column(self, column: Column) -> Tensor | None:
        """[T] float64, computed at most once."""
        return self._once(column, lambda: column.of(self))

    def _once(self, key: Any, make: Any) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]
