"""Causes that show as one factor of every gradient, or as another denominator of the loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from workbench.diagnose.causes.cause import NOT, Cause, Family, Judge, Judged, likeliest
from workbench.diagnose.causes.whole import another_gradient
from workbench.diagnose.denominators import AXES, NEEDS
from workbench.diagnose.facts import Facts

FACTORS = Family("loss", "gradient")
SMALL = 8
"""Numbers whose ratio is no evidence for a count: some multiple of each of them is any even or round count."""


# ---- one factor on everything ------------------------------------------------------------------------------

_AXES = {
    "dp": "data-parallel ranks",
    "cp": "context-parallel ranks",
    "tp": "tensor-parallel ranks",
    "micro_batches": "micro-batches",
    "accumulation": "accumulation steps",
}


def _factor(name: str, inverse: bool) -> Judge:
    def judge(facts: Facts) -> Judged:
        if not facts.scaled or not facts.inputs_same or facts.forward_same is False:
            return NOT
        hits = [at for at, named in enumerate(facts.factor_names) if (named.name, named.inverse) == (name, inverse)]
        if not hits:
            return NOT
        named = facts.factor_names[hits[0]]
        if facts.inexact_power:
            return 0.3, [
                f"every gradient is about {facts.step.factor:.6g} times the trusted one, which is "
                f"{named.description}; but such a factor rounds nothing, and something was rounded"
            ]
        loss = {
            True: "the loss is right",
            False: f"the loss is {facts.loss_factor or 0:.4g} times",
            None: "the loss says nothing",
        }[facts.loss_proved]
        return max(0.95 - 0.08 * hits[0], 0.5), [
            f"every gradient is {facts.step.factor:.6g} times the trusted one, which is {named.description}; {loss}"
        ]

    return judge


def _either(name: str, inverse: str) -> Judge:
    """A quotient, which is listed under one of two names among the sizes."""
    return lambda facts: likeliest(_factor(name, False)(facts), _factor(inverse, True)(facts))


def _factor_causes() -> Iterator[tuple[str, str, Judge, frozenset[str]]]:
    """Name, description, judge and needs of a cause for every size that a factor may equal, in both directions."""
    for axis in AXES:
        many = _AXES[axis]
        each = f"each of the {many} counts the whole where its share was due: summed where it must be averaged"
        yield f"times_{axis}", each, _factor(axis, False), frozenset({axis})
        share = f"averaged over {many}, each of which holds only its share of the sum"
        yield f"over_{axis}", share, _factor(axis, True), frozenset({axis})
    for axes in (*itertools.combinations(AXES, 2), *itertools.combinations(AXES, 3)):
        many, key, size = " and ".join(_AXES[axis] for axis in axes), "_".join(axes), " * ".join(axes)
        yield f"times_{key}", f"a factor of {many} too much", _factor(size, False), frozenset(axes)
        yield f"over_{key}", f"a factor of {many} too little", _factor(size, True), frozenset(axes)
    for above, below in itertools.permutations(AXES, 2):
        description = f"a factor of {_AXES[above]} too much, of {_AXES[below]} too little"
        judge = _either(f"{above} / {below}", f"{below} / {above}")
        yield f"times_{above}_over_{below}", description, judge, frozenset({above, below})
    for size, description in (
        ("documents", "the number of documents"),
        ("trained tokens", "the number of trained tokens"),
        ("all documents / documents", "documents counted that train nothing"),
        ("all tokens / trained tokens", "tokens counted that do not train"),
        ("padded tokens / trained tokens", "padding counted among the tokens"),
        ("(trained tokens + masked documents) / trained tokens", "a document that trains nothing counted as one token"),
        ("trained tokens / documents", "documents counted for tokens, or the other way round"),
        ("temperature", "the sampling temperature"),
        ("kept mass", "the mass that sampling kept"),
    ):
        key = size.replace(" / ", "_per_").replace(" ", "_").strip("(").replace(")", "").replace("+", "and")
        needs = frozenset({size.replace(" ", "_")}) if size in ("temperature", "kept mass") else frozenset()
        yield f"over_{key}", f"divided once too often by: {description}", _factor(size, True), needs
        yield f"times_{key}", f"multiplied once too often with: {description}", _factor(size, False), needs


FACTORS += (Cause(*stated, FACTORS.uses) for stated in _factor_causes())


@FACTORS.cause("every gradient is multiplied with the same wrong number")
def _unnamed_factor(facts: Facts) -> Judged:
    if not facts.scaled or facts.factor_names or not facts.inputs_same:
        return NOT
    return 0.6, [f"every gradient is {facts.step.factor:.6g} times the trusted one, which equals no size on record"]


# ---- denominators of the loss ------------------------------------------------------------------------------


def _local(kind: str) -> Judge:
    def judge(facts: Facts) -> Judged:
        if facts.forward_same is False or facts.mask_same is False:
            return NOT
        hits = [way for way in facts.ways if way.kind == kind]
        if not hits:
            change = facts.loss_change
            lengths = kind == "documents" and change is not None and change.kind == "lengths"
            return (0.9, [change.clause]) if lengths and change else NOT
        others = {way.kind for way in facts.ways} - {kind}
        score = 0.93 - 0.1 * len(others) - 0.02 * facts.ways.index(hits[0])
        return score, [f"the recorded loss is what {hits[0].description}, gives"]

    return judge


for _kind, _parts in (
    ("documents", "averaged within each document"),
    ("rows", "divided by counts of each micro-batch"),
    ("ranks", "divided by counts of each data-parallel rank"),
    ("shards", "divided by counts of each context-parallel rank"),
    ("row shards", "divided by counts of each rank's part of a micro-batch"),
):
    FACTORS.add(
        f"mean_per_{_kind.replace(' ', '_')}",
        f"the loss is {_parts}",
        _local(_kind),
        *NEEDS[_kind],
        uses=("loss", "tokens"),
    )


@FACTORS.cause("the loss is divided by a count of other tokens or documents", uses=("loss", "tokens"))
def _other_count(facts: Facts) -> Judged:
    if facts.forward_same is False or facts.mask_same is False:
        return NOT
    if hits := [way for way in facts.ways if not way.kind]:
        return (0.5 if _weighed_otherwise(facts) else 0.9), [f"the recorded loss is the sum over {hits[0].description}"]
    if (match := facts.count_ratio) is not None and (facts.loss_follows or not facts.factor_names):
        unit, count, other = match
        clear = not facts.factor_names and (facts.loss_follows or not _simple(count, other))
        return (0.85 if clear else 0.45), [
            f"every gradient is {facts.step.factor:.6g} times the trusted one, as if there were {other} and not "
            f"{count} {unit}, or the other way round"
        ]
    return NOT


def _simple(count: int, other: int) -> bool:
    """True if two counts are in the ratio of small numbers, as many of any step are; lost or doubled ones are not."""
    divisor = math.gcd(count, other)
    return max(count, other) // divisor <= SMALL and abs(count - other) > 2


def _weighed_otherwise(facts: Facts) -> bool:
    """True if one count for the whole step explains the loss, but no factor explains the gradient.

    Tokens that were divided by counts of their parts are divided by one of the step, so parts weigh by their size.
    """
    return (
        facts.gradient_same is False
        and not facts.step.parallel
        and bool(facts.ways)
        and not any(way.kind for way in facts.ways)
    )


@FACTORS.cause("tokens are weighed by counts of parts of the step, or by weights of others")
def _uneven_weights(facts: Facts) -> Judged:
    """Tokens have wrong weights: visible in the loss, or in the gradient alone."""
    step = facts.step
    apart = facts.loss_same is False and facts.gradient_same is False
    if (change := facts.loss_change) is not None and change.kind in ("ids", "documents"):
        return 0.9, [change.clause]
    if facts.token_losses_same and apart and not facts.ways and not facts.scaled:
        return 0.6, ["values of the loss agree token by token, and their sum does not: tokens have other weights"]
    if facts.inputs_same and _weighed_otherwise(facts):
        return 0.9, [
            f"the recorded loss is the sum over {facts.ways[0].description}, and the gradient is not the trusted "
            "one times a number: parts of the step weigh by their size"
        ]
    if facts.inputs_same and (near := facts.near_name) is not None:
        return 0.65, [
            f"every gradient is about {step.factor:.5g} times the trusted one, which is {near.description} within "
            f"its rounding, and the loss {facts.loss_factor or 0:.6g} times, which is not: parts of the "
            "step weigh by counts of their own"
        ]
    if (text := another_gradient(facts)) and (step.cosine or 0) > 0.5 and 0.5 < (facts.norm_factor or 0) < 2:
        return 0.45, [f"{text}: tokens may pull by weights that are not their own"]
    return _uneven_counts(facts)


def _uneven_counts(facts: Facts) -> Judged:
    """Local counts without per-token values: another loss and a nearly parallel gradient from the same inputs."""
    step = facts.step
    if (
        facts.loss_same is not False
        or not facts.inputs_same
        or facts.scaled
        or facts.ways
        or facts.gradient_same is not False
    ):
        return NOT
    if facts.metrics_off("ratio/", "clip/"):
        return 0.15, ["the same inputs give another loss and gradient, but ratios differ too"]
    cosine = "" if step.cosine is None else f", cosine {step.cosine:.3f}"
    if step.cosine is not None and step.cosine < 0.5:
        return 0.3, [f"the same inputs give another loss and gradient{cosine}"]
    large = (facts.norm_factor or 1) > 1.3 or (facts.norm_factor or 1) < 0.7
    return 0.55 if large else 0.4, [
        f"the same inputs give another loss and gradient, {facts.norm_factor or 0:.3g} times as long{cosine}: some "
        "tokens weigh too much, others too little"
    ]
