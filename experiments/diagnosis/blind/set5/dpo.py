"""DPO with label smoothing and a likelihood term; chosen and rejected in one call, padded on the left."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from common import VOCAB, Doc, Log, Rows, Run, Text, batches, logprobs, padded

BETA, SMOOTHING, LIKELIHOOD = 0.2, 0.1, 0.3


def build(run: Run) -> LlamaForCausalLM:
    """A small Llama with tied embeddings."""
    torch.manual_seed(run.seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.18,
        tie_word_embeddings=True,
        attention_dropout=0.1 if run.has("dropout_on") else 0.0,
        use_cache=False,
        attn_implementation=run.get("attention", "sdpa"),
    )
    model = LlamaForCausalLM(config)
    if run.has("untied"):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return (model.to(torch.bfloat16) if run.bf16 else model).train()


def pairs(run: Run, step: int) -> list[tuple[Doc, Doc]]:
    """Eight pairs of a chosen and a rejected completion, of three sources."""
    text = Text(run.seed * 10 + step)
    out = []
    for i in range(8):
        chosen, rejected = text.group(2 * i, i, 2)
        if run.has("swapped_source") and i % 3 == 1:
            chosen, rejected = (
                replace(rejected, number=chosen.number, values={}),
                replace(chosen, number=rejected.number, values={}),
            )
        out.append((chosen, rejected))
    return out


def call(model: LlamaForCausalLM, rows: Rows, masked: bool = True) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of tokens."""
    given = {"attention_mask": rows.real.long(), "position_ids": rows.positions} if masked else {}
    return logprobs(model(input_ids=rows.ids, use_cache=False, **given).logits, rows.ids)


def flush(docs: list[Doc], extra: int) -> Rows:
    """Rows that end in the same column."""
    rows = padded(docs, left=False, extra=extra)
    shifts = [rows.ids.shape[1] - len(d.ids) for d in docs]
    for name in ("ids", "documents", "positions", "trained", "source"):
        value = getattr(rows, name)
        setattr(rows, name, torch.stack([line.roll(s) for line, s in zip(value, shifts, strict=True)]))
    return rows


def dpo(run: Run):
    """Run three steps of eight pairs."""
    policy = build(run)
    reference = policy if run.has("reference_live") else copy.deepcopy(policy).requires_grad_(False).eval()
    if not run.has("reference_live"):
        for p in reference.parameters():
            p.requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))
    micro = run.get("micro", 2)
    context = {
        "dp": 1,
        "micro_batches": 8 // micro,
        "max_grad_norm": 5.0,
        "beta": BETA,
        "label_smoothing": SMOOTHING,
        "rpo_alpha": LIKELIHOOD,
        "denominator": "pairs",
        "attention_dropout": 0.0,
        "tied": True,
    }
    log = Log(run, policy, optimizer, context)
    torch.manual_seed(run.seed + 1)
    for step in range(3):
        parts = batches(run.permuted(pairs(run, step), step), micro)
        sums = [0.0, 0.0, 0.0]
        for part in parts:
            values = micro_batch(run, log, policy, reference, part, len(parts))
            sums = [a + b / 8 for a, b in zip(sums, values, strict=True)]
        names = ("loss/preference", "loss/likelihood", "rewards/margins")
        log.note(metrics=dict(zip(names, sums, strict=True)))
        log.keep()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return log.done()


def micro_batch(
    run: Run, log: Log, policy: LlamaForCausalLM, reference: LlamaForCausalLM, part: list, parts: int
) -> tuple[float, float, float]:
    """Back-propagate some pairs; return the sums of both terms and of the margins."""
    rows = flush([c for c, _ in part] + [r for _, r in part], run.get("extra", 0))
    tokens, entropy = call(policy, rows)
    with torch.no_grad():
        ref, _ = call(reference, rows, masked=not run.has("ref_unmasked"))
    mask = rows.trained.float()
    lengths = mask.sum(1)
    shares = lengths[:, None] if run.has("mean_logps") else 1.0
    ours, theirs = ((x * mask / shares).sum(1).chunk(2) for x in (tokens, ref))
    margin = BETA * ((ours[0] - theirs[0]) - (ours[1] - theirs[1]))
    preference = -(1 - SMOOTHING) * F.logsigmoid(margin) - SMOOTHING * F.logsigmoid(-margin)
    counted = mask
    if run.has("prompt_nll"):
        counted = (rows.real & (rows.positions > 0)).float()
    mean = -(tokens * counted).sum(1) / counted.sum(1)
    chosen, rejected = mean.chunk(2)
    likelihood = LIKELIHOOD * ((chosen + rejected) / 2 if run.has("nll_rejected") else chosen)
    loss = (preference + likelihood).mean()
    if not run.has("unscaled_accumulation"):
        loss = loss * len(part) / 8
    loss.backward()
    log.note(
        counts=rows.counts(),
        tokens={
            **rows.names(),
            "trained": rows.trained,
            "policy_logprobs": tokens,
            "ref_logprobs": ref,
            "entropy_nats": entropy,
        },
    )
    return float(preference.sum()), float(likelihood.sum()), float(margin.sum())
