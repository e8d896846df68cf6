"""GSPO on packed completions: two epochs over a rollout, ratios of sequences, truncated weights for the sampler."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from common import (
    Batch,
    Decoder,
    Run,
    by_document,
    counts_of,
    entropy_of,
    in_order,
    initialise,
    noise_of,
    packed,
    rows_of,
    said,
    spread_out,
    where_of,
    write_docs,
)
from torch import Tensor

DOCS, GROUP, EPOCHS, CAPACITY, EPSILON, CAP = 12, 4, 2, 36, 0.3, 1.3


def per_document(values: Tensor, batch: Batch, mask: Tensor) -> Tensor:
    """[documents of the step] sum of values over the masked tokens of each."""
    return torch.zeros(DOCS).index_add(0, batch.doc[mask], values[mask].float())


def train(run: Run) -> None:
    model = run.weights(initialise(Decoder(kernel=run.get("kernel", "sdpa")), run.seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, foreach=run.get("foreach", True))
    parts = run.get("micro", 2)
    recorder = run.recorder(
        model, optimizer, micro_batches=parts, max_grad_norm=2.0, temperature=1.0, denominator="documents",
        clip=EPSILON, sampler_cap=CAP,
    )  # fmt: skip
    for rollout in range(2):
        docs = write_docs(run.seed, rollout, DOCS, group=GROUP)
        rng = np.random.default_rng([run.seed, 70 + rollout])
        rewards = torch.tensor(rng.normal(size=DOCS), dtype=torch.float32)
        advantages = rewards - rewards.view(-1, GROUP).mean(1).repeat_interleave(GROUP)
        whole = packed(in_order(run, docs), run.get("capacity", CAPACITY))
        bounds = torch.linspace(0, len(whole.ids), parts + 1).round().int().tolist()
        batches = [rows_of(whole, a, b) for a, b in itertools.pairwise(bounds) if a < b]
        with torch.no_grad():
            old = [said(run, forward(model, b), b.ids) for b in batches]
        # the sampler computes in another precision and with other kernels; what it saw is data of the rollout
        noise = noise_of(docs, run.seed + rollout, 0.35)
        sampler = sampled(run, model, docs, noise)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            total, weight_sum = 0.0, 0.0
            for batch, before in zip(batches, old, strict=True):
                mask = batch.answer
                if run.bug("first_token_lost"):
                    mask = mask & torch.nn.functional.pad(mask[:, :-1], (1, 0))
                logits = forward(model, batch)
                logp = said(run, logits, batch.ids)
                seen = spread_out(batch, sampler)
                base = seen if run.bug("sampler_as_old") else before
                length = per_document(torch.ones_like(logp), batch, mask)
                over = length
                if run.bug("ratio_over_whole_length"):
                    over = per_document(torch.ones_like(logp), batch, batch.real)
                if run.bug("ratio_of_sums"):
                    over = torch.ones(DOCS)
                delta = per_document(logp - base, batch, mask) / over.clamp(min=1)
                number = batch.doc.clamp(min=0)
                ratio = (logp - base).exp() if run.bug("token_ratios") else delta.exp()[number]
                weight = (before - seen).exp()
                if run.bug("sampler_weight_inverted"):
                    weight = (seen - before).exp()
                if not run.bug("sampler_weight_uncapped"):
                    weight = weight.clamp(max=CAP)
                advantage = by_document(batch, dict(enumerate(advantages.tolist())))
                bounded = ratio.clamp(1 - EPSILON, 1 + EPSILON)
                per_token = -torch.minimum(ratio * advantage, bounded * advantage) * weight
                loss = run.add(per_document(per_token, batch, mask) / length.clamp(min=1)) / DOCS
                loss.backward()
                total += loss.item()
                weight_sum += (per_document(weight, batch, mask) / length.clamp(min=1)).sum().item() / DOCS
                if run.rich:
                    clipped = ((advantage > 0) & (ratio > 1 + EPSILON)) | ((advantage < 0) & (ratio < 1 - EPSILON))
                    noted = where_of(batch) | {
                        "policy_logprobs": logp, "old_logprobs": base, "sampler_logprobs": seen,
                        "entropy_nats": entropy_of(logits), "trained": mask, "losses": per_token,
                        "advantages": advantage, "rewards": by_document(batch, dict(enumerate(rewards.tolist()))),
                        "ratios": ratio, "clipped": clipped & mask,
                    }  # fmt: skip
                    recorder.note(counts=counts_of(batch, mask), tokens=noted)
            run.seen(model, total)
            if run.rich:
                recorder.note(metrics={"loss/policy": total, "sampler/weight": weight_sum})
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
    recorder.close()


def forward(model: torch.nn.Module, batch: Batch) -> Tensor:
    return model(batch.ids, attention_mask=batch.same_document, position_ids=batch.positions)


@torch.no_grad()
def sampled(run: Run, model: torch.nn.Module, docs: list, noise: dict[int, Tensor]) -> dict[int, Tensor]:
    """What the sampler noted while it drew each document: one document at a time, with its own error."""
    out = {}
    for doc in docs:
        logits = model(doc.ids[None])[:, :-1].float()
        logp = logits.log_softmax(-1).gather(-1, doc.ids[None, 1:, None])[0, :, 0]
        out[doc.number] = torch.nn.functional.pad(logp, (1, 0)) + noise[doc.number]
    return out
