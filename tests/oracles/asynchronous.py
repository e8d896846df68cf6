"""Asynchronous RL the long way: every version of the weights kept, every token sampled alone, each formula written out.

Source: decoupled PPO, arXiv 2505.24298, equation 5 (a clipped ratio to the policy at the start of the update, times
the weight of that policy against the one that sampled); an estimate of that policy: AReaL,
docs/algorithms/prox_approx.md; weights that change while a completion is sampled, with and without the keys and values
of the older ones: PipelineRL, arXiv 2509.19128. Leave-one-out baselines: arXiv 2402.14740.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface

from tests.oracles.step import exact

_STORED = {}


def _decoding(module, query, key, value, attention_mask, scaling=None, **_):
    """Attention of one token on the keys and values that were computed when the earlier ones were fed."""
    keys, values = _STORED.setdefault(module.layer_idx, ([], []))
    keys.append(key[0, :, 0])
    values.append(value[0, :, 0])
    share = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = torch.stack([query[0, head, 0] @ k[head // share] for k in keys]) * scaling
        heads.append(torch.softmax(scores, dim=0) @ torch.stack([v[head // share] for v in values]))
    return torch.stack(heads)[None, None], None


def _fed(model, tokens, first):
    """Logits after the last of some tokens, fed one by one from a position."""
    for at, token in enumerate(tokens, first):
        logits = model(input_ids=torch.tensor([[token]]), position_ids=torch.tensor([[at]]), use_cache=False).logits[
            0, 0
        ]
    return logits


def _load(model, weights):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


@torch.no_grad()
def sample(model, prompt, uniforms, weights_at, *, temperature, ends, recompute):
    """One completion; ``weights_at(place)`` gives name and weights of the version that samples a place."""
    _STORED.clear()
    tokens, logprobs, versions = [], [], []
    for place, uniform in enumerate(uniforms):
        version, weights = weights_at(place)
        _load(model, weights)
        if place == 0:
            logits = _fed(model, prompt, 0)
        elif recompute and version != versions[-1]:
            _STORED.clear()
            logits = _fed(model, [*prompt, *tokens], 0)
        else:
            logits = _fed(model, tokens[-1:], len(prompt) + place - 1)
        logps = torch.log_softmax(logits / temperature, dim=0)
        total, reached = logps.exp().sum().item(), 0.0
        token = -1
        while reached <= uniform * total:
            token += 1
            reached += logps[token].exp().item()
        tokens.append(token)
        logprobs.append(logps[token].item())
        versions.append(version)
        if token in ends:
            break
    return tokens, logprobs, versions


def _logprobs(model, document, temperature):
    """Log-probabilities of the completion's tokens, with a gradient."""
    ids = document["prompt"] + document["tokens"]
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] / temperature
    start = len(document["prompt"])
    return [torch.log_softmax(logits[t - 1], dim=0)[ids[t]] for t in range(start, len(ids))]


def train(
    model,
    prompts,
    uniforms,
    reward,
    *,
    steps,
    updates=1,
    queue=0,
    mixed=False,
    at_once=1,
    in_flight=None,
    recompute=False,
    max_staleness=None,
    arrives=lambda version, weights: weights(version),
    old="trainer",
    cap=None,
    oldest=None,
    clip=0.2,
    temperature=1.0,
    ends=(),
    learning_rate=1.0,
):
    """Train; yield the documents and every gradient of each step.

    Args:
        model: a stock decoder, which stays as it is.
        prompts: number of a sampling -> lists of ids.
        uniforms: numbers of sampling and prompt -> rows of numbers, one a completion.
        reward: number of sampling, of prompt and tokens -> reward.
        arrives: version and a function from versions to weights -> what the sampler has in the place of that version.
        old: "trainer", "sampler", "behaviour" or "interpolated".
        cap: of the weight old / sampler; None: no weight.
        oldest: tokens of greater age are not trained on; None: all are.
    """
    import copy

    trained, sampler = exact(copy.deepcopy(model)), exact(copy.deepcopy(model))
    AttentionInterface.register("oracle_decoding", _decoding)
    sampler.set_attn_implementation("oracle_decoding")
    history = []
    for step in range(steps):
        history.append({name: p.detach().clone() for name, p in trained.named_parameters()})
        number, update = divmod(step, updates)
        if update == 0:
            documents = []
            for at, prompt in enumerate(prompts(number)):
                age = (at // at_once) % (queue + 1) if mixed else queue
                begin = max(0, number - age) * updates

                def weights_at(place, begin=begin, number=number):
                    version = begin if in_flight is None else min(begin + place // in_flight, number * updates)
                    return version, arrives(version, lambda v: history[max(0, v)])

                group = []
                for row in uniforms(number, at):
                    tokens, logprobs, versions = sample(
                        sampler, prompt, row, weights_at, temperature=temperature, ends=ends, recompute=recompute
                    )
                    group.append(
                        {
                            "prompt": prompt,
                            "tokens": tokens,
                            "sampler": logprobs,
                            "versions": versions,
                            "reward": reward(number, at, tokens),
                        }
                    )
                for one in group:
                    others = [d["reward"] for d in group if d is not one]
                    one["advantage"] = one["reward"] - sum(others) / len(others)
                documents += group
            for document in documents:
                ages = [number * updates - version for version in document["versions"]]
                document["ages"] = ages
                document["trains"] = max_staleness is None or max(ages) <= max_staleness
                with torch.no_grad():
                    if old == "behaviour":
                        document["old"] = []
                        for place, version in enumerate(document["versions"]):
                            _load(trained, history[version])
                            document["old"].append(_logprobs(trained, document, temperature)[place].item())
                        _load(trained, history[-1])
                    else:
                        document["old"] = [value.item() for value in _logprobs(trained, document, temperature)]
                    if old == "sampler":
                        document["old"] = document["sampler"]
        size = len(documents) // updates
        of_step = documents[update * size : (update + 1) * size]
        tokens = sum(len(d["tokens"]) for d in of_step if d["trains"])
        trained.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64)
        for document in of_step:
            if not document["trains"]:
                continue
            for place, logprob in enumerate(_logprobs(trained, document, temperature)):
                behaviour, age = document["sampler"][place], document["ages"][place]
                if oldest is not None and age > oldest:
                    continue
                anchor = torch.tensor(document["old"][place], dtype=torch.float64)
                if old == "interpolated":
                    anchor = behaviour + age / (age + 1) * (logprob.detach() - behaviour)
                ratio, advantage = torch.exp(logprob - anchor), document["advantage"]
                value = -torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - clip, 1 + clip) * advantage)
                weight = 1.0 if cap is None else min(cap, torch.exp(anchor - behaviour).item())
                total = total + weight * value / tokens
        total.backward()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.named_parameters()}
        yield documents, gradients
        with torch.no_grad():
            for name, parameter in trained.named_parameters():
                parameter -= learning_rate * gradients[name]
