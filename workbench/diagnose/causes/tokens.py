"""Causes that show in tokens and their log-probabilities.

Letters: S tokens of the source batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from workbench.diagnose.causes import given
from workbench.diagnose.causes.cause import NOT, Family, Judged, likeliest
from workbench.diagnose.facts import Facts, fit

TOKENS = Family("tokens")
SHIFTED = 0.3
"""Share of the targets that a shift at the ends of documents does not reach."""
SEEN = 0.97
"""Score of what a recorder saw: see `workbench.diagnose.causes.observed`."""


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


TOKENS.add(
    "targets_at_shard_edges",
    "each rank shifts the targets of its own shard",
    _at(("shard edges",), "policy_logprobs", "trained"),
    "cp",
)


@TOKENS.cause("targets are taken from the next document")
def _targets_at_document_ends(facts: Facts) -> Judged:
    """The last token of a document predicts, or trains, the first of the next; a token lost there is a mask fault."""
    if (number := _first_of_documents(facts)) and not _all_shifted(facts):
        return 0.95, [f"{number} first tokens of documents train, which no token of theirs predicts, and no others"]
    score, why = likeliest(
        _at(("document ends",), "policy_logprobs")(facts),
        _at(("document starts",), "policy_logprobs", "trained")(facts),
    )
    return (0.4 * score if _all_shifted(facts) else score), why  # of all tokens: those at ends are among them


def _all_shifted(facts: Facts) -> bool:
    return bool(facts.targets_shifted) or facts.distributions_shifted is not None


def _first_of_documents(facts: Facts) -> int:
    """Number of tokens that train in the suspect alone, if all are first ones of documents; 0 if any other differs."""
    off, starts = facts.off_tokens("trained"), facts.places.get("document starts")
    if off is None or starts is None or facts.trained is None or bool((off & (facts.trained | ~starts)).any()):
        return 0
    return int(off.sum())


@TOKENS.cause("the first trained token of each document is treated otherwise")
def _first_tokens(facts: Facts) -> Judged:
    score, why = _BEGINNINGS(facts)
    return (0.3 * score if _first_of_documents(facts) else score), why


_BEGINNINGS = _at(("document beginnings",), "policy_logprobs", "trained", "old_logprobs", high=0.9)


@TOKENS.cause("positions or keys of other ranks are wrong where shards or their halves meet", "cp")
def _positions_of_shards(facts: Facts) -> Judged:
    """Differences behind an edge between ranks, or behind half a shard, which is the rarer mistake."""
    return likeliest(
        _at(("behind shard edges", "returns"), "policy_logprobs")(facts),
        _at(("behind half a shard",), "policy_logprobs", high=0.9)(facts),
    )


def _behind_first_documents(facts: Facts) -> Judged:
    """Differences in all documents but the first of a row: of attention, or of positions that run on."""
    return _at(("later documents",), "policy_logprobs")(facts)


@TOKENS.cause("tokens attend to other documents of their row", "packing")
def _attention_across_documents(facts: Facts) -> Judged:
    return likeliest(_noted_attention_across_documents(facts), given.other_attention(facts, packed=True))


def _noted_attention_across_documents(facts: Facts) -> Judged:
    score, why = _behind_first_documents(facts)
    same = facts.step.token_same("positions")
    if not score or same is False:
        return NOT
    if facts.other_positions:
        return 0.3 * score, [*why, f"but {facts.other_positions}"]
    return (score, why) if same else (0.49 * score, [*why, "positions were not noted: they may run on instead"])


@TOKENS.cause("positions of tokens are others: they run on through a row, or restart elsewhere")
def _position_ids(facts: Facts) -> Judged:
    return likeliest(_noted_position_ids(facts), given.other_positions(facts))


def _noted_position_ids(facts: Facts) -> Judged:
    same = facts.step.token_same("positions")
    if facts.other_tokens > SHIFTED:
        return NOT
    if facts.other_positions and _behind_first_documents(facts)[0] > 0.5:
        return 0.96, [facts.other_positions]
    if same is False and facts.forward_same is False:
        off = facts.off_tokens("positions")
        return 0.97, [f"positions of {0 if off is None else int(off.sum())} tokens differ, and their log-probabilities"]
    score, why = _behind_first_documents(facts)
    return (0.48 * score, [*why, "positions were not noted"]) if score and same is None else NOT


@TOKENS.cause("tokens attend to padding")
def _attention_to_padding(facts: Facts) -> Judged:
    return likeliest(_noted_attention_to_padding(facts), given.other_attention(facts, packed=False))


def _noted_attention_to_padding(facts: Facts) -> Judged:
    """All documents differ that are shorter than the longest of their micro-batch, and no other."""
    if facts.forward_same is not False or facts.padded_moved < 0.8 or _behind_first_documents(facts)[0] > 0.9:
        return NOT
    return 0.9 * facts.padded_moved, [
        f"log-probabilities of {facts.padded_moved:.0%} of the documents differ that are shorter than the longest of "
        "their micro-batch, and of no other"
    ]


@TOKENS.cause("tokens read other features than their own")
def _other_features(facts: Facts) -> Judged:
    """Score of forward differences behind tokens replaced by a feature: in all documents that read one, or in some.

    Some documents are weaker evidence, since in most documents little trains before a feature.
    """
    place, off = "behind features", facts.off_tokens("policy_logprobs")
    if off is None or facts.trained is None or place not in facts.places or not (off & facts.trained).any():
        return NOT
    if (agreed := facts.agree(place, "policy_logprobs")) >= 0.2:
        return 0.95 * min(1.0, agreed + 0.15), [f"what differs lies {place} (agreement {agreed:.2f} of 1)"]
    if (off & facts.trained & ~facts.places[place]).any():
        return NOT
    return 0.4, [f"all {int((off & facts.trained).sum())} tokens that differ lie {place}, in some documents of several"]


@TOKENS.cause("other tokens train")
def _other_mask(facts: Facts) -> Judged:
    return likeliest(_noted_other_mask(facts), given.other_labels(facts, counted=True))


def _noted_other_mask(facts: Facts) -> Judged:
    if facts.mask_same is not False:
        return _more_than_noted(facts)
    at_places = max(
        facts.agree(place, "trained") for place in ("shard edges", "document starts", "document beginnings")
    )
    off = facts.off_tokens("trained")
    if facts.other_documents:
        return 0.3, [f"other tokens train, but {facts.other_documents}"]
    return 0.85 * (1 - 0.45 * at_places), ["other tokens train" + ("" if off is None else f": {int(off.sum())} differ")]


def _more_than_noted(facts: Facts) -> Judged:
    """The trained tokens that were noted are the same, and their count is not: others train, which have no place."""
    right, wrong = (step.counts.get("trained_tokens") for step in facts.pair)
    if facts.mask_same is None or None in (right, wrong) or right == wrong or facts.absent or facts.added:
        return NOT
    return 0.8, [f"{wrong:g} tokens train, not {right:g}, although the same are noted: the others have no place"]


@TOKENS.cause("other data: documents are lost, doubled or taken in another order", uses=("tokens",))
def _other_data(facts: Facts) -> Judged:
    return likeliest(_noted_other_data(facts), given.other_ids(facts))


def _noted_other_data(facts: Facts) -> Judged:
    """The vocabulary ids of the tokens are others, in more places than a shift or a mask explains."""
    if repeated := facts.pair[1].observed.get("repeated"):
        return SEEN, [f"{repeated} tokens of the step were noted twice and more, by their places"]
    if facts.absent:
        return (0.5 if "micro-batches" in facts.absent and not facts.smaller_step else 0.9), [facts.absent]
    if facts.added:
        return 0.9, [facts.added]
    if not all("targets" in tokens for tokens in facts.tokens):
        return (0.9, [facts.other_documents]) if facts.other_documents else NOT
    right, wrong = (tokens["targets"] for tokens in facts.tokens)
    there = [tokens["trained"].bool() if "trained" in tokens else right >= 0 for tokens in facts.tokens]
    off = facts.other_tokens
    if facts.targets_shifted or given.ids_same(facts):
        return NOT
    if off < SHIFTED:  # a shift at the ends of documents changes fewer
        return NOT
    ids, others = (values[mask].sort().values for values, mask in zip((right, wrong), there, strict=True))
    if len(ids) == len(others) and torch.equal(ids, others):
        return 0.95, [f"the ids of {off:.0%} of the trained tokens differ, and all of them are there: another order"]
    return 0.95, [f"the ids of {off:.0%} of the trained tokens differ, and are not those of the trusted run"]


@TOKENS.cause("log-probabilities are those of other tokens of the same distributions")
def _other_targets(facts: Facts) -> Judged:
    return likeliest(_noted_other_targets(facts), given.other_labels(facts, counted=False))


def _noted_other_targets(facts: Facts) -> Judged:
    """The distribution at a token is the same, as its entropy shows, but another token's log-probability is taken."""
    if facts.targets_shifted:  # with the ids of the model the data moved, and not their targets
        return (0.45 if given.other_ids(facts)[0] else 0.97), [facts.targets_shifted]
    if facts.other_tokens > 0 and given.ids_same(facts):
        return 0.93, [
            f"targets of {facts.other_tokens:.0%} of the trained tokens differ, and the model is given the same"
        ]
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


@TOKENS.cause("the reference's log-probabilities are not those of these tokens")
def _ref_logprobs(facts: Facts) -> Judged:
    return _anchor(facts, "ref_logprobs", "the reference's")


@TOKENS.cause("the sampler's log-probabilities are not those of these tokens")
def _sampler_logprobs(facts: Facts) -> Judged:
    return _anchor(facts, "sampler_logprobs", "the sampler's")


def _anchor(facts: Facts, name: str, whose: str) -> Judged:
    """Log-probabilities of another model that differ although the policy's own do not."""
    off = facts.off_tokens(name)
    if facts.forward_same is not True or off is None or not bool(off.any()):
        return NOT
    wrong, policy = facts.tokens[1][name].double()[off], facts.tokens[1]["policy_logprobs"].double()[off]
    same = float(torch.isclose(policy, wrong, atol=1e-6).double().mean())
    right = facts.tokens[0][name].double()
    shifts = ((1, "before"), (-1, "after"))
    shifted = [word for shift, word in shifts if _equal(right.roll(shift)[off], wrong) > 0.6]
    detail = (
        " and equal the policy's own" if same > 0.9 else f" and are those of the token {shifted[0]}" if shifted else ""
    )
    return 0.93, [f"{whose} log-probabilities of {int(off.sum())} tokens differ{detail}, and the policy's do not"]


def _equal(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.isclose(one, other, atol=1e-5).double().mean()) if len(one) else 0.0


@TOKENS.cause("the old policy's log-probabilities are not those of these tokens")
def _old_logprobs(facts: Facts) -> Judged:
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
    if same > 0.9 and facts.forward_same is False:
        return 0.2, ["the policy itself differs, and its old log-probabilities with it: a consequence"]
    return 0.85, [f"old log-probabilities of {int(off.sum())} tokens differ{detail}"]


# ---- log-probabilities and entropies ------------------------------------------------------------------------


@TOKENS.cause("logits are divided by another temperature", "temperature")
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


@TOKENS.cause("log-probabilities are scaled after the softmax", "temperature")
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
    expected = 1 - 1 / temperature  # to first order: from 1 / T to 1
    if rest > 0.35 or rest > as_is or not 0.5 < slope / expected < 1.4:
        return NOT
    return 0.93 - rest, [
        f"times the temperature they move along logp + entropy (slope {slope:.3g}, {rest:.1%} "
        "unexplained): the softmax was without it, and its logarithm was divided"
    ]


@TOKENS.cause("the softmax sums over other tokens of the vocabulary")
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


@TOKENS.cause("the policy says something else of its tokens")
def _other_logprobs(facts: Facts) -> Judged:
    if facts.forward_same is not False:
        return NOT
    return 0.2, [f"the policy says something else of {facts.share_off('policy_logprobs'):.0%} of the tokens"]


@TOKENS.cause("the entropy is computed wrong")
def _entropy_alone(facts: Facts) -> Judged:
    if facts.step.token_same("entropy_nats") is not False or facts.forward_same is not True:
        return NOT
    return 0.96, ["log-probabilities agree, and entropies do not"]
