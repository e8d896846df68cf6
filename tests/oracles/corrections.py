"""Corrections of the sampler's mismatch the long way: one document, one token at a time, plain floats.

Sources: truncated weights: Yao et al. (2025), "Your efficient RL framework secretly brings you off-policy RL
training"; zeroed weights: arXiv 2510.18855; sequence weights and rejection: Liu et al. (2025), "When speed kills
stability"; off-policy sequence masking: arXiv 2512.02556, section 3.1; second moment: arXiv 2510.01161.
"""

from __future__ import annotations

import math


def correction(
    documents,
    *,
    ratio="none",
    low=None,
    high=None,
    outside="truncate",
    normalize=False,
    gate="none",
    gate_level="token",
    gate_low=None,
    gate_high=None,
    opsm=None,
    opsm_anchor="sampler",
    m2=None,
    further=(),
    log_clamp=math.inf,
    mean_epsilon=0.0,
    given_epsilon=0.0,
    gate_action="reject",
):
    """Return weight and verdict of each token of a step.

    Args:
        documents: dicts of lists: mask, old, sampler, policy, advantages; given for ratios of that name. Values under
            the mask are not looked at.
        further: (statistic, level, low, high) of gates after the first.
        log_clamp: bound of a weight's log, and of a token's log ratio in a gate.
        mean_epsilon: added to a number of tokens that ``normalize`` divides by.
        given_epsilon: added to a weight before its log.
        gate_action: truncate: what a gate does not let through keeps its place, and its weight is bounded, which then
            happens to no other.

    Returns:
        Per document a list of (raw weight, applied weight, kept), None for tokens that are not trained.
    """
    raws = [
        [None if x is None else math.exp(held(x, log_clamp)) for x in exponents(document, ratio, given_epsilon)]
        for document in documents
    ]
    gates = [*([(gate, gate_level, gate_low, gate_high)] if gate != "none" else []), *further]
    results = []
    for document, raw in zip(documents, raws, strict=True):
        tokens = []
        for t, weight in enumerate(raw):
            if weight is None:
                tokens.append(None)
                continue
            kept, applied, passed = True, weight, True
            if low is not None and weight < low:
                applied, kept = (low, True) if outside == "truncate" else (0.0, False)
            if high is not None and weight > high:
                applied, kept = (high, True) if outside == "truncate" else (0.0, False)
            for name, level, least, most in gates:
                value = statistic(document, t, name, level, log_clamp)
                if (least is not None and value < least) or (most is not None and value > most):
                    passed = False
            if gate_action == "truncate":
                applied = weight if passed else applied
            else:
                kept = kept and passed
            if opsm is not None and document["advantages"][t] < 0:
                gaps = [document[opsm_anchor][s] - document["policy"][s] for s in trained(document)]
                if sum(gaps) / len(gaps) > opsm:
                    kept = False
            tokens.append([weight, applied, kept])
        results.append(tokens)
    if normalize:
        scale = mean_weight(results, over_documents="document" in ratio, epsilon=mean_epsilon)
        for tokens in results:
            for token in tokens:
                if token is not None:
                    token[1] = token[1] / scale
    if m2 is not None:
        cutoff = second_moment_cutoff(documents, m2)
        for document, tokens in zip(documents, results, strict=True):
            for t in trained(document):
                if (document["old"][t] - document["sampler"][t]) ** 2 > cutoff:
                    tokens[t][2] = False
    for tokens in results:
        for token in tokens:
            if token is not None and not token[2]:
                token[1] = 0.0
    return results


def trained(document):
    return [t for t, counts in enumerate(document["mask"]) if counts]


def segments(document):
    """Unbroken runs of trained tokens."""
    runs, run = [], []
    for t, counts in enumerate([*document["mask"], 0]):
        if counts:
            run.append(t)
        elif run:
            runs.append(run)
            run = []
    return runs


def held(x, bound):
    return min(max(x, -bound), bound)


def exponents(document, ratio, given_epsilon):
    if ratio == "given":
        return [
            math.log(w) if counts and w else -math.inf if counts else None
            for w, counts in zip(document["given"], document["mask"], strict=True)
        ]
    if ratio == "given_document_mean":
        own = [math.log(document["given"][t] + given_epsilon) for t in trained(document)]
        return [sum(own) / len(own) if counts else None for counts in document["mask"]]
    mu = [document["old"][t] - document["sampler"][t] if counts else None for t, counts in enumerate(document["mask"])]
    if ratio == "none":
        return [None if m is None else 0.0 for m in mu]
    if ratio == "token":
        return mu
    out = [None] * len(mu)
    parts = segments(document) if ratio == "segment_mean" else [trained(document)]
    for part in parts:
        total = sum(mu[t] for t in part)
        for t in part:
            out[t] = total if ratio == "document_sum" else total / len(part)
    return out


def statistic(document, t, gate, level, log_clamp):
    def of(mu):
        return {
            "ratio": math.exp(mu),
            "k1": -mu,
            "k2": mu * mu / 2,
            "k3": math.exp(mu) - 1 - mu,
            "inverse_k3": math.exp(-mu) - 1 + mu,
        }[gate]

    if gate in ("binary_kl", "sampler_binary_kl", "total_variation"):
        of_probabilities = {"binary_kl": binary_kl, "sampler_binary_kl": sampler_binary_kl}.get(gate, total_variation)
        own = [of_probabilities(document["old"][s], document["sampler"][s]) for s in trained(document)]
        return {
            "token": lambda _: of_probabilities(document["old"][t], document["sampler"][t]),
            "document_max": max,
            "document_min": min,
            "document_sum": sum,
            "document_mean": lambda v: sum(v) / len(v),
        }[level](own)
    mus = [held(document["old"][s] - document["sampler"][s], log_clamp) for s in trained(document)]
    if level == "token":
        return of(held(document["old"][t] - document["sampler"][t], log_clamp))
    if level == "document_max":
        return max(of(mu) for mu in mus)
    if level == "document_min":
        return min(of(mu) for mu in mus)
    if gate == "ratio":  # the geometric mean, and the likelihood ratio of the document
        return math.exp(sum(mus) / len(mus)) if level == "document_mean" else math.exp(sum(mus))
    return sum(of(mu) for mu in mus) / (len(mus) if level == "document_mean" else 1)


def binary_kl(old, sampler):
    """The greater of both divergences between this token and another one; probabilities stay 1e-8 from 0 and 1."""
    p, q = (min(max(math.exp(x), 1e-8), 1 - 1e-8) for x in (old, sampler))

    def divergence(a, b):
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    return max(divergence(p, q), divergence(q, p))


def sampler_binary_kl(old, sampler):
    """The divergence from the sampler to the old policy; probabilities stay 1e-6 from 0 and 1."""
    q, p = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (old, sampler))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def total_variation(old, sampler):
    q, p = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (old, sampler))
    return abs(p - q)


def mean_weight(found, *, over_documents, epsilon):
    values = []
    for tokens in found:
        own = [token[1] for token in tokens if token is not None]
        values += ([sum(own) / (len(own) + epsilon)] if own else []) if over_documents else own
    mean = sum(values) / (len(values) + epsilon * (not over_documents)) if values else 0.0
    return mean if mean > 0 else 1.0


def second_moment_cutoff(documents, threshold):
    squares = sorted(
        (document["old"][t] - document["sampler"][t]) ** 2 for document in documents for t in trained(document)
    )
    while squares and math.fsum(squares) / len(squares) > threshold:
        worst = squares[-1]
        squares = [square for square in squares if square < worst]
    return squares[-1] if squares else -math.inf
