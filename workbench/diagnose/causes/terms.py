"""Causes that show in terms of the loss: advantages, clipping, ratios, penalties, and the loss itself."""

from __future__ import annotations

from workbench.diagnose.causes.cause import NOT, Family, Judged
from workbench.diagnose.facts import ADVANTAGES, Facts
from workbench.diagnose.loss_facts import other_parts

TERMS = Family("tokens")


@TERMS.cause("advantages are other ones: grouped, centred or whitened otherwise", uses=("metrics",))
def _advantages(facts: Facts) -> Judged:
    off = facts.metrics_off(*ADVANTAGES)
    tokens = facts.off_tokens("advantages")
    if tokens is not None and bool(tokens.any()):
        off = [f"advantages of {int(tokens.sum())} tokens", *off]
    if not off or facts.forward_same is False or facts.mask_same is False or facts.gradient_same is not False:
        return NOT
    rewards = ", and rewards too" if facts.step.token_same("rewards") is False else ""
    return 0.9, [f"{', '.join(off)} differ, and log-probabilities do not{rewards}"]


@TERMS.cause("other tokens are clipped, by the same ratios", uses=("metrics", "tokens"))
def _clipping(facts: Facts) -> Judged:
    """The ratios are right, and other tokens are clipped, or at other bounds."""
    if facts.forward_same is False or facts.old_same is False or facts.mask_same is False:
        return NOT
    if forms := facts.other_surrogate:
        of_clip = other_parts(*forms) == {"clip"} and all("clip" in form.clip for form in forms)
        if of_clip:
            return 0.94, [_by_surrogates(facts)]
    if (judged := _changed(facts, "clip"))[0] or facts.other_surrogate:
        return judged
    if facts.metrics_off("ratio/", "correction/") or facts.step.token_same("ratios") is False:
        return NOT
    clipped, metrics = facts.off_tokens("clipped"), facts.metrics_off("clip/")
    number = 0 if clipped is None else int(clipped.sum())
    if (not number and not metrics) or (facts.gradient_same is not False and facts.loss_same is not False):
        return NOT
    reason = f"{number} tokens are clipped otherwise" if number else f"{metrics[0]} differs"
    known = any(key.startswith("ratio/") and key in facts.pair[1].metrics for key in facts.pair[0].metrics)
    if number and facts.forward_same and facts.old_same and facts.step.token_same("advantages") is not False:
        return (0.6 if facts.clips_documents else 0.9), [reason, "log-probabilities of both policies do not differ"]
    if not known:
        return 0.4, [reason]
    return (0.6 if facts.clips_documents else 0.85), [reason, "ratios of tokens do not differ"]


@TERMS.cause("importance ratios are computed otherwise from equal log-probabilities", uses=("metrics",))
def _ratio(facts: Facts) -> Judged:
    if facts.forward_same is False or facts.old_same is False or facts.mask_same is False:
        return NOT
    if forms := facts.other_surrogate:
        ratios = "ratios" in other_parts(*forms) and all(form.ratios.startswith("ratios") for form in forms)
        return (0.94, [_by_surrogates(facts)]) if ratios else _changed(facts, "ratio")
    if (judged := _changed(facts, "ratio"))[0]:
        return judged
    if facts.other_ratios:
        return 0.95, [facts.other_ratios]
    off = facts.metrics_off("ratio/", "clip/", "correction/", "kl/")
    other = facts.off_tokens("ratios")
    if other is not None and bool(other.any()) and facts.old_same is not None and facts.forward_same:
        return 0.92, [
            f"ratios of {int(other.sum())} tokens differ, and the log-probabilities that they are computed from do not"
        ]
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


@TERMS.cause("one term of the loss is weighed or computed otherwise", uses=("metrics",))
def _one_term(facts: Facts) -> Judged:
    """One term of the loss is wrong and others are right, from the same inputs."""
    if forms := facts.other_surrogate:
        of_terms = other_parts(*forms) <= {"correction", "penalty", "entropy"} and facts.inputs_same
        return (0.94, [_by_surrogates(facts)]) if of_terms else _changed(facts, "term", "correction")
    if (judged := _changed(facts, "term", "correction"))[0]:
        return judged
    if facts.has_terms and facts.token_losses_same is False and facts.loss_change is None and facts.inputs_same:
        return 0.62, ["values of the loss differ token by token, from the same inputs, and it has several parts"]
    off, right = facts.terms
    weighed = facts.token_losses_same is True  # values are right: terms differ by the weights of tokens
    if not right and not weighed and (text := facts.moved_by_a_term):
        return 0.9, [text]
    off = [key for key in off if not key.startswith("loss/total")]
    if (
        len(off) > 1
        and not right
        and not weighed
        and facts.inputs_same
        and facts.gradient_same is False
        and facts.terms_apart
    ):
        return 0.78, [f"{', '.join(off)} differ, each by a factor of its own"]
    if not off or not right or not facts.inputs_same or not (facts.gradient_same is False or facts.term_hidden):
        return NOT
    if facts.metrics_off("ratio/", "clip/"):
        return 0.3, [f"{', '.join(off)} differ, {', '.join(right)} do not"]
    trusted, suspect = facts.step.metrics[off[0]]
    times = f", {suspect / trusted:.6g} times" if trusted else ""
    return 0.8, [f"{', '.join(off)} differ{times}, {', '.join(right)} do not"]


@TERMS.cause("labels are smoothed over a part of the vocabulary", "tp", uses=("loss", "gradient"))
def _smoothing(facts: Facts) -> Judged:
    """Of a smoothed likelihood only the mean over the vocabulary is not the log-probability, which is right here."""
    smoothed = any(record.context.get("label_smoothing") for record in (facts.evidence.trusted, facts.evidence.suspect))
    likelihood = all(key.startswith(("loss/policy", "loss/total")) for key in facts.terms[0])
    if not smoothed or not facts.inputs_same or not facts.forward_same or not likelihood:
        return NOT
    if facts.loss_same is not False or facts.gradient_same is not False or facts.scaled:
        return NOT
    reasons = ["labels are smoothed, log-probabilities do not differ, and the loss of the same tokens does"]
    known = facts.context.get("tp") and facts.step.token_same("policy_logprobs")
    return (0.85 if known and facts.step.token_same("entropy_nats") is not False else 0.3), reasons


@TERMS.cause("the per-token loss is another one", uses=("loss", "gradient"))
def _other_loss(facts: Facts) -> Judged:
    if facts.inputs_same and facts.gradient_same is False and facts.other_surrogate:
        return (0.4 if facts.loss_change else 0.9), [_by_surrogates(facts)]
    if not facts.inputs_same or facts.loss_same is not False or facts.gradient_same is not False:
        return NOT
    terms = facts.metrics_off("loss/")
    if facts.scaled and facts.step.parallel:
        return 0.3, ["the same inputs give another loss, and every gradient times one number"]
    if facts.token_losses_same is False:
        return (0.4 if facts.loss_change else 0.6), ["values of the loss differ token by token, from the same inputs"]
    return 0.35, ["the same inputs give another loss" + (f": {', '.join(terms)}" if terms else "")]


def _changed(facts: Facts, *kinds: str) -> Judged:
    """Score where values of the loss moved as another part of one of these kinds moves them."""
    change = facts.loss_change
    return (0.92, [change.clause]) if change is not None and change.kind in kinds else NOT


def _by_surrogates(facts: Facts) -> str:
    trusted, suspect = facts.other_surrogate or ("", "")
    return f"the suspect's loss is that of {suspect}, and the trusted one's that of {trusted}, each from its own tokens"
