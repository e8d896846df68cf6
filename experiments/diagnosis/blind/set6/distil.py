"""Distillation of a larger decoder on responses: gloo processes, gradients all-reduced by hand in buckets."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common import Decoder, Gradients, Log, Run, chunks, counts, entropies, grids, in_processes, late, logprobs, padded
from common import single, text

STEPS, DOCUMENTS, TEMPERATURE, ALPHA = 3, 16, 2.0, 0.5


def distil(run: Run) -> Gradients:
    return in_processes(run.get("world", 2), lambda rank, world: work(run, rank, world))


def reduced(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def work(run: Run, rank: int, world: int) -> Gradients:
    kernel = run.get("attention", "sdpa")
    student = Decoder(run.seed, kernel=kernel)
    teacher = Decoder(run.seed + 1, d=48, layers=3, kernel=kernel).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    context = {"dp": world, "max_grad_norm": 1.0, "denominator": "response tokens of all ranks", "alpha": ALPHA}
    log = Log(run, student, optimizer, context | {"distillation_temperature": TEMPERATURE})
    for step in range(STEPS):
        rng = np.random.default_rng([run.seed, step])
        docs = [single(rng, n, text(rng, int(rng.integers(3, 8))), 4, 15) for n in range(DOCUMENTS)]
        mine = run.ordered(docs, step)[rank::world]
        own = sum(sum(d.response) for d in mine)
        count = float(own) if run.has("local_tokens") else reduced(own) / world
        terms = {"distillation": 0.0, "cross_entropy": 0.0}
        for part in chunks(mine, run.get("micro", 4)):
            b = padded(part, "right", run.get("extra", 0))
            with run.autocast():
                logits = student(b["ids"], attention_mask=b["mask"], position_ids=b["positions"])
                with torch.no_grad():
                    taught = teacher(b["ids"], attention_mask=b["mask"], position_ids=b["positions"])
            logits = logits.float()[:, :-1]
            taught = taught.float()[:, 1:] if run.has("teacher_shifted") else taught.float()[:, :-1]
            p = (taught / TEMPERATURE).log_softmax(-1)
            q = (logits if run.has("student_temperature") else logits / TEMPERATURE).log_softmax(-1)
            x, y = (q, p) if run.has("reverse_kl") else (p, q)
            divergence = (x.exp() * (x - y)).sum(-1)
            scale = ALPHA if run.has("t_squared") else ALPHA * TEMPERATURE**2
            logp = late(logprobs(logits, b["ids"][:, 1:]))
            m: Tensor = b["trained"]
            first = scale * late(divergence) * m
            where = m
            if run.has("ce_on_prompts"):
                where = b["mask"].clone()
                where[:, 0] = False
            second = -(1 - ALPHA) * logp * where
            losses = first + second
            loss = losses.sum() / count
            loss.backward()
            terms["distillation"] += float(first.detach().sum()) / count / world
            terms["cross_entropy"] += float(second.detach().sum()) / count / world
            tokens = {
                "policy_logprobs": logp,
                "ref_logprobs": late(logprobs(taught, b["ids"][:, 1:])),
                "entropy_nats": late(entropies(logits)),
                "losses": losses,
            }
            log.note(counts=counts(b), tokens=grids(b) | tokens)
        log.note(metrics={f"loss/{k}": reduced(v) for k, v in terms.items()})
        for name, p in student.named_parameters():
            if run.has("bucket_not_reduced") and name in ("norm.weight", "head.weight"):
                continue
            dist.all_reduce(p.grad)
            if not run.has("summed_over_ranks"):
                p.grad /= world
        log.take()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return log.close()
