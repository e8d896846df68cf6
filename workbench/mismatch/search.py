"""Search for the configuration under which a recorded column comes out, token by token.

From the stated configuration, each factor's values are switched alone; the states that come nearest are kept, and
switched further, up to `DEPTH` factors at once: two causes may each hide the other's fit. A switch is taken only if the
column comes much nearer than another rounding of the same numbers could bring it; see `better`.

Letters: T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.mismatch.computing import Computation
from workbench.mismatch.configuration import Configuration
from workbench.mismatch.factors import (
    ALIKE,
    BY_NAME,
    FACTORS,
    SAMPLING,
    SIGNS,
    TINY,
    State,
    Switch,
    as_near,
    distance,
    score,
)

DEPTH = 3
"""Factors that are switched at once."""
WIDTH = 4
"""States that are switched further."""
GAIN = 0.6
"""Mean log distance that a switch has to gain. Another, independent rounding of the same numbers at most halves the
variance of the distance, and gains log(2) / 2 = 0.35; `experiments/attribution` has the false alarms of clean runs."""
EXACT = 3 * TINY
"""Nats below which a median distance cannot get any nearer."""
ROUNDING = ("head precision", "trunk precision", "attention kernel", "FP8", "routes", "LoRA merge")
"""Factors that may change nothing but the rounding."""
WEIGHTS = ("stale weights", "head precision", "trunk precision", "FP8", "LoRA merge")
"""Factors that change weights."""
LIKELIER = 20.0
"""Nats of a normal log-likelihood by which other weights have to be likelier: of tokens that are not independent, with
some 30 switches tried."""
DOCUMENTS = 4
"""Documents from which on their spread says anything; a convention."""
MIDDLE = 3.0
"""Standard errors, over tokens, by which squared distances have to shrink: `LIKELIER` takes distances for normal, and
those of a mixture whose routes flip are not."""
REPRODUCED = 1e-5
"""Nats of a median token up to which a sampler's rounding is reproduced: half the tokens to the last bits."""
FURTHER = 3.0
"""Multiple of the distance from the record beyond which another column is not tried as its middle."""
ROUNDS = 12
"""Times that a temperature and a truncation are fitted in turn: each value shifts the other's."""
FITTED_FACTORS = ("temperature", "truncation", "tokenisation", "wrong prefix")
"""Factors whose values are fitted, under the switches so far."""
WITHIN = 2.5
"""Multiple of the floor's mean below which the mean of every document is within the noise; the threshold of the
furthest of a dozen documents is about twice the mean."""
PARTIAL = 0.6
"""Mean log distance by which a document is nearer with a switch, or without it."""


@dataclass(frozen=True)
class Found:
    """A state of the search.

    Attributes:
        switches: of the stated configuration, in the order in which they were found.
        column_T: [T] column under them.
        score: mean log distance from the record.
    """

    switches: tuple[Switch, ...]
    column_T: Tensor
    score: float


@dataclass(frozen=True)
class Explanation:
    """The switches under which a column comes out, and the others that come as near.

    Attributes:
        switches: that were taken; () if none is better than the stated configuration.
        column_T: [T] column under them.
        stated_T: [T] column of the stated configuration.
        rivals: switch that was taken -> switches of other factors that come as near in its place.
    """

    switches: tuple[Switch, ...]
    column_T: Tensor
    stated_T: Tensor
    rivals: tuple[tuple[Switch, tuple[Switch, ...]], ...] = ()

    def none(self) -> Explanation:
        """The explanation without switches: what is stated."""
        return Explanation((), self.stated_T, self.stated_T)


def explain(computation: Computation, stated: Configuration, recorded_T: Tensor, *, noise: float = 0.0) -> Explanation:
    """Find the switches under which the recorded column comes out.

    Args:
        computation: of the record.
        stated: configuration of the side that recorded.
        recorded_T: [T] nats.
        noise: mean distance, in nats, that rounding alone makes between two computations as stated.
    """
    counted_T = computation.counted_T & recorded_T.isfinite()
    stated_T = computation.column(stated)
    start = Found((), stated_T, score(stated_T, recorded_T, counted_T))

    def within_noise(state: Found) -> bool:
        return _furthest(computation, state, recorded_T, counted_T) < WITHIN * noise

    best, beam, everything = start, [start], [start]
    for depth in range(DEPTH):
        if _exact(computation, best, recorded_T, counted_T):
            break
        found: dict[frozenset[tuple[str, tuple[tuple[str, object], ...]]], Found] = {}
        for state in beam:
            for switch in _proposed(computation, stated, state, recorded_T, noise):
                one = switched(computation, stated, state, switch, recorded_T, counted_T)
                key = frozenset((s.factor, s.changes) for s in one.switches)
                if key not in found or one.score < found[key].score:
                    found[key] = one
        ranked = sorted(found.values(), key=lambda one: one.score)
        if state.switches:
            ranked = _fitted_again(computation, stated, ranked, recorded_T, counted_T)
        everything += ranked
        nearest = next(
            (one for one in ranked if better(one, best, recorded_T, counted_T, computation.document_T, noise)), None
        )
        best = nearest or best
        beam = [best] if best.switches and within_noise(best) else _diverse(ranked)
        if not beam or (nearest is None and (best is not start or depth or within_noise(start))):
            break
    best = _pruned(computation, stated, best, recorded_T, counted_T, noise)
    refined = _refined(computation, stated, best, recorded_T, counted_T)
    if refined is not best:  # on these weights a rounding may come out that did not on others
        tried = [
            switched(computation, stated, refined, switch, recorded_T, counted_T)
            for switch in _proposed(computation, stated, refined, recorded_T, noise)
        ]
        nearest = min(tried, key=lambda one: one.score, default=refined)
        everything += tried
        best = nearest if better(nearest, refined, recorded_T, counted_T, computation.document_T, noise) else refined
    rivals = tuple((switch, _rivals(best, switch, everything, recorded_T, counted_T)) for switch in best.switches)
    return Explanation(best.switches, best.column_T, stated_T, rivals)


def better(new: Found, old: Found, recorded_T: Tensor, counted_T: Tensor, document_T: Tensor, noise: float) -> bool:
    """True if a state with more switches comes nearer than chance and rounding could bring it.

    The gain is judged where the switches act: over the tokens whose distance they change; that of another rounding over
    documents as well, as one flipped route or quantised value moves all later tokens of its document.
    """
    before_T, after_T = (distance(one.column_T, recorded_T, counted_T) for one in (old, new))
    both_T = before_T.isfinite() & after_T.isfinite()
    gain_T = (before_T - after_T)[both_T]
    moved = gain_T[gain_T.abs() > 1e-3]
    if len(moved) < SIGNS**2 or not len(moved):
        return False
    extra = max(1, len(new.switches) - len(old.switches))
    error = float(moved.square().sum().sqrt())
    left_T, right_T = before_T[both_T].exp(), after_T[both_T].exp()
    halves = float(left_T.sum()) >= math.exp(GAIN * extra) * float(right_T.sum()) and float(left_T.mean()) > 2 * noise
    if float(moved.sum()) < SIGNS * error or not (float(moved.mean()) >= GAIN * extra or halves):
        return False
    added = [switch for switch in new.switches if switch not in old.switches]
    if not all(switch.factor in ROUNDING and not BY_NAME[switch.factor].partial for switch in added):
        return True
    gains_N = torch.zeros(int(document_T.max()) + 1, dtype=gain_T.dtype).index_add(0, document_T[both_T], gain_T)
    return len(gains_N) < DOCUMENTS or float(gains_N.mean()) >= SIGNS * float(gains_N.std()) / len(gains_N) ** 0.5


def _mean(state: Found, recorded_T: Tensor, counted_T: Tensor) -> float:
    """Mean distance of a state's column, nats."""
    return float((state.column_T - recorded_T).abs()[counted_T].nanmean())


def _furthest(computation: Computation, state: Found, recorded_T: Tensor, counted_T: Tensor) -> float:
    """Largest mean distance of one document, nats: a cause may act in few."""
    off_T = (state.column_T - recorded_T).abs()
    compared_T = counted_T & off_T.isfinite()
    sums_N = torch.zeros(len(computation.documents), dtype=torch.float64)
    sums_N.index_add_(0, computation.document_T[compared_T], off_T[compared_T])
    counts_N = torch.bincount(computation.document_T[compared_T], minlength=len(sums_N))
    return float((sums_N / counts_N.clamp(min=1)).max())


def _exact(computation: Computation, state: Found, recorded_T: Tensor, counted_T: Tensor) -> bool:
    """True if nothing is left to explain, in any document."""
    off_T = (state.column_T - recorded_T).abs()[counted_T]
    compared = off_T[off_T.isfinite()]
    near = bool(len(compared)) and float(compared.quantile(0.9)) <= EXACT
    return near and _furthest(computation, state, recorded_T, counted_T) <= 3 * EXACT


def _proposed(
    computation: Computation, stated: Configuration, state: Found, recorded_T: Tensor, noise: float
) -> list[Switch]:
    """Switches of a state; within the noise, only those that change the rounding can bring it nearer."""
    view = State(computation, configured(stated, state.switches), recorded_T, state.column_T)
    used = {switch.factor for switch in state.switches}
    counted_T = computation.counted_T & recorded_T.isfinite()
    within = _furthest(computation, state, recorded_T, counted_T) < WITHIN * noise
    factors = [factor for factor in FACTORS if factor.name not in used and (factor.name in ROUNDING or not within)]
    return [switch for factor in factors for switch in factor.propose(view)]


def switched(
    computation: Computation, stated: Configuration, state: Found, switch: Switch, recorded_T: Tensor, counted_T: Tensor
) -> Found:
    """The state with a switch, in the documents in which it helps if it harms in others and may act in some alone."""
    switches = (*state.switches, switch)
    column_T = computation.assembled(stated, switches)
    if BY_NAME[switch.factor].partial:
        gain_T = distance(state.column_T, recorded_T, counted_T) - distance(column_T, recorded_T, counted_T)
        helped = frozenset(
            number
            for number in range(len(computation.documents))
            if float(torch.nanmean(gain_T[computation.document_T == number]).nan_to_num()) > PARTIAL
        )
        harmed = any(
            float(torch.nanmean(gain_T[computation.document_T == number]).nan_to_num()) < -PARTIAL
            for number in range(len(computation.documents))
        )
        if helped and harmed:
            switches = (*state.switches, replace(switch, documents=helped))
            column_T = computation.assembled(stated, switches)
    return Found(switches, column_T, score(column_T, recorded_T, counted_T))


def _fitted_again(
    computation: Computation, stated: Configuration, ranked: Sequence[Found], recorded_T: Tensor, counted_T: Tensor
) -> list[Found]:
    """Fit earlier switches of the nearest states again: a value that was fitted under a wrong trunk is a little off."""
    fitted = []
    for one in ranked[: 2 * WIDTH]:
        for _ in range(ROUNDS):
            before = one
            for switch in one.switches[:-1]:  # which moves the fitted one to the end
                if switch.factor in FITTED_FACTORS:
                    one = _fitted_once(computation, stated, one, switch, recorded_T, counted_T)
            if len({switch.factor for switch in one.switches} & set(SAMPLING)) < 2 or one.score >= before.score:
                break
        fitted.append(one)
    return sorted([*fitted, *ranked[2 * WIDTH :]], key=lambda one: one.score)


def _fitted_once(
    computation: Computation, stated: Configuration, state: Found, switch: Switch, recorded_T: Tensor, counted_T: Tensor
) -> Found:
    """The nearest state with another value of one of the switches, or the state itself."""
    rest = tuple(one for one in state.switches if one is not switch)
    column_T = computation.assembled(stated, rest)
    start = Found(rest, column_T, score(column_T, recorded_T, counted_T))
    view = State(computation, configured(stated, rest), recorded_T, column_T)
    tried = [
        switched(computation, stated, start, new, recorded_T, counted_T) for new in BY_NAME[switch.factor].propose(view)
    ]
    return min([state, *tried], key=lambda one: one.score)


def configured(stated: Configuration, switches: Sequence[Switch]) -> Configuration:
    """Return a configuration after switches, as if all acted in all documents."""
    for switch in switches:
        stated = stated.with_changes(switch.changes)
    return stated


def _diverse(ranked: Sequence[Found]) -> list[Found]:
    """The nearest states, at most two of which switch the same factors."""
    counts: dict[frozenset[str], int] = {}
    beam: list[Found] = []
    for one in ranked:
        key = frozenset(switch.factor for switch in one.switches)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= 2 and len(beam) < WIDTH:
            beam.append(one)
    return beam


def _pruned(
    computation: Computation,
    stated: Configuration,
    best: Found,
    recorded_T: Tensor,
    counted_T: Tensor,
    noise: float,
) -> Found:
    """Leave out switches without which the column comes as near."""
    for switch in best.switches:
        rest = tuple(one for one in best.switches if one is not switch)
        column_T = computation.assembled(stated, rest)
        without = Found(rest, column_T, score(column_T, recorded_T, counted_T))
        if not better(best, without, recorded_T, counted_T, computation.document_T, noise):
            return _pruned(computation, stated, without, recorded_T, counted_T, noise)
    return best


def _refined(
    computation: Computation, stated: Configuration, best: Found, recorded_T: Tensor, counted_T: Tensor
) -> Found:
    """Add switches of the weights whose exact values lie in the middle of the recorded ones.

    A sampler whose rounding is another one is off by the whole noise under any configuration, and no switch comes much
    nearer. The noise lies around the exact values of its own weights, though: these are compared in float64. Where half
    of the tokens come out already, the weights are right, and what is left is a route or a last bit that flipped.
    """
    off_T = (best.column_T - recorded_T).abs()[counted_T]
    if _exact(computation, best, recorded_T, counted_T) or float(off_T.nanmedian()) <= REPRODUCED:
        return best
    before = _spread(computation.assembled(stated, best.switches, exact=True), recorded_T, counted_T)
    used, found = {switch.factor for switch in best.switches}, []
    view = State(computation, configured(stated, best.switches), recorded_T, best.column_T)
    for factor in FACTORS:
        for switch in factor.propose(view) if factor.name in WEIGHTS and factor.name not in used else ():
            switches = (*best.switches, switch)
            apart_T = (computation.assembled(stated, switches) - best.column_T).abs()[counted_T]
            if float(apart_T.nanmean()) > FURTHER * _mean(best, recorded_T, counted_T):
                continue  # by the triangle inequality it is no nearer
            after = _spread(computation.assembled(stated, switches, exact=True), recorded_T, counted_T)
            if (gain := likelier(before, after)) >= LIKELIER:
                found.append((gain, switches))
    if not found:
        return best
    _, switches = max(found, key=lambda pair: pair[0])
    column_T = computation.assembled(stated, switches)
    return _refined(
        computation, stated, Found(switches, column_T, score(column_T, recorded_T, counted_T)), recorded_T, counted_T
    )


def likelier(before: Tensor, after: Tensor) -> float:
    """Nats of a normal log-likelihood that distances from another middle gain; 0 if chance could have made it.

    Shapes: [T], [T]; of other tokens than before: 0.
    """
    if len(after) != len(before):
        return 0.0
    gain_T = before.square() - after.square()
    if float(gain_T.sum()) < MIDDLE * float(gain_T.square().sum().sqrt()):
        return 0.0
    return len(before) * math.log(_rms(before) / max(_rms(after), 1e-12))


def _spread(column_T: Tensor, recorded_T: Tensor, counted_T: Tensor) -> Tensor:
    """Distances of the compared tokens, limited to eight medians: few tokens far off decide nothing here."""
    off_T = (column_T - recorded_T).abs()[counted_T]
    off_T = off_T[off_T.isfinite()]
    return off_T.clamp(max=8 * float(off_T.median())) if len(off_T) else off_T


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _rivals(
    best: Found, switch: Switch, everything: Sequence[Found], recorded_T: Tensor, counted_T: Tensor
) -> tuple[Switch, ...]:
    """Switches of other factors that come as near in the place of one that was taken."""
    rest = {(one.factor, one.changes) for one in best.switches if one is not switch}
    best_T, rivals = distance(best.column_T, recorded_T, counted_T), []
    for state in everything:
        others = [one for one in state.switches if (one.factor, one.changes) not in rest]
        if len(state.switches) == len(best.switches) and len(others) == 1 and others[0].factor != switch.factor:
            apart = (state.column_T - best.column_T).abs()[counted_T]
            near = state.score <= best.score + ALIKE or float(apart.nan_to_num(torch.inf).max()) <= 4 * TINY
            if switch.factor in SAMPLING and others[0].factor in SAMPLING:  # they move all tokens: chance is judged
                near = near or as_near(distance(state.column_T, recorded_T, counted_T), best_T)
            if near:
                rivals.append(others[0])
    return tuple(dict.fromkeys(rivals))
