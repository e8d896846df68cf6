"""Causes of another loss of further tokens (multi-token prediction), where the policy's own loss is right.

Records of the workbench have the log-probability of the token that each depth predicts, 0 where it predicts none, so
that other targets, another layer and other weights are told apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.diagnose.causes.cause import NOT, Family, Judged
from workbench.diagnose.denominators import PIECES, names_of, pieces
from workbench.diagnose.facts import Facts

PREDICTION = Family("metrics", "tokens")
_VALUES = re.compile(r"^prediction_(\d+)_logprobs$")
_EXACT = 1e-4
"""Relative distance of a term from a weighted mean of its recorded values: rounding of sums in float32."""


class _Depth(NamedTuple):
    """One depth in both records: its term, the values of its tokens [S], and their numbers if these differ."""

    name: str
    terms: tuple[float, float]
    values: tuple[Tensor, Tensor]
    counts: tuple[float, float] | None

    @property
    def counted(self) -> tuple[Tensor, Tensor]:
        """[S] bool, tokens with a prediction, in each record."""
        one, other = self.values
        return one != 0, other != 0

    @property
    def same_tokens(self) -> bool:
        """True if both records predict at the same places, as far as values and their numbers tell."""
        return self.counts is None and torch.equal(*self.counted)

    def same_values(self, nats: float) -> bool:
        """True if all values agree within a tolerance."""
        one, other = (values.double() for values in self.values)
        return bool(((one - other).abs() <= nats * (1 + one.abs())).all())

    @property
    def factor(self) -> float | None:
        """Weight of a token in the suspect over that in the trusted record, if all have one weight; else the mean's."""
        means = [
            -float(values.double()[counted].mean()) for values, counted in zip(self.values, self.counted, strict=True)
        ]
        usable = all(means) and self.terms[0]
        return (self.terms[1] / means[1]) / (self.terms[0] / means[0]) if usable else None


def _depths(facts: Facts) -> Iterator[_Depth]:
    """Depths whose term differs, while the policy's inputs and log-probabilities do not."""
    if facts.forward_same is False or facts.mask_same is False or facts.gradient_same is True:
        return
    for name in facts.tokens[0]:
        match = _VALUES.match(name)
        if match is None or name not in facts.tokens[1]:
            continue
        depth, off = f"prediction_{match[1]}", facts.step.metrics
        term = next((key for key in off if key.startswith("loss/") and key.split("/")[1] == depth), None)
        if term is not None:
            values = facts.tokens[0][name], facts.tokens[1][name]
            one, other = (step.metrics.get(f"prediction/tokens_{match[1]}/sum") for step in facts.pair)
            counts = None if one is None or other is None or one == other else (one, other)
            yield _Depth(depth, off[term], values, counts)


@PREDICTION.cause("further tokens are predicted at other places: shifted again, or across the ends of documents")
def _prediction_targets(facts: Facts) -> Judged:
    for depth in _depths(facts):
        if not depth.same_tokens:
            one, other = depth.counted
            added, lost = int((other & ~one).sum()), int((one & ~other).sum())
            number = "" if depth.counts is None else f", {depth.counts[1]:.0f} in all and not {depth.counts[0]:.0f}"
            text = f"values of {depth.name} lie at {added} other tokens and are missing at {lost}{number}"
            return 0.96, [f"{text}; the policy's tokens are the same"]
    return NOT


@PREDICTION.cause("layers that predict further tokens compute something else: their inputs, targets or experts")
def _prediction_layer(facts: Facts) -> Judged:
    for depth in _depths(facts):
        if depth.same_tokens and not depth.same_values(facts.step.noise.logprob_nats):
            return 0.95, [
                f"values of {depth.name} differ at the same tokens, and the policy's log-probabilities do not"
            ]
    return NOT


def _weighed(facts: Facts) -> Iterator[tuple[_Depth, float]]:
    """Depths of which only the weights of tokens differ, with their `_Depth.factor`."""
    for depth in _depths(facts):
        factor = depth.factor
        if depth.same_tokens and factor and factor > 0 and depth.same_values(facts.step.noise.logprob_nats):
            yield depth, factor


@PREDICTION.cause("the loss of further tokens is multiplied or divided by a size, or is a sum in place of a mean")
def _prediction_factor(facts: Facts) -> Judged:
    for depth, factor in _weighed(facts):
        count = int(depth.counted[0].sum())
        if abs(factor / count - 1) <= _EXACT:
            return 0.96, [f"{depth.name} is {factor:.6g} times too big: by the number of its tokens, as a sum is"]
        if named := names_of(factor, facts.sizes, _EXACT):
            return 0.96, [f"{depth.name} is {factor:.6g} times the trusted one, which is {named[0].description}"]
    return NOT


@PREDICTION.cause("the loss of further tokens is divided by counts of ranks or rows in place of the step's")
def _prediction_counts(facts: Facts) -> Judged:
    """Score of a mean of means over pieces, weighed alike or by trained tokens; a lower one for any other weights."""
    for depth, factor in _weighed(facts):
        if _prediction_factor(facts)[0]:
            return NOT
        for kind, means in _means_of_pieces(facts, depth):
            if abs(factor / means - 1) <= _EXACT:
                return 0.96, [f"{depth.name} is the mean over the means of each {PIECES[kind]}, to rounding"]
        return 0.82, [f"{depth.name} is {factor:.6g} times the trusted one, from the same values of the same tokens"]
    return NOT


def _means_of_pieces(facts: Facts, depth: _Depth) -> Iterator[tuple[str, float]]:
    """Kind of pieces, and a mean of their means over the mean of all tokens."""
    counted, trained = depth.counted[0], facts.trained
    values = depth.values[0].double()
    if trained is None or not bool(counted.any()):
        return
    whole = values[counted].mean()
    for kind, labels in pieces(facts.tokens[1], facts.context).items():
        _, place = torch.unique(labels, return_inverse=True)
        number = int(place.max()) + 1
        sums = torch.bincount(place, weights=values * counted, minlength=number)
        counts = torch.bincount(place, weights=counted.double(), minlength=number)
        shares = torch.bincount(place, weights=trained.double(), minlength=number)
        means = sums / counts.clamp_min(1)
        yield kind, float(means[counts > 0].mean() / whole)
        yield kind, float((means * shares).sum() / shares.sum() / whole)
