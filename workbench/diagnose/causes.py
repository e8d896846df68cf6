"""Possible causes of a difference, as data: a name, a description, preconditions, and a score from the facts.

Each cause follows from mathematics, not from a list of observed bugs: the effect of such a mistake on the loss, on
every parameter's gradient, on each token and over time. A score is between 0 and 1: near 1, the facts leave little
else; 0.5, they fit, and fit others; below 0.1 it is not reported. Values that were not recorded make a cause neither
more nor less likely.

Letters: S tokens of the source batch.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from workbench.diagnose.denominators import AXES, NEEDS, names_of
from workbench.diagnose.facts import ADVANTAGES, Facts, coarse, fit
from workbench.diagnose.modules import module_reached_wrongly, module_scaled, other_features

Judged = tuple[float, list[str]]
"""A score, and the reasons for it."""


@dataclass(frozen=True)
class Cause:
    """A possible cause of a difference.

    Attributes:
        name: one to three words, joined by underscores.
        description: description.
        judge: score of the cause, from the facts.
        needs: sizes that must exceed 1 (or values that must differ from the default) for it to act at all: axes,
            "micro_batches", "temperature", ...
        uses: parts of a record that it reads.
    """

    name: str
    description: str
    judge: Callable[[Facts], Judged]
    needs: frozenset[str] = frozenset()
    uses: tuple[str, ...] = ("loss", "gradient")


NOT: Judged = (0.0, [])
ROUNDED_NATS = 0.05
"""Rounding logits to eight bits moves a log-probability by less."""
_AXES = {
    "dp": "data-parallel ranks",
    "cp": "context-parallel ranks",
    "tp": "tensor-parallel ranks",
    "micro_batches": "micro-batches",
    "accumulation": "accumulation steps",
}


# ---- no difference, or none that matters -------------------------------------------------------------------


def _no_difference(facts: Facts) -> Judged:
    if any(step.differs for step in facts.evidence.steps):
        return NOT
    telling = " and ".join(facts.step.telling) or "nothing that is not zero"
    zeros = f"; {' and '.join(facts.step.silent)}: zero in both, which proves nothing" if facts.step.silent else ""
    return 0.99, [f"{telling} agree within noise in all {len(facts.evidence.steps)} step(s){zeros}"]


def _not_finite(facts: Facts) -> Judged:
    broken = facts.step.not_finite
    return (0.99, [f"{len(broken)} number(s) are not finite, {broken[0]} first"]) if broken else NOT


def _rounding(facts: Facts) -> Judged:
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
    if not _gradient_only(facts) or step.residue is None or step.cosine is None or not facts.off:
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


def _factor(name: str, inverse: bool) -> Callable[[Facts], Judged]:
    def judge(facts: Facts) -> Judged:
        if not facts.scaled or not facts.inputs_same or facts.forward_same is False:
            return NOT
        hits = [at for at, named in enumerate(facts.factor_names) if (named.name, named.inverse) == (name, inverse)]
        if not hits:
            return NOT
        named = facts.factor_names[hits[0]]
        if facts.inexact_power:
            return 0.45, [
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


def _either(name: str, inverse: str) -> Callable[[Facts], Judged]:
    """A quotient, which is listed under one of two names among the sizes."""
    return lambda facts: max(_factor(name, False)(facts), _factor(inverse, True)(facts), key=lambda judged: judged[0])


def _factor_causes() -> list[Cause]:
    """A cause for every size that a factor may equal, in both directions."""
    causes = []
    for axis in AXES:
        many = _AXES[axis]
        causes += [
            Cause(
                f"times_{axis}",
                f"each of the {many} counts the whole where its share was due: summed where it must be averaged",
                _factor(axis, False),
                frozenset({axis}),
            ),
            Cause(
                f"over_{axis}",
                f"averaged over {many}, each of which holds only its share of the sum",
                _factor(axis, True),
                frozenset({axis}),
            ),
        ]
    for several in (2, 3):
        for axes in itertools.combinations(AXES, several):
            many, key = " and ".join(_AXES[axis] for axis in axes), "_".join(axes)
            causes += [
                Cause(
                    f"times_{key}", f"a factor of {many} too much", _factor(" * ".join(axes), False), frozenset(axes)
                ),
                Cause(
                    f"over_{key}", f"a factor of {many} too little", _factor(" * ".join(axes), True), frozenset(axes)
                ),
            ]
    for above, below in itertools.permutations(AXES, 2):
        causes += [
            Cause(
                f"times_{above}_over_{below}",
                f"a factor of {_AXES[above]} too much, of {_AXES[below]} too little",
                _either(f"{above} / {below}", f"{below} / {above}"),
                frozenset({above, below}),
            )
        ]
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
        causes += [
            Cause(f"over_{key}", f"divided once too often by: {description}", _factor(size, True), needs),
            Cause(f"times_{key}", f"multiplied once too often with: {description}", _factor(size, False), needs),
        ]
    return causes


def _some_factor(facts: Facts) -> Judged:
    if not facts.scaled or facts.factor_names or not facts.inputs_same:
        return NOT
    return 0.6, [f"every gradient is {facts.step.factor:.6g} times the trusted one, which equals no size on record"]


# ---- denominators of the loss ------------------------------------------------------------------------------


def _local(kind: str) -> Callable[[Facts], Judged]:
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


def _step_count(facts: Facts) -> Judged:
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


def _uneven_weights(facts: Facts) -> Judged:
    """Tokens have wrong weights: visible in the loss, or in the gradient alone."""
    step = facts.step
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
    if (text := _another_gradient(facts)) and (step.cosine or 0) > 0.5 and 0.5 < (facts.norm_factor or 0) < 2:
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
    cosine = step.cosine if step.cosine is not None else 0.9
    if cosine < 0.5:
        return 0.3, [f"the same inputs give another loss and gradient; cosine {cosine:.3f}"]
    large = (facts.norm_factor or 1) > 1.3 or (facts.norm_factor or 1) < 0.7
    return 0.55 if large else 0.4, [
        f"the same inputs give another loss and gradient, {facts.norm_factor or 0:.3g} times as long, cosine "
        f"{cosine:.3f}: some tokens weigh too much, others too little"
    ]


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


def _metrics_alone(facts: Facts) -> Judged:
    if not facts.step.metrics or facts.gradient_same is False or facts.loss_same is False:
        return NOT
    if any(facts.step.token_same(name) is False for name in ("policy_logprobs", "trained")):
        return NOT
    if not [key for key in facts.step.metrics if not key.startswith("gradient/")]:
        return NOT
    first, (right, wrong) = next(iter(facts.step.metrics.items()))
    agreed = _agreed(loss=facts.loss_proved, gradient=facts.gradient_same)
    return 0.93, [
        f"{agreed}; {len(facts.step.metrics)} of {facts.step.compared_metrics} metrics "
        f"differ, {first} is {wrong:.4g}, not {right:.4g}"
    ]


def _norm_alone(facts: Facts) -> Judged:
    """The reported norm is not the norm of the gradient."""
    off = facts.metrics_off("gradient/norm/")
    others = [key for key in facts.step.metrics if key not in off]
    if others or facts.loss_same is False:
        return NOT
    whole_known = bool(facts.step.parameters) and facts.step.cosine is not None
    if off and whole_known and facts.gradient_same:
        return 0.96, ["every gradient is right, and what is reported as its norm is not"]
    return NOT


# ---- which tokens -------------------------------------------------------------------------------------------


def _at(places: tuple[str, ...], *values: str, high: float = 0.95) -> Callable[[Facts], Judged]:
    """Differences, in one of these values or in any, lie at one of these places."""
    among = [values, *((value,) for value in values if len(values) > 1)]

    def judge(facts: Facts) -> Judged:
        agreed, place = max((facts.agree(place, *chosen), place) for place in places for chosen in among)
        if not agreed and facts.all_lie_in(places[0]) and facts.share_off(values[0]) > 0.98:
            return 0.4, [f"every trained token differs, and all of them lie at {places[0]}"]
        if agreed < 0.2:
            return NOT
        return high * min(1.0, agreed + 0.15), [f"what differs lies at {place} (agreement {agreed:.2f} of 1)"]

    return judge


def _next_document(facts: Facts) -> Judged:
    """The last token of a document predicts, or trains, the first of the next; a token lost there is a mask fault."""
    return max(
        _at(("document ends",), "policy_logprobs")(facts),
        _at(("document starts",), "policy_logprobs", "trained")(facts),
        key=lambda judged: judged[0],
    )


def _shard_positions(facts: Facts) -> Judged:
    """Differences behind an edge between ranks, or behind half a shard, which is the rarer mistake."""
    return max(
        _at(("behind shard edges", "returns"), "policy_logprobs")(facts),
        _at(("behind half a shard",), "policy_logprobs", high=0.9)(facts),
        key=lambda judged: judged[0],
    )


def _mask_moved(facts: Facts) -> Judged:
    if facts.mask_same is not False:
        return NOT
    at_places = max(
        facts.agree(place, "trained") for place in ("shard edges", "document starts", "document beginnings")
    )
    return 0.85 * (1 - 0.7 * at_places), [
        "other tokens train"
        + ("" if facts.off_tokens("trained") is None else f": {int(facts.off_tokens('trained').sum())} differ")
    ]


def _other_targets(facts: Facts) -> Judged:
    """The distribution at a token is the same, as its entropy shows, but another token's log-probability is taken."""
    change, off, entropies = facts.change(), facts.off_tokens("policy_logprobs"), facts.off_tokens("entropy_nats")
    if (shift := facts.distributions_shifted) is not None:
        return 0.95, [
            "entropies are those of the token "
            f"{'before' if shift > 0 else 'after'}, and log-probabilities are not: the distributions are "
            "right, and the targets of others are read"
        ]
    if change is None or off is None or entropies is None or not bool(off.any()) or not bool((change[1] != 0).any()):
        return NOT
    turned = facts.change("entropy_nats")
    if (
        turned is None
        or float((off & ~entropies).sum()) < 0.9 * float(off.sum())
        or float(turned[1].norm()) > 0.05 * float(change[1].norm())
    ):
        return NOT
    moved = change[1][change[1].abs() > facts.step.noise.logprob_nats]
    if len(moved) and abs(float(moved.sign().mean())) > 0.95 and facts.share_off("policy_logprobs") > 0.3:
        return NOT
    at_places = max(facts.agree(place, "policy_logprobs") for place in ("shard edges", "document ends"))
    return 0.8 * (1 - 0.5 * at_places), [
        f"log-probabilities of {int(off.sum())} tokens differ, and the entropies "
        "there do not: the distributions are right, and other targets are read"
    ]


def _old_misaligned(facts: Facts) -> Judged:
    if facts.old_same is not False:
        return NOT
    change = facts.change("old_logprobs")
    if change is None:
        return 0.6, ["old log-probabilities differ"]
    right, wrong = (tokens["old_logprobs"].double() for tokens in facts.tokens)
    off = facts.step.tokens["old_logprobs"]
    for shift, word in ((1, "before"), (-1, "after")):
        match = float(torch.isclose(right.roll(shift), wrong, atol=1e-5)[off].double().mean())
        if match > 0.6:
            return 0.96, [f"old log-probabilities are those of the token {word}"]
    zeros = float((wrong[off] == 0).double().mean())
    policy = facts.tokens[1].get("policy_logprobs")
    same = 0.0 if policy is None else float(torch.isclose(policy.double()[off], wrong[off], atol=1e-6).double().mean())
    detail = " and are 0" if zeros > 0.5 else " and equal the policy's own" if same > 0.9 else ""
    return 0.85, [f"old log-probabilities of {int(off.sum())} tokens differ{detail}"]


# ---- log-probabilities and entropies ------------------------------------------------------------------------


def _temperature(facts: Facts) -> Judged:
    """To first order, d logp / d (1/T) = logp + entropy: a wrong temperature moves each token in that direction."""
    change, entropy = facts.change(), facts.change("entropy_nats")
    if facts.forward_same is not False or change is None or entropy is None:
        return NOT
    middle = (change[0] + entropy[0]) + (change[1] + entropy[1]) / 2
    slope, rest = fit(middle, change[1])
    everywhere = facts.share_off("policy_logprobs") >= 0.8 or float((change[1] != 0).double().mean()) > 0.95
    if rest > 0.35 or not everywhere or abs(slope) < 0.01:
        return NOT
    sharper = float(entropy[1].sum()) < 0
    if (slope > 0) != sharper:
        return NOT
    return 0.95 - rest, [
        f"log-probabilities move along logp + entropy (slope {slope:.3g}, {rest:.1%} unexplained), "
        f"and the entropy {'falls' if sharper else 'rises'}"
    ]


def _logprobs_scaled(facts: Facts) -> Judged:
    """Log-probabilities of the plain softmax, divided by a temperature: multiplied back, they are those at T = 1."""
    change, entropy = facts.change(), facts.change("entropy_nats")
    if facts.forward_same is not False or change is None:
        return NOT
    slope, rest = fit(change[0], change[1])
    if rest <= 1e-6 + facts.step.noise.logprob_nats and abs(slope) > 1e-4:
        return 0.97, [f"every log-probability is {1 + slope:.6g} times the trusted one"]
    temperature = float(facts.context.get("temperature") or 1.0)
    if entropy is None or temperature == 1:
        return NOT
    undone = temperature * (change[0] + change[1]) - change[0]
    slope, rest = fit(change[0] + entropy[0], undone)
    _, as_is = fit(change[0] + entropy[0], change[1])
    if rest > 0.35 or rest > as_is or (slope > 0) != (temperature > 1):
        return NOT
    return 0.93 - rest, [
        f"times the temperature they move along logp + entropy (slope {slope:.3g}, {rest:.1%} "
        "unexplained): the softmax was without it, and its logarithm was divided"
    ]


def _normaliser(facts: Facts) -> Judged:
    change = facts.change()
    if facts.forward_same is not False or change is None or facts.share_off("policy_logprobs") < 0.3:
        return NOT
    moved = change[1][change[1].abs() > facts.step.noise.logprob_nats]
    sided = abs(float(moved.sign().mean())) if len(moved) else 0.0
    if sided < 0.98:
        return NOT
    return 0.5 + 0.3 * facts.share_off("policy_logprobs"), [
        f"log-probabilities of {len(moved)} tokens move, all of them "
        f"{'up' if float(moved.sum()) > 0 else 'down'}: the normaliser is over other tokens of the vocabulary"
    ]


def _logprobs_other(facts: Facts) -> Judged:
    if facts.forward_same is not False:
        return NOT
    return 0.2, [f"the policy says something else of {facts.share_off('policy_logprobs'):.0%} of the tokens"]


def _entropy_alone(facts: Facts) -> Judged:
    if facts.step.token_same("entropy_nats") is not False or facts.forward_same is not True:
        return NOT
    return 0.96, ["log-probabilities agree, and entropies do not"]


# ---- terms of the loss --------------------------------------------------------------------------------------


def _advantages(facts: Facts) -> Judged:
    off = facts.metrics_off(*ADVANTAGES)
    if not off or facts.forward_same is False or facts.mask_same is False or facts.gradient_same is not False:
        return NOT
    return 0.9, [f"{', '.join(off)} differ, and log-probabilities do not"]


def _clipping(facts: Facts) -> Judged:
    """The ratios are right, and other tokens are clipped, or at other bounds."""
    if facts.forward_same is False or facts.old_same is False or facts.mask_same is False:
        return NOT
    if facts.metrics_off("ratio/", "correction/") or facts.step.token_same("ratios") is False:
        return NOT
    clipped, metrics = facts.off_tokens("clipped"), facts.metrics_off("clip/")
    number = 0 if clipped is None else int(clipped.sum())
    if (not number and not metrics) or (facts.gradient_same is not False and facts.loss_same is not False):
        return NOT
    reason = f"{number} tokens are clipped otherwise" if number else f"{metrics[0]} differs"
    if not any(key.startswith("ratio/") and key in facts.pair[1].metrics for key in facts.pair[0].metrics):
        return 0.4, [reason]
    return (0.6 if facts.clips_documents else 0.85), [reason, "ratios of tokens do not differ"]


def _ratio(facts: Facts) -> Judged:
    if facts.forward_same is False or facts.old_same is False or facts.mask_same is False:
        return NOT
    off = facts.metrics_off("ratio/", "clip/", "correction/", "kl/")
    if (
        not off
        and facts.document_values_cut
        and facts.loss_moves_less
        and _one_term(facts)[0] >= 0.8
        and all(key.startswith("loss/policy") for key in facts.terms[0])
    ):
        return 0.85, [
            "only the policy's term differs, its gradient much and its value little; tokens' values do not "
            "follow their own ratios, so ratios are those of documents, of which ranks hold parts"
        ]
    if not off or facts.gradient_same is not False or facts.metrics_off(*ADVANTAGES):
        return NOT
    return 0.75, [f"{', '.join(off[:3])} differ, and the log-probabilities that they are computed from do not"]


def _one_term(facts: Facts) -> Judged:
    """One term of the loss is wrong and others are right, from the same inputs."""
    off, right = facts.terms
    off = [key for key in off if not key.startswith("loss/total")]
    if not off or not right or not facts.inputs_same or not (facts.gradient_same is False or facts.term_hidden):
        return NOT
    if facts.metrics_off("ratio/", "clip/"):
        return 0.3, [f"{', '.join(off)} differ, {', '.join(right)} do not"]
    trusted, suspect = facts.step.metrics[off[0]]
    times = f", {suspect / trusted:.6g} times" if trusted else ""
    return 0.8, [f"{', '.join(off)} differ{times}, {', '.join(right)} do not"]


def _other_loss(facts: Facts) -> Judged:
    if not facts.inputs_same or facts.loss_same is not False or facts.gradient_same is not False:
        return NOT
    terms = facts.metrics_off("loss/")
    return 0.35, ["the same inputs give another loss" + (f": {', '.join(terms)}" if terms else "")]


# ---- gradients, where the loss is right ---------------------------------------------------------------------


def _gradient_only(facts: Facts) -> bool:
    return (
        facts.gradient_same is False
        and facts.loss_same is not False
        and facts.forward_same is not False
        and facts.mask_same is not False
    )


def _no_gradient(facts: Facts) -> Judged:
    if facts.without_gradient and len(facts.without_gradient) == len(facts.step.parameters):
        return 0.98, ["no parameter has a gradient"]
    return NOT


def _part_without_gradient(facts: Facts) -> Judged:
    if not facts.without_gradient or len(facts.without_gradient) == len(facts.step.parameters):
        return NOT
    return 0.95, [f"{len(facts.without_gradient)} parameter(s) have no gradient, {facts.without_gradient[0]} first"]


def _only(groups: set[str], high: float) -> Callable[[Facts], Judged]:
    def judge(facts: Facts) -> Judged:
        if not _gradient_only(facts) or not facts.clear or not facts.groups_off() <= groups:
            return NOT
        ratios = sorted(p.ratio for p in facts.off.values())
        return high, [
            f"only {len(facts.off)} of {len(facts.step.parameters)} parameters differ, each of them "
            f"{' or '.join(sorted(groups))}; their norms are {ratios[0]:.3g} to {ratios[-1]:.3g} times as "
            "large"
        ]

    return judge


def _norms_only(facts: Facts) -> Judged:
    return _only({"norm"}, 0.95)(facts)


def _scaled_together(facts: Facts) -> float | None:
    """The common factor of the parameters that differ; None if they have none."""
    known = [p for p in facts.off.values() if p.cosine is not None and not math.isnan(p.ratio)]
    if len(known) < len(facts.off) or not known:
        return None
    middle, noise = statistics.median(p.ratio for p in known), max(1e-4, facts.step.noise.gradient)
    alike = all((p.cosine or 0) > 1 - noise and abs(p.ratio / middle - 1) < noise for p in known) if middle else False
    return middle if alike else None


def _head_only(facts: Facts) -> Judged:
    score, why = _only({"head"}, 0.9)(facts)
    if (
        not score
        and facts.right
        and facts.off
        and facts.groups_off() == {"embedding"}
        and not any("lm_head" in name for name in facts.step.parameters)
    ):
        score, why = _only({"embedding"}, 0.85)(facts)  # a tied head is the embedding
    return score, why


def _small(facts: Facts) -> bool:
    return all(p.cosine is not None and p.cosine > 0.999 and abs(p.ratio - 1) < 0.02 for p in facts.off.values())


def _head_rounded(facts: Facts) -> Judged:
    score, why = _head_only(facts)
    return (0.96, [*why, "by rounding of a lower precision"]) if score and _small(facts) else NOT


def _head_wrong(facts: Facts) -> Judged:
    score, why = _head_only(facts)
    return NOT if not score or _small(facts) or facts.without_gradient else (score, why)


def _below_head(facts: Facts) -> Judged:
    """All but the head's own gradient is wrong: the head passes a wrong gradient down into the model."""
    if not _gradient_only(facts):
        return NOT
    if (
        not any("lm_head" in name for name in facts.step.parameters)
        and (factor := facts.all_but_embedding_scaled) is not None
    ):
        return 0.88, [f"all but the embedding, which is the head too, is {factor:.6g} times the trusted gradient"]
    right = {name for name in facts.right if "lm_head" in name}
    others = [name for name in facts.right if name not in right and facts.right[name].share > 1e-3]
    if not facts.clear or not right or others:
        return NOT
    return 0.9, ["the head's own gradient is right, and everything below it is wrong"]


def _keys_values(facts: Facts) -> Judged:
    if not _gradient_only(facts) or not facts.clear or not facts.top_off:
        return NOT
    if facts.top_off & {"k_proj", "v_proj"} and not facts.top_off & {"q_proj", "o_proj", "down_proj", "gate_proj"}:
        return 0.93, ["in the highest layer that differs, keys and values are wrong, and queries and outputs right"]
    return NOT


def _attention_backward(facts: Facts) -> Judged:
    if not _gradient_only(facts) or not facts.clear or not facts.top_off:
        return NOT
    if "q_proj" in facts.top_off and not facts.top_off & {"o_proj", "down_proj"} and facts.above_right:
        return 0.9, ["in the highest layer that differs, what is before attention is wrong, and behind it right"]
    return NOT


def _layer_input(facts: Facts) -> Judged:
    """In the highest layer that differs, projections are right, and everything before them is wrong."""
    if not _gradient_only(facts) or not facts.clear or not facts.top_off or facts.groups_off() == {"norm"}:
        return NOT
    mlp = {"down_proj", "gate_proj", "up_proj"}
    before_mlp = {"post_attention_layernorm", "o_proj"} <= facts.top_off and not facts.top_off & mlp
    before_attention = facts.top_off == {"input_layernorm"}
    if not before_mlp and not before_attention:
        return NOT
    return 0.85, [
        f"in the highest layer that differs, {'the MLP' if before_mlp else 'attention'} is right, and what "
        "it gives back to its input is not"
    ]


def _some_parameters(facts: Facts) -> Judged:
    if not _gradient_only(facts) or not facts.clear or facts.scaled:
        return NOT
    if (factor := _scaled_together(facts)) is not None:
        named = names_of(factor, facts.sizes, max(1e-4, facts.step.noise.gradient / 5))
        return 0.5, [
            f"{len(facts.off)} of {len(facts.step.parameters)} parameters are {factor:.6g} times the trusted "
            f"ones{', which is ' + named[0].description if named else ''}; {next(iter(facts.off))} first"
        ]
    return 0.3, [f"{len(facts.off)} of {len(facts.step.parameters)} parameters differ, {next(iter(facts.off))} first"]


def _agreed(**parts: bool | None) -> str:
    """Clause that lists the parts known to agree, and those that are unknown or zero in both."""
    right = [name.replace("_", "-") for name, same in parts.items() if same]
    unknown = [name.replace("_", "-") for name, same in parts.items() if same is None]
    texts = (
        [f"{' and '.join(right)} {'are' if len(right) > 1 or right[0].endswith('s') else 'is'} right"] if right else []
    )
    return ", ".join(texts + ([f"{' and '.join(unknown)} unknown or zero in both"] if unknown else []))


def _another_gradient(facts: Facts) -> str:
    """Clause for a right loss with every gradient wrong and no common factor; "" if that is not the case."""
    if not _gradient_only(facts) or (facts.scaled and not facts.inexact_power):
        return ""
    if facts.clear and any(p.share > 0.05 for p in facts.right.values()):
        return ""
    cosine = "" if facts.step.cosine is None else f", cosine {facts.step.cosine:.3f}"
    agreed = _agreed(loss=facts.loss_proved, log_probabilities=facts.forward_same)
    return f"{agreed}, and every gradient is another one, {facts.norm_factor or 0:.3g} times as long{cosine}"


def _ranks_lost(facts: Facts) -> Judged:
    """Only a part of the tokens reaches the gradient: another direction, and shorter."""
    if facts.lost_pieces:
        return 0.88, [f"no token of some {facts.lost_pieces} trains, and all of the others do"]
    text = _another_gradient(facts)
    if not text:
        return NOT
    return (0.6 if _partial(facts) else 0.3), [f"{text}: a part of the tokens does not reach it"]


def _partial(facts: Facts) -> bool:
    """True if a gradient may be that of some ranks and micro-batches only.

    Gradients of other tokens are nearly orthogonal to it, so the remaining part is neither along nor against the lost
    one, and a share q of n similar parts is sqrt(q) times as long, q at least 1 / n.
    """
    norm, factor = facts.norm_factor, facts.step.factor
    if norm is None or norm > 1:  # longer than the whole: it can only lack parts that point against it
        return False
    parts = math.prod(int(facts.context.get(axis) or 1) for axis in ("dp", "cp", "micro_batches", "accumulation"))
    if not norm or norm**2 < 1 / (4 * max(parts, 2)):
        return False
    if facts.step.cosine is None or factor is None:
        return norm < 0.85
    lost = math.sqrt(max(1 - 2 * factor + norm**2, 0.0))
    return lost > 0.2 and abs(factor - norm**2) < 0.35 * norm * lost


def _repeated(facts: Facts) -> Judged:
    """Some parts of the tokens reach the gradient more often than others: another direction, and longer."""
    text = _another_gradient(facts)
    if not text or (facts.norm_factor or 1) < 1.25:
        return NOT
    likely = (facts.step.cosine or 0) <= 0.97 and (facts.step.factor or 1) > 1.25
    return (0.55 if likely else 0.45), [f"{text}: parts of it are added more than once"]


def _term_gradient(facts: Facts) -> Judged:
    """The value of a term is right and its derivative is not."""
    text = _another_gradient(facts)
    if not text:
        return NOT
    return 0.5, [f"{text}: a term's value is right and its derivative is not"]


# ---- over time ----------------------------------------------------------------------------------------------


def _update(facts: Facts) -> Judged:
    """The first gradients agree, and the weights after them do not."""
    steps = facts.evidence.steps
    before = [step for step in steps if step.number < facts.step.number]
    if not before or facts.forward_same is not False:
        return NOT
    if not all(step.gradient_same for step in before if step.gradient_same is not None):
        return NOT
    return 0.9, [
        f"loss and gradient agree up to step {before[-1].number}, and from step {facts.step.number} on the "
        "policy is another one: the update differs"
    ]


def _not_cleared(facts: Facts) -> Judged:
    """The gradient of a later step contains that of the step before as well."""
    excess = facts.excess_of_earlier_step
    if excess is None or excess[1] > max(0.02, 2 * facts.step.noise.gradient):
        return NOT
    return 0.97, [
        f"what is too much in step {facts.step.number} is {excess[0]:.4g} times the gradient of the step before"
    ]


def _settings(facts: Facts) -> Judged:
    trusted, suspect = facts.evidence.trusted.context, facts.context
    names = ("temperature", "learning_rate", "denominator", "max_grad_norm", "optimizer")
    off = [name for name in names if name in trusted and name in suspect and trusted[name] != suspect[name]]
    if not off or not any(step.differs for step in facts.evidence.steps):
        return NOT
    return 0.7, [f"{name} is {suspect[name]!r}, not {trusted[name]!r}" for name in off]


_CP, _TP, _ROWS = frozenset({"cp"}), frozenset({"tp"}), frozenset({"packing"})

CAUSES: tuple[Cause, ...] = (
    Cause("no_difference", "nothing differs beyond rounding", _no_difference, uses=()),
    Cause(
        "not_finite",
        "something became infinite or not a number: a mask that multiplies, or an empty division",
        _not_finite,
    ),
    Cause(
        "lower_precision", "somewhere numbers were rounded to a lower precision", _rounding, uses=("gradient", "tokens")
    ),
    *_factor_causes(),
    Cause("unnamed_factor", "every gradient is multiplied with the same wrong number", _some_factor),
    *(
        Cause(f"mean_per_{kind.replace(' ', '_')}", description, _local(kind), NEEDS[kind], ("loss", "tokens"))
        for kind, description in (
            ("documents", "the loss is averaged within each document"),
            ("rows", "the loss is divided by counts of each micro-batch"),
            ("ranks", "the loss is divided by counts of each data-parallel rank"),
            ("shards", "the loss is divided by counts of each context-parallel rank"),
            ("row shards", "the loss is divided by counts of each rank's part of a micro-batch"),
        )
    ),
    Cause(
        "other_count",
        "the loss is divided by a count of other tokens or documents",
        _step_count,
        uses=("loss", "tokens"),
    ),
    Cause(
        "uneven_weights", "tokens are weighed by counts of parts of the step, or by weights of others", _uneven_weights
    ),
    Cause("loss_alone", "the loss is reported wrong, and trained right", _loss_alone),
    Cause(
        "metrics_alone", "metrics are computed or merged wrong; training is right", _metrics_alone, uses=("metrics",)
    ),
    Cause("norm_alone", "the gradient's norm is reported wrong: replicas counted, or parts merged wrong", _norm_alone),
    Cause(
        "targets_at_shard_edges",
        "each rank shifts the targets of its own shard",
        _at(("shard edges",), "policy_logprobs", "trained"),
        _CP,
        ("tokens",),
    ),
    Cause("targets_at_document_ends", "targets are taken from the next document", _next_document, uses=("tokens",)),
    Cause(
        "first_tokens",
        "the first trained token of each document is treated otherwise",
        _at(("document beginnings",), "policy_logprobs", "trained", "old_logprobs", high=0.9),
        uses=("tokens",),
    ),
    Cause(
        "positions_of_shards",
        "positions or keys of other ranks are wrong where shards or their halves meet",
        _shard_positions,
        _CP,
        ("tokens",),
    ),
    Cause(
        "attention_across_documents",
        "tokens attend to other documents of their row",
        _at(("later documents",), "policy_logprobs"),
        _ROWS,
        ("tokens",),
    ),
    Cause("other_features", "tokens read other features than their own", other_features, uses=("tokens",)),
    Cause("other_mask", "other tokens train", _mask_moved, uses=("tokens",)),
    Cause(
        "other_targets",
        "log-probabilities are those of other tokens of the same distributions",
        _other_targets,
        uses=("tokens",),
    ),
    Cause(
        "old_logprobs",
        "the old policy's log-probabilities are not those of these tokens",
        _old_misaligned,
        uses=("tokens",),
    ),
    Cause(
        "temperature",
        "logits are divided by another temperature",
        _temperature,
        frozenset({"temperature"}),
        ("tokens",),
    ),
    Cause(
        "logprobs_scaled",
        "log-probabilities are scaled after the softmax",
        _logprobs_scaled,
        frozenset({"temperature"}),
        ("tokens",),
    ),
    Cause("normaliser", "the softmax sums over other tokens of the vocabulary", _normaliser, uses=("tokens",)),
    Cause("other_logprobs", "the policy says something else of its tokens", _logprobs_other, uses=("tokens",)),
    Cause("entropy_alone", "the entropy is computed wrong", _entropy_alone, uses=("tokens",)),
    Cause(
        "advantages",
        "advantages are other ones: grouped, centred or whitened otherwise",
        _advantages,
        uses=("metrics",),
    ),
    Cause("clipping", "other tokens are clipped, by the same ratios", _clipping, uses=("metrics", "tokens")),
    Cause("ratio", "importance ratios are computed otherwise from equal log-probabilities", _ratio, uses=("metrics",)),
    Cause("one_term", "one term of the loss is weighed or computed otherwise", _one_term, uses=("metrics",)),
    Cause("other_loss", "the per-token loss is another one", _other_loss),
    Cause("no_gradient", "nothing is back-propagated", _no_gradient),
    Cause("part_without_gradient", "a part of the model gets no gradient", _part_without_gradient, uses=("gradient",)),
    Cause(
        "norms_not_summed",
        "gradients of replicated norms are not summed over ranks that hold parts of them",
        _norms_only,
        _TP,
        ("gradient",),
    ),
    Cause("head_rounded", "the head's gradient is summed in a lower precision", _head_rounded, uses=("gradient",)),
    Cause("head_gradient", "the head's own gradient is wrong", _head_wrong, uses=("gradient",)),
    Cause(
        "gradient_below_head", "what flows back from the head into the model is wrong", _below_head, uses=("gradient",)
    ),
    Cause(
        "keys_values_not_summed",
        "gradients of keys and values miss the parts of other ranks or copies",
        _keys_values,
        uses=("gradient",),
    ),
    Cause(
        "attention_backward", "attention is right forward and wrong backward", _attention_backward, _CP, ("gradient",)
    ),
    Cause(
        "layer_input_gradient",
        "what flows back from a layer's projections into its input is wrong",
        _layer_input,
        uses=("gradient",),
    ),
    Cause(
        "module_scaled",
        "one module's gradient is summed over ranks too many, or averaged over some",
        module_scaled,
        frozenset({"one rank"}),
        ("gradient",),
    ),
    Cause(
        "module_reached_wrongly",
        "the gradient that crosses into one module is not that of all its readers",
        module_reached_wrongly,
        frozenset({"one rank"}),
        ("gradient",),
    ),
    Cause("some_parameters", "a part of the model has another gradient", _some_parameters, uses=("gradient",)),
    Cause(
        "ranks_lost",
        "gradients of some ranks or micro-batches are not added",
        _ranks_lost,
        frozenset({"dp * cp * micro_batches"}),
        ("loss", "gradient"),
    ),
    Cause(
        "added_repeatedly",
        "gradients of earlier ranks or micro-batches are added again and again",
        _repeated,
        frozenset({"dp * cp * tp * micro_batches"}),
        ("loss", "gradient"),
    ),
    Cause(
        "term_without_gradient", "a term of the loss is detached, or differentiates what it should not", _term_gradient
    ),
    Cause("gradients_not_cleared", "gradients of the step before are added again", _not_cleared, uses=("gradient",)),
    Cause("update", "optimizer, learning rate or clipping differ", _update, uses=("gradient", "tokens")),
    Cause("other_settings", "the two runs have different settings", _settings, uses=()),
)
