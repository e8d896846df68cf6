"""NeMo-RL's losses, row by row in float64 (NVIDIA-NeMo/RL 7ea279ab). Imports nothing of the workbench.

Arrays are [rows, tokens] tensors, aligned to the token that is predicted. Every count that divides has 1e-8 more.
"""

import math

import torch

TINY = 1e-8


def estimate(kind, d):
    """Of KL(p || q) from d = log q - log p."""
    return {"k1": -d, "k2": d * d / 2, "k3": torch.exp(d) - 1 - d}[kind]


def held(x, bound):
    return x if bound is None else torch.clamp(x, -bound, bound)


def kl(kind, x, f, input_clamp, output_clamp, weight=None):
    d = f - x
    inside = held(d, input_clamp)
    value = estimate(kind, inside)
    if weight is not None:
        value = torch.where(inside == d, weight, weight.detach()) * value
    return held(value, output_clamp)


def tokens_of(mask, row):
    return [t for t in range(mask.shape[1]) if mask[row, t] > 0]


def policy_loss(c, arrays):
    """Return loss, gradient and metrics of the clipped loss; c has every option, and the global counts."""
    x = arrays["logprobs"].clone().requires_grad_()
    s, f, a, m = (arrays[name] for name in ("rollout_logprobs", "ref_logprobs", "advantages", "mask"))
    sampled = arrays.get("sample_mask", torch.ones(len(x), dtype=torch.float64))
    old = x.detach() if c["force_on_policy_ratio"] else arrays["old_logprobs"]
    by_token, of_rows = c["token_level_loss"], c["sequence_level_importance_ratios"]
    tokens, rows = c["global_valid_toks"] + TINY, c["global_valid_seqs"] + TINY
    low, high = 1 - c["ratio_clip_min"], 1 + c["ratio_clip_max"]
    kind, top, bottom = (c[f"truncated_importance_sampling_{n}"] for n in ("type", "ratio", "ratio_min"))
    policy = penalty = 0.0 * x.sum()
    looks, helds, weights, outside, errors = (
        [],
        [],
        [],
        0.0,
        dict.fromkeys(
            ("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error", "approx_entropy"), 0.0
        ),
    )
    for i in range(len(x)):
        own = tokens_of(m, i)
        if not sampled[i]:
            continue
        share = 1 / tokens if by_token else 1 / ((len(own) + TINY) * rows)
        mean_ratio = torch.exp(sum(x[i, t] - old[i, t] for t in own) / (len(own) + TINY)) if own else None
        product = math.exp(sum(float(old[i, t] - s[i, t]) for t in own))
        geometric = math.exp(sum(float(old[i, t] - s[i, t]) for t in own) / (len(own) + TINY))
        kept_row = kind != "seq-mask-tis" or bottom <= geometric <= top
        outside += 0.0 if kept_row else 1 / rows
        for t in own:
            p, o, q, adv = x[i, t], old[i, t], s[i, t], a[i, t]
            if c["force_on_policy_ratio"]:
                ratio = clipped = torch.exp(p - p.detach())
            elif c["disable_ppo_ratio"]:
                ratio = clipped = p
            else:
                ratio = mean_ratio if of_rows else torch.exp(p - o)
                clipped = torch.clamp(ratio, low, high)
            term = -adv * clipped.detach() * p if c["use_cispo"] else torch.maximum(-adv * ratio, -adv * clipped)
            if c["ratio_clip_c"] is not None and adv < 0:
                term = torch.minimum(term, -adv * c["ratio_clip_c"])
            weight = product if of_rows else math.exp(o - q)
            if kind in ("tis", "icepop"):
                floor = bottom or 0.0
                beyond = not floor <= weight <= top
                outside += beyond / tokens
                weight = (0.0 if beyond else weight) if kind == "icepop" else min(max(weight, floor), top)
            if not kept_row:
                weight = 0.0
            if c["use_importance_sampling_correction"]:
                term = weight * term
            policy = policy + share * term
            if c["reference_policy_kl_penalty"] and not c["use_kl_in_reward"]:
                u = torch.exp(p - q) if c["use_on_policy_kl_approximation"] else torch.exp(p - p.detach())
                penalty = penalty + share * kl(
                    c["reference_policy_kl_type"], p, f[i, t], c["kl_input_clamp_value"], c["kl_output_clamp_value"], u
                )
            looks.append(ratio.item())
            helds.append(clipped.item())
            weights.append(weight)
            mixture = math.log((math.exp(o) + math.exp(q)) / 2)
            pair = [estimate("k3", torch.tensor(float(v) - mixture, dtype=torch.float64)) for v in (o, q)]
            for name, value in (
                ("token_mult_prob_error", math.exp(abs(q - o))),
                ("gen_kl_error", estimate(c["reference_policy_kl_type"], o - q)),
                ("policy_kl_error", estimate(c["reference_policy_kl_type"], q - o)),
                ("js_divergence_error", (pair[0] + pair[1]) / 2),
                ("approx_entropy", -math.exp(p.item() - q) * p.item()),
            ):
                errors[name] += float(value) / tokens
    likelihood = torch.zeros((), dtype=torch.float64)
    if c["positive_example_nll_weight"] and "rewards" in arrays:
        good = [(i, t) for i in range(len(x)) if sampled[i] and arrays["rewards"][i] > 0 for t in tokens_of(m, i)]
        likelihood = sum((-x[i, t] for i, t in good), 0.0 * x.sum()) / (len(good) + TINY)
    coefficient = 0.0 if c["use_kl_in_reward"] else c["reference_policy_kl_penalty"]
    loss = policy + coefficient * penalty + c["positive_example_nll_weight"] * likelihood
    loss.backward()
    metrics = {
        "loss": loss.item(),
        "kl_penalty": penalty.item(),
        "positive_nll_loss": likelihood.item(),
        "num_valid_samples": float(sampled.sum()),
        **errors,
    }
    for name, values in (("probs_ratio", looks), ("probs_ratio_clamped", helds)):
        metrics |= {
            name: sum(values) / tokens,
            f"{name}_min": min(values, default=math.inf),
            f"{name}_max": max(values, default=-math.inf),
        }
    if not of_rows:
        metrics["sampling_importance_ratio"] = sum(weights) / tokens
    if kind is not None:
        metrics["is_oob_ratio"] = outside
    return {"loss": loss.detach(), "grad_logprobs": x.grad, "metrics": metrics}


def nll(c, arrays):
    x = arrays["logprobs"].clone().requires_grad_()
    counted = [(i, t) for i in range(len(x)) if arrays["sample_mask"][i] for t in tokens_of(arrays["mask"], i)]
    loss = sum((-x[i, t] for i, t in counted), 0.0 * x.sum()) / (c["global_valid_toks"] + TINY)
    loss.backward()
    return {
        "loss": loss.detach(),
        "grad_logprobs": x.grad,
        "metrics": {
            "loss": loss.item(),
            "num_unmasked_tokens": len(counted),
            "num_valid_samples": float(arrays["sample_mask"].sum()),
        },
    }


def bradley_terry(rewards, sampled, sequences, beta=1.0):
    """(loss, metrics) of rows 2i, chosen, and 2i + 1, rejected."""
    pairs, loss = sequences / 2 + TINY, 0.0
    metrics = {"accuracy": 0.0, "rewards_chosen_mean": 0.0, "rewards_rejected_mean": 0.0}
    for i in range(0, len(rewards), 2):
        chosen, rejected = rewards[i], rewards[i + 1]
        loss = loss + sampled[i] * torch.log(1 + torch.exp(-beta * (chosen - rejected))) / pairs
        metrics["accuracy"] += float(sampled[i] * (chosen > rejected)) / pairs
        metrics["rewards_chosen_mean"] += float(sampled[i] * chosen.detach()) / pairs
        metrics["rewards_rejected_mean"] += float(sampled[i + 1] * rejected.detach()) / pairs
    return loss, metrics | {"num_valid_samples": float(sampled.sum()) / 2}


def preference(c, arrays):
    rewards = arrays["rewards"].clone().requires_grad_()
    loss, metrics = bradley_terry(rewards.reshape(-1), arrays["sample_mask"], c["global_valid_seqs"])
    loss.backward()
    return {"loss": loss.detach(), "grad_rewards": rewards.grad, "metrics": metrics | {"loss": loss.item()}}


def dpo(c, arrays):
    x = arrays["logprobs"].clone().requires_grad_()
    f, m, sampled = arrays["ref_logprobs"], arrays["mask"], arrays["sample_mask"]
    rewards, likelihood = [], 0.0 * x.sum()
    for i in range(len(x)):
        own = tokens_of(m, i)
        total = sum((x[i, t] - f[i, t] for t in own), 0.0 * x[i, 0])
        rewards.append(total / max(1, len(own)) if c["preference_average_log_probs"] else total)
        if i % 2 == 0 and sampled[i]:
            each = sum((-x[i, t] for t in own), 0.0 * x[i, 0])
            likelihood = likelihood + (each / max(1, len(own)) if c["sft_average_log_probs"] else each)
    likelihood = likelihood / (c["global_valid_seqs"] / 2 + TINY)
    loss, metrics = bradley_terry(rewards, sampled, c["global_valid_seqs"], c["reference_policy_kl_penalty"])
    total = c["preference_loss_weight"] * loss + c["sft_loss_weight"] * likelihood
    total.backward()
    metrics |= {
        "loss": total.item(),
        "preference_loss": loss.item(),
        "sft_loss": likelihood.item() if c["sft_loss_weight"] else 0.0,
    }
    return {"loss": total.detach(), "grad_logprobs": x.grad, "metrics": metrics}


def value(c, arrays):
    v = arrays["values"].clone().requires_grad_()
    old, target, m = (arrays[name] for name in ("old_values", "returns", "mask"))
    count, clip, loss = c["global_valid_toks"] + TINY, c["cliprange"], 0.0 * v.sum()
    sums = dict.fromkeys(("vf_clipfrac", "returns_mean", "values_mean", "returns_sq_mean", "residual_sq_mean"), 0.0)
    here = [(i, t) for i in range(len(v)) for t in tokens_of(m, i)]
    for i, t in here:
        error = (v[i, t] - target[i, t]) ** 2
        if clip:
            pessimistic = (torch.clamp(v[i, t], old[i, t] - clip, old[i, t] + clip) - target[i, t]) ** 2
            sums["vf_clipfrac"] += float(pessimistic > error) / count
            loss = loss + torch.maximum(error, pessimistic) / 2 / count
        else:
            loss = loss + error / 2 / count
        sums["returns_mean"] += float(target[i, t]) / count
        sums["values_mean"] += v[i, t].item() / count
        sums["returns_sq_mean"] += float(target[i, t]) ** 2 / count
        sums["residual_sq_mean"] += error.item() / count
    loss = c["scale"] * loss
    loss.backward()
    values = [v[i, t].item() for i, t in here]
    return {
        "loss": loss.detach(),
        "grad_values": v.grad,
        "metrics": sums
        | {
            "loss": loss.item(),
            "values_min": min(values, default=0.0),
            "values_max": max(values, default=0.0),
            "num_valid_samples": len(v),
        },
    }


def deviation(values):
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((r - mean) ** 2 for r in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def group_advantages(c, rewards, groups):
    """(advantages, baselines, deviations): of the others of the group where one is left out."""
    advantages, baselines, deviations = [], [], []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and j != i]
        looked_at = others if c["use_leave_one_out_baseline"] else [*others, reward]
        alone = not others
        baselines.append(reward if alone else math.fsum(looked_at) / len(looked_at))
        deviations.append(0.0 if alone or max(looked_at) == min(looked_at) else deviation(looked_at))
        divide = c["normalize_rewards"] and deviations[-1] > 0
        advantages.append((reward - baselines[-1]) / (deviations[-1] + 1e-6 if divide else 1.0))
    return advantages, baselines, deviations


def whitened(values, counted, *, ddof, floor, tiny):
    """Every value, by mean and variance of those that count."""
    chosen = [v for v, on in zip(values, counted, strict=True) if on]
    count = len(chosen) + tiny
    mean = math.fsum(chosen) / count
    variance = math.fsum((v - mean) ** 2 for v in chosen) / count * len(chosen) / (len(chosen) - ddof)
    root = math.sqrt(max(variance, 1e-8) if floor else variance + 1e-8)
    return [(v - mean) / root for v in values]


def penalty(c, x, f):
    """Of one token, in the reward; clamped by 20 and 10."""
    if c["kl_in_reward"] is None:
        return 0.0
    return c["kl_coef"] * float(kl(c["kl_in_reward"], x, f, 20.0, 10.0))


def reinforce_plus_plus(c, arrays):
    rewards, groups = arrays["rewards"].tolist(), arrays["group_ids"].tolist()
    if c["minus_baseline"]:
        _, baselines, _ = group_advantages(
            {"use_leave_one_out_baseline": False, "normalize_rewards": False}, rewards, groups
        )
        rewards = [r - b for r, b in zip(rewards, baselines, strict=True)]
    shape, m = arrays["mask"].shape, arrays["mask"]
    flat = [
        rewards[i] - penalty(c, arrays["logprobs"][i, t], arrays["ref_logprobs"][i, t])
        for i in range(shape[0])
        for t in range(shape[1])
    ]
    result = whitened(flat, m.reshape(-1).tolist(), ddof=0, floor=True, tiny=0.0)
    return torch.tensor(result, dtype=torch.float64).reshape(shape)


def gae(c, arrays):
    """Return (advantages, returns), masked tokens carrying the value of the next trained one."""
    m, v = arrays["mask"], arrays["values"].tolist()
    advantages, returns = torch.zeros(2, *m.shape, dtype=torch.float64)
    for i in range(len(m)):
        own = tokens_of(m, i)
        rewards = {t: -penalty(c, arrays["logprobs"][i, t], arrays["ref_logprobs"][i, t]) for t in own}
        if own:
            rewards[own[-1]] += float(arrays["rewards"][i])
        lambdas = [
            c["gae_lambda"] if c["gae_lambda_policy"] is None else c["gae_lambda_policy"],
            c["gae_lambda"] if c["gae_lambda_value"] is None else c["gae_lambda_value"],
        ]
        if c["length_adaptive_alpha"]:
            lambdas[0] = 1 - 1 / max(1.0, c["length_adaptive_alpha"] * len(own))
        for out, lam in zip((advantages, returns), lambdas, strict=True):
            for t in range(m.shape[1]):
                later = [u for u in own if u >= t]
                steps = [
                    rewards[u] + (c["gae_gamma"] * v[i][later[k + 1]] if k + 1 < len(later) else 0.0) - v[i][u]
                    for k, u in enumerate(later)
                ]
                out[i, t] = sum((c["gae_gamma"] * lam) ** k * step for k, step in enumerate(steps))
    returns += arrays["values"]
    if c["normalize_advantages"]:
        result = whitened(advantages.reshape(-1).tolist(), m.reshape(-1).tolist(), ddof=1, floor=False, tiny=TINY)
        advantages = torch.tensor(result, dtype=torch.float64).reshape(m.shape)
    return torch.where(m > 0, advantages, 0.0), returns


def shaped(c, rewards, lengths=None, truncated=None):
    if c.get("stop_properly_penalty_coef") is not None:
        return [c["stop_properly_penalty_coef"] * r if cut else r for r, cut in zip(rewards, truncated, strict=True)]
    start = c["max_response_length"] - c["overlong_buffer_length"]
    return [
        r + min(0.0, -(n - start) / c["overlong_buffer_length"] * c["overlong_buffer_penalty"])
        for r, n in zip(rewards, lengths, strict=True)
    ]
