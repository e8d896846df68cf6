"""AReaL's actor and critic losses, token by token in float64 (cbff54d6). Imports nothing of the workbench."""

import math

import torch


def _bernoulli(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def _metric(kind, old, sampler):
    gap = old - sampler
    if kind == "ratio":
        return gap  # gathered in logs
    if kind == "kl_k1":
        return gap
    if kind == "kl_k2":
        return gap * gap / 2
    if kind == "kl_k3":
        return math.exp(-gap) - 1 + gap
    p, q = (min(max(math.exp(value), 1e-8), 1 - 1e-8) for value in (old, sampler))
    return max(_bernoulli(p, q), _bernoulli(q, p))


def _reject(rule, sequences, old, sampler):
    """Return token -> whether it survives, and its weight."""
    lower, upper = rule["lower"], rule["upper"]

    def inside(value):
        return value <= upper and (lower is None or value >= lower)

    def bounded(weight):
        return min(max(weight, 0.0 if lower is None else lower), upper)

    kept, weights, raw = {}, {}, {}
    for tokens in sequences:
        if not tokens:
            continue
        values = {t: _metric(rule["metric"], old[t], sampler[t]) for t in tokens}
        own = {t: math.exp(old[t] - sampler[t]) for t in tokens}
        if rule["level"] == "token":
            for t in tokens:
                value = math.exp(values[t]) if rule["metric"] == "ratio" else values[t]
                kept[t] = rule["action"] == "clamp" or inside(value)
                raw[t], weights[t] = own[t], bounded(own[t]) if rule["action"] == "clamp" else own[t]
            continue
        gathered = {"sum": sum, "max": max, "mean": lambda v: sum(v) / len(v)}[rule["agg"]](list(values.values()))
        if rule["metric"] == "ratio":
            gathered = math.exp(gathered)
            own = dict.fromkeys(tokens, math.exp(sum(old[t] - sampler[t] for t in tokens) / len(tokens)))
        for t in tokens:
            within = inside(gathered)
            kept[t] = rule["action"] == "clamp" or within
            raw[t] = own[t]
            weights[t] = bounded(own[t]) if rule["action"] == "clamp" and not within else own[t]
    return kept, weights, raw


def policy_loss(function, config, arrays):
    """Loss, gradient, ratios, weights and metrics of PPO, GSPO, SAPO and CISPO."""
    shape = arrays["logprobs"].shape
    x = torch.tensor(arrays["logprobs"], requires_grad=True)
    flat = x.reshape(-1)
    old, advantages, mask = (arrays[name].reshape(-1) for name in ("old_logprobs", "advantages", "mask"))
    index = arrays.get("document_index")
    index = [t // shape[1] for t in range(len(old))] if index is None else index.tolist()
    sequences = [[t for t in range(len(old)) if index[t] == d and mask[t] > 0] for d in range(max(index) + 1)]
    number = sum(map(len, sequences)) or 1
    rule = config["rejection_sampling"]
    kept, weights, raw = {}, {}, {}
    if rule is not None:
        kept, weights, raw = _reject(rule, sequences, old, arrays["rollout_logprobs"].reshape(-1))
    total, clipped, dual = 0.0, 0, 0
    ratios, behave, keeps = (torch.zeros(len(old), dtype=torch.float64) for _ in range(3))
    of_sequences = config["level"] == "sequence" and "cispo" not in function
    high = config["eps_clip"] if config["eps_clip_higher"] is None else config["eps_clip_higher"]
    for tokens in sequences:
        counted = [t for t in tokens if kept.get(t, True)]
        for t in tokens:
            keep, weight = kept.get(t, True), weights.get(t, 1.0)
            ratio, a = torch.exp(flat[t] - old[t]), advantages[t]
            if of_sequences and not keep:
                continue
            if of_sequences:
                ratio = torch.exp(sum(flat[s] - old[s] for s in counted) / len(counted))
                a = sum(advantages[s] for s in counted) / len(counted)
            ratios[t] = ratio.item()
            if rule is not None and keep:
                behave[t], keeps[t] = weight, 1.0
            if "sapo" in function:
                tau = config["tau_pos"] if a > 0 else config["tau_neg"]
                value = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * a
            elif "cispo" in function:
                clamped = torch.clamp(ratio, 1 - config["eps_clip"], 1 + high).detach()
                value = -clamped * a * flat[t]
                clipped += int((clamped != ratio).item() and keep)
            else:
                clamped = torch.clamp(ratio, 1 - config["eps_clip"], 1 + high)
                value = torch.maximum(-a * ratio, -a * clamped)
                clipped += int((-a * ratio < -a * clamped).item())
                if config["c_clip"] is not None:
                    dual += int((config["c_clip"] * abs(a) < value).item())
                    value = torch.clamp(value, max=config["c_clip"] * abs(a))
            if keep:
                total = total + value * weight / number
    total = total + flat.sum() * 0.0
    total.backward()
    results = {
        "loss": total.detach(),
        "grad_logprobs": x.grad,
        "importance_weight": ratios.reshape(shape),
        "metrics": {"clip_fraction": clipped / number, "dual_clip_fraction": dual / number},
    }
    if rule is not None:
        results |= {"behave_is_weight": behave.reshape(shape), "kept_mask": keeps.reshape(shape)}
        changed = [t for t in kept if (not kept[t] if rule["action"] == "mask" else raw[t] != weights[t])]
        results["metrics"]["filtered_fraction"] = len(changed) / number
    return results


def critic(config, arrays):
    """The clipped error of a critic."""
    values = torch.tensor(arrays["values"], requires_grad=True)
    old, returns, mask = (torch.tensor(arrays[name]) for name in ("old_values", "returns", "mask"))
    delta = config["huber_delta"]

    def error(u):
        if config["loss_fn_type"] == "mse":
            return u * u / 2
        return torch.where(u.abs() < delta, u * u / 2, delta * (u.abs() - delta / 2))

    moved = old + torch.clamp(values - old, -config["value_eps_clip"], config["value_eps_clip"])
    worst = torch.maximum(error(values - returns), error(moved - returns))
    loss = (worst * mask).sum() / mask.sum()
    loss.backward()
    return {"loss": loss.detach(), "grad_values": values.grad}


def normalization(config, arrays):
    """Values over their deviation, masked ones as 0 would be."""
    values = torch.tensor(arrays["values"])
    mask = torch.ones_like(values) if arrays.get("mask") is None else torch.tensor(arrays["mask"], dtype=torch.float64)
    dims = config.get("dim")
    dims = tuple(range(values.dim())) if dims is None else dims
    kept = values * mask
    count = mask.sum(dims, keepdim=True)
    mean = kept.sum(dims, keepdim=True) / count
    variance = (kept * kept).sum(dims, keepdim=True) / count - mean * mean
    if config["unbiased"]:
        variance = variance * count / (count - 1)
    return {"result": (kept - mean) / (variance.sqrt() + config["eps"])}
