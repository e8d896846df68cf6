"""SkyRL's policy losses with their penalties, row by row in float64 (NovaSky-AI/SkyRL 0.3.0).

Imports nothing of the workbench.
"""

import math

import torch


def shares(c, mask, groups):
    """Return row -> the factor of each of its tokens in the policy term."""
    rows, lengths = len(mask), [int(row.sum()) for row in mask]
    if c["loss_reduction"] in ("token_mean", "token_mean_legacy"):
        return [1 / max(sum(lengths), 1)] * rows
    if c["loss_reduction"] == "sequence_mean":
        return [1 / (rows * max(n, 1)) for n in lengths]
    if c["loss_reduction"] == "seq_mean_token_sum_norm":
        return [1 / (rows * c["max_seq_len"])] * rows
    prompts = sorted(set(groups))
    of_prompt = {p: sum(n for n, own in zip(lengths, groups, strict=True) if own == p) for p in prompts}
    return [1 / (len(prompts) * max(of_prompt[p], 1)) for p in groups]


def weight_and_kept(c, old, sampler, own):
    """Return (token -> weight, token -> kept) of a row with the tokens ``own``."""
    options = {
        "tis_ratio_type": None,
        "token_tis_ratio_clip_high": 2.0,
        "sequence_tis_ratio_clip_high": 5.0,
        "sequence_mask_metric": None,
        "geo_mask_low": 0.99,
        "geo_mask_high": 1.01,
        "product_mask_low": 0.5,
        "product_mask_high": 2.0,
        "outlier_token_is_threshold_low": None,
        "outlier_token_is_threshold_high": None,
        "token_mask_is_threshold_low": None,
        "token_mask_is_threshold_high": None,
        **c["off_policy_correction"],
    }
    gap = {t: float(old[t] - sampler[t]) for t in own}
    ratio = {t: math.exp(min(max(g, -20), 20)) for t, g in gap.items()}
    kept = dict.fromkeys(own, True)
    low, high = options["outlier_token_is_threshold_low"], options["outlier_token_is_threshold_high"]
    if any((low is not None and r < low) or (high is not None and r > high) for r in ratio.values()):
        kept = dict.fromkeys(own, False)
    low, high = options["token_mask_is_threshold_low"], options["token_mask_is_threshold_high"]
    if low is not None and high is not None:
        kept = {t: kept[t] and low <= ratio[t] <= high for t in own}
    total = sum(gap.values())
    if options["sequence_mask_metric"] is not None and own:
        mean = options["sequence_mask_metric"] == "geometric"
        value, name = math.exp(total / len(own) if mean else total), "geo" if mean else "product"
        if not options[f"{name}_mask_low"] <= value <= options[f"{name}_mask_high"]:
            kept = dict.fromkeys(own, False)
    weight = dict.fromkeys(own, 1.0)
    if options["tis_ratio_type"] == "token":
        weight = {t: min(ratio[t], options["token_tis_ratio_clip_high"]) for t in own}
    elif options["tis_ratio_type"] == "sequence":
        weight = dict.fromkeys(own, min(math.exp(total), options["sequence_tis_ratio_clip_high"]))
    return weight, kept


def of_token(c, x, old, sampler, a, mean):
    """Return (value, clipped) of a token with the advantage a; mean: of the row's log ratio."""
    kind, low, high = c["policy_loss_type"], 1 - c["eps_clip_low"], 1 + c["eps_clip_high"]
    ratio = torch.exp(torch.clamp(x - old, -20, 20))
    if kind in ("regular", "dual_clip", "gspo"):
        if kind == "gspo":
            ratio = torch.exp(torch.clamp(x - x.detach() + mean, max=10))
        plain, bounded = ratio * a, torch.clamp(ratio, low, high) * a
        value = -torch.minimum(plain, bounded)
        if kind == "dual_clip" and a < 0:
            value = torch.minimum(-a * c["clip_ratio_c"], value)
        return value, bool(bounded < plain)
    if kind == "sapo":
        tau = c["sapo"]["tau_pos"] if a > 0 else c["sapo"]["tau_neg"]
        return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * a, False
    if kind == "cispo":
        bounds = 1 - c["cispo"]["cispo_eps_clip_low"], 1 + c["cispo"]["cispo_eps_clip_high"]
        return -a * ratio.detach().clamp(*bounds) * x, not bounds[0] <= float(ratio.detach()) <= bounds[1]
    if kind == "importance_sampling":
        return -torch.exp(x - old) * a, False
    ratio = torch.exp(torch.clamp(x - sampler, -20, 20))
    if kind == "rollout_is":
        inside = low < float(ratio.detach()) < high
        return -(float(ratio.detach()) if inside else 0.0) * a * x, not inside
    p, q, d = math.exp(float(x.detach())), math.exp(float(sampler)), c["dppo"]
    moved = p - q
    if d["dppo_type"] == "binary_kl":
        moved = q * float((sampler - x).detach()) + (1 - q) * math.log((1 - q) / (1 - p))
        moved = math.copysign(moved, p - q)
    dropped = (a > 0 and moved > d["delta_high"]) or (a < 0 and -moved > d["delta_low"])
    return -ratio * a * (0.0 if dropped else 1.0), bool(dropped)


def kl_of(kind, x, ref):
    if kind == "k3":
        d = torch.clamp(ref - x, -20, 20)
        return torch.clamp(torch.exp(d) - d - 1, -10, 10)
    d = x - ref
    return {"k1": d, "abs": d.abs(), "k2": d * d / 2}[kind]


def policy_loss(c, arrays):
    """Return loss, gradient and metrics; c has every option that is read here."""
    x = arrays["logprobs"].clone().requires_grad_()
    o, s, r, h, a, m = (
        arrays[n] for n in ("old_logprobs", "rollout_logprobs", "ref_logprobs", "entropies", "advantages", "mask")
    )
    share = shares(c, m, arrays["group_ids"][:, 0].tolist())
    loss, clipped, count, kl, entropy = 0.0 * x.sum(), 0, int(m.sum()), 0.0, 0.0
    for i in range(len(x)):
        own = [t for t in range(m.shape[1]) if m[i, t] > 0]
        mean = sum((x[i, t] - o[i, t]).detach() for t in own) / max(len(own), 1)
        weight, kept = weight_and_kept(c, o[i], s[i], own)
        for t in own:
            value, cut = of_token(c, x[i, t], o[i, t], s[i, t], a[i, t], mean)
            loss = loss + share[i] * weight[t] * value * (1.0 if kept[t] else 0.0)
            clipped += cut
            kl = kl + kl_of(c["kl_estimator_type"], x[i, t], r[i, t]) / len(own) / len(x)
            entropy += float(h[i, t]) / count
    metrics = {"policy/loss_metrics/clip_ratio": clipped / max(count, 1), "policy/policy_entropy": entropy}
    if c["use_kl_loss"]:
        loss = loss + c["kl_loss_coef"] * kl
        metrics["policy/policy_kl"] = float(kl.detach())
    if c["use_entropy_loss"]:
        loss = loss - c["entropy_loss_coef"] * entropy
    loss.backward()
    return {"loss": loss.detach(), "grad_logprobs": x.grad, "metrics": metrics}
