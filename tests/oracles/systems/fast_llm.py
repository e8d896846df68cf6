"""Fast-LLM's losses, token by token in float64 (7d61a1ba). Imports nothing of the workbench."""

import numpy as np
import torch


def policy_loss(kind, config, arrays):
    """GRPO or GSPO on logits, with raw and registered metrics."""
    z = torch.tensor(arrays["logits"], requires_grad=True)
    logits = z.reshape(-1, z.shape[-1]) * config["logits_scale_factor"]
    targets = arrays["targets"].reshape(-1)
    old, advantage, index = (
        torch.tensor(arrays[name]).reshape(-1) for name in ("old_logprobs", "advantages", "document_index")
    )
    log_p = torch.log_softmax(logits, -1)
    low, high = 1 - config["epsilon_low"], 1 + config["epsilon_high"]
    names = (
        "old_logprobs",
        "new_logprobs",
        "ratio_new_old",
        "kl_new_old",
        "clipped_ratio_fraction",
        "advantage",
        "entropy",
    )
    sums = dict.fromkeys((*names, "ratio_new_old_sum", "ratio_new_old_squared_sum"), 0.0)
    trained, segments, total = [], 0, z.sum() * 0.0
    for document in range(int(index.max()) + 1):
        at = [t for t in range(len(targets)) if index[t] == document and targets[t] >= 0]
        if not at:
            continue
        segments += 1
        trained += at
        x = torch.stack([log_p[t, targets[t]] for t in at])
        o, a = old[at], advantage[at]
        entropy = -(log_p[at].exp() * log_p[at]).sum(-1)
        if kind == "grpo":
            log_r = x - o
            values = torch.minimum(log_r.exp() * a, torch.clamp(log_r.exp(), low, high) * a)
            total = total - values.sum() / config["divisor"]
            raw = log_r.exp()
        else:
            log_r = (x - o).mean().reshape(1)
            mean = a.mean()
            value = torch.minimum(log_r.exp() * mean, torch.clamp(log_r.exp(), low, high) * mean)
            total = total - len(at) * value.sum() / config["divisor"]
            raw = log_r.exp()
        r = raw.detach()
        for name, values in zip(
            names, (o, x, r, r - 1 - log_r, ((r < low) | (r > high)).double(), a, entropy), strict=True
        ):
            sums[name] += values.mean().item()
        sums["ratio_new_old_sum"] += r.sum().item()
        sums["ratio_new_old_squared_sum"] += (r * r).sum().item()
    (total * config["grad_output"]).backward()
    before = arrays.get("grad_logits_in")
    seen = advantage[trained].tolist()
    plain = {
        "max_advantage": max(seen),
        "min_advantage": min(seen),
        "num_tokens": float(len(trained)),
        **({"num_segments": float(segments)} if kind == "gspo" else {}),
    }
    registered = {
        name: value / (config["num_documents_in_batch"] if name in names else 1) for name, value in sums.items()
    } | plain
    metrics = {**sums, **plain, **{f"registered.{name}": value for name, value in registered.items()}}
    return {
        "loss": total.detach(),
        "grad_logits": z.grad if before is None else z.grad + torch.tensor(before),
        "metrics": metrics,
    }


def entropy_loss(config, arrays):
    """Cross entropy and KL divergences over all tokens."""
    z = torch.tensor(arrays["logits"], requires_grad=True)
    scale, kind, form = config["logits_scale_factor"], config["entropy_loss_type"], config["target_format"]
    rows, mask = z.reshape(-1, z.shape[-1]), arrays.get("mask")
    target = arrays["target"].reshape(-1) if form == "labels" else arrays["target"].reshape(rows.shape)
    total = z.sum() * 0.0
    for t in range(len(rows)):
        if (form == "labels" and target[t] < 0) or (mask is not None and not mask.reshape(-1)[t]):
            continue
        log_p = torch.log_softmax(rows[t] * scale, 0)
        if form == "labels":
            q = torch.zeros_like(log_p)
            q[target[t]] = 1.0
            q = q if kind == "cross_entropy" else q + 1e-10
        else:
            q = torch.tensor(target[t])
            q = torch.softmax(q * scale / config["temperature"], 0) if form == "logits" else q
        if kind == "cross_entropy":
            value = -(q * log_p).sum()
        elif kind == "forward_kl":
            value = (q * (q.log() - log_p)).sum()
        else:
            value = (log_p.exp() * (log_p - q.log())).sum()
        total = total + value / len(rows)
    (total * config["grad_output"]).backward()
    return {"loss": total.detach(), "grad_logits": z.grad}


def z_loss(config, arrays):
    """The squared log normaliser over all tokens."""
    z = torch.tensor(arrays["logits"], requires_grad=True)
    squares = torch.logsumexp(z * config["logits_scale_factor"], -1) ** 2
    mask = arrays.get("mask")
    total = (squares if mask is None else squares * torch.tensor(mask)).mean()
    total.backward()
    return {"loss": total.detach(), "grad_logits": z.grad}


def dpo(config, arrays):
    """One sigmoid of all spans of the batch."""
    z = torch.tensor(arrays["logits"], requires_grad=True)
    policy = torch.log_softmax(z * config["logits_scale_factor"], -1)
    reference = torch.log_softmax(torch.tensor(arrays["ref_logits"]), -1)

    apart, targets = policy - reference, np.maximum(arrays["targets"], 0)

    def gathered(spans):
        return sum(
            apart[row, t, targets[row, t]]
            for row, of_row in enumerate(spans)
            for begin, end in of_row
            for t in range(begin, end)
        )

    margin = config["beta"] * (gathered(config["chosen_spans"]) - gathered(config["rejected_spans"]))
    loss = torch.nn.functional.softplus(-margin)
    loss.backward()
    return {"loss": loss.detach(), "grad_logits": z.grad}
