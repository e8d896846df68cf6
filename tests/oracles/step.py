"""One optimizer step the long way: a stock model, one document at a time, every logit, the formula from the paper.

Source: DeepSeekMath, arXiv 2402.03300, equation 3 (per-document mean) and equation 4 (KL estimate);
DAPO, arXiv 2503.14476, equations 8 and 10 (per-token mean, two clip bounds). Losses on whole documents: GSPO, arXiv
2507.18071, equations 5 and 7; GMPO, arXiv 2507.20673; LUSPO, arXiv 2602.05261; VESPO, arXiv 2602.10693; DPO, arXiv
2305.18290, equation 7; the sequence weight of a truncated importance sampling: verl and TRL.
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
    """Rotary angles of default type, in float64, from the published formula; once for both halves of a head, or not."""

    def __init__(self, head_dim, theta, twice=True):
        super().__init__()
        self.twice = twice
        # Models hold the inverse frequencies in float32; the ground truth of such a model uses those numbers.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
        self.inverse = (1.0 / (theta**exponents)).double()

    def forward(self, x, position_ids):
        angle = position_ids.double().unsqueeze(-1) * self.inverse
        angle = torch.cat((angle, angle), -1) if self.twice else angle
        return torch.cos(angle), torch.sin(angle)


class ExactMixture(nn.Module):
    """A mixture of experts, one token and one expert at a time.

    Scores are a softmax, or sigmoids whose largest k are taken after a bias is added. The scores of the chosen experts
    weigh their outputs, made to sum to 1 unless the router does not; experts that every token has are added.

    Attributes:
        given: experts of the next tokens, in place of those with the largest scores (also where None); [] for none.
        seen: logits, scores and experts of each token so far.
    """

    def __init__(self, block):
        super().__init__()
        for name, child in block.named_children():
            self.add_module(name, child)
        self.given, self.seen = [], []

    def forward(self, x):
        up_of, down_of = self.experts.gate_up_proj.unbind(), self.experts.down_proj.unbind()
        mixed = torch.stack([self.one_token(token, up_of, down_of) for token in x[0]]).unsqueeze(0)
        return (mixed, None) if hasattr(self, "router") else mixed

    def expert(self, number, token, up, down):
        """One expert's output for a token; those of gpt-oss have biases, bounds, and gate and up in turn."""
        if not hasattr(self.experts, "gate_up_proj_bias"):
            gate, up = (up @ token).tensor_split(2)
            return down @ (gate / (1 + torch.exp(-gate)) * up)
        both = token @ up + self.experts.gate_up_proj_bias[number]
        gate = torch.clamp(both[0::2], max=self.experts.limit)
        up = torch.clamp(both[1::2], min=-self.experts.limit, max=self.experts.limit)
        return (up + 1) * gate / (1 + torch.exp(-self.experts.alpha * gate)) @ down + self.experts.down_proj_bias[
            number
        ]

    def one_token(self, token, up_of, down_of):
        router = self.gate if hasattr(self, "gate") else self.router
        logits = router.weight @ token + getattr(router, "bias", 0.0)
        bias = getattr(router, "e_score_correction_bias", None)
        scores = torch.softmax(logits, dim=0) if bias is None else 1 / (1 + torch.exp(-logits))
        ranked = scores.detach() if bias is None else scores.detach() + bias
        own = sorted(range(len(scores)), key=lambda e: -ranked[e].item())[: router.top_k]
        chosen = (self.given.pop(0) if self.given else None) or own
        self.seen.append((logits, scores, chosen))
        result = 0.0
        for expert in chosen:
            result = result + scores[expert] * self.expert(expert, token, up_of[expert], down_of[expert])
        if getattr(router, "norm_topk_prob", True):
            result = result / sum(scores[expert] for expert in chosen)
        result = result * getattr(router, "routed_scaling_factor", 1.0)
        shared = getattr(self, "shared_experts", getattr(self, "shared_expert", None))
        if shared is not None:
            gate, up = shared.gate_proj.weight @ token, shared.up_proj.weight @ token
            added = shared.down_proj.weight @ (gate / (1 + torch.exp(-gate)) * up)
            if hasattr(self, "shared_expert_gate"):
                added = added / (1 + torch.exp(-(self.shared_expert_gate.weight @ token)))
            result = result + added
        return result


def exact_eager(module, query, key, value, attention_mask, scaling=None, sliding_window=None, s_aux=None, **_):
    """Causal attention of one document, query by query. The stock eager one takes its softmax in float32.

    A sink is one more score of each query of a head, without a value.
    """
    share = query.shape[1] // key.shape[1]
    k, v = (x[0].repeat_interleave(share, dim=0) for x in (key, value))
    scores = query[0] @ k.transpose(1, 2) * scaling
    outputs = []
    for t in range(query.shape[2]):
        seen = slice(max(0, t + 1 - (sliding_window or t + 1)), t + 1)
        row = scores[:, t, seen] if s_aux is None else torch.cat([scores[:, t, seen], s_aux[:, None]], dim=1)
        outputs.append(torch.softmax(row, dim=1)[:, None, : seen.stop - seen.start] @ v[:, seen])
    return torch.cat(outputs, dim=1).transpose(0, 1).unsqueeze(0), None


def exact(model):
    """The same model with eager attention and nothing below float64, on the same weights."""
    model = model.double()
    config = model.config
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "variance_epsilon"):
                setattr(parent, name, ExactNorm(child.weight, child.variance_epsilon))
            elif hasattr(child, "inv_freq"):
                twice = "GptOss" not in type(child).__name__
                setattr(parent, name, ExactRotary(config.head_dim, config.rope_parameters["rope_theta"], twice))
            elif hasattr(child, "experts"):
                setattr(parent, name, ExactMixture(child))
    AttentionInterface.register("oracle_eager", exact_eager)
    model.set_attn_implementation("oracle_eager")
    return model.eval()


def grpo_step(
    model, documents, *, clip_low, clip_high, kl_coefficient, denominator, temperature=1.0, clip_decisions=None
):
    """Loss and every gradient, accumulated document by document.

    Args:
        model: from `exact`.
        documents: dicts of lists: tokens, loss_mask, advantages, old_logprobs, ref_logprobs; and, optionally, supports,
            the ids over which each token's log-probability is normalised, [] for the whole vocabulary.
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
            support = document["supports"][t] if "supports" in document else []
            over = scores[support] if support else scores
            logprob = scores[document["tokens"][t]] - torch.logsumexp(over, dim=0)
            logprobs.append(logprob.item())
            if not document["loss_mask"][t]:
                continue
            advantage = document["advantages"][t]
            ratio = torch.exp(logprob - document["old_logprobs"][t])
            bound = torch.tensor(1 + clip_high if advantage > 0 else 1 - clip_low, dtype=torch.float64)
            if clip_decisions is None:
                surrogate = torch.minimum(
                    ratio * advantage, torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * advantage
                )
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
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    return loss, gradients, kept_logprobs


def document_logprobs(model, documents, *, temperature=1.0):
    """Log-probability of every token, as scalars with a gradient: ``[d][t]``, None for a document's first token."""
    logprobs = []
    for document in documents:
        logits = model(input_ids=torch.tensor([document["tokens"]]), use_cache=False).logits[0] / temperature
        logprobs.append(
            [None]
            + [
                logits[t - 1][document["tokens"][t]] - torch.logsumexp(logits[t - 1], dim=0)
                for t in range(1, len(document["tokens"]))
            ]
        )
    return logprobs


def policy_step(model, documents, logprobs, values, *, weight, gradient_weight=None):
    """Return loss and every gradient of a loss that may couple tokens of documents, and several documents.

    Args:
        model: from `exact`.
        documents: dicts of lists.
        logprobs: from `document_logprobs`; may serve several losses.
        values: a function of (documents, logprobs) that gives the per-token values to be minimised, ``[d][t]``, for
            the trained tokens.
        weight: a function of a document's number: what each of its trained tokens weighs in the loss.
        gradient_weight: the same for the gradient; None: the same.

    Returns:
        loss (float), gradients by parameter name.
    """
    model.zero_grad(set_to_none=True)
    result = values(documents, logprobs)
    loss, driving = 0.0, []
    for number in range(len(documents)):
        for t in trained(documents[number]):
            loss += weight(number) * result[number][t].item()
            driving.append((gradient_weight or weight)(number) * result[number][t])
    if driving:
        torch.stack(driving).sum().backward(retain_graph=True)
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    return loss, gradients


def trained(document):
    """Places of the tokens that count."""
    return [t for t, trains in enumerate(document["loss_mask"]) if trains]


def log_ratios(document, logprobs, anchor="old_logprobs"):
    """log(policy / anchor) of each trained token, by place."""
    return {t: logprobs[t] - document[anchor][t] for t in trained(document)}


def each_document(function):
    """A loss that looks at one document at a time, for `policy_step`."""
    return lambda documents, logprobs: [function(d, lp) for d, lp in zip(documents, logprobs, strict=True)]


def clipped(ratio, advantage, low, high):
    """PPO's pessimistic surrogate of one ratio."""
    return -torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def gspo(low, high):
    """The clipped surrogate of the geometric mean of a document's ratios, on each of its tokens."""

    @each_document
    def values(document, logprobs):
        ratios = log_ratios(document, logprobs)
        if not ratios:
            return {}
        ratio = torch.exp(sum(ratios.values()) / len(ratios))
        return {t: clipped(ratio, document["advantages"][t], low, high) for t in ratios}

    return values


def gspo_with_kl(low, high, coefficient):
    """The same, and k3 of policy against sampler times the document's ratio, which carries its gradient."""

    @each_document
    def values(document, logprobs):
        ratios = log_ratios(document, logprobs)
        if not ratios:
            return {}
        ratio, result = torch.exp(sum(ratios.values()) / len(ratios)), {}
        for t, gap in log_ratios(document, logprobs, "sampler_logprobs").items():
            penalty = coefficient * ratio * (torch.exp(-gap) - 1 + gap)
            result[t] = clipped(ratio, document["advantages"][t], low, high) + penalty
        return result

    return values


def gspo_of_kept(low, high, smallest, greatest, veto):
    """The same over tokens whose w = old / sampler is inside its bounds, times w, with the mean of their advantages.

    A document with a trained token whose w is below the veto has none of them (AReaL's rejection, the fork's veto).
    """

    @each_document
    def values(document, logprobs):
        ratios, result = log_ratios(document, logprobs), {}
        weights = {t: math.exp(document["old_logprobs"][t] - document["sampler_logprobs"][t]) for t in ratios}
        whole = min(weights.values(), default=1.0) >= veto
        kept = [t for t, w in weights.items() if whole and smallest <= w <= greatest]
        for t in ratios:
            if t in kept:
                ratio = torch.exp(sum(ratios[s] for s in kept) / len(kept))
                advantage = sum(document["advantages"][s] for s in kept) / len(kept)
                result[t] = weights[t] * clipped(ratio, advantage, low, high)
            else:
                result[t] = 0.0 * ratios[t]
        return result

    return values


def gspo_of_segments(low, high):
    """The same with a ratio for each unbroken run of trained tokens."""

    @each_document
    def values(document, logprobs):
        ratios, result, run = log_ratios(document, logprobs), {}, []
        for t in range(len(document["tokens"]) + 1):
            if t in ratios:
                run.append(t)
                continue
            for member in run:
                ratio = torch.exp(sum(ratios[other] for other in run) / len(run))
                result[member] = clipped(ratio, document["advantages"][member], low, high)
            run = []
        return result

    return values


def luspo(low, high):
    """GSPO times the length of the document."""
    plain = gspo(low, high)
    return lambda documents, logprobs: [
        {t: len(trained(document)) * value for t, value in result.items()}
        for document, result in zip(documents, plain(documents, logprobs), strict=True)
    ]


def gmpo(low, high):
    """The geometric mean of ratios that were clipped, in logs, one by one."""

    @each_document
    def values(document, logprobs):
        ratios = log_ratios(document, logprobs)
        if not ratios:
            return {}
        kept = [
            torch.clamp(d, max=high) if document["advantages"][t] > 0 else torch.clamp(d, min=-low)
            for t, d in ratios.items()
        ]
        ratio = torch.exp(sum(kept) / len(kept))
        return {t: -document["advantages"][t] * ratio for t in ratios}

    return values


def vespo(k_positive, lambda_positive, k_negative, lambda_negative, bound=None):
    """A policy gradient weighed by a gamma-shaped function of the document's whole ratio.

    Args:
        bound: if given, the ratio has the truncated ratios of old to sampler in it, too.
    """

    @each_document
    def values(document, logprobs):
        log_weight = sum(d.item() for d in log_ratios(document, logprobs).values())
        if bound is not None:
            log_weight += sum(
                min(document["old_logprobs"][t] - document["sampler_logprobs"][t], math.log(bound))
                for t in trained(document)
            )
        results = {}
        for t in trained(document):
            advantage = document["advantages"][t]
            k, rate = (k_positive, lambda_positive) if advantage >= 0 else (k_negative, lambda_negative)
            phi = math.exp(rate + k * log_weight - rate * math.exp(log_weight))
            results[t] = -phi * advantage * logprobs[t]
        return results

    return values


def ppo_with_sequence_weight(low, high, bound, mean):
    """The token surrogate times min(W, bound), W the sampler correction of the whole document (a sum or a mean)."""

    @each_document
    def values(document, logprobs):
        gaps = [document["old_logprobs"][t] - document["sampler_logprobs"][t] for t in trained(document)]
        results = {}
        for t, d in log_ratios(document, logprobs).items():
            weight = min(math.exp(sum(gaps) / (len(gaps) if mean else 1)), bound)
            results[t] = weight * clipped(torch.exp(d), document["advantages"][t], low, high)
        return results

    return values


def inside(document, low, high):
    """Return whether old / sampler of each token lies between two bounds, by position; untrained tokens too."""
    return [
        low <= math.exp(o - s) <= high
        for o, s in zip(document["old_logprobs"], document["sampler_logprobs"], strict=True)
    ]


def ppo_with_token_gate(low, high, smallest, greatest):
    """The token surrogate times w = old / sampler, and 0 where w is outside its bounds (IcePop, arXiv 2510.18855)."""

    @each_document
    def values(document, logprobs):
        kept, result = inside(document, smallest, greatest), {}
        for t, d in log_ratios(document, logprobs).items():
            weight = math.exp(document["old_logprobs"][t] - document["sampler_logprobs"][t]) if kept[t] else 0.0
            result[t] = weight * clipped(torch.exp(d), document["advantages"][t], low, high)
        return result

    return values


def ppo_with_normalised_weight(low, high, bound):
    """The token surrogate times min(w, bound) over the mean of that over all trained tokens of the step (verl)."""

    def values(documents, logprobs):
        weights = [
            {t: min(math.exp(d["old_logprobs"][t] - d["sampler_logprobs"][t]), bound) for t in trained(d)}
            for d in documents
        ]
        mean = sum(sum(w.values()) for w in weights) / sum(map(len, weights))
        return [
            {
                t: weight[t] / mean * clipped(torch.exp(d), document["advantages"][t], low, high)
                for t, d in log_ratios(document, text).items()
            }
            for document, text, weight in zip(documents, logprobs, weights, strict=True)
        ]

    return values


def dpo(beta):
    """Minus log sigmoid of the margin of the chosen over the rejected document, on every token of both."""

    def values(documents, logprobs):
        results = []
        for document in documents:
            if not trained(document):
                results.append({})
                continue
            pair = [d for d in range(len(documents)) if documents[d]["group_id"] == document["group_id"]]
            chosen, rejected = sorted(pair, key=lambda d: -documents[d]["reward"])
            margin = sum(log_ratios(documents[chosen], logprobs[chosen], "ref_logprobs").values()) - sum(
                log_ratios(documents[rejected], logprobs[rejected], "ref_logprobs").values()
            )
            loss = torch.log(1 + torch.exp(-beta * margin))
            results.append(dict.fromkeys(trained(document), loss))
        return results

    return values


def ppo(low, high):
    """The token surrogate."""
    return each_document(
        lambda document, logprobs: {
            t: clipped(torch.exp(d), document["advantages"][t], low, high)
            for t, d in log_ratios(document, logprobs).items()
        }
    )


def smoothed_logprobs(model, documents, *, smoothing, temperature=1.0):
    """Expected log-probability under each token's smoothed label: 1 - e + e / V at the token, e / V at the others."""
    results = []
    for document in documents:
        logits = model(input_ids=torch.tensor([document["tokens"]]), use_cache=False).logits[0] / temperature
        values = [None]
        for t in range(1, len(document["tokens"])):
            scores = logits[t - 1]
            label = torch.full_like(scores, smoothing / len(scores))
            label[document["tokens"][t]] += 1 - smoothing
            values.append((label * (scores - torch.logsumexp(scores, dim=0))).sum())
        results.append(values)
    return results


def likelihood():
    """Minus the (smoothed) log-probability of each trained token."""
    return each_document(lambda document, logprobs: {t: -logprobs[t] for t in trained(document)})
