"""linkedin/Liger-Kernel 0.8.5 from its formulas. float64. Imports nothing from workbench.

Its losses on policies are TRL's terms on log-probabilities of hidden states, divided by counts of the call. luspo is
the sum over a row's tokens that it is meant to be; the kernel's own reads padding.
"""

import math

import torch
from torch.nn.functional import logsigmoid

from tests.oracles.systems.trl import Row


def logprobs_of(arrays, temperature, prefix="", leaves=None):
    """[B, T] of the targets; those that are negative have that of token 0."""
    leaves = leaves or {}
    hidden, weight = (leaves.get(name, arrays.get(f"{prefix}{name}")) for name in ("hidden", "weight"))
    bias = leaves.get("bias", arrays.get(f"{prefix}bias"))
    logits = torch.einsum("bth,vh->btv", hidden, weight) + (0 if bias is None else bias)
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, arrays["targets"].clamp_min(0).unsqueeze(-1)).squeeze(-1)


def _leaves(arrays):
    return {name: arrays[name].clone().requires_grad_() for name in ("hidden", "weight", "bias") if name in arrays}


def policy_loss(options, arrays):
    """Loss, gradients and metrics of one call."""
    leaves = _leaves(arrays)
    logprobs = logprobs_of(arrays, options["temperature"], leaves=leaves)
    logprobs.retain_grad()
    given = {**arrays, "logprobs": logprobs.detach(), "entropies": torch.zeros_like(logprobs.detach())}
    if "ref_hidden" in arrays:
        given["ref_logprobs"] = logprobs_of(arrays, options["temperature"], prefix="ref_")
    terms = {**options, "off_policy_mask_threshold": None}
    if "ref_logprobs" not in given:
        terms["beta"] = 0.0
    rows = [Row(number, terms, given, logprobs) for number in range(len(logprobs))]
    for row in rows:
        row.evaluate(None)
    kind, tokens = options["loss_type"], sum(row.count for row in rows)
    items = tokens if options["num_items_in_batch"] is None else options["num_items_in_batch"]
    loss = logprobs.sum() * 0
    for row in rows:
        if not row.count:
            continue
        divisor = {
            "grpo": len(rows) * row.count,
            "sapo": len(rows) * row.count,
            "bnpo": tokens,
            "luspo": len(rows),
            "dr_grpo": len(rows) * options["max_completion_length"],
        }.get(kind, max(items, 1))
        loss = loss + row.values.sum() / divisor
    loss.backward()
    return {
        "loss": loss.item(),
        "logprobs": logprobs.detach(),
        "grad_logprobs": logprobs.grad,
        **{f"grad_{name}": leaf.grad for name, leaf in leaves.items()},
        "metrics": _metrics(options, terms, rows, tokens),
    }


def _metrics(options, terms, rows, tokens):
    clipped, divergence = 0, 0.0
    for row in rows:
        if not row.count:
            continue
        low, high = 1 - options["epsilon_low"], 1 + options["epsilon_high"]
        if options["loss_type"] == "cispo":
            low, high = -math.inf, options["epsilon_high"]
        if options["loss_type"] in ("sapo", "vespo"):
            low, high = -math.inf, math.inf
        for ratio, advantage in zip(row.ratio.detach().tolist(), row.advantages.tolist(), strict=True):
            clipped += (ratio < low and advantage < 0) or (ratio > high and advantage > 0)
        if terms["beta"]:
            divergence += math.fsum(row.divergence.detach().tolist())
    results = {"clip_fraction": clipped / tokens}
    return results | ({"kl": divergence / tokens} if options["beta"] else {})


def dpo(options, arrays):
    """Loss and gradients on pairs: row i is chosen, row i + P rejected."""
    leaves = _leaves(arrays)
    logprobs, pairs = logprobs_of(arrays, 1.0, leaves=leaves), len(arrays["targets"]) // 2
    reference = None
    if options["use_ref_model"]:
        own = (
            arrays
            if "ref_weight" in arrays
            else {**arrays, "ref_weight": arrays["weight"], "ref_bias": arrays.get("bias")}
        )
        reference = logprobs_of(own, 1.0, prefix="ref_")
    rewards, likelihoods, chosen_tokens = [], [], 0
    for number, targets in enumerate(arrays["targets"]):
        at = torch.nonzero(targets != options["ignore_index"]).squeeze(1)
        gaps = logprobs[number][at] - (0 if reference is None else reference[number][at])
        rewards.append(gaps.mean() if options["average_log_prob"] else gaps.sum())
        likelihoods.append(logprobs[number][at].sum())
        chosen_tokens += len(at) if number < pairs else 0
    loss = sum(pair(options, rewards[p], rewards[p + pairs]) for p in range(pairs)) / pairs
    if options["compute_nll_loss"]:
        loss = loss - options["alpha"] * sum(likelihoods[:pairs]) / chosen_tokens
    loss.backward()
    return {"loss": loss.item(), **{f"grad_{name}": leaf.grad for name, leaf in leaves.items()}}


def pair(options, chosen, rejected):
    """Return the loss of one pair, from its implied rewards."""
    beta, flipped, s = options["beta"], options["label_smoothing"], torch.sigmoid
    margin = beta * (chosen - rejected)
    kinds = {
        "sigmoid": lambda: -logsigmoid(margin),
        "hinge": lambda: (1 - margin).clamp_min(0),
        "exo_pair": lambda: s(margin) * (s(margin) / (1 - flipped)).log() + s(-margin) * (s(-margin) / flipped).log(),
        "nca_pair": lambda: -(s(beta * chosen).log() + (s(-beta * chosen).log() + s(-beta * rejected).log()) / 2),
        "robust": lambda: (flipped * s(-margin).log() - (1 - flipped) * s(margin).log()) / (1 - 2 * flipped),
        "bco_pair": lambda: -s(beta * chosen).log() - s(-beta * rejected).log(),
        "sppo_hard": lambda: (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2,
        "apo_zero": lambda: 1 - s(beta * chosen) + s(beta * rejected),
        "apo_down": lambda: s(beta * chosen) + 1 - s(margin),
        "discopop": lambda: (
            -logsigmoid(margin) * (1 - s(margin / options["discopop_tau"]))
            + torch.exp(-margin) * s(margin / options["discopop_tau"])
        ),
    }
    return kinds[options["loss_type"]]()
