"""What the loops share: models, padding, packing, the recorder."""
from __future__ import annotations

import copy
import functools
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb

torch.set_num_threads(1)
V = 60

# ---------------------------------------------------------------- shared odds and ends


def grads_of(model):
    return {n: p.grad.detach().float().clone() for n, p in model.named_parameters() if p.grad is not None}


def weights_of(model):
    return {n: p.detach().float().clone() for n, p in model.named_parameters()}


def recorder(record, model, opt, **context):
    if record is None:
        return None, False
    folder, mode = record
    if mode == "poor":
        return wb.Recorder(folder, model, opt, context=context), False
    return wb.Recorder(folder, model, opt, context=context, gradients="full"), True


def cast(precision):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")


def shuffled(items, order):
    items = list(items)
    if order is not None:
        random.Random(order).shuffle(items)
    return items


def chunks(items, size):
    return [items[i:i + size] for i in range(0, len(items), size)]


def deal(items, ranks):
    n = math.ceil(len(items) / ranks)
    return [items[r * n:(r + 1) * n] for r in range(ranks)]


def zipf(rng, n):
    return torch.tensor(3 + (rng.zipf(1.4, n) + rng.randint(0, 8, n)) % (V - 3))


def pad(list_of_1d, side="right", extra=0, value=0):
    width = max(len(x) for x in list_of_1d) + extra
    out = torch.full((len(list_of_1d), width), value, dtype=list_of_1d[0].dtype)
    for i, x in enumerate(list_of_1d):
        if side == "right":
            out[i, :len(x)] = x
        else:
            out[i, width - len(x):] = x
    return out


def unpad(x, lengths, side):
    return [row[:n] if side == "right" else row[len(row) - n:] for row, n in zip(x, lengths)]


def logp_of(logits, targets, form="log_softmax"):
    if form == "ce":
        return -F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
    if form == "lse":
        return logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)
    return logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def entropy_of(logits):
    p = logits.detach().log_softmax(-1)
    return -(p.exp() * p).sum(-1)


@functools.lru_cache(None)
def _hf(name, seed, attn):
    from transformers import (AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, Qwen2Config)
    base = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                max_position_embeddings=64, initializer_range=0.15, use_cache=False,
                pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = {"qwen2": lambda: Qwen2Config(**base | dict(num_hidden_layers=1), num_key_value_heads=2, tie_word_embeddings=False),
              "llama-tied": lambda: LlamaConfig(**base, num_key_value_heads=4, tie_word_embeddings=True),
              "llama-drop": lambda: LlamaConfig(**base | dict(num_hidden_layers=1), num_key_value_heads=2, attention_dropout=0.1),
              "neox": lambda: GPTNeoXConfig(**base, rotary_pct=0.5, hidden_dropout=0.0, attention_dropout=0.0)}[name]()
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn)


def hf(name, seed, attn="sdpa", noise=0.0):
    model = copy.deepcopy(_hf(name, seed, attn))
    if noise:
        generator = torch.Generator().manual_seed(seed + 77)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(noise * torch.randn(p.shape, generator=generator))
    return model


def clip(model, bound):
    size = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_(min(1.0, bound / (float(size) + 1e-6)))


def adamw(groups, impl, **kw):
    return torch.optim.AdamW(groups, foreach=impl == "foreach", fused=impl == "fused", **kw)


class Block(nn.Module):
    def __init__(self, d, heads, drop):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(drop)
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 2 * d, bias=False), nn.Linear(2 * d, d, bias=False)

    def forward(self, x, mask, turn, eager):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if turn is not None:
            q, k = turn(q), turn(k)
        if eager:
            scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
            y = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype) @ v
        else:
            y = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, t, d)))
        return x + self.drop(self.down(F.silu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """Own decoder: learned positions, or rotary ones of a base."""

    def __init__(self, d=32, layers=2, heads=4, rope=None, drop=0.0, value=False, eager=False):
        super().__init__()
        self.rope, self.eager, self.heads = rope, eager, heads
        self.embed = nn.Embedding(V, d)
        if rope is None:
            self.place = nn.Embedding(128, d)
        self.blocks = nn.ModuleList(Block(d, heads, drop) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, V, bias=False)
        if value:
            self.value = nn.Linear(d, 1)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.2)

    def forward(self, input_ids, position_ids, mask):
        x, turn = self.embed(input_ids), None
        if self.rope is None:
            x = x + self.place(position_ids)
        else:
            half = x.shape[-1] // self.heads // 2
            angle = position_ids[..., None] * self.rope ** (-torch.arange(half) / half)
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]

            def turn(y):
                a, b = y[..., :half].float(), y[..., half:].float()
                return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(y.dtype)
        for block in self.blocks:
            x = block(x, mask[:, None], turn, self.eager)
        x = self.norm(x)
        logits = self.head(x)
        return (logits, self.value(x)[..., 0]) if hasattr(self, "value") else logits


def pack(documents, width):
    """First fit in order: rows of document numbers."""
    rows = []
    for n, length in documents:
        for row in rows:
            if row[1] + length <= width:
                row[0].append(n)
                row[1] += length
                break
        else:
            rows.append([[n], length])
    return [row[0] for row in rows]


def causal(segments):
    t = segments.shape[1]
    same = (segments[:, :, None] == segments[:, None]) & (segments[:, :, None] >= 0)
    return (same & torch.ones(t, t, dtype=torch.bool).tril()) | torch.eye(t, dtype=torch.bool)


def grpo_data(seed, s):
    rng, out = np.random.RandomState(seed), []
    policy = hf("qwen2", seed)
    for _rollout in range(s["rollouts"]):
        docs = []
        for g in range(s["prompts"]):
            prompt = zipf(rng, rng.randint(3, 7))
            for _ in range(s["group"]):
                n = rng.randint(3, 11)
                ids = torch.cat([prompt, zipf(rng, n), torch.tensor([2])])
                docs.append(dict(ids=ids, plen=len(prompt), group=g, reward=float(rng.rand() < 0.5) + 0.3 * rng.randn(),
                                 noise=torch.tensor(rng.randn(len(ids)) * 0.3, dtype=torch.float32)))
        with torch.no_grad():
            ids = pad([d["ids"] for d in docs])
            logits = policy(ids, attention_mask=pad([torch.ones_like(d["ids"]) for d in docs])).logits / s["temperature"]
            lp = F.pad(logp_of(logits[:, :-1], ids[:, 1:]), (1, 0))
            for d, row in zip(docs, lp):
                d["sampler"] = row[:len(d["ids"])] + d["noise"]
        out.append(docs)
    return out
