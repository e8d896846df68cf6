"""Advantages from their definitions: sums over completions and over later tokens, plain floats.

Sources: GRPO, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783; RLOO, arXiv 2402.14740; OPO, arXiv
2505.23585; GPG, arXiv 2504.02546; GDPO, arXiv 2601.05242; REINFORCE++, arXiv 2501.03262; GAE, arXiv 1506.02438,
equation 16 (the sum, not the recursion); VC-PPO, arXiv 2503.01491; VAPO, arXiv 2504.05118.
"""

from __future__ import annotations

import math


def deviation(values, ddof):
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - ddof))


def group(
    rewards, groups, *, baseline="mean", scale="std", ddof=1, epsilon=1e-4, singleton="zero", trained=None, lengths=None
):
    """Return one advantage per completion; untrained completions are in no mean and get 0."""
    trained = trained or [True] * len(rewards)
    here = [i for i in range(len(rewards)) if trained[i]]
    out = [0.0] * len(rewards)
    for i in here:
        own = [j for j in here if groups[j] == groups[i]]
        others = [rewards[j] for j in own if j != i]
        values = [rewards[j] for j in own]
        if not others:
            out[i] = 0.0 if singleton == "zero" else rewards[i] / (1 if scale == "none" else 1 + epsilon)
            continue
        if max(values) == min(values):
            continue
        if baseline == "mean":
            difference = rewards[i] - math.fsum(values) / len(values)
        elif baseline == "leave_one_out":
            difference = rewards[i] - math.fsum(others) / len(others)
        else:
            difference = rewards[i] - math.fsum(lengths[j] * rewards[j] for j in own) / sum(lengths[j] for j in own)
        population = {"std": values, "leave_one_out_std": others, "batch_std": [rewards[j] for j in here], "none": []}[
            scale
        ]
        if scale == "none":
            out[i] = difference
        elif len(population) <= ddof:
            out[i] = difference if scale == "leave_one_out_std" else 0.0
        elif max(population) == min(population):
            out[i] = difference
        else:
            out[i] = difference / (deviation(population, ddof) + epsilon)
    return out


def gpg(rewards, groups, *, trained=None):
    alive = [i for i in range(len(rewards)) if trained is None or trained[i]]
    speaking = [i for i in alive if len({rewards[j] for j in alive if groups[j] == groups[i]}) > 1]
    alpha = len(alive) / len(speaking) if speaking else 1.0
    return [alpha * a for a in group(rewards, groups, scale="none", trained=trained)]


def gdpo(components, groups, weights, *, ddof=1, epsilon=1e-4, trained=None):
    parts = [
        group([row[k] for row in components], groups, ddof=ddof, epsilon=epsilon, trained=trained)
        for k in range(len(weights))
    ]
    total = [math.fsum(w * part[i] for w, part in zip(weights, parts, strict=True)) for i in range(len(components))]
    return group(total, [0] * len(total), ddof=ddof, epsilon=epsilon, trained=trained)


def whitened(values, *, ddof, epsilon, form):
    """Values of the trained tokens of the step."""
    if len(values) <= ddof or max(values) == min(values):
        return [0.0] * len(values)
    mean, variance = math.fsum(values) / len(values), deviation(values, ddof) ** 2
    root = math.sqrt(variance + epsilon if form == "add" else max(variance, epsilon))
    return [(v - mean) / root for v in values]


def returns(rewards, discount):
    """Return the discounted sum of later rewards of the trained tokens of one document."""
    return [math.fsum(discount ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]


def generalised(rewards, values, discount, lambda_):
    """Advantages of the trained tokens of one document, as the sum over all steps to come."""
    n = len(rewards)
    deltas = [rewards[t] + (discount * values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [math.fsum((discount * lambda_) ** (s - t) * deltas[s] for s in range(t, n)) for t in range(n)]


def adaptive_lambda(alpha, length):
    return max(0.0, 1 - 1 / (alpha * length))


def pass_at_k(rewards, groups, *, scale="std", epsilon=1e-6):
    out = [0.0] * len(rewards)
    for i, reward in enumerate(rewards):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == groups[i]]
        second, best = sorted(own)[-2:]
        if reward == best > second:
            out[i] = (best - second) / (deviation(own, 1) + epsilon if scale == "std" else 1.0)
    return out


def optimal_baselines(documents, groups, *, aligned, zero_tail, epsilon=1e-8):
    """Advantages of each document's trained tokens, in order.

    Args:
        documents: a list of tokens a document: (place, reward, log-probability, sum of squared probabilities, weight).
        groups: prompt of each document.
        aligned: "position": a step is a place; "trained": the n-th trained token.
        zero_tail: the longest completion has no baseline where it is alone.
    """
    steps = [[place if aligned == "position" else n for n, (place, *_) in enumerate(own)] for own in documents]
    to_go = [[math.fsum(token[1] for token in own[n:]) for n in range(len(own))] for own in documents]
    energy = [
        [
            math.fsum((1 - 2 * math.exp(x) + squares) * w**2 for _, _, x, squares, w in own[: n + 1])
            for n in range(len(own))
        ]
        for own in documents
    ]
    out = []
    for i, own in enumerate(documents):
        group = [j for j in range(len(documents)) if groups[j] == groups[i] and (documents[j] or aligned == "position")]
        others = [len(documents[j]) for j in group if j != i]
        results = []
        for n in range(len(own)):
            at = [(j, m) for j in group for m, step in enumerate(steps[j]) if step == steps[i][n]]
            baseline = math.fsum(to_go[j][m] * energy[j][m] for j, m in at) / (
                math.fsum(energy[j][m] for j, m in at) + epsilon
            )
            tail = zero_tail and others and len(own) > max(others) and steps[i][n] >= max(others)
            results.append(to_go[i][n] - (baseline if others and not tail else 0.0))
        out.append(results)
    return out
