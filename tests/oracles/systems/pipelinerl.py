"""One step of PipelineRL, document by document in float64 (58d39345). Imports nothing of the workbench."""

import statistics

import torch


def rl_step(config, arrays):
    """Loss, gradient and statistics of a packed row."""
    z = torch.tensor(arrays["logits"], requires_grad=True)
    logits = z.reshape(-1, z.shape[-1]) / config["temperature"]
    targets = arrays["targets"].reshape(-1)
    old, ref, advantage, reward, group, index = (
        torch.tensor(arrays[name]).reshape(-1)
        for name in ("old_logprobs", "ref_logprobs", "advantages", "rewards", "group_tokens", "document_index")
    )
    overflow = arrays.get("overflow")
    overflow = torch.zeros_like(reward) if overflow is None else torch.tensor(overflow).reshape(-1)
    log_p = torch.log_softmax(logits, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    share = config["current_step"] / config["max_step"]
    kl_coef = config["kl_coef"] + (config["final_kl_coef"] - config["kl_coef"]) * share
    bonus = config["entropy_bonus"] + (config["final_entropy_bonus"] - config["entropy_bonus"]) * share
    limit, low, high = config["clamp_log_ratio_ref_new_value"], config["epsilon_low"], config["epsilon_high"]
    means = dict.fromkeys(
        (
            "reward",
            "entropy",
            "old_logprobs",
            "new_logprobs",
            "ref_logprobs",
            "advantage",
            "kl",
            "kl_new_old",
            "mean_abs_log_ratio_new_old",
            "ratio_new_old",
            "ratio_ref_new",
            "ratio_ref_old",
            "token_weight",
            "clamp_log_ratio_ref_new_indicator",
            "clamp_log_ratio_new_old_indicator",
        ),
        0.0,
    )
    seen = {name: [] for name in ("reward", "advantage", "kl", "token_weight", "ratio")}
    total = z.sum() * 0.0
    documents = int(index.max()) + 1
    for document in range(documents):
        at = [t for t in range(len(targets)) if index[t] == document and targets[t] >= 0]
        if not at:
            continue
        x = torch.stack([log_p[t, targets[t]] for t in at])
        o, f, a, g, w, h = old[at], ref[at], advantage[at], reward[at], group[at], entropy[at]
        weight = 1 / w if config["group_normalization"] else torch.full_like(w, 1 / config["batch_size"])
        if config["overlong_filtering"]:
            weight = weight * (1 - overflow[at])
        ratio = torch.exp(x - o)
        d = torch.clamp(f - x, -limit, limit)
        kl = torch.exp(d) - d - 1
        signal = a if config["use_advantages"] else g
        if config["relu_log_p_weights"]:
            signal = torch.clamp(signal, min=0)
        shown = ratio
        if config["policy_loss"] == "gspo":
            whole, mean = torch.exp((x - o).mean()), a.mean()
            clamped = torch.clamp(whole, 1 - low, 1 + high)
            if weight.sum() > 0:
                total = total - weight.sum() * torch.minimum(whole * mean, clamped * mean)
            outside = torch.full_like(x, float((clamped != whole).item() and weight.sum().item() > 0))
        else:
            if config["policy_loss"] == "ppo":
                clamped = torch.clamp(ratio, 1 - low, 1 + high)
                value, outside = torch.minimum(ratio * signal, clamped * signal), (clamped != ratio).double()
            else:
                outside = (ratio > 1 + high).double()
                shown = torch.clamp(ratio, 0, 1 + high)
                value = x * signal * shown.detach()
            total = total - (weight * (value - kl_coef * kl + bonus * h)).sum()
        for name, values in (
            ("reward", g),
            ("entropy", h),
            ("old_logprobs", o),
            ("new_logprobs", x),
            ("ref_logprobs", f),
            ("advantage", a),
            ("kl", kl),
            ("kl_new_old", ratio - (x - o) - 1),
            ("mean_abs_log_ratio_new_old", (x - o).abs()),
            ("ratio_new_old", shown),
            ("ratio_ref_new", torch.exp(f - x)),
            ("ratio_ref_old", torch.exp(f - o)),
            ("token_weight", weight),
            ("clamp_log_ratio_ref_new_indicator", ((f - x).abs() > limit).double()),
            ("clamp_log_ratio_new_old_indicator", outside),
        ):
            means[name] += values.mean().item()
        for name, values in (("reward", g), ("advantage", a), ("kl", kl), ("token_weight", weight), ("ratio", shown)):
            seen[name] += values.tolist()
    total.backward()
    loss = total.item()
    extremes = {
        f"{edge}_{name}": pick(seen[name])
        for name in ("reward", "advantage", "kl", "token_weight")
        for edge, pick in (("max", max), ("min", min))
    }
    metrics = {
        **means,
        **extremes,
        "loss": loss,
        "max_loss": loss,
        "min_loss": loss,
        "kl_coef": documents * kl_coef,
        "entropy_bonus_coef": documents * bonus,
        "num_output_tokens_sum": float(len(seen["ratio"])),
        "ratio_new_old_sum": sum(seen["ratio"]),
        "ratio_new_old_squared_sum": sum(r * r for r in seen["ratio"]),
        "input_size": float(z.shape[0] * (z.shape[1] + 1)),
    }
    return {"loss": total.detach(), "grad_logits": z.grad, "metrics": metrics}


def leave_one_out(config, rewards, group_ids):
    """Rewards against the mean of the others, over the deviation of all."""
    results = []
    for i, reward in enumerate(rewards):
        members = [float(r) for r, g in zip(rewards, group_ids, strict=True) if g == group_ids[i]]
        if len(members) == 1:
            results.append(0.0)
            continue
        difference = reward - (sum(members) - reward) / (len(members) - 1)
        results.append(
            difference / (statistics.stdev(members) + 1e-4) if config["divide_advantage_by_std"] else difference
        )
    return {"advantages": torch.tensor(results, dtype=torch.float64)}
