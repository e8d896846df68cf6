"""SFT on conversations in packed rows: accumulation, one denominator for the step, learned positions."""

from __future__ import annotations

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from common import EOS, Decoder, Doc, Gradients, Log, Run, chunks, counts, entropies, grids, late, logprobs, pack, packed, text

STEPS, DOCUMENTS, WIDTH = 3, 18, 60


def conversation(rng: np.random.Generator, number: int) -> Doc:
    ids, response = [], []
    for _ in range(int(rng.integers(1, 3))):
        user, answer = text(rng, int(rng.integers(3, 7))), [*text(rng, int(rng.integers(2, 9))), EOS]
        ids += user + answer
        response += [False] * len(user) + [True] * len(answer)
    return Doc(ids, response, number)


def sft(run: Run) -> Gradients:
    model = Decoder(run.seed, rotary=False, kernel=run.get("attention", "sdpa"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, betas=(0.9, 0.95))
    schedule = LambdaLR(optimizer, lambda n: max(0.05, 1 - 0.2 * n))
    width, kernel = run.get("width", WIDTH), run.get("loss", "ce")
    log = Log(run, model, optimizer, {"denominator": "trained tokens of the step", "max_grad_norm": 1.0, "width": width})
    for step in range(STEPS):
        rng = np.random.default_rng([run.seed, step])
        docs = run.ordered([conversation(rng, n) for n in range(DOCUMENTS)], step)
        micro = [packed(rows, width) for rows in chunks(pack(docs, width), run.get("micro", 2))]
        if run.has("drop_last"):
            micro = micro[:-1]
        for b in micro:
            if run.has("eos_masked"):
                b["trained"] &= b["ids"] != EOS
            if run.has("positions_run_on"):
                b["positions"] = torch.arange(width).expand(b["ids"].shape)
            if run.has("double_shift"):
                # what is trained at a place is now the token after it, with that token's label
                for name in ("ids_of_labels", "trained"):
                    b[name] = torch.roll(b.get(name, b["ids"]), -1, 1)
                same = torch.roll(b["documents"], -1, 1) == b["documents"]
                same[:, -1] = False
                b["trained"] &= same & (b["positions"] > 0)
        total = sum(int(b["trained"].sum()) for b in micro)
        if run.has("all_tokens"):
            total = sum(int(b["mask"].sum()) for b in micro)
        for b in micro:
            labels = b.get("ids_of_labels", b["ids"])
            with run.autocast():
                mask = b["mask"] if run.has("attention_all") else b["block"]
                logits = model(b["ids"], attention_mask=mask, position_ids=b["positions"])
            logits = logits.float()[:, :-1]
            logp = late(logprobs(logits, labels[:, 1:], kernel))
            nll = -logp * b["trained"]
            own = int(b["trained"].sum())
            loss = nll.sum() / own / len(micro) if run.has("mean_of_micro_batches") else nll.sum() / total
            loss.backward()
            tokens = {"policy_logprobs": logp, "entropy_nats": late(entropies(logits)), "losses": nll}
            log.note(counts=counts(b), tokens=grids(b) | {"targets": labels} | tokens)
            if run.has("schedule_per_micro_batch"):
                schedule.step()
        log.take()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if run.has("no_master_weights"):
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.bfloat16())
        optimizer.zero_grad()
        if not run.has("schedule_per_micro_batch"):
            schedule.step()
    return log.close()
