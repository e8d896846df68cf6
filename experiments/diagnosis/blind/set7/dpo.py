"""DPO of pairs, chosen and rejected in one forward pass: smoothed labels, a likelihood term on the chosen."""

from __future__ import annotations

import copy

import numpy as np
import torch
from common import (
    EOS,
    VOCAB,
    Batch,
    Decoder,
    Doc,
    Run,
    chunks,
    counts_of,
    entropy_of,
    in_order,
    initialise,
    padded,
    said,
    where_of,
)
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

STEPS, PAIRS, MICRO, BETA, SMOOTHING, NLL = 3, 8, 4, 0.4, 0.1, 0.3


def write_pairs(seed: int, step: int) -> list[tuple[Doc, Doc]]:
    rng = np.random.default_rng([seed, step])
    pairs = []
    for n in range(PAIRS):
        question = rng.integers(2, VOCAB, rng.integers(3, 7))
        sides = [rng.integers(2, VOCAB, rng.integers(3, 11)) for _ in "cr"]
        docs = [Doc(2 * n + s, torch.tensor([*question, *said_, EOS]), len(question)) for s, said_ in enumerate(sides)]
        pairs.append((docs[0], docs[1]))
    return pairs


def forward(run: Run, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    with run.autocast():
        logits = model(batch.ids, attention_mask=batch.real, position_ids=batch.positions)
    return said(run, logits, batch.ids), logits


def train(run: Run) -> None:
    micro, ranks = run.get("micro", MICRO), run.get("ranks", 1)
    model = initialise(Decoder(rotary=True, dropout=0.1, kernel=run.get("kernel", "sdpa")), run.seed)
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    if run.bug("reference_in_half"):
        reference = reference.to(torch.bfloat16)
    if not run.bug("dropout_left_on"):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0, foreach=run.get("foreach", True))
    recorder = run.recorder(
        model, optimizer, dp=ranks, micro_batches=-(-PAIRS // ranks // micro), max_grad_norm=1.0, beta=BETA,
        label_smoothing=SMOOTHING, nll_coefficient=NLL, denominator="pairs",
    )  # fmt: skip
    for step in range(STEPS):
        pairs = in_order(run, write_pairs(run.seed, step))
        batches = []
        for rank in range(ranks):
            for part in chunks(pairs[rank::ranks], micro):
                batches.append(padded([p[0] for p in part] + [p[1] for p in part], multiple=run.get("multiple", 1)))
        chosen_tokens = sum(int(b.answer[: len(b.ids) // 2].sum()) for b in batches)
        all_tokens = sum(int(b.answer.sum()) for b in batches)
        optimizer.zero_grad()
        sums = dict.fromkeys(("dpo", "nll", "all", "margin"), 0.0)
        for batch in batches:
            half = len(batch.ids) // 2
            mask = batch.answer
            if run.bug("mask_of_chosen"):
                mask = torch.cat([mask[:half], mask[:half]])
            logp, logits = forward(run, model, batch)
            with torch.no_grad():
                ref, _ = forward(run, reference, batch)
            gain = ((logp - ref) * mask).sum(1)
            if run.bug("mean_logprobs"):
                gain = gain / mask.sum(1)
            margin = BETA * (gain[:half] - gain[half:])
            inner = BETA * margin if run.bug("beta_squared") else margin
            pair = -(1 - SMOOTHING) * logsigmoid(inner) - SMOOTHING * logsigmoid(-inner)
            if run.bug("nll_of_both"):
                nll = -run.add(logp * mask) / all_tokens
            else:
                nll = -run.add(logp[:half] * mask[:half]) / chosen_tokens
            loss = pair.sum() / PAIRS + NLL * nll
            (loss * ranks).backward()
            sums["dpo"] += pair.sum().item() / PAIRS
            sums["nll"] += NLL * nll.item()
            sums["all"] += loss.item()
            sums["margin"] += margin.sum().item() / PAIRS
            if run.rich:
                noted = where_of(batch) | {
                    "policy_logprobs": logp, "ref_logprobs": ref, "entropy_nats": entropy_of(logits), "trained": mask,
                }  # fmt: skip
                recorder.note(loss, counts=counts_of(batch, mask), tokens=noted)
            else:
                recorder.note(loss)
        for p in model.parameters():
            p.grad.div_(ranks)
        run.seen(model, sums["all"])
        if run.rich:
            recorder.note(metrics={"loss/dpo": sums["dpo"], "loss/nll": sums["nll"], "rewards/margins": sums["margin"]})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    recorder.close()
