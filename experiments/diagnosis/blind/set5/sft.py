"""Supervised fine-tuning on conversations of two turns, with gradient accumulation over the tokens of a step."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from common import EOS, VOCAB, Doc, Log, Run, Text, batches, padded

STEPS, DOCS = 3, 6


def build(run: Run) -> GPT2LMHeadModel:
    """A small GPT-2 without dropout."""
    torch.manual_seed(run.seed)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.15,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=EOS,
        eos_token_id=EOS,
        attn_implementation=run.get("attention", "sdpa"),
    )
    return GPT2LMHeadModel(config)


def conversation(run: Run, text: Text, number: int) -> Doc:
    """Two questions and answers; `mask` says which tokens after the first question are trained."""
    question, first, again, second = (text.words(int(text.rng.integers(2, 7))) for _ in range(4))
    mask = [True] * (len(first) + 1) + [run.has("later_user_turn")] * len(again) + [True] * (len(second) + 1)
    response = [*first, EOS, *again, *second, EOS]
    if run.has("eos_as_pad"):
        mask = [m and token != EOS for m, token in zip(mask, response, strict=True)]
    doc = Doc(number, number, question, response)
    doc.values["mask"] = torch.tensor(mask)
    return doc


def groups(model: GPT2LMHeadModel, everywhere: bool) -> list[dict]:
    """Parameters with and without weight decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.1 if everywhere else 0.0}]


def token_losses(run: Run, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies; `labels` are those that the collator has shifted, -100 where none is trained."""
    logits = logits.bfloat16() if run.has("bf16_logits") else logits.float()
    logs = F.log_softmax(logits, -1)
    token = logs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1).float()
    logs = logs.float()
    return token, -(logs.exp() * logs).sum(-1)


def sft(run: Run):
    """Run the steps, each of which accumulates micro-batches."""
    model = build(run)
    if run.has("frozen_embedding"):
        model.transformer.wte.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(groups(model, run.has("decay_all")), lr=4e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / 12)))
    micro = run.get("micro", 2)
    context = {
        "dp": 1,
        "micro_batches": DOCS // micro,
        "max_grad_norm": 2.0,
        "denominator": "tokens of the step",
        "schedule": "cosine",
        "weight_decay": 0.1,
        "decay_norms": False,
    }
    log = Log(run, model, optimizer, context)
    parts: list[tuple[list[Doc], int]] = []
    for step in range(STEPS):
        text = Text(run.seed * 10 + step)
        docs = [conversation(run, text, i) for i in range(DOCS)]
        tokens = int(sum(d.values["mask"].sum() for d in docs))
        parts += [(part, tokens) for part in batches(run.permuted(docs, step), micro)]
    each = DOCS // micro
    for i, (part, tokens) in enumerate(parts, 2 if run.has("early_step") else 1):
        micro_batch(run, log, model, part, tokens, each)
        if run.has("schedule_per_micro"):
            schedule.step()
        if i % each == 0:
            log.keep()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            if not run.has("schedule_per_micro"):
                schedule.step()
            optimizer.zero_grad()
    return log.done()


def micro_batch(run: Run, log: Log, model: GPT2LMHeadModel, part: list[Doc], tokens: int, each: int) -> None:
    """Back-propagate some conversations; `tokens` is the denominator of the step."""
    rows = padded(part, left=False, extra=run.get("extra", 0))
    rows.trained &= rows.spread("mask").bool()
    with run.autocast():
        logits = model(
            input_ids=rows.ids, attention_mask=rows.real.long(), position_ids=rows.positions, use_cache=False
        ).logits
    targets = torch.where(rows.trained, rows.ids, -100)
    shift = 2 if run.has("double_shift") else 1
    labels = F.pad(targets[:, shift:], (0, shift), value=-100)
    ids = F.pad(rows.ids[:, shift:], (0, shift))
    token, entropy = token_losses(run, logits, torch.where(labels == -100, ids, labels))
    counted = labels != -100
    losses = -token
    denominator = counted.sum() * each if run.has("micro_means") else tokens
    ((losses * counted).sum() / denominator).backward()
    back = lambda x: F.pad(x[:, : x.shape[1] - shift], (shift, 0))  # noqa: E731
    log.note(
        counts=rows.counts(),
        tokens={
            **rows.names(),
            "trained": back(counted),
            "policy_logprobs": back(token),
            "entropy_nats": back(entropy),
            "losses": back(losses),
        },
    )
