"""LoRA the long way: a stock model whose weights are W + scale B A, and the chain rule from dW to dA and dB.

Source: Hu et al., arXiv 2106.09685, section 4.1; the scale alpha / r, or alpha / sqrt(r): Kalajdzievski, arXiv
2312.03732.
"""

from __future__ import annotations

import torch
from torch import nn

from tests.oracles.step import grpo_step


def merge(model, adapters, scale):
    """Add scale B A to every adapted weight of an unsharded model, in float64, in place.

    Args:
        model: from `exact`. A tied head that has an adapter gets a weight of its own.
        adapters: name of the adapted weight -> A [(E,) r, I] and B [(E,) O, r].
    """
    if "lm_head.weight" in adapters and model.lm_head.weight is model.model.embed_tokens.weight:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, (a, b) in adapters.items():
            for weight, down, up in _matrices(parameters[name], a, b):
                for row in range(len(weight)):
                    weight[row] += scale * (up[row] @ down)
    return model


def lora_step(model, documents, adapters, scale, **settings):
    """Loss, gradients of A and B by the adapted weight's name, and log-probabilities, as `grpo_step` gives them.

    Also the gradient of every merged weight, from which those of its adapter follow.
    """
    loss, of_weights, logprobs = grpo_step(merge(model, adapters, scale), documents, **settings)
    return loss, factor_gradients(of_weights, adapters, scale), logprobs, of_weights


def factor_gradients(of_weights, adapters, scale):
    """Gradients of A and B by the adapted weight's name, from the gradient of each merged weight."""
    gradients = {}
    for name, (a, b) in adapters.items():
        down, up = torch.zeros_like(a, dtype=torch.float64), torch.zeros_like(b, dtype=torch.float64)
        for (gradient, one_a, one_b), (_, to_a, to_b) in zip(
            _matrices(of_weights[name], a, b), _matrices(of_weights[name], down, up), strict=True
        ):
            to_a += scale * one_b.T @ gradient
            to_b += scale * gradient @ one_a.T
        gradients[name] = down, up
    return gradients


def _matrices(weight, a, b):
    """Weight, A and B of each matrix: one, or one for each expert."""
    a, b = (factor if factor.dtype == torch.float64 else factor.double() for factor in (a, b))
    return list(zip(weight, a, b, strict=True)) if weight.dim() == 3 else [(weight, a, b)]
