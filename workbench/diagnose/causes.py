"""Possible causes of a difference, as data: a name, a description, preconditions, and a score from the facts.

Each cause follows from mathematics, not from a list of observed bugs: the effect of such a mistake on the loss, on
every parameter's gradient, on each token and over time. A score is between 0 and 1: near 1, the facts leave little
else; 0.5, they fit, and fit others; below 0.1 it is not reported. Values that were not recorded make a cause neither
more nor less likely.

Here are the causes that show in whole numbers: rounding, factors, denominators, and what is only reported wrong. The
others are in `token_causes` and `gradient_causes`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from workbench.diagnose.denominators import AXES, NEEDS
from workbench.diagnose.facts import Facts, coarse
from workbench.diagnose.sight import sampler_moved
from workbench.metrics.step import MOST_MOVED

Judged = tuple[float, list[str]]
"""A score, and the reasons for it."""
Judge = Callable[[Facts], Judged]
NOT: Judged = (0.0, [])
ROUNDED_NATS = 0.05
"""Rounding logits to eight bits moves a log-probability by less."""


@dataclass(frozen=True)
class Cause:
    """A possible cause of a difference.

    Attributes:
        name: one to three words, joined by underscores.
        judge: score of the cause, from the facts.
        needs: sizes that must exceed 1 (or values that must differ from the default) for it to act at all: axes,
            "micro_batches", "temperature", ...
        uses: parts of a record that it reads.
    """

    name: str
    description: str
    judge: Judge
    needs: frozenset[str]
    uses: tuple[str, ...]


class Family(list[Cause]):
    """Causes in the order of their declaration, in which equal scores are ranked.

    Args:
        uses: parts of a record that a cause reads if it states no other.
    """

    def __init__(self, *uses: str) -> None:
        super().__init__()
        self.uses = uses

    def add(self, name: str, description: str, judge: Judge, *needs: str, uses: tuple[str, ...] | None = None) -> None:
        """Declare a cause; see `Cause`."""
        self.append(Cause(name, description, judge, frozenset(needs), self.uses if uses is None else uses))

    def cause(self, description: str, *needs: str, uses: tuple[str, ...] | None = None) -> Callable[[Judge], Judge]:
        """Decorate the function that judges a cause and has its name, after an underscore; see `Cause`."""

        def declare(judge: Judge) -> Judge:
            self.add(judge.__name__.removeprefix("_"), description, judge, *needs, uses=uses)
            return judge

        return declare


def likeliest(*judged: Judged) -> Judged:
    """The first of the highest score."""
    return max(judged, key=lambda each: each[0])


WHOLE = Family("loss", "gradient")


# ---- no difference, or none that matters -------------------------------------------------------------------


@WHOLE.cause("nothing differs beyond rounding", uses=())
def _no_difference(facts: Facts) -> Judged:
    if any(step.differs for step in facts.evidence.steps):
        return NOT
    telling = " and ".join(facts.step.telling) or "nothing that is not zero"
    zeros = f"; {' and '.join(facts.step.silent)}: zero in both, which proves nothing" if facts.step.silent else ""
    return 0.99, [f"{telling} agree within noise in all {len(facts.evidence.steps)} step(s){zeros}"]


@WHOLE.cause("something became infinite or not a number: a mask that multiplies, or an empty division")
def _not_finite(facts: Facts) -> Judged:
    broken = facts.step.not_finite
    return (0.99, [f"{len(broken)} number(s) are not finite, {broken[0]} first"]) if broken else NOT


@WHOLE.cause("somewhere numbers were rounded to a lower precision", uses=("gradient", "tokens"))
def _lower_precision(facts: Facts) -> Judged:
    """Small deviations in both directions and no factor: in the forward pass, or in the gradient alone."""
    return _rounded_logprobs(facts) if facts.forward_same is False else _rounded_gradient(facts)


def _rounded_logprobs(facts: Facts) -> Judged:
    change = facts.change()
    if change is None or len(change[1]) < 8 or facts.mask_same is False:
        return NOT
    right, moved = change
    if (name := coarse(right + moved)) is not None and coarse(right) is None:
        return 0.97, [f"every log-probability has a place in {name}, and the trusted ones have not"]
    size, mean = float(moved.square().mean().sqrt()), abs(float(moved.mean()))
    if not size or facts.share_moved < 0.9 or float(moved.abs().max()) > min(0.3, 8 * size):
        return NOT
    factor, residue = facts.step.factor, facts.step.residue
    if residue is not None and (residue > 0.15 or abs((factor or 0.0) - 1) > 0.05):
        return NOT
    if size > ROUNDED_NATS or mean > 4 * size / len(moved) ** 0.5 or abs(float(moved.sign().mean())) > 0.5:
        return NOT
    return 0.8, [
        f"log-probabilities of all tokens are off by {size:.2g} nats, at most {float(moved.abs().max()):.2g}, "
        "in both directions, and no other cause leaves them unbiased"
    ]


def _rounded_gradient(facts: Facts) -> Judged:
    step = facts.step
    if not facts.gradient_only or step.residue is None or step.cosine is None or not facts.off:
        return NOT
    if step.residue > 8e-3 or abs((step.factor or 0.0) - 1) > 1e-3 or len(facts.off) < 0.7 * len(step.parameters):
        return NOT
    right, wrong = facts.elements
    moved = (wrong - right).abs()
    if (name := coarse(wrong)) is not None and coarse(right) is None:
        return 0.97, [f"every element of the gradient has a place in {name}, and the trusted ones have not"]
    near = float((moved <= right.abs() / 100).double().mean())
    return (0.75 if near > 0.85 else 0.3), [
        f"{near:.0%} of the gradient's elements are right to a hundredth of themselves, whatever their size"
    ]


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


WHOLE += (Cause(*stated, WHOLE.uses) for stated in _factor_causes())


@WHOLE.cause("every gradient is multiplied with the same wrong number")
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
            return NOT
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
    WHOLE.add(
        f"mean_per_{_kind.replace(' ', '_')}",
        f"the loss is {_parts}",
        _local(_kind),
        *NEEDS[_kind],
        uses=("loss", "tokens"),
    )


@WHOLE.cause("the loss is divided by a count of other tokens or documents", uses=("loss", "tokens"))
def _other_count(facts: Facts) -> Judged:
    if facts.forward_same is False or facts.mask_same is False:
        return NOT
    if hits := [way for way in facts.ways if not way.kind]:
        return (0.5 if _weighed_otherwise(facts) else 0.9), [f"the recorded loss is the sum over {hits[0].description}"]
    if (match := facts.count_ratio) is not None and (facts.loss_follows or not facts.factor_names):
        unit, count, other = match
        return (0.5 if facts.factor_names else 0.85), [
            f"every gradient is {facts.step.factor:.6g} times the trusted one, as if there were {other} and not "
            f"{count} {unit}, or the other way round"
        ]
    return NOT


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


@WHOLE.cause("tokens are weighed by counts of parts of the step, or by weights of others")
def _uneven_weights(facts: Facts) -> Judged:
    """Tokens have wrong weights: visible in the loss, or in the gradient alone."""
    step = facts.step
    apart = facts.loss_same is False and facts.gradient_same is False
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


@WHOLE.cause("the loss is reported wrong, and trained right")
def _loss_alone(facts: Facts) -> Judged:
    if facts.loss_same is not False or facts.gradient_same is not True:
        return NOT
    named = f", which is {facts.loss_names[0].description}" if facts.loss_names else ""
    if not facts.inputs_same:
        return 0.3, ["the gradient is right within noise, but the loss is computed from other inputs"]
    return (0.5 if facts.term_hidden else 0.95), [
        f"the gradient is right, and the loss {facts.loss_factor or 0:.4g} times{named}"
    ]


# ---- metrics ------------------------------------------------------------------------------------------------


@WHOLE.cause("metrics are computed or merged wrong; training is right", uses=("metrics",))
def _metrics_alone(facts: Facts) -> Judged:
    if not facts.step.metrics or facts.gradient_same is False or facts.loss_same is False:
        return NOT
    if any(facts.step.token_same(name) is False for name in ("policy_logprobs", "trained")):
        return NOT
    if not [key for key in facts.step.metrics if not key.startswith("gradient/")]:
        return NOT
    first, (right, wrong) = next(iter(facts.step.metrics.items()))
    agreed = parts_that_agree(loss=facts.loss_proved, gradient=facts.gradient_same)
    return 0.93, [
        f"{agreed}; {len(facts.step.metrics)} of {facts.step.compared_metrics} metrics "
        f"differ, {first} is {wrong:.4g}, not {right:.4g}"
    ]


@WHOLE.cause("updates of the policy do not reach its sampler: its dtype rounds them away", uses=("metrics",))
def _updates_not_sampled(facts: Facts) -> Judged:
    """Other completions are sampled from then on; the trap itself is a property of the suspect's own record."""
    steps = [step.number for step in facts.evidence.steps]
    share, trusted = (sampler_moved(record, steps) for record in (facts.evidence.suspect, facts.evidence.trusted))
    if share is None or share >= MOST_MOVED or (trusted is not None and trusted < 2 * share):
        return NOT
    other = "and the trusted one sees all" if trusted is None else f"and {trusted:.2g} of the trusted one's"
    return 0.3, [f"{share:.2g} of the sampler's weights differ from those of the start, {other}"]


@WHOLE.cause("the gradient's norm is reported wrong: replicas counted, or parts merged wrong")
def _norm_alone(facts: Facts) -> Judged:
    """The reported norm is not the norm of the gradient."""
    off, step = facts.metrics_off("gradient/norm/"), facts.step
    if not off or len(off) < len(step.metrics) or facts.loss_same is False:
        return NOT
    if step.cosine is None or not facts.gradient_same:  # a norm is compared with the whole gradient
        return NOT
    return 0.96, ["every gradient is right, and what is reported as its norm is not"]


def parts_that_agree(**parts: bool | None) -> str:
    """Clause that lists the parts known to agree, and those that are unknown or zero in both."""
    right = [name.replace("_", "-") for name, same in parts.items() if same]
    unknown = [name.replace("_", "-") for name, same in parts.items() if same is None]
    texts = (
        [f"{' and '.join(right)} {'are' if len(right) > 1 or right[0].endswith('s') else 'is'} right"] if right else []
    )
    return ", ".join(texts + ([f"{' and '.join(unknown)} unknown or zero in both"] if unknown else []))


def another_gradient(facts: Facts) -> str:
    """Clause for a right loss with every gradient wrong and no common factor; "" if that is not the case."""
    if not facts.gradient_only or (facts.scaled and not facts.inexact_power):
        return ""
    if facts.clear and any(p.share > 0.05 for p in facts.right.values()):
        return ""
    cosine = "" if facts.step.cosine is None else f", cosine {facts.step.cosine:.3f}"
    agreed = parts_that_agree(loss=facts.loss_proved, log_probabilities=facts.forward_same)
    return f"{agreed}, and every gradient is another one, {facts.norm_factor or 0:.3g} times as long{cosine}"
