"""The GRPO step of the torchtitan fork, row by row in float64 (94d6abd4). Imports nothing of the workbench.

Two of its mistakes are left out, as wherever these numbers are compared: the gradient of its sequence ratio (twice the
right one), and the geometric importance weight (one of the batch in place of the row's).
"""

import math

import torch

ROWS = "mean over rows of per-row token mean"


def step(config, arrays):
    """Loss, gradient, the matrix of losses and every metric."""
    z = torch.tensor(arrays["logits"], requires_grad=True)
    rows, width = arrays["targets"].shape
    log_p = torch.log_softmax(z, -1)
    x = torch.gather(log_p, -1, torch.tensor(arrays["targets"])[..., None])[..., 0]
    reward, mask = torch.tensor(arrays["advantages"]), torch.tensor(arrays["mask"])
    on_policy = "old_logprobs" not in arrays
    old = x.detach() if on_policy else torch.tensor(arrays["old_logprobs"])
    threshold = config["onpolicy_logp_threshold"]
    above = mask.clone()
    if threshold not in (0.0, 1.0):
        floor = math.log(threshold) if 0 < threshold < 1 else threshold
        above = mask * (x.detach() >= floor)
    low, high = 1 - config["clip_ratio_lower_bound"], 1 + config["clip_ratio_upper_bound"]
    weights, sampler_metrics = _importance(config["rollout_is"], arrays, old, above)
    losses, ratios = torch.zeros_like(x), torch.zeros_like(x)
    for b in range(rows):
        log_ratio = x[b] - old[b]
        if config["policy_ratio_type"] == "sequence":
            log_ratio = ((log_ratio * above[b]).sum() / above[b].sum().clamp(min=1)).expand(width)
        for t in range(width):
            ratio = torch.exp(log_ratio[t])
            ratios[b, t] = ratio.detach()
            clamped = ratio
            if not on_policy:
                clamped = torch.clamp(ratio, max=high) if reward[b, t] > 0 else torch.clamp(ratio, min=low)
            losses[b, t] = -reward[b, t] * clamped * weights[b, t]
    entropy = (log_p.exp() * log_p).sum(-1) * config["entropy_loss_weight"]
    logit = ((config["logit_loss_weight"] * z) ** 2).mean(-1)
    losses = (
        losses
        + (entropy if config["entropy_loss_weight"] > 0 else 0)
        + (logit if config["logit_loss_weight"] > 0 else 0)
    )
    ref = torch.tensor(arrays["ref_logprobs"]) if config["use_ref_model"] else None
    if ref is not None:
        d = ref - x
        kl = {"k3": torch.exp(d) - d - 1, "mse": d * d / 2, "abs": d.abs()}[config["kl_estimator_type"]]
        losses = losses + max(config["kl_beta"], 0.0) * kl
    by_row = (losses * mask).sum(-1) / mask.sum(-1)
    loss = by_row.mean() if config["reduction"] == ROWS else (losses * mask).sum() / mask.sum()
    loss.backward()

    x, good, bad = x.detach(), (reward > 0).double(), (reward <= 0).double()

    def mean(values, at=above):
        return ((values * at).sum() / at.sum()).item()

    def over_rows(values, at=above):
        return ((values * at).sum(-1) / at.sum(-1)).mean().item()

    def of_many(values, at):
        return mean(values, at) if at.sum() > 1 else 0.0

    metrics = {
        "loss_metrics/global_logp": over_rows(x, mask),
        "loss_metrics/global_ratio": over_rows(ratios),
        "loss_metrics/global_logit_loss": over_rows(logit.detach() if config["logit_loss_weight"] > 0 else 0 * x),
        "loss_metrics/global_entropy_loss": over_rows(entropy.detach() if config["entropy_loss_weight"] > 0 else 0 * x),
        "loss_metrics/global_logits_mean": mean(z.detach().mean(-1)),
        "loss_metrics/global_total_pos": float(good.sum() > 1),
        "loss_metrics/global_total_neg": float(bad.sum() > 1),
        "loss_metrics/global_pos_logp": of_many(x, good * above) * over_rows(torch.ones_like(x), mask),
        "loss_metrics/global_neg_logp": of_many(x, bad * above) * over_rows(torch.ones_like(x), mask),
        "loss_metrics/global_pos_reward": good.mean().item(),
        "loss_metrics/global_neg_reward": bad.mean().item(),
        "loss_metrics/global_advantages": reward.mean().item(),
        "logp_dist/threshold_filter_ratio": 1 - mean((above > 0).double(), mask),
        **_spread("logp_dist", x, mask),
        **sampler_metrics,
    }
    if sampler_metrics:
        metrics["inflogp_dist/importance_ratio"] = mean(weights)
    if on_policy:
        metrics["raw_ratio"] = mean(ratios)
    else:
        under, over = (ratios < low).double() * bad, (ratios > high).double() * good
        metrics |= {
            "loss_metrics/global_clip_ratio": mean(under + over),
            "loss_metrics/global_clip_ratio_pos": mean(over),
            "loss_metrics/global_clip_ratio_neg": mean(under),
            "loss_metrics/global_offp_logp": mean(x),
            "loss_metrics/global_offp_ref_logp": 0.0 if ref is None else mean(ref),
        }
    if ref is not None:
        margin = reward * (x - ref)
        metrics |= {
            "loss_metrics/ref_logp": mean(ref, mask),
            "loss_metrics/kl_div_est": mean(kl.detach()),
            "loss_metrics/margin": mean(margin),
            "loss_metrics/pos_margin": of_many(margin, good * above),
            "loss_metrics/neg_margin": of_many(margin, bad * above),
            "loss_metrics/pos_ref_logp": of_many(ref, good * above),
            "loss_metrics/neg_ref_logp": of_many(ref, bad * above),
            "loss_metrics/logits_mean_ref": 0.0,
        }
    return {
        "loss": loss.detach(),
        "grad_logits": z.grad,
        "per_token_loss": losses.detach(),
        "logprobs": x,
        "metrics": metrics,
    }


def _spread(name, values, mask):
    kept = values[mask > 0]
    return {f"{name}/mean": kept.mean().item(), f"{name}/min": kept.min().item(), f"{name}/max": kept.max().item()}


def _importance(options, arrays, old, mask):
    """Return the weights of every position, and their reported metrics."""
    weights = torch.ones_like(old)
    if "rollout_logprobs" not in arrays:
        return weights, {}
    sampler = torch.tensor(arrays["rollout_logprobs"])
    metrics = _spread("inflogp_dist", sampler, torch.tensor(arrays["mask"]))
    if options is None or options["rollout_is_threshold"] is None:
        return weights, metrics
    drawn = mask * (sampler <= 0)
    gap, high = old - sampler, options["rollout_is_threshold"]
    low = 1 / high if options["rollout_is_threshold_lower"] is None else options["rollout_is_threshold_lower"]
    gathered, out = [], torch.zeros_like(old)
    for b in range(len(old)):
        total, number = (gap[b] * drawn[b]).sum().item(), drawn[b].sum().item()
        if options["rollout_is_level"] == "token":
            logs = gap[b]
        else:
            value = total if options["rollout_is_level"] == "sequence" else total / number
            gathered.append(value)
            logs = torch.full_like(gap[b], value)
        raw = torch.exp(torch.clamp(logs, -20, 20))
        if options["rollout_is_mode"] == "truncate":
            weights[b] = torch.clamp(raw, max=high)
        else:
            out[b] = ((raw < low) | (raw > high)).double()
            weights[b] = raw * (1 - out[b])
        veto = options["rollout_is_veto_threshold"]
        if veto is not None and bool(((gap[b] < math.log(veto)) & (drawn[b] > 0)).any()):
            weights[b] = 0.0
        weights[b] = weights[b] * drawn[b]
    metrics["mismatch/inf_logratio"] = sum(gathered) / len(gathered) if gathered else gap.mean().item()
    if options["rollout_is_mode"] == "mask":
        metrics["mismatch/rollout_is_masked_fraction"] = ((out * drawn).sum() / drawn.sum()).item()
        rows = (out * drawn).sum(-1) > 0 if options["rollout_is_level"] == "token" else out[:, 0] > 0
        metrics["mismatch/rollout_is_seq_masked_fraction"] = rows.double().mean().item()
    return weights, metrics


def masked(function, config, arrays):
    """`masked_mean` and `masked_sum`."""
    values = torch.tensor(arrays["values"], requires_grad=True)
    mask = torch.tensor(arrays["mask"])
    if "sum" in function:
        result = (values * mask).sum(-1) if config["per_seq"] else (values * mask).sum()
    elif config["per_seq"]:
        result = ((values * mask).sum(-1) / mask.sum(-1)).mean()
    else:
        result = (values * mask).sum() / mask.sum()
    cotangent = torch.tensor(arrays["cotangent"]) if "cotangent" in arrays else torch.ones_like(result)
    (result * cotangent).sum().backward()
    return {"result": result.detach(), "grad_values": values.grad}


def reward_norm(config, arrays):
    """Rewards against their group, one rank."""
    rewards, groups = torch.tensor(arrays["rewards"]), torch.tensor(arrays["group_ids"])
    result = torch.zeros_like(rewards)
    for group in groups.unique():
        members = rewards[groups == group]
        result[groups == group] = (members - members.mean()) / (members.std() + config["eps"])
    return {"advantages": result}
