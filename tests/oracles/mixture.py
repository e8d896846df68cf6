"""Losses of routers the long way: every token of every document first, then the two sums of the papers, one backward.

Source: load balancing: arXiv 2101.03961, equations 4 to 6, and for several experts of a token arXiv 2412.19437,
equations 17 to 19; z-loss: arXiv 2202.08906, equation 5; biases: arXiv 2408.15664, section 3.
"""

from __future__ import annotations

import torch

from tests.oracles.step import ExactMixture, clipped, document_logprobs, trained


def mixtures(model):
    """The mixtures of a model from `tests.oracles.step.exact`, in order."""
    return [module for module in model.modules() if isinstance(module, ExactMixture)]


def mixture_step(model, documents, *, clip_low, clip_high, kl_coefficient, balance=0.0, z=0.0, routes=None):
    """Loss of every kind, every gradient and the loads of experts, of a clipped surrogate with a per-token mean.

    Args:
        model: from `tests.oracles.step.exact`.
        documents: dicts of lists.
        balance, z: coefficients of the losses of each mixture.
        routes: ``[d][t][mixture]`` experts that are taken, None for a token without a route, which no loss of routers
            counts; None: each router's choice.

    Returns:
        losses by name, gradients by parameter name, loads ``[mixture][expert]``, routes ``[d][t][mixture]``.
    """
    model.zero_grad(set_to_none=True)
    layers = mixtures(model)
    for number, layer in enumerate(layers):
        layer.seen = []
        layer.given = [token and token[number] for document in routes or () for token in document]
    logprobs = document_logprobs(model, documents)
    count = sum(len(trained(document)) for document in documents)
    policy = torch.zeros((), dtype=torch.float64)
    for document, of_tokens in zip(documents, logprobs, strict=True):
        for t in trained(document):
            ratio = torch.exp(of_tokens[t] - document["old_logprobs"][t])
            gap = document["ref_logprobs"][t] - of_tokens[t]
            value = clipped(ratio, document["advantages"][t], clip_low, clip_high)
            policy = policy + (value + kl_coefficient * (torch.exp(gap) - gap - 1)) / count
    lengths = [len(document["tokens"]) for document in documents]
    counted = [routes is None or routes[d][t] is not None for d, length in enumerate(lengths) for t in range(length)]
    losses, loads = {"policy": policy}, []
    for layer in layers:
        seen = [token for token, counts in zip(layer.seen, counted, strict=True) if counts]
        experts = layer.experts.num_experts
        load = [sum(expert in chosen for _, _, chosen in seen) for expert in range(experts)]
        loads.append(load)
        term = 0.0
        for expert in range(experts):
            mean = sum(scores[expert] / scores.sum() for _, scores, _ in seen) / len(seen)
            term = term + load[expert] / sum(load) * mean
        losses["router_balance"] = losses.get("router_balance", 0.0) + balance * experts * term
        square = sum(torch.logsumexp(logits, dim=0) ** 2 for logits, _, _ in seen) / len(seen)
        losses["router_z"] = losses.get("router_z", 0.0) + z * square
    losses["total"] = sum(losses.values())
    losses["total"].backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    at, taken = 0, []
    for length in lengths:
        taken.append([[layer.seen[at + t][2] for layer in layers] for t in range(length)])
        at += length
    return {name: value.item() for name, value in losses.items()}, gradients, loads, taken


def balanced_biases(biases, loads, step):
    """Biases after a step: up by ``step`` where an expert had fewer tokens than the mean, down where it had more."""
    moved = []
    for bias, load in zip(biases, loads, strict=True):
        mean = sum(load) / len(load)
        moved.append([b + step * ((count < mean) - (count > mean)) for b, count in zip(bias, load, strict=True)])
    return moved
