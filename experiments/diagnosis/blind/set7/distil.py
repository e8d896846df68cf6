"""Distillation on left-padded answers: soft loss against a larger teacher at a temperature, and that of labels."""

from __future__ import annotations

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
    padded,
    said,
    where_of,
    write_docs,
)
from torch import Tensor, nn
from torch.nn.functional import kl_div, pad

STEPS, DOCS, MICRO, TEMPERATURE, SOFT = 3, 10, 4, 2.0, 0.6


def divergence(run: Run, student: Tensor, teacher: Tensor) -> Tensor:
    """[rows, T] divergence of the distributions from which each token is predicted."""
    p = (student[:, :-1].float() / TEMPERATURE).log_softmax(-1)
    shifted = teacher[:, 1:] if run.bug("teacher_not_shifted") else teacher[:, :-1]
    q = (shifted.float() / TEMPERATURE).log_softmax(-1)
    if run.bug("reverse_kl"):
        p, q = q, p
    if run.get("divergence", "kl_div") == "by_hand":
        out = (q.exp() * (q - p)).sum(-1)
    else:
        out = kl_div(p, q, log_target=True, reduction="none").sum(-1)
    if not run.bug("temperature_squared_lost"):
        out = out * TEMPERATURE**2
    return pad(out, (1, 0))


def train(run: Run) -> None:
    micro = run.get("micro", MICRO)
    model = initialise(Decoder(kernel=run.get("kernel", "sdpa")), run.seed)
    teacher = initialise(Decoder(width=48, layers=3, dropout=0.1), run.seed + 1).requires_grad_(False)
    if not run.bug("teacher_in_train_mode"):
        teacher.eval()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.05},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=6e-3,
        foreach=run.get("foreach", True),
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=3)
    recorder = run.recorder(
        model, optimizer, micro_batches=-(-DOCS // micro), max_grad_norm=5.0, temperature=TEMPERATURE,
        soft_weight=SOFT, denominator="trained tokens",
    )  # fmt: skip
    for step in range(STEPS):
        docs = in_order(run, write_docs(run.seed, step, DOCS))
        batches = [padded(d, multiple=run.get("multiple", 1), left=True) for d in chunks(docs, micro)]
        tokens = sum(int(b.answer.sum()) for b in batches)
        optimizer.zero_grad(set_to_none=False)
        sums = {"soft": 0.0, "hard": 0.0}
        for batch in batches:
            student, taught, positions = forward(run, model, teacher, batch)
            soft = divergence(run, student, taught)
            hard = -said(run, student, batch.ids)
            over = DOCS if run.bug("batchmean") else tokens
            soft_sum = SOFT * run.add(soft * batch.answer) / over
            hard_sum = (1 - SOFT) * run.add(hard * batch.answer) / tokens
            (soft_sum + hard_sum).backward()
            sums["soft"] += soft_sum.item()
            sums["hard"] += hard_sum.item()
            if run.rich:
                noted = where_of(batch, positions) | {
                    "policy_logprobs": said(run, student, batch.ids, TEMPERATURE),
                    "ref_logprobs": said(run, taught, batch.ids, TEMPERATURE),
                    "entropy_nats": entropy_of(student, TEMPERATURE),
                    "trained": batch.answer,
                    "losses": SOFT * soft + (1 - SOFT) * hard,
                }
                recorder.note(counts=counts_of(batch, batch.answer), tokens=noted)
        run.seen(model, sums["soft"] + sums["hard"])
        if run.rich:
            recorder.note(metrics={"loss/soft": sums["soft"], "loss/hard": sums["hard"]})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
    recorder.close()


def forward(run: Run, model: nn.Module, teacher: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    positions = batch.places if run.bug("positions_of_padded_row") else batch.positions
    with run.autocast():
        student = model(batch.ids, attention_mask=batch.real, position_ids=positions)
        with torch.no_grad():
            taught = teacher(batch.ids, attention_mask=batch.real, position_ids=positions)
    return student, taught, positions
