"""slime's policy loss, sample by sample in float64 (THUDM/slime 624b824a). Imports nothing of the workbench."""

import torch


def policy_loss(config, arrays):
    """Loss, gradient and metrics of `compute_policy_loss` and its siblings, summed over samples."""
    x = torch.tensor(arrays["logprobs"], requires_grad=True)
    old, ref, sampler, advantage, mask = (
        torch.tensor(arrays[name])
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "mask")
    )
    index = torch.tensor(arrays["document_index"])
    if config.get("use_rollout_logprobs"):
        train, old = old, sampler
    else:
        train = old
    low, high = config["eps_clip"], config["eps_clip_high"]
    if high is None:
        high = low
    total, clipped, kl_sum, penalty, opsm = 0.0, 0.0, 0.0, 0.0, 0.0
    weighted = {"ois": 0.0, "tis": 0.0, "tis_clipfrac": 0.0}
    for document in range(int(index.max()) + 1):
        at = (index == document).nonzero()[:, 0]
        kept = [t for t in at.tolist() if mask[t] > 0]
        share = 1.0 if config["calculate_per_token_loss"] else 1.0 / max(len(kept), 1)
        mean = sum((old[t] - x[t] for t in kept), start=torch.zeros(())) / max(len(kept), 1)
        dropped = config["opsm_delta"] is not None and mean.item() > config["opsm_delta"]
        for t in at.tolist():
            if dropped and advantage[t] < 0:
                opsm += 1 / max(len(kept), 1)
        for t in kept:
            gap = mean if config["advantage_estimator"] == "gspo" else old[t] - x[t]
            ratio, a = torch.exp(-gap), advantage[t]
            clamped = torch.clamp(ratio, 1 - low, 1 + high)
            if config["advantage_estimator"] == "cispo":
                value = -clamped.detach() * a * x[t]
                clipped += share * (clamped != ratio).item()
            else:
                value = torch.maximum(-ratio * a, -clamped * a)
                clipped += share * (-clamped * a > -ratio * a).item()
                if config["eps_clip_c"] is not None and a < 0:
                    value = torch.minimum(value, -config["eps_clip_c"] * a)
            if dropped and a < 0:
                value = value * 0.0
            if config.get("use_tis"):
                raw = torch.exp(train[t] - sampler[t])
                weight = torch.clamp(raw, config["tis_clip_low"], config["tis_clip"])
                value = value * weight
                for name, number in (("ois", ratio), ("tis", raw), ("tis_clipfrac", weight != raw)):
                    weighted[name] += share * number.item()
            total = total + share * value
            kl_sum += share * gap.item()
            if config["kl_loss_type"] is not None:
                d = x[t] - ref[t]
                kl = {"k1": d, "k2": d * d / 2}.get(config["kl_loss_type"], torch.exp(-d) - 1 + d)
                if config.get("use_unbiased_kl"):
                    kl = torch.exp(x[t] - old[t]) * kl
                if config["kl_loss_type"] == "low_var_kl":
                    kl = torch.clamp(kl, -10, 10)
                penalty += share * kl.item()
                total = total + config["kl_loss_coef"] * share * kl
    total.backward()
    metrics = {"pg_clipfrac": clipped, "ppo_kl": kl_sum}
    metrics |= weighted if config.get("use_tis") else {}
    if config["opsm_delta"] is not None:
        metrics["opsm_clipfrac"] = opsm
    if config["kl_loss_type"] is not None:
        metrics["kl_loss"] = penalty
    return {"loss": total.detach(), "grad_logprobs": x.grad, "metrics": metrics}


def logprobs(config, arrays):
    """Return log-probabilities on the support, entropies of all, the gradient of their product with cotangents."""
    logits = torch.tensor(arrays["logits"], requires_grad=True)
    values, entropies = [], []
    for t, target in enumerate(arrays["targets"]):
        keep = [
            v for v in range(logits.shape[1]) if not config["keep_mask"] or arrays["keep_mask"][t][v] or v == target
        ]
        values.append(logits[t, target] - torch.logsumexp(logits[t, keep], 0))
        p = torch.softmax(logits[t], 0)
        entropies.append(-(p * torch.log(p)).sum())
    values, entropies = torch.stack(values), torch.stack(entropies)
    inner = (values * torch.tensor(arrays["cotangent_logprobs"])).sum()
    if config["entropy_grad"]:
        inner = inner + (entropies * torch.tensor(arrays["cotangent_entropy"])).sum()
    inner.backward()
    return {"logprobs": values.detach(), "entropy": entropies.detach(), "grad_logits": logits.grad}


def gae(config, arrays):
    """Advantages and returns, row by row."""
    rewards, values = arrays["token_rewards"], arrays["values"]
    advantages = torch.zeros(rewards.shape, dtype=torch.float64)
    for row in range(rewards.shape[0]):
        running = 0.0
        for t in reversed(range(rewards.shape[1])):
            later = values[row, t + 1] if t + 1 < rewards.shape[1] else 0.0
            error = rewards[row, t] + config["gamma"] * later - values[row, t]
            running = error + config["gamma"] * config["lam"] * running
            advantages[row, t] = running
    return {"advantages": advantages, "returns": advantages + torch.tensor(values)}
