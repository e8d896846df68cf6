"""One GRPO step the long way: a stock model, one document at a time, every logit, the formula from the paper.

Source: DeepSeekMath, arXiv 2402.03300, equation 3 (per-document mean) and equation 4 (KL estimate);
DAPO, arXiv 2503.14476, equations 8 and 10 (per-token mean, two clip bounds).
"""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import AttentionInterface


class ExactNorm(nn.Module):
    """x / rms(x) * weight, in the precision of x."""

    def __init__(self, weight, epsilon):
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, x):
        return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + self.epsilon) * self.weight


class ExactRotary(nn.Module):
    """Rotary angles of default type, in float64, from the published formula."""

    def __init__(self, head_dim, theta):
        super().__init__()
        # Models hold the inverse frequencies in float32; the truth of such a model uses those numbers.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
        self.inverse = (1.0 / (theta**exponents)).double()

    def forward(self, x, position_ids):
        angle = position_ids.double().unsqueeze(-1) * self.inverse
        angle = torch.cat((angle, angle), -1)
        return torch.cos(angle), torch.sin(angle)


def exact_eager(module, query, key, value, attention_mask, scaling=None, **_):
    """Causal attention of one document, written out. The stock eager one takes its softmax in float32."""
    share = query.shape[1] // key.shape[1]
    outputs = []
    for head in range(query.shape[1]):
        q, k, v = query[0, head], key[0, head // share], value[0, head // share]
        scores = q @ k.T * scaling
        for t in range(len(scores)):
            outputs.append(torch.softmax(scores[t, : t + 1], dim=0) @ v[: t + 1])
    length = query.shape[2]
    return torch.stack(outputs).view(query.shape[1], length, -1).transpose(0, 1).unsqueeze(0), None


def exact(model):
    """The same model with eager attention and nothing below float64, on the same weights."""
    model = model.double()
    config = model.config
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "variance_epsilon"):
                setattr(parent, name, ExactNorm(child.weight, child.variance_epsilon))
            elif hasattr(child, "inv_freq"):
                setattr(parent, name, ExactRotary(config.head_dim, config.rope_parameters["rope_theta"]))
    AttentionInterface.register("oracle_eager", exact_eager)
    model.set_attn_implementation("oracle_eager")
    return model.eval()


def grpo_step(model, documents, *, clip_low, clip_high, kl_coefficient, denominator, temperature=1.0,
              clip_decisions=None):
    """Loss and every gradient, accumulated document by document.

    Args:
        model: from `exact`.
        documents: dicts of lists: tokens, loss_mask, advantages, old_logprobs, ref_logprobs.
        clip_decisions: per document, per token, True for the clipped branch; None decides here.

    Returns:
        loss (float), gradients by parameter name, per-document lists of log-probabilities of the tokens.
    """
    model.zero_grad(set_to_none=True)
    trained_per_document = [sum(document["loss_mask"]) for document in documents]
    all_trained = sum(trained_per_document)
    documents_trained = sum(1 for trained in trained_per_document if trained)
    loss, kept_logprobs = 0.0, []
    for number, (document, trained) in enumerate(zip(documents, trained_per_document, strict=True)):
        ids = torch.tensor([document["tokens"]])
        logits = model(input_ids=ids, use_cache=False).logits[0] / temperature
        terms, logprobs = [], []
        for t in range(1, len(document["tokens"])):
            scores = logits[t - 1]
            logprob = scores[document["tokens"][t]] - torch.logsumexp(scores, dim=0)
            logprobs.append(logprob.item())
            if not document["loss_mask"][t]:
                continue
            advantage = document["advantages"][t]
            ratio = torch.exp(logprob - document["old_logprobs"][t])
            bound = torch.tensor(1 + clip_high if advantage > 0 else 1 - clip_low, dtype=torch.float64)
            if clip_decisions is None:
                surrogate = torch.minimum(ratio * advantage,
                                          torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * advantage)
            else:
                surrogate = (bound if clip_decisions[number][t] else ratio) * advantage
            penalty = 0.0
            if kl_coefficient:
                gap = document["ref_logprobs"][t] - logprob
                penalty = kl_coefficient * (torch.exp(gap) - gap - 1)
            weight = 1 / all_trained if denominator == "token" else 1 / (documents_trained * trained)
            terms.append(weight * (penalty - surrogate))
        kept_logprobs.append([math.nan, *logprobs])
        if terms:
            share = torch.stack(terms).sum()
            share.backward()
            loss += share.item()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                 for name, p in model.named_parameters()}
    return loss, gradients, kept_logprobs
