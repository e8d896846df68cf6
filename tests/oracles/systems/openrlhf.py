"""OpenRLHF's losses, row by row in float64 (OpenRLHF/OpenRLHF 0.11.2). Imports nothing of the workbench."""

import math

import torch


def tokens_of(mask, row):
    return [t for t in range(mask.shape[1]) if mask[row, t] > 0]


def shares(c, mask, *, by_token):
    """Return row -> the factor of each of its tokens."""
    lengths = [len(tokens_of(mask, i)) for i in range(len(mask))]
    if by_token:
        count = c.get("batch_num_tokens")
        each = 1 / sum(lengths) if count is None else c.get("dp_size", 1) / count
        return [each] * len(mask)
    count = c.get("global_batch_size")
    each = 1 / sum(n > 0 for n in lengths) if count is None else c.get("dp_size", 1) / count
    return [each / (n + 1e-8) for n in lengths]


def policy_loss(c, arrays):
    """Return loss, gradient and metrics; c has every option."""
    x = arrays["logprobs"].clone().requires_grad_()
    o, s, a, m = (arrays[name] for name in ("old_logprobs", "rollout_logprobs", "advantages", "mask"))
    gspo, level = c["policy_loss_type"] == "gspo", c["is_correction_level"]
    corrected, bounds = level != "off", (1 - c["clip_eps_low"], 1 + c["clip_eps_high"])
    low, high = c["is_correction_threshold"]
    filtered, kept_rows = 0, 0
    share = shares(c, m, by_token=c["token_level_loss"] and not gspo)
    loss, clipped, drift, gap, count = 0.0 * x.sum(), 0, 0.0, 0.0, 0
    for i in range(len(x)):
        own = tokens_of(m, i)
        if not own:
            continue
        anchor = s if gspo and corrected else o
        mean = torch.exp(sum(x[i, t] - anchor[i, t] for t in own) / len(own))
        of_tokens = {t: gated(c["is_correction_gating"], float(o[i, t]), float(s[i, t])) for t in own}
        of_row = sum(of_tokens.values()) / len(own)
        if c["is_correction_gating"] == "ratio":
            of_row = math.exp(sum(math.log(value) for value in of_tokens.values()) / len(own))
        kept_rows += int(low <= of_row <= high)
        for t in own:
            ratio = mean if gspo else torch.exp(torch.clamp(x[i, t] - o[i, t], -20, 20))
            plain, bounded = ratio * a[i, t], torch.clamp(ratio, *bounds) * a[i, t]
            gain = torch.minimum(plain, bounded)
            if c["dual_clip"] is not None and a[i, t] < 0:
                gain = torch.maximum(gain, c["dual_clip"] * a[i, t])
            weight = 1.0
            if corrected and not gspo:
                weight = math.exp(o[i, t] - s[i, t])
                inside = low <= (of_row if level == "seq" else of_tokens[t]) <= high
                filtered += int(not inside)
                if c["is_correction_mode"] == "clip":
                    weight = min(max(weight, low), high)
                elif not inside:
                    weight = 0.0
            loss = loss - share[i] * weight * gain
            clipped += int(bounded < plain)
            drift += float(o[i, t] - x[i, t].item())
            gap += float(s[i, t] - o[i, t])
            count += 1
    loss.backward()
    metrics = {"clip_ratio": clipped / count, "ppo_kl": drift / count}
    if corrected and not gspo:
        metrics["vllm_kl"] = gap / count
        metrics["is_filter_ratio"] = 1 - kept_rows / len(x) if level == "seq" else filtered / count
    return {"loss": loss.detach(), "grad_logprobs": x.grad, "metrics": metrics}


def gated(kind, old, sampler):
    """The statistic of a token that is_correction_threshold bounds."""
    if kind == "ratio":
        return math.exp(old - sampler)
    p, q = (min(max(math.exp(value), 1e-6), 1 - 1e-6) for value in (sampler, old))
    if kind == "tv":
        return abs(p - q)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def value_loss(c, arrays):
    v = arrays["values"].clone().requires_grad_()
    old, target, m = (arrays[name] for name in ("old_values", "returns", "mask"))
    share, loss = shares(c, m, by_token=c["token_level_loss"]), 0.0 * v.sum()
    for i in range(len(v)):
        for t in tokens_of(m, i):
            error = (v[i, t] - target[i, t]) ** 2
            if c["clip_eps"] is not None:
                near = old[i, t] + torch.clamp(v[i, t] - old[i, t], -c["clip_eps"], c["clip_eps"])
                error = torch.maximum(error, (near - target[i, t]) ** 2)
            loss = loss + share[i] * error / 2
    loss.backward()
    return {"loss": loss.detach(), "grad_values": v.grad}


def dpo(c, arrays):
    policy = torch.stack([arrays["chosen_logprob_sums"], arrays["rejected_logprob_sums"]]).requires_grad_()
    ref = torch.stack([arrays["ref_chosen_logprob_sums"], arrays["ref_rejected_logprob_sums"]])
    loss, number = 0.0, policy.shape[1]
    for p in range(number):
        h = (policy[0, p] - ref[0, p]) - (policy[1, p] - ref[1, p])
        if c["ipo"]:
            each = (h - 1 / (2 * c["beta"])) ** 2
        else:
            e, z = c["label_smoothing"], c["beta"] * h
            each = (1 - e) * torch.log(1 + torch.exp(-z)) + e * torch.log(1 + torch.exp(z))
        loss = loss + each / number
    loss.backward()
    rewards = c["beta"] * (policy.detach() - ref).sum(1) / number
    return {
        "loss": loss.detach(),
        "grad_chosen_rejected": policy.grad,
        "metrics": {"chosen_reward_mean": rewards[0].item(), "rejected_reward_mean": rewards[1].item()},
    }


def kl(kind, x, f):
    d = f - x
    value = {"k1": -d, "k2": d * d / 2, "k3": torch.exp(d) - 1 - d}[kind]
    return torch.clamp(value, -10, 10)


def token_rewards(c, rewards, kl_values, mask):
    """The reward on the last trained token (of an empty row: the last one), less the KL of every token."""
    out = [[-max(0.0, c["kl_coef"]) * k for k in row] for row in kl_values.tolist()]
    for i, reward in enumerate(rewards.tolist()):
        if c["reward_clip_range"] is not None:
            reward = min(max(reward, c["reward_clip_range"][0]), c["reward_clip_range"][1])
        out[i][(tokens_of(mask, i) or [mask.shape[1] - 1])[-1]] += reward
    return out
