"""Supervised fine-tuning on packed conversations: micro-batches of rows, AdamW, warm-up and cosine, clipping."""

from __future__ import annotations

import itertools
import math

import torch
from common import Decoder, Run, counts_of, in_order, initialise, packed, rows_of, said, where_of, write_docs

STEPS, CAPACITY, MICRO = 3, 40, 3


def schedule(n: int) -> float:
    return (n + 1) / 6 if n < 5 else 0.5 * (1 + math.cos(math.pi * (n - 5) / 20))


def train(run: Run) -> None:
    model = initialise(Decoder(kernel=run.get("kernel", "sdpa")), run.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, foreach=run.get("foreach", True)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    recorder = run.recorder(
        model, optimizer, micro_batches=run.get("micro", MICRO), max_grad_norm=1.0, denominator="trained tokens"
    )
    for step in range(STEPS):
        docs = in_order(run, write_docs(run.seed, step, 14))
        batch = packed(docs, run.get("capacity", CAPACITY))
        mask = batch.answer
        if run.bug("role_header_trained"):
            mask = mask | (torch.nn.functional.pad(mask[:, 2:], (0, 2)) & batch.real & (batch.positions > 0))
        bounds = torch.linspace(0, len(batch.ids), run.get("micro", MICRO) + 1).round().int().tolist()
        trained = int(mask.sum())
        if run.bug("row_capacity_denominator"):
            trained = batch.ids.numel()
        optimizer.zero_grad()
        total = 0.0
        for start, end in itertools.pairwise(bounds):
            if start == end:
                continue
            part, part_mask = rows_of(batch, start, end), mask[start:end]
            positions = part.places if run.bug("positions_of_row") else part.positions
            attention = part.real if run.bug("document_mask_dropped") else part.same_document
            with run.autocast():
                logits = model(part.ids, attention_mask=attention, position_ids=positions)
            if run.bug("shifted_twice"):
                late = torch.nn.functional.pad(part.ids[:, 1:], (0, 1))
                nll = -said(run, logits, late)
                part_mask = torch.nn.functional.pad(part_mask[:, 1:], (0, 1))
            else:
                nll = -said(run, logits, part.ids)
            if run.bug("micro_mean"):
                loss = run.add(nll * part_mask) / part_mask.sum() / (len(bounds) - 1)
            else:
                loss = run.add(nll * part_mask) / trained
            if run.bug("cleared_per_micro_batch"):
                optimizer.zero_grad()
            loss.backward()
            total += loss.item()
            if run.bug("schedule_per_micro_batch"):
                scheduler.step()
            if run.rich:
                tokens = where_of(part, positions)
                if run.bug("shifted_twice"):
                    tokens["targets"] = late
                tokens |= {"policy_logprobs": -nll, "losses": nll, "trained": part_mask}
                recorder.note(counts=counts_of(part, part_mask), tokens=tokens)
        run.seen(model, total)
        if run.rich:
            recorder.note(metrics={"train/loss": total, "lr": scheduler.get_last_lr()[0]})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not run.bug("schedule_per_micro_batch"):
            scheduler.step()
    recorder.close()
