"""GRPO on padded completions: two rollouts of two mini-batches, clip-higher, KL to a reference, mean over tokens."""

from __future__ import annotations

import numpy as np
import torch
from common import (
    Batch,
    Decoder,
    Run,
    chunks,
    counts_of,
    entropy_of,
    in_order,
    initialise,
    neighbour,
    padded,
    said,
    where_of,
    write_docs,
)
from torch import Tensor

GROUP, PROMPTS, MINI, MICRO, BETA, LOW, HIGH = 4, 4, 2, 4, 0.1, 0.1, 0.3


def rewards_of(run: Run, rollout: int, n: int) -> Tensor:
    rng = np.random.default_rng([run.seed, 50 + rollout])
    return torch.tensor(rng.integers(0, 2, n) + 0.5 * rng.random(n) * rng.choice([0.4, 1.6], n), dtype=torch.float32)


def advantages_of(run: Run, rewards: Tensor) -> Tensor:
    grouped = rewards.view(-1, GROUP)
    mean = grouped.mean(1)
    std = grouped.std(1, correction=0 if run.bug("population_std") else 1)
    if run.bug("advantages_tiled"):
        return (rewards - mean.repeat(GROUP)) / (std.repeat(GROUP) + 1e-4)
    if run.bug("std_of_batch"):
        std = rewards.std().expand_as(std)
    return (rewards - mean.repeat_interleave(GROUP)) / (std.repeat_interleave(GROUP) + 1e-4)


def forward(run: Run, model: torch.nn.Module, batch: Batch) -> Tensor:
    with run.autocast():
        return model(batch.ids, attention_mask=batch.real, position_ids=batch.positions)


def train(run: Run) -> None:
    micro = run.get("micro", MICRO)
    model = initialise(Decoder(rotary=True, kernel=run.get("kernel", "sdpa")), run.seed)
    reference = model if run.bug("reference_is_policy") else neighbour(model, run.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0, foreach=run.get("foreach", True))
    recorder = run.recorder(
        model, optimizer, micro_batches=-(-GROUP * PROMPTS // MINI // micro), max_grad_norm=1.0, temperature=1.0,
        denominator="tokens of the mini-batch", kl_coefficient=BETA, clip_low=LOW, clip_high=HIGH,
    )  # fmt: skip
    for rollout in range(2):
        docs = write_docs(run.seed, rollout, GROUP * PROMPTS, group=GROUP)
        rewards = rewards_of(run, rollout, len(docs))
        advantages = advantages_of(run, rewards)
        minis = [
            [padded(d, multiple=run.get("multiple", 1)) for d in chunks(in_order(run, mini), micro)]
            for mini in chunks(docs, len(docs) // MINI)
        ]
        with torch.no_grad():
            old = [[said(run, forward(run, model, b), b.ids) for b in mini] for mini in minis]
        optimizer.zero_grad()
        for n, mini in enumerate(minis):
            if n and not run.bug("not_cleared"):
                optimizer.zero_grad()
            update(run, model, reference, recorder, mini, old[n], rewards, advantages)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    recorder.close()


def mask_of(run: Run, batch: Batch, docs_prompt: Tensor) -> Tensor:
    return batch.places >= docs_prompt[:, None] if run.bug("padding_trained") else batch.answer


def prompts_of(batch: Batch) -> Tensor:
    return (batch.real & ~batch.answer).sum(1)


def update(
    run: Run, model: torch.nn.Module, reference: torch.nn.Module, recorder: object, mini: list[Batch],
    old: list[Tensor], rewards: Tensor, advantages: Tensor,
) -> None:  # fmt: skip
    masks = [mask_of(run, b, prompts_of(b)) for b in mini]
    tokens = sum(int(m.sum()) for m in masks)
    rows = sum(len(b.ids) for b in mini)
    sums = dict.fromkeys(("policy", "kl", "all", "clipped"), 0.0)
    for batch, mask, before in zip(mini, masks, old, strict=True):
        logits = forward(run, model, batch)
        logp = said(run, logits, batch.ids)
        with torch.no_grad():
            ref = said(run, forward(run, reference, batch), batch.ids)
        row_doc = batch.doc.max(1).values
        advantage = advantages[row_doc][:, None].expand_as(logp)
        ratio = (logp - before).exp()
        high = LOW if run.bug("one_epsilon") else HIGH
        surrogate = -torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + high) * advantage)
        gap = ref - logp
        kl = -gap if run.bug("kl_first_estimator") else gap.exp() - gap - 1
        per_token = surrogate + BETA * kl

        def mean(x: Tensor, mask: Tensor = mask) -> Tensor:
            if run.bug("mean_of_sequences"):
                return ((x * mask).sum(1) / mask.sum(1)).sum() / rows
            return run.add(x * mask) / tokens

        loss = mean(per_token)
        loss.backward()
        clipped = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - LOW))
        sums["policy"] += mean(surrogate).item()
        sums["kl"] += mean(kl).item()
        sums["all"] += loss.item()
        sums["clipped"] += mean(clipped.float()).item()
        if run.rich:
            noted = where_of(batch) | {
                "policy_logprobs": logp, "old_logprobs": before, "ref_logprobs": ref,
                "entropy_nats": entropy_of(logits),
                "trained": mask, "losses": per_token, "advantages": advantage,
                "rewards": rewards[row_doc][:, None].expand_as(logp), "ratios": ratio, "clipped": clipped & mask,
            }  # fmt: skip
            recorder.note(counts=counts_of(batch, mask), tokens=noted)
    run.seen(model, sums["all"])
    if run.rich:
        recorder.note(
            metrics={
                "loss/policy": sums["policy"],
                "loss/kl": BETA * sums["kl"],
                "actor/clip_fraction": sums["clipped"],
            }
        )
