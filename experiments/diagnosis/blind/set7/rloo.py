"""REINFORCE leave-one-out on left-padded completions: temperature, KL in the reward, one update a rollout."""

from __future__ import annotations

import numpy as np
import torch
from common import (
    Batch,
    Decoder,
    Run,
    by_document,
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
from torch import Tensor, nn

STEPS, DOCS, GROUP, MICRO, TEMPERATURE, KL = 4, 12, 4, 4, 0.8, 0.1


def forward(run: Run, model: nn.Module, batch: Batch) -> Tensor:
    mask = None if run.bug("padding_attended") else batch.real
    return model(batch.ids, attention_mask=mask, position_ids=batch.positions)


def train(run: Run) -> None:
    micro = run.get("micro", MICRO)
    model = run.weights(initialise(Decoder(kernel=run.get("kernel", "sdpa")), run.seed))
    reference = neighbour(model, run.seed, 0.05)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.8, 0.9), foreach=run.get("foreach", True))
    recorder = run.recorder(
        model, optimizer, micro_batches=-(-DOCS // micro), temperature=TEMPERATURE, kl_coefficient=KL,
        denominator="completions",
    )  # fmt: skip
    temperature = 1.0 if run.bug("temperature_missing") else TEMPERATURE
    for step in range(STEPS):
        if run.bug("moments_lost") and step == 2:
            optimizer.state.clear()
        scores = np.random.default_rng([run.seed, 30 + step]).normal(0.0, 1.0, DOCS)
        docs = in_order(run, write_docs(run.seed, step, DOCS, group=GROUP))
        batches = [padded(d, multiple=run.get("multiple", 1), left=True) for d in chunks(docs, micro)]
        optimizer.zero_grad()
        rewards = torch.zeros(DOCS)
        passes = []
        for batch in batches:
            logits = forward(run, model, batch)
            logp = said(run, logits, batch.ids, temperature)
            with torch.no_grad():
                ref = said(run, forward(run, reference, batch), batch.ids, temperature)
            penalty = ((logp.detach() - ref) * batch.answer).sum(1)
            if run.bug("penalty_mean"):
                penalty = penalty / batch.answer.sum(1)
            number = batch.doc.max(1).values
            rewards[number] = torch.tensor(scores, dtype=torch.float32)[number] - KL * penalty
            passes.append((batch, logits, logp, ref))
        grouped = rewards.view(-1, GROUP)
        if run.bug("baseline_with_itself"):
            baseline = grouped.mean(1, keepdim=True).expand_as(grouped)
        else:
            baseline = (grouped.sum(1, keepdim=True) - grouped) / (GROUP - 1)
        advantages = (grouped - baseline).flatten()
        total = 0.0
        for batch, logits, logp, ref in passes:
            advantage = by_document(batch, dict(enumerate(advantages.tolist())))
            per_token = -advantage * logp
            loss = run.add(per_token * batch.answer) / DOCS
            loss.backward()
            total += loss.item()
            if run.rich:
                noted = where_of(batch) | {
                    "policy_logprobs": logp, "ref_logprobs": ref, "entropy_nats": entropy_of(logits, temperature),
                    "trained": batch.answer, "losses": per_token, "advantages": advantage,
                    "rewards": by_document(batch, dict(enumerate(rewards.tolist()))),
                }  # fmt: skip
                recorder.note(counts=counts_of(batch, batch.answer), tokens=noted)
        run.seen(model, total)
        if run.rich:
            recorder.note(metrics={"loss/policy": total, "reward": rewards.mean().item()})
        optimizer.step()
    recorder.close()
