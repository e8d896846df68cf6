"""Policy surrogates the long way: plain floats, one document after another, one token after another.

A document is a mapping of equally long lists: policy, old, sampler, ref (log-probabilities), advantages, mask; and
reward, group. Every surrogate is two functions over all documents of a batch:

    value(documents, frozen, **parameters)              value of every token (0.0 where the mask is off)
    gradient(documents, weights, **parameters)          d(sum of weight * value) / d(policy log-probability)

``frozen`` holds the log-probabilities that stand under a stop-gradient; a finite difference moves ``documents`` and
leaves ``frozen`` where it was. Gradients are written out from the formulas, not by differentiation.

Sources: PPO 1707.06347; dual clip 1912.09729; INTELLECT-2 2505.07291; MiniMax-M1 (CISPO) 2506.13585; GSPO 2507.18071;
GMPO 2507.20673; SAPO 2511.20347; VESPO 2602.10693; LUSPO 2602.05261; GPG 2504.02546; DPPO 2602.04879; DRO 2405.19107;
Clip-Cov and KL-Cov 2505.22617; DPO 2305.18290; VAPO 2504.05118 (arXiv); ref_kl: prime-rl.
"""

from __future__ import annotations

import math

# -- one token -------------------------------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def clip(x, low, high):
    return max(low, min(high, x))


def ppo_of_ratio(r, a, *, clip_low, clip_high, dual_clip=None, delta=None):
    bounded = r if delta is None else min(r, delta)
    value = -min(bounded * a, clip(r, 1 - clip_low, 1 + clip_high) * a)
    if dual_clip is not None and a < 0:
        value = min(value, -dual_clip * a)
    return value


def slope_of_ppo(r, a, **bounds):
    """Return d value / d log r: the ratio's own branch is the one whose value it has."""
    return -r * a if ppo_of_ratio(r, a, **bounds) == -(r * a) else 0.0


def ppo(x, x0, anchor, a, *, log_clamp=math.inf, **bounds):
    return ppo_of_ratio(math.exp(clip(x - anchor, -log_clamp, log_clamp)), a, **bounds)


def ppo_slope(x, anchor, a, *, log_clamp=math.inf, **bounds):
    return slope_of_ppo(math.exp(x - anchor), a, **bounds) if abs(x - anchor) <= log_clamp else 0.0


def importance_sampling(x, x0, anchor, a):
    return -math.exp(x - anchor) * a


def importance_sampling_slope(x, anchor, a):
    return -math.exp(x - anchor) * a


def reinforce(x, x0, anchor, a):
    return -a * x


def reinforce_slope(x, anchor, a):
    return -a


def on_policy(x, x0, anchor, a):
    return -a * math.exp(x - x0)


def on_policy_slope(x, anchor, a):
    return -a


def cispo_weight(x, anchor, clip_low, clip_high, bounds):
    if bounds == "relative":
        low = -math.inf if clip_low is None else 1 - clip_low
        return clip(math.exp(x - anchor), low, 1 + clip_high)
    return clip(math.exp(x - anchor), -math.inf if clip_low is None else clip_low, clip_high)


def sapo(x, x0, anchor, a, *, tau_positive, tau_negative, log_clamp=math.inf):
    tau = tau_positive if a > 0 else tau_negative
    return -4 / tau * sigmoid(tau * (math.exp(clip(x - anchor, -log_clamp, log_clamp)) - 1)) * a


def sapo_slope(x, anchor, a, *, tau_positive, tau_negative, log_clamp=math.inf):
    if abs(x - anchor) > log_clamp:
        return 0.0
    tau, r = (tau_positive if a > 0 else tau_negative), math.exp(x - anchor)
    half = abs(tau * (r - 1) / 2)
    return 0.0 if half > 350 else -a * r / math.cosh(half) ** 2


def dro(x, x0, anchor, a, *, beta):
    return -(a * x - beta / 2 * (x - anchor) ** 2)


def dro_slope(x, anchor, a, *, beta):
    return -a + beta * (x - anchor)


def binary_kl(q, p):
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def dropped_tv(x, anchor, a, low, high):
    moved = math.exp(x) - math.exp(anchor)
    return moved > high if a > 0 else moved < -low


def dropped_kl(x, anchor, a, low, high):
    p, q = math.exp(x), math.exp(anchor)
    return binary_kl(q, p) > high and p > q if a > 0 else binary_kl(q, p) > low and p < q


def dropped_either_way(x, anchor, a, threshold):
    return abs(math.exp(x) - math.exp(anchor)) > threshold


def masked_ratio(x, x0, anchor, a, dropped, ratio_cap, log_clamp=math.inf):
    if dropped:
        return 0.0
    if ratio_cap is None:
        return -a * math.exp(clip(x - anchor, -log_clamp, log_clamp))
    return -a * min(math.exp(clip(x0 - anchor, -log_clamp, log_clamp)), ratio_cap) * x


def masked_ratio_slope(x, anchor, a, dropped, ratio_cap, log_clamp=math.inf):
    if dropped or (ratio_cap is None and abs(x - anchor) > log_clamp):
        return 0.0
    r = math.exp(clip(x - anchor, -log_clamp, log_clamp))
    return -a * (r if ratio_cap is None else min(r, ratio_cap))


def dppo_tv(x, x0, anchor, a, *, threshold_low, threshold_high, **held):
    return masked_ratio(
        x, x0, anchor, a, dropped_tv(x0, anchor, a, threshold_low, threshold_high), **{"ratio_cap": None, **held}
    )


def dppo_tv_slope(x, anchor, a, *, threshold_low, threshold_high, **held):
    return masked_ratio_slope(
        x, anchor, a, dropped_tv(x, anchor, a, threshold_low, threshold_high), **{"ratio_cap": None, **held}
    )


def dppo_kl(x, x0, anchor, a, *, threshold_low, threshold_high, **held):
    return masked_ratio(
        x, x0, anchor, a, dropped_kl(x0, anchor, a, threshold_low, threshold_high), **{"ratio_cap": None, **held}
    )


def dppo_kl_slope(x, anchor, a, *, threshold_low, threshold_high, **held):
    return masked_ratio_slope(
        x, anchor, a, dropped_kl(x, anchor, a, threshold_low, threshold_high), **{"ratio_cap": None, **held}
    )


def ipo(x, x0, anchor, a, *, threshold):
    return masked_ratio(x, x0, anchor, a, dropped_either_way(x0, anchor, a, threshold), None)


def ipo_slope(x, anchor, a, *, threshold):
    return masked_ratio_slope(x, anchor, a, dropped_either_way(x, anchor, a, threshold), None)


def sft(x, x0, anchor, a):
    return -x


def sft_slope(x, anchor, a, *, label_smoothing=0.0):
    """Of an unsmoothed loss: a smoothed one depends on more than a token's log-probability."""
    assert not label_smoothing
    return -1.0


# -- every token by itself -------------------------------------------------------------------------------------


def counted(document):
    return [t for t, on in enumerate(document["mask"]) if on]


def zeros(documents):
    return [[0.0] * len(document["mask"]) for document in documents]


def each_token(rule, slope):
    def value(documents, frozen, *, anchor="old", **parameters):
        out = zeros(documents)
        for d, (document, still) in enumerate(zip(documents, frozen, strict=True)):
            for t in counted(document):
                out[d][t] = rule(
                    document["policy"][t],
                    still["policy"][t],
                    document[anchor][t],
                    document["advantages"][t],
                    **parameters,
                )
        return out

    def gradient(documents, weights, *, anchor="old", **parameters):
        out = zeros(documents)
        for d, document in enumerate(documents):
            for t in counted(document):
                out[d][t] = weights[d][t] * slope(
                    document["policy"][t], document[anchor][t], document["advantages"][t], **parameters
                )
        return out

    return value, gradient


def ref_kl_value(documents, frozen, *, threshold_low, anchor="sampler"):
    """-sg[ref - l] r, 0 where the probability fell by more than the threshold."""
    out = zeros(documents)
    for d, (document, still) in enumerate(zip(documents, frozen, strict=True)):
        for t in counted(document):
            x0, other = still["policy"][t], document[anchor][t]
            if math.exp(x0) - math.exp(other) >= -threshold_low:
                out[d][t] = -(document["ref"][t] - x0) * math.exp(document["policy"][t] - other)
    return out


def ref_kl_gradient(documents, weights, *, threshold_low, anchor="sampler"):
    values = ref_kl_value(documents, documents, threshold_low=threshold_low, anchor=anchor)  # e^x is its own slope
    return [[w * v for w, v in zip(ws, vs, strict=True)] for ws, vs in zip(weights, values, strict=True)]


# -- one ratio a document --------------------------------------------------------------------------------------


def runs_of(document):
    """The unbroken runs of trained tokens."""
    runs, before = [], None
    for t in counted(document):
        if before is None or t != before + 1:
            runs.append([])
        runs[-1].append(t)
        before = t
    return runs


def parts_of(document, level):
    """Lists of tokens that share a ratio."""
    tokens = counted(document)
    if level == "segment":
        return runs_of(document)
    return [tokens] if tokens else []


def mean_log_ratio(document, part, anchor):
    return sum(document["policy"][t] - document[anchor][t] for t in part) / len(part)


def advantage_of(document, t, advantage_level):
    if advantage_level == "token":
        return document["advantages"][t]
    tokens = counted(document)
    return sum(document["advantages"][u] for u in tokens) / len(tokens)


def gspo_value(documents, frozen, *, anchor="old", level="document", advantage_level="token", **bounds):
    out = zeros(documents)
    for d, document in enumerate(documents):
        for part in parts_of(document, level):
            s = math.exp(mean_log_ratio(document, part, anchor))
            for t in part:
                out[d][t] = ppo_of_ratio(s, advantage_of(document, t, advantage_level), **bounds)
    return out


def gspo_gradient(documents, weights, *, anchor="old", level="document", advantage_level="token", **bounds):
    out = zeros(documents)
    for d, document in enumerate(documents):
        for part in parts_of(document, level):
            s = math.exp(mean_log_ratio(document, part, anchor))
            wanted = sum(
                weights[d][t] * slope_of_ppo(s, advantage_of(document, t, advantage_level), **bounds) for t in part
            )
            for t in part:
                out[d][t] = wanted / len(part)
    return out


def gspo_token_value(documents, frozen, *, anchor="old", level="document", log_cap=math.inf, **bounds):
    out = zeros(documents)
    for d, (document, still) in enumerate(zip(documents, frozen, strict=True)):
        for part in parts_of(document, level):
            log_s = mean_log_ratio(still, part, anchor)
            for t in part:
                own = math.exp(min(log_s + document["policy"][t] - still["policy"][t], log_cap))
                out[d][t] = ppo_of_ratio(own, document["advantages"][t], **bounds)
    return out


def gspo_token_gradient(documents, weights, *, anchor="old", level="document", log_cap=math.inf, **bounds):
    out = zeros(documents)
    for d, document in enumerate(documents):
        for part in parts_of(document, level):
            log_s = mean_log_ratio(document, part, anchor)
            for t in part:
                slope = slope_of_ppo(math.exp(log_s), document["advantages"][t], **bounds)
                out[d][t] = weights[d][t] * slope * (log_s <= log_cap)
    return out


def cispo_of_parts(documents, *, anchor, level, log_clamp=None, **bounds):
    """The truncated weight of each token: of its own ratio, or of the geometric mean over its document or segment."""
    result = zeros(documents)
    for number, document in enumerate(documents):
        parts = [[t] for t in counted(document)] if level == "token" else parts_of(document, level)
        for part in parts:
            ratio = mean_log_ratio(document, part, anchor)
            clamped = ratio if log_clamp is None else clip(ratio, -log_clamp, log_clamp)
            for t in part:
                result[number][t] = cispo_weight(clamped, 0.0, **bounds)
    return result


def cispo_value(documents, frozen, *, anchor="old", level="token", **bounds):
    weights = cispo_of_parts(frozen, anchor=anchor, level=level, **bounds)
    result = zeros(documents)
    for number, document in enumerate(documents):
        for t in counted(document):
            result[number][t] = -document["advantages"][t] * weights[number][t] * document["policy"][t]
    return result


def cispo_gradient(documents, weights, *, anchor="old", level="token", **bounds):
    truncated = cispo_of_parts(documents, anchor=anchor, level=level, **bounds)
    result = zeros(documents)
    for number, document in enumerate(documents):
        for t in counted(document):
            result[number][t] = -document["advantages"][t] * truncated[number][t] * weights[number][t]
    return result


def luspo_value(documents, frozen, **parameters):
    values = gspo_value(documents, frozen, **parameters)
    return [[len(counted(document)) * v for v in row] for document, row in zip(documents, values, strict=True)]


def luspo_gradient(documents, weights, **parameters):
    gradients = gspo_gradient(documents, weights, **parameters)
    return [[len(counted(document)) * g for g in row] for document, row in zip(documents, gradients, strict=True)]


def pessimistic(log_ratio, a, clip_low, clip_high):
    """sign(A) min(sign(A) d, sign(A) clip(d))."""
    sign = (a > 0) - (a < 0)
    return sign * min(sign * log_ratio, sign * clip(log_ratio, -clip_low, clip_high))


def gmpo_value(documents, frozen, *, anchor="old", clip_low, clip_high):
    out = zeros(documents)
    for d, document in enumerate(documents):
        tokens = counted(document)
        if not tokens:
            continue
        product = 1.0
        for t in tokens:
            log_ratio = document["policy"][t] - document[anchor][t]
            product *= math.exp(pessimistic(log_ratio, document["advantages"][t], clip_low, clip_high) / len(tokens))
        for t in tokens:
            out[d][t] = -document["advantages"][t] * product
    return out


def gmpo_gradient(documents, weights, *, anchor="old", clip_low, clip_high):
    values, out = (
        gmpo_value(documents, documents, anchor=anchor, clip_low=clip_low, clip_high=clip_high),
        zeros(documents),
    )
    for d, document in enumerate(documents):
        tokens = counted(document)
        wanted = sum(weights[d][t] * values[d][t] for t in tokens)
        for t in tokens:
            log_ratio, a = document["policy"][t] - document[anchor][t], document["advantages"][t]
            if a != 0 and pessimistic(log_ratio, a, clip_low, clip_high) == log_ratio:
                out[d][t] = wanted / len(tokens)
    return out


def vespo_weight(document, t, anchor, k_positive, lambda_positive, k_negative, lambda_negative):
    total = sum(clip(document["policy"][u] - document[anchor][u], -20, 20) for u in counted(document))
    w = math.exp(clip(total, math.log(1e-8), 20))
    rising = document["advantages"][t] >= 0
    k, decay = (k_positive, lambda_positive) if rising else (k_negative, lambda_negative)
    return math.exp(decay) * w**k * math.exp(-decay * w)


def vespo_value(documents, frozen, *, anchor="old", **shape):
    out = zeros(documents)
    for d, (document, still) in enumerate(zip(documents, frozen, strict=True)):
        for t in counted(document):
            out[d][t] = -vespo_weight(still, t, anchor, **shape) * document["advantages"][t] * document["policy"][t]
    return out


def vespo_gradient(documents, weights, *, anchor="old", **shape):
    out = zeros(documents)
    for d, document in enumerate(documents):
        for t in counted(document):
            out[d][t] = -weights[d][t] * vespo_weight(document, t, anchor, **shape) * document["advantages"][t]
    return out


# -- selections over all tokens of the batch -------------------------------------------------------------------


def covariances(documents):
    """(covariance, document, token) of every counted token."""
    tokens = [(d, t) for d, document in enumerate(documents) for t in counted(document)]
    mean_a = sum(documents[d]["advantages"][t] for d, t in tokens) / len(tokens)
    mean_x = sum(documents[d]["policy"][t] for d, t in tokens) / len(tokens)
    return [((documents[d]["advantages"][t] - mean_a) * (documents[d]["policy"][t] - mean_x), d, t) for d, t in tokens]


def clip_cov_candidates(documents, *, anchor="old", clip_low, clip_high, cov_low, cov_high):
    results = set()
    for cov, d, t in covariances(documents):
        document = documents[d]
        r, a = math.exp(document["policy"][t] - document[anchor][t]), document["advantages"][t]
        clipped_by_ppo = clip(r, 1 - clip_low, 1 + clip_high) * a < r * a
        if cov_low < cov < cov_high and not clipped_by_ppo:
            results.add((d, t))
    return results


def clip_cov_value(documents, frozen, *, anchor="old", clip_low, clip_high, cov_fraction, cov_low, cov_high):
    """With cov_fraction 1 every candidate is selected, and no choice among them is left to make."""
    assert cov_fraction == 1
    bounds = {"clip_low": clip_low, "clip_high": clip_high}
    out = each_token(ppo, ppo_slope)[0](documents, frozen, anchor=anchor, **bounds)
    for d, t in clip_cov_candidates(frozen, anchor=anchor, cov_low=cov_low, cov_high=cov_high, **bounds):
        out[d][t] = 0.0
    return out


def clip_cov_gradient(documents, weights, *, anchor="old", clip_low, clip_high, cov_fraction, cov_low, cov_high):
    bounds = {"clip_low": clip_low, "clip_high": clip_high}
    out = each_token(ppo, ppo_slope)[1](documents, weights, anchor=anchor, **bounds)
    for d, t in clip_cov_candidates(documents, anchor=anchor, cov_low=cov_low, cov_high=cov_high, **bounds):
        out[d][t] = 0.0
    return out


def kl_cov_selected(documents, fraction):
    ordered = sorted(covariances(documents), key=lambda found: (-found[0], found[1], found[2]))
    return {(d, t) for _, d, t in ordered[: max(1, int(fraction * len(ordered)))]}


def kl_cov_value(documents, frozen, *, anchor="old", cov_fraction, cov_coefficient):
    out = each_token(importance_sampling, importance_sampling_slope)[0](documents, frozen, anchor=anchor)
    for d, t in kl_cov_selected(frozen, cov_fraction):
        out[d][t] += cov_coefficient * abs(documents[d]["policy"][t] - documents[d][anchor][t])
    return out


def kl_cov_gradient(documents, weights, *, anchor="old", cov_fraction, cov_coefficient):
    out = each_token(importance_sampling, importance_sampling_slope)[1](documents, weights, anchor=anchor)
    for d, t in kl_cov_selected(documents, cov_fraction):
        d_log = documents[d]["policy"][t] - documents[d][anchor][t]
        out[d][t] += weights[d][t] * cov_coefficient * ((d_log > 0) - (d_log < 0))
    return out


# -- preference pairs and rewarded completions -----------------------------------------------------------------


def pairs_of(documents):
    """(chosen, rejected) indices, by group."""
    by_group = {}
    for d, document in enumerate(documents):
        if counted(document):
            by_group.setdefault(document["group"], []).append(d)
    return [tuple(sorted(pair, key=lambda d: -documents[d]["reward"])) for pair in by_group.values()]


def margin(documents, chosen, rejected):
    def implied(d):
        return sum(documents[d]["policy"][t] - documents[d]["ref"][t] for t in counted(documents[d]))

    return implied(chosen) - implied(rejected)


def dpo_value(documents, frozen, *, beta, label_smoothing=0.0):
    out = zeros(documents)
    for chosen, rejected in pairs_of(documents):
        m = beta * margin(documents, chosen, rejected)
        loss = -(1 - label_smoothing) * math.log(sigmoid(m)) - label_smoothing * math.log(sigmoid(-m))
        for d in (chosen, rejected):
            for t in counted(documents[d]):
                out[d][t] = loss
    return out


def dpo_gradient(documents, weights, *, beta, label_smoothing=0.0):
    out = zeros(documents)
    for chosen, rejected in pairs_of(documents):
        m = beta * margin(documents, chosen, rejected)
        slope = beta * (-(1 - label_smoothing) * sigmoid(-m) + label_smoothing * sigmoid(m))
        weight = sum(weights[d][t] for d in (chosen, rejected) for t in counted(documents[d]))
        for d, sign in ((chosen, 1), (rejected, -1)):
            for t in counted(documents[d]):
                out[d][t] = sign * weight * slope
    return out


def positive_nll(documents):
    """Mean negative log-likelihood over the tokens of rewarded documents; 0 if there is none."""
    tokens = [(d, t) for d, document in enumerate(documents) if document["reward"] > 0 for t in counted(document)]
    return sum(-documents[d]["policy"][t] for d, t in tokens) / len(tokens) if tokens else 0.0


ORACLES = {
    "ppo": each_token(ppo, ppo_slope),
    "importance_sampling": each_token(importance_sampling, importance_sampling_slope),
    "reinforce": each_token(reinforce, reinforce_slope),
    "gpg": each_token(reinforce, reinforce_slope),
    "on_policy": each_token(on_policy, on_policy_slope),
    "cispo": (cispo_value, cispo_gradient),
    "sapo": each_token(sapo, sapo_slope),
    "dro": each_token(dro, dro_slope),
    "dppo_tv": each_token(dppo_tv, dppo_tv_slope),
    "dppo_kl": each_token(dppo_kl, dppo_kl_slope),
    "ipo": each_token(ipo, ipo_slope),
    "ref_kl": (ref_kl_value, ref_kl_gradient),
    "sft": each_token(sft, sft_slope),
    "gspo": (gspo_value, gspo_gradient),
    "gspo_token": (gspo_token_value, gspo_token_gradient),
    "luspo": (luspo_value, luspo_gradient),
    "gmpo": (gmpo_value, gmpo_gradient),
    "vespo": (vespo_value, vespo_gradient),
    "clip_cov": (clip_cov_value, clip_cov_gradient),
    "kl_cov": (kl_cov_value, kl_cov_gradient),
    "dpo": (dpo_value, dpo_gradient),
}
"""Kind -> its value and its gradient."""


def total(kind, documents, frozen, weights, **parameters):
    """sum of weight * value over the batch."""
    values = ORACLES[kind][0](documents, frozen, **parameters)
    return sum(w * v for ws, vs in zip(weights, values, strict=True) for w, v in zip(ws, vs, strict=True))


def finite_differences(kind, documents, weights, *, step=1e-5, **parameters):
    """Return d(total) / d(policy log-probability) by central differences, with frozen stop-gradients."""
    out = zeros(documents)
    for d, document in enumerate(documents):
        for t in counted(document):
            ends = []
            for shift in (step, -step):
                moved = list(document["policy"])
                moved[t] += shift
                there = [*documents[:d], {**document, "policy": moved}, *documents[d + 1 :]]
                ends.append(total(kind, there, documents, weights, **parameters))
            out[d][t] = (ends[0] - ends[1]) / (2 * step)
    return out
