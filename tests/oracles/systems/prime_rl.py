"""prime-rl's loss, document by document in float64 (PrimeIntellect-ai/prime-rl 559b4477). No workbench here."""

import math

import torch


def share(hits, of):
    """A mean of flags, which there is one in single precision; 0 of nothing."""
    return torch.tensor(hits / max(1, of), dtype=torch.float32).double().item()


def mean(values):
    return sum(values) / max(1, len(values))


def rl(c, x, q, a, weights, tokens):
    """(sum over tokens, numbers of the document) of the component rl."""
    total, dropped = 0.0, []
    for t in tokens:
        r = torch.exp(x[t] - q[t])
        moved = math.exp(x[t].item()) - math.exp(q[t])
        if c["type"] == "ipo":
            beyond = abs(moved) > c["ipo_threshold"]
        else:
            beyond = moved > c["dppo_mask_high"] if a[t] > 0 else moved < -c["dppo_mask_low"]
        dropped += [t] if beyond else []
        pull = c["kl_tau"] * (x[t] - q[t]) ** 2
        total = total + weights[t] * (pull - (0.0 if beyond else c["adv_tau"] * a[t] * r))
    numbers = trust(x, q, tokens, dropped)
    if c["type"] == "default":
        for name, sign in (("low", -1), ("high", 1)):
            numbers[f"is_masked_{name}"] = share(sum(sign * a[t] > 0 for t in dropped), len(tokens))
        for name, sign in (("positive", 1), ("negative", -1)):
            numbers[f"masked_advantage_{name}"] = share(sum(sign * a[t] > 0 for t in dropped), len(dropped))
    return total, numbers


def trust(x, q, tokens, dropped):
    def mismatch(chosen):
        return mean([math.exp(x[t].item() - q[t]) - (x[t].item() - q[t]) - 1 for t in chosen])

    return {
        "masked_mismatch_kl": mismatch(dropped),
        "is_masked": share(len(dropped), len(tokens)),
        "unmasked_mismatch_kl": mismatch([t for t in tokens if t not in dropped]),
    }


def ref_kl(x, q, f, weights, tokens):
    total, dropped = 0.0, []
    for t in tokens:
        beyond = math.exp(x[t].item()) - math.exp(q[t]) < -0.2
        dropped += [t] if beyond else []
        gain = 0.0 if beyond else (f[t] - x[t]).detach() * torch.exp(x[t] - q[t])
        total = total + weights[t] * (1e-3 * (x[t] - q[t]) ** 2 - gain)
    numbers = {f"ref_kl.{name}": value for name, value in trust(x, q, tokens, dropped).items()}
    return total, numbers | {"ref_kl": mean([f[t] - x[t].item() for t in tokens])}


def ce(x, weights, tokens):
    return sum(-weights[t] * x[t] for t in tokens), {"nll": mean([-x[t].item() for t in tokens])}


def compute_loss(c, arrays):
    """Loss, gradient, and numbers of each document that a component sees."""
    x = arrays["logprobs"].clone().requires_grad_()
    q, a, f = (arrays[name].tolist() for name in ("rollout_logprobs", "advantages", "ref_logprobs"))
    index, mask = arrays["document_index"].tolist(), arrays["mask"].tolist()
    loss, result = 0.0 * x.sum(), {}
    for name in ("rl", "ce", "ref_kl"):
        weights = arrays.get(f"{name}_weights")
        if weights is None and name != "rl":
            continue
        values = [1.0] * len(index) if weights is None else weights.tolist()
        for document in range(max(index) + 1):
            tokens = [
                t for t in range(len(index)) if index[t] == document and values[t] != 0 and (mask[t] or name != "rl")
            ]
            if not tokens and weights is not None:
                continue
            total, numbers = {
                "rl": lambda v, k: rl(c, x, q, a, v, k),
                "ce": lambda v, k: ce(x, v, k),
                "ref_kl": lambda v, k: ref_kl(x, q, f, v, k),
            }[name](values, tokens)
            loss = loss + total / c[f"{name}_scale"]
            for key, value in numbers.items():
                result.setdefault(f"doc_{key}", []).append(value)
    loss.backward()
    return {"loss": loss.detach(), "grad_logprobs": x.grad, **result}
