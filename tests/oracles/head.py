"""Outputs of a head for one token at a time, and every gradient of them, in Python floats.

Sources: the softmax with temperature; Gemma 2 (arXiv 2408.00118), section 2, for the soft cap c tanh(a / c); Granite
and Cohere of `transformers` for a scale on the logits; top-k (arXiv 1805.04833) and top-p (arXiv 1904.09751) for the
renormalised distribution over the support.
"""

from __future__ import annotations

import math


def logits(hidden, weight, bias, *, temperature, scale, cap, valid):
    """z of every token that exists, and its derivative by hidden . weight."""
    z, slope = [], []
    for v in range(valid):
        a = scale * (math.fsum(x * y for x, y in zip(hidden, weight[v], strict=True)) + bias[v])
        squashed = a if cap is None else cap * math.tanh(a / cap)
        z.append(squashed / temperature)
        slope.append(scale / temperature * (1 if cap is None else 1 - math.tanh(a / cap) ** 2))
    return z, slope


def distribution(z, support):
    """Log-normaliser and log-probabilities over the support; a token of logit -inf has none."""
    top = max(z[v] for v in support)
    normaliser = top + math.log(math.fsum(math.exp(z[v] - top) for v in support))
    return normaliser, {v: z[v] - normaliser for v in support}


def entropy(logprobs):
    """Return the entropy of a distribution; impossible tokens add nothing."""
    return -math.fsum(math.exp(p) * p for p in logprobs.values() if p != -math.inf)


def say(hidden, weight, bias, target, support, *, temperature, scale, cap, valid, wants):
    """Fields of one token by name, and the gradient of ``sum wants[name] * field`` by every hidden . weight_v.

    ``support`` is the truncated support, None for the whole vocabulary.
    """
    z, slope = logits(hidden, weight, bias, temperature=temperature, scale=scale, cap=cap, valid=valid)
    everything = range(valid)
    kept = sorted({*support, target}) if support else everything
    normaliser, whole = distribution(z, everything)
    _, among = distribution(z, kept)
    text = {
        "logprobs": whole[target],
        "entropy": entropy(whole),
        "logsumexp": normaliser,
        "mean_squared_logit": math.fsum(x * x for x in z if x != -math.inf) / valid,
        "mean_logit": math.fsum(z) / valid,
        "support_logprobs": among[target],
        "support_entropy": entropy(among),
    }
    gradient = []
    for v in everything:
        p, q = math.exp(whole[v]), math.exp(among[v]) if v in among else 0.0
        dz = wants["logprobs"] * ((v == target) - p) + wants["logsumexp"] * p
        if p:
            dz -= wants["entropy"] * p * (whole[v] + text["entropy"])
        if z[v] != -math.inf:
            dz += wants["mean_squared_logit"] * 2 * z[v] / valid
        dz += wants["mean_logit"] / valid
        if v in among:
            dz += wants["support_logprobs"] * ((v == target) - q)
        if q:
            dz -= wants["support_entropy"] * q * (among[v] + text["support_entropy"])
        gradient.append(dz * slope[v])
    return text, gradient


def row(hidden, weight, bias, targets, *, temperatures, scale, cap, valid, active, kept, wants):
    """Lists for a whole row: fields by name, and the gradients of hidden, weight and bias.

    A token that is not active, or whose target is negative, says 0 and moves nothing.
    """
    width = len(weight[0])
    d_hidden = [[0.0] * width for _ in hidden]
    d_weight = [[0.0] * width for _ in weight]
    d_bias = [0.0] * len(weight)
    fields = {name: [0.0] * len(hidden) for name in wants}
    for t, target in enumerate(targets):
        if not active[t] or target < 0:
            continue
        text, gradient = say(
            hidden[t],
            weight,
            bias,
            target,
            kept[t] if kept else None,
            temperature=temperatures[t],
            scale=scale,
            cap=cap,
            valid=valid,
            wants={name: values[t] for name, values in wants.items()},
        )
        for name in wants:
            fields[name][t] = text[name]
        for v, slope in enumerate(gradient):
            d_bias[v] += slope
            for d in range(width):
                d_hidden[t][d] += slope * weight[v][d]
                d_weight[v][d] += slope * hidden[t][d]
    return fields, d_hidden, d_weight, d_bias
