"""Causes that show in whole numbers: nothing or rounding, what is not finite, and what is only reported wrong."""

from __future__ import annotations

from workbench.diagnose.causes.cause import NOT, Family, Judged
from workbench.diagnose.facts import Facts, coarse
from workbench.diagnose.sight import sampler_moved
from workbench.metrics.step import MOST_MOVED

ROUNDED_NATS = 0.05
"""Rounding logits to eight bits moves a log-probability by less."""

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


@WHOLE.cause("the loss is reported wrong, and trained right")
def _loss_alone(facts: Facts) -> Judged:
    if facts.loss_same is not False or facts.gradient_same is not True:
        return NOT
    named = f", which is {facts.loss_names[0].description}" if facts.loss_names else ""
    if facts.step.cosine is None and facts.outputs is not None and facts.outputs.weights_same is False:
        return 0.3, ["norms of gradients are right within noise, but predictions weigh otherwise"]
    if not facts.inputs_same:
        return 0.3, ["the gradient is right within noise, but the loss is computed from other inputs"]
    return (0.5 if facts.term_hidden else 0.95), [
        f"the gradient is right, and the loss {facts.loss_factor or 0:.4g} times{named}"
    ]


# ---- metrics ------------------------------------------------------------------------------------------------


_INPUTS = ("policy_logprobs", "trained", "old_logprobs", "ref_logprobs", "sampler_logprobs", "advantages", "rewards")
"""Values of tokens that metrics are computed from: with other ones they are not wrong alone."""


@WHOLE.cause("metrics are computed or merged wrong; training is right", uses=("metrics",))
def _metrics_alone(facts: Facts) -> Judged:
    if not facts.step.metrics or facts.gradient_same is False or facts.loss_same is False:
        return NOT
    if any(facts.step.token_same(name) is False for name in _INPUTS):
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
