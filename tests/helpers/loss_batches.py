"""Batches for pure losses: documents as plain lists for the oracles, and the same as LossInputs."""

from __future__ import annotations

import math
import random

import torch

from workbench.losses import LossInputs

MASKS = {
    "all": [1] * 7,
    "prompt": [0, 0, 0, 1, 1, 1, 1, 1],
    "one token": [0, 0, 1],
    "lone": [1],
    "empty": [0, 0, 0, 0],
    "turns": [0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0],
    "long": [0] * 3 + [1] * 20,
    "late": [0] * 6 + [1, 1],
}
RUBBISH = (math.nan, math.inf, -math.inf, 1e30)


def nasty_documents(seed, *, low=1e-3, high=1e3, advantages="tokens", rubbish=True, masks=MASKS):
    """Documents with ratios between low and high (the ends included), zero advantages, and rubbish under the mask.

    Args:
        seed: of the generator.
        low: smallest ratio to the old, sampler and reference policies.
        high: largest ratio.
        advantages: "tokens": each its own, some 0; "documents": one a document, one document 0.
        rubbish: NaN and infinities where the mask is off.
        masks: the documents.
    """
    rng = random.Random(seed)
    ends = [math.log(low), math.log(high)]
    documents = []
    for number, mask in enumerate(masks.values()):
        size = len(mask)
        shared = 0.0 if number == 3 else rng.uniform(0.2, 2.0) * (-1) ** number
        document = {
            "mask": list(mask),
            "policy": [],
            "old": [],
            "sampler": [],
            "ref": [],
            "advantages": [],
            "reward": float(number % 2),
            "group": number // 2,
        }
        for t in range(size):
            log_ratio = ends[t % 2] if t in (4, 5) else rng.uniform(*ends)
            x = -rng.uniform(0.02, 2.0) + min(0.0, log_ratio)
            document["policy"].append(x)
            document["old"].append(x - log_ratio)
            for other in ("sampler", "ref"):
                document[other].append(min(-1e-3, x - rng.uniform(*ends)))
            own = rng.choice((-1, 1)) * rng.uniform(0.2, 2.0) if rng.random() > 0.2 else 0.0
            document["advantages"].append(own if advantages == "tokens" else shared)
            if rubbish and not mask[t]:
                for name in ("policy", "old", "sampler", "ref", "advantages"):
                    document[name][t] = rng.choice(RUBBISH)
        documents.append(document)
    return documents


def random_weights(documents, seed):
    """Positive weights, another one for every token."""
    rng = random.Random(seed)
    return [[rng.uniform(0.1, 1.0) for _ in document["mask"]] for document in documents]


def packed(documents, *, padding=3, dtype=torch.float64, **more):
    """The documents as one row, with padding behind; the policy's log-probabilities are a leaf."""

    def row(name, fill):
        return torch.tensor([v for document in documents for v in document[name]] + [fill] * padding, dtype=dtype)

    sizes = [len(document["mask"]) for document in documents]
    numbers = torch.tensor([*range(len(sizes)), -1]).repeat_interleave(torch.tensor([*sizes, padding]))
    rewards, groups = ([document[name] for document in documents] for name in ("reward", "group"))
    fields = {
        "old_logprobs_T": row("old", math.nan),
        "sampler_logprobs_T": row("sampler", math.nan),
        "ref_logprobs_T": row("ref", math.nan),
        "advantages_T": row("advantages", math.nan),
        "loss_mask_T": row("mask", 0).bool(),
        "document_ids_T": numbers,
        "rewards_T": torch.tensor([*rewards, 0.0], dtype=dtype)[numbers],
        "group_ids_T": torch.tensor([*groups, -1])[numbers],
        **more,
    }
    policy_T = row("policy", math.nan).requires_grad_()
    return policy_T, LossInputs(policy_T, **fields)


def flat(lists, *, padding=3):
    """Per-document lists as one float64 row."""
    return torch.tensor([v for one in lists for v in one] + [0.0] * padding, dtype=torch.float64)


def weighted_total(term, inputs, weights):
    """Return the sum that a step back-propagates: uncounted values are ignored."""
    kept_T = torch.where(inputs.loss_mask_T, term.values_T, 0.0)
    return (kept_T * flat(weights, padding=len(kept_T) - sum(map(len, weights)))).sum()
