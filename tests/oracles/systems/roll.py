"""ROLL's actor loss, row by row in float64 (alibaba/ROLL 8eb27cc2). Imports nothing of the workbench."""

import torch


def policy_loss(c, arrays):
    """Return loss, gradient and metrics; c has every option that is read here."""
    x = arrays["logprobs"].clone().requires_grad_()
    o, r, h, a, m = (arrays[n] for n in ("old_logprobs", "ref_logprobs", "entropies", "advantages", "mask"))
    low, high = (c["pg_clip_low"], c["pg_clip_high"]) if c["use_pg_clip_range"] else (c["pg_clip"], c["pg_clip"])
    rows = [[t for t in range(m.shape[1]) if m[i, t] > 0] for i in range(len(x))]
    tokens, alive = sum(map(len, rows)), sum(bool(own) for own in rows)
    loss, ratios, near, far = 0.0 * x.sum(), 0.0, 0.0, 0.0
    for i, own in enumerate(rows):
        n = len(own)
        share = {"token-mean": 1 / tokens, "seq-mean-token-sum": 1 / (alive + 1e-8)}.get(
            c["loss_agg_mode"], 1 / (n + 1e-8) / (alive + 1e-8)
        )
        mean = sum(x[i, t] - o[i, t] for t in own) / (n + 1e-8)
        for t in own:
            ratio = torch.exp(mean if c["importance_sampling"] == "seq" else x[i, t] - o[i, t])
            value = -torch.minimum(ratio * a[i, t], ratio.clamp(1 - low, 1 + high) * a[i, t])
            if c["dual_clip_loss"] and a[i, t] < 0:
                value = -torch.maximum(-value, (1 + c["pg_clip"] * 2) * a[i, t])
            if c["use_kl_loss"]:
                d = r[i, t] - x[i, t]
                value = value + c["kl_loss_coef"] * (torch.exp(d) - d - 1).clamp(-10, 10)
            value = c["rl_loss_coef"] * value - c["entropy_loss_coef"] * h[i, t]
            loss = loss + share * value
            gap = float((x[i, t] - o[i, t]).detach())
            ratios += float(torch.exp(x[i, t] - o[i, t]).detach()) / n / alive
            near, far = near + gap**2 / 2 / tokens, far + gap / tokens
    loss.backward()
    metrics = {} if c["importance_sampling"] == "seq" else {"actor/ratio_mean": ratios}
    if c["loss_agg_mode"] == "token-mean":
        metrics |= {"actor/approxkl": near, "actor/policykl": far}
    return {"loss": loss.detach(), "grad_logprobs": x.grad, "metrics": metrics}
