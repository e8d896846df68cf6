"""Seven small foreign training loops (plain PyTorch, CPU), each a deterministic function of
(settings, fault, seed, precision), each recording itself with wb.Recorder in mode "rich" or "poor".

    LOOPS[kind](settings, fault, seed, precision, record=(folder, mode)) -> list of {name: gradient}, one a step

`fault` is None for the right run or the name of one planted mistake. The package under test is used for recording only.
"""
from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)

STEPS = 3


# ------------------------------------------------------------------------------------------------ models
class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


def attend(q, k, v, allowed, how):
    """allowed: bool [R,1,T,T]"""
    if how == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)
    scores = scores.float().masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v


class RopeBlock(nn.Module):
    def __init__(self, d, heads, kv):
        super().__init__()
        self.heads, self.kv, self.hd = heads, kv, d // heads
        self.norm1, self.norm2 = RMSNorm(d), RMSNorm(d)
        self.qkv = nn.Linear(d, (heads + 2 * kv) * self.hd, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.up = nn.Linear(d, 4 * d, bias=False)
        self.down = nn.Linear(2 * d, d, bias=False)

    def forward(self, x, cos, sin, allowed, how):
        R, T, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).split([self.heads * self.hd, self.kv * self.hd, self.kv * self.hd], -1)
        q = q.view(R, T, self.heads, self.hd).transpose(1, 2)
        k = k.view(R, T, self.kv, self.hd).transpose(1, 2)
        v = v.view(R, T, self.kv, self.hd).transpose(1, 2)

        def rotate(z):
            a, b = z.chunk(2, -1)
            return (torch.cat([a * cos - b * sin, b * cos + a * sin], -1)).to(z.dtype)

        q, k = rotate(q), rotate(k)
        rep = self.heads // self.kv
        if rep > 1:
            k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        y = attend(q, k, v, allowed, how).transpose(1, 2).reshape(R, T, d)
        x = x + self.out(y)
        g, u = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(g) * u)


class RopeDecoder(nn.Module):
    def __init__(self, vocab, d=32, layers=2, heads=4, kv=None):
        super().__init__()
        self.hd = d // heads
        self.tok = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList([RopeBlock(d, heads, kv or heads) for _ in range(layers)])
        self.norm = RMSNorm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)
        nn.init.normal_(self.tok.weight, std=1.0)

    def forward(self, ids, pos, allowed, how="sdpa"):
        inv = 100.0 ** (-torch.arange(0, self.hd, 2).float() / self.hd)
        angle = pos[:, None, :, None].float() * inv
        cos, sin = angle.cos(), angle.sin()
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x, cos, sin, allowed, how)
        return self.lm_head(self.norm(x))


class LearnedBlock(nn.Module):
    def __init__(self, d, heads, p):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.fc, self.proj = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.drop = nn.Dropout(p)

    def forward(self, x, allowed, how):
        R, T, d = x.shape
        h = self.ln_1(x)
        q, k, v = (m(h).view(R, T, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = attend(q, k, v, allowed, how).transpose(1, 2).reshape(R, T, d)
        x = x + self.drop(self.o(y))
        return x + self.drop(self.proj(F.gelu(self.fc(self.ln_2(x)))))


class LearnedDecoder(nn.Module):
    def __init__(self, vocab, d=32, layers=2, heads=4, tied=False, dropout=0.0, places=320):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(places, d)
        self.h = nn.ModuleList([LearnedBlock(d, heads, dropout) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=m.weight.shape[1] ** -0.5)
                if m.bias is not None:
                    nn.init.zeros_(m.bias)
        nn.init.normal_(self.wte.weight, std=0.3)
        nn.init.normal_(self.wpe.weight, std=0.3)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids, pos, allowed, how="sdpa"):
        x = self.wte(ids) + self.wpe(pos)
        for block in self.h:
            x = block(x, allowed, how)
        return self.head(self.ln_f(x))


# ------------------------------------------------------------------------------------------------ data
@dataclass
class Sample:
    ids: torch.Tensor       # [T]
    trained: torch.Tensor   # [T] bool: the token was sampled by the policy (answers; no tool output)
    answer: torch.Tensor    # [T] bool: everything after the prompt
    reward: float
    group: int
    doc: int                # number of the document in its step
    place: int              # of its first target in its step
    old: torch.Tensor       # [T] log-probabilities of the rollout engine, 0 for the first token


def draw(seed, steps, groups, n, vocab, prompt=(3, 6), answer=(4, 14), holes=False, binary=False):
    rng = random.Random(seed)
    out = []
    for _ in range(steps):
        rows, place = [], 0
        for g in range(groups):
            head = [rng.randrange(3, vocab) for _ in range(rng.randint(*prompt))]
            rewards = [float(rng.random() < 0.5) if binary else rng.gauss(0, 1) for _ in range(n)]
            if binary and len(set(rewards)) == 1:
                rewards[rng.randrange(n)] = 1.0 - rewards[0]
            for i in range(n):
                tail = [rng.randrange(3, vocab) for _ in range(rng.randint(*answer))] + [2]
                ids = torch.tensor(head + tail)
                ans = torch.arange(len(ids)) >= len(head)
                trained = ans.clone()
                if holes and len(tail) > 6 and rng.random() < 0.7:
                    trained[len(head) + 2:len(head) + 5] = False
                rows.append(Sample(ids, trained, ans, rewards[i], g, len(rows), place, torch.zeros(len(ids))))
                place += len(ids) - 1
        out.append(rows)
    return out


def collate(samples, side="right", to=0, multiple=1):
    """Padded rows; every array is [rows, T] and speaks about the token at its place."""
    T = max(max(len(s.ids) for s in samples), to)
    T = -(-T // multiple) * multiple
    R = len(samples)
    b = {"ids": torch.zeros(R, T, dtype=torch.long), "real": torch.zeros(R, T, dtype=torch.bool),
         "pos": torch.zeros(R, T, dtype=torch.long), "trained": torch.zeros(R, T, dtype=torch.bool),
         "answer": torch.zeros(R, T, dtype=torch.bool),
         "doc": torch.full((R, T), -1), "source": torch.full((R, T), -1), "old": torch.zeros(R, T)}
    for r, s in enumerate(samples):
        n = len(s.ids)
        a = T - n if side == "left" else 0
        w = slice(a, a + n)
        b["ids"][r, w], b["real"][r, w], b["pos"][r, w] = s.ids, True, torch.arange(n)
        b["trained"][r, w], b["answer"][r, w], b["doc"][r, w], b["old"][r, w] = s.trained, s.answer, s.doc, s.old
        b["source"][r, a + 1:a + n] = s.place + torch.arange(n - 1)
    return b


def pack(samples, tail=0):
    """One packed row of all documents, then `tail` padding tokens."""
    rows = [collate([s]) for s in samples]
    b = {k: torch.cat([r[k] for r in rows], 1) for k in rows[0]}
    if tail:
        blank = collate([samples[0]], to=0)
        L = tail
        pad = {k: torch.zeros(1, L, dtype=v.dtype) for k, v in blank.items()}
        pad["doc"].fill_(-1)
        pad["source"].fill_(-1)
        b = {k: torch.cat([b[k], pad[k]], 1) for k in b}
    return b


def allowed_pairs(b, documents=True, padding=True):
    T = b["ids"].shape[1]
    ok = torch.ones(T, T, dtype=torch.bool).tril()[None]
    if padding:
        ok = ok & b["real"][:, None, :]
    if documents:
        ok = ok & (b["doc"][:, :, None] == b["doc"][:, None, :])
    return (ok | torch.eye(T, dtype=torch.bool))[:, None]


def logprobs(logits, targets, temperature=1.0, how="log_softmax", low=False):
    """log-probability of the targets and entropy, in float32"""
    z = logits.float() / temperature
    if low:
        lp = (z.bfloat16()).log_softmax(-1).gather(-1, targets[..., None])[..., 0].float()
    elif how == "logsumexp":
        lp = z.gather(-1, targets[..., None])[..., 0] - z.logsumexp(-1)
    elif how == "chunked":
        lp = torch.cat([c.log_softmax(-1).gather(-1, t[..., None])[..., 0]
                        for c, t in zip(z.split(5, 1), targets.split(5, 1))], 1)
    else:
        lp = z.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    with torch.no_grad():
        full = z.log_softmax(-1)
        entropy = -(full.exp() * full).sum(-1)
    return lp, entropy


def rollout(model, steps, seed, temperature=1.0, noise=0.2):
    """Fill in the log-probabilities that the rollout engine returned: those of the first policy, with the noise of staleness."""
    gen = torch.Generator().manual_seed(seed + 77)
    every = [s for rows in steps for s in rows]
    b = collate(every)
    for r in range(len(every)):
        b["doc"][r] = torch.where(b["doc"][r] >= 0, r, -1)
    with torch.no_grad():
        lp, _ = logprobs(model(b["ids"], b["pos"], allowed_pairs(b)), b["ids"].roll(-1, 1), temperature)
    lp = lp + noise * torch.randn(lp.shape, generator=gen)
    for r, s in enumerate(every):
        s.old[1:] = lp[r, :len(s.ids) - 1]


def autocast(precision):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")


def arrange(rows, order):
    if order == "reversed":
        return rows[::-1]
    if order == "length":
        return sorted(rows, key=lambda s: (len(s.ids), s.doc))
    if order == "shuffled":
        return random.Random(5).sample(rows, len(rows))
    return list(rows)


def portions(rows, n):
    """n micro-batches of nearly equal numbers of rows"""
    k, m = divmod(len(rows), n)
    out, at = [], 0
    for i in range(n):
        out.append(rows[at:at + k + (i < m)])
        at += k + (i < m)
    return [p for p in out if p]


def group_advantages(rows, population=False, whole=False, scale=True):
    out = {}
    for g in sorted({s.group for s in rows}):
        r = torch.tensor([s.reward for s in rows if whole or s.group == g])
        for s in rows:
            if s.group == g:
                a = s.reward - r.mean()
                out[s.doc] = float(a / (r.std(unbiased=not population) + 1e-6)) if scale else float(a)
    return out


def spread(doc, advantages):
    table = torch.zeros(max(advantages) + 2)
    for d, a in advantages.items():
        table[d] = a
    return table[doc]           # -1 reads the last entry, 0


def surrogate(lp, old, adv, low=0.2, high=0.2, dual=None, wrong_max=False):
    ratio = (lp - old).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    value = (torch.maximum if wrong_max else torch.minimum)(ratio * adv, clipped * adv)
    if dual:
        value = torch.where(adv < 0, torch.maximum(value, dual * adv), value)
    return -value, ratio


def snapshot(model):
    return {n: p.grad.detach().float().clone() for n, p in model.named_parameters() if p.grad is not None}


# ------------------------------------------------------------------------------------------------ recording
class Book:
    """What a user writes who has read the documentation of wb.Recorder; nothing is recorded where record is None."""

    def __init__(self, record, model, optimizer, context, precision):
        self.rec, self.rich = None, False
        if record is None:
            return
        import workbench as wb
        folder, mode = record
        self.rich = mode == "rich"
        context = dict(context, precision={"float32": "float32", "bf16": "bfloat16"}[precision])
        self.rec = wb.Recorder(folder, model, optimizer, context=context, gradients="full" if self.rich else "norms")

    def note(self, loss, batch=None, trained=None, tokens=None, metrics=None, documents=None):
        if self.rec is None:
            return
        if not self.rich:
            self.rec.note(loss)
            return
        extra = {}
        if batch is not None:       # arrays of targets: the first column of the rows is no target
            doc, source, real = batch["doc"], batch["source"], batch["real"]
            live = doc[trained]
            if documents is None:
                documents = int(live[live >= 0].unique().numel())
            extra["counts"] = {"documents": documents, "trained_tokens": int(trained.sum()),
                               "all_tokens": int(real.sum()), "padded_tokens": int((~real).sum())}
            extra["tokens"] = {k: v.detach() for k, v in tokens.items()} | {"trained": trained, "documents": doc, "source": source}
        self.rec.note(loss, metrics=metrics, **extra)

    def report(self, metrics):
        if self.rec is not None and self.rich:
            self.rec.note(metrics={k: float(v) for k, v in metrics.items()})

    def take(self):
        if self.rec is not None:
            self.rec.take_gradients()

    def step(self):
        if self.rec is not None:
            self.rec.step()

    def close(self):
        if self.rec is not None:
            self.rec.close()


def targets_of(b, **more):
    """The arrays of `b` as its targets see them: places 1..T-1"""
    out = {k: b[k][:, 1:] for k in ("doc", "source")} | {"real": b["real"]}      # all_tokens counts first tokens too
    out.update(more)
    return out


# ------------------------------------------------------------------------------------------------ 1. padded GRPO
def padded_grpo(settings, fault, seed, precision, record=None):
    """GRPO on padded rows, gradient accumulation, token mean over the whole step."""
    s = dict(groups=4, n=4, micro_batches=4, side="left", pad_to=0, attention="sdpa", order="given", lr=2e-3, wd=0.1,
             max_grad_norm=1.0, clip=0.2, softmax="log_softmax", scale_after=False, layers=2, d=32, vocab=64) | settings
    torch.manual_seed(seed)
    model = RopeDecoder(s["vocab"], s["d"], s["layers"])
    data = draw(seed, STEPS, s["groups"], s["n"], s["vocab"])
    rollout(model, data, seed)
    if fault == "frozen_layer":
        for p in model.blocks[0].parameters():
            p.requires_grad_(False)
    params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    plain = [p for n, p in params if "norm" in n or "tok" in n]
    decay = [p for n, p in params if not ("norm" in n or "tok" in n)]
    if fault == "decay_everything":
        opt = torch.optim.AdamW([{"params": decay, "weight_decay": s["wd"]}, {"params": plain, "weight_decay": s["wd"]}], lr=s["lr"])
    else:
        opt = torch.optim.AdamW([{"params": decay, "weight_decay": s["wd"]}, {"params": plain, "weight_decay": 0.0}], lr=s["lr"])
    book = Book(record, model, opt, {"dp": 1, "micro_batches": s["micro_batches"], "order": s["order"], "temperature": 1.0,
                                     "max_grad_norm": s["max_grad_norm"], "denominator": "tokens", "padding_side": s["side"],
                                     "pad_to": s["pad_to"], "attention": s["attention"], "clip_ratio": s["clip"]}, precision)
    trace = []
    for rows in data:
        adv_of = group_advantages(rows, population=fault == "population_std")
        rows = arrange(rows, s["order"])
        micro = portions(rows, s["micro_batches"])
        batches = [collate(m, s["side"], s["pad_to"]) for m in micro]

        def mask_of(b):
            return b["trained"][:, :-1] if fault == "mask_unshifted" else b["trained"][:, 1:]

        total = sum(int(mask_of(b).sum()) for b in batches)
        if fault == "count_padding":
            total = sum(mask_of(b).numel() for b in batches)
        if fault == "lost_micro_batch":
            batches = batches[:-1]
        clipfrac, seen = 0.0, 0
        for b in batches:
            with autocast(precision):
                logits = model(b["ids"], b["pos"], allowed_pairs(b, padding=fault != "attend_padding",
                                                                 documents=fault != "attend_padding"), s["attention"])
            lp, ent = logprobs(logits[:, :-1], b["ids"][:, 1:], how=s["softmax"], low=fault == "bf16_log_softmax")
            old, mask = b["old"][:, 1:], mask_of(b)
            if fault == "old_shifted":
                old = old.roll(1, 1)
            pg, ratio = surrogate(lp, old, spread(b["doc"], adv_of)[:, 1:], s["clip"], s["clip"])
            pg = torch.where(mask, pg, 0.0)
            if fault == "mean_of_means":
                loss = back = pg.sum() / mask.sum() / len(batches)
            else:
                loss = pg.sum() / total
                back = pg.sum() if s["scale_after"] else loss
            back.backward()
            clipfrac += float((((ratio - 1).abs() > s["clip"]) & mask).sum())
            seen += int(mask.sum())
            book.note(loss.detach(), targets_of(b), mask, {"policy_logprobs": lp, "old_logprobs": old, "entropy_nats": ent})
        if s["scale_after"]:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= total
        trace.append(snapshot(model))
        book.take()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s["max_grad_norm"])
        book.report({"grad_norm": norm, "clip_fraction": clipfrac / seen, "reward_mean": sum(r.reward for r in rows) / len(rows)})
        opt.step()
        opt.zero_grad()
    book.close()
    return trace


# ------------------------------------------------------------------------------------------------ 2. packed DAPO
def packed_dapo(settings, fault, seed, precision, record=None):
    """DAPO: documents packed in one row per micro-batch, clip-higher, token mean, overlong penalty, temperature != 1."""
    s = dict(groups=4, n=4, micro_batches=3, layout="packed", tail=0, attention="sdpa", order="given", lr=1e-3, temperature=0.7,
             max_grad_norm=0.5, clip_low=0.2, clip_high=0.28, overlong=10, penalty=0.7, softmax="log_softmax", vocab=72) | settings
    torch.manual_seed(seed)
    model = LearnedDecoder(s["vocab"], 32, 2)
    data = draw(seed, STEPS, s["groups"], s["n"], s["vocab"], binary=True)
    rollout(model, data, seed, s["temperature"], noise=0.3)
    if fault != "no_overlong_penalty":
        for rows in data:
            for r in rows:
                over = int(r.answer.sum()) - s["overlong"]
                if over > 0:
                    r.reward -= s["penalty"] * min(over / 4, 1.0)
    opt = torch.optim.AdamW(model.parameters(), lr=s["lr"], betas=(0.9, 0.99), weight_decay=0.01)
    book = Book(record, model, opt, {"dp": 1, "micro_batches": s["micro_batches"], "order": s["order"], "layout": s["layout"],
                                     "temperature": s["temperature"], "max_grad_norm": s["max_grad_norm"],
                                     "denominator": "tokens", "clip_low": s["clip_low"], "clip_high": s["clip_high"],
                                     "attention": s["attention"]}, precision)
    trace = []
    for rows in data:
        adv_of = group_advantages(rows)
        micro = portions(arrange(rows, s["order"]), s["micro_batches"])
        batches = [pack(m, s["tail"]) if s["layout"] == "packed" else collate(m) for m in micro]
        masks = []
        for b in batches:
            mask = b["trained"][:, 1:] & (b["doc"][:, 1:] == b["doc"][:, :-1])
            if fault == "eos_untrained":
                mask = mask & (b["ids"][:, 1:] != 2)
            if fault == "train_boundary":
                mask = mask | ((b["doc"][:, 1:] != b["doc"][:, :-1]) & (b["doc"][:, 1:] >= 0))
            masks.append(mask)
        total = sum(int(m.sum()) for m in masks)
        for b, mask in zip(batches, masks):
            pos = b["pos"]
            if fault == "positions_run_on":
                pos = torch.arange(pos.shape[1]).expand_as(pos)
            with autocast(precision):
                logits = model(b["ids"], pos, allowed_pairs(b, documents=fault != "attend_across"), s["attention"])
            lp, ent = logprobs(logits[:, :-1], b["ids"][:, 1:], 1.0 if fault == "temperature_missing" else s["temperature"],
                               how=s["softmax"])
            old, adv = b["old"][:, 1:], spread(b["doc"], adv_of)[:, 1:]
            if fault == "train_boundary":
                edge = b["doc"][:, 1:] != b["doc"][:, :-1]
                old = torch.where(edge, lp.detach(), old)
                adv = torch.where(edge, spread(b["doc"], adv_of)[:, :-1], adv)
            high = s["clip_low"] if fault == "clip_symmetric" else s["clip_high"]
            pg, ratio = surrogate(lp, old, adv, s["clip_low"], high, wrong_max=fault == "clip_max")
            pg = torch.where(mask, pg, 0.0)
            if fault == "divide_by_documents":
                loss = pg.sum() / len(rows)
            elif fault == "document_means":
                loss = sum(pg[(b["doc"][:, 1:] == d) & mask].mean() for d in b["doc"].unique().tolist() if d >= 0) / len(rows)
            else:
                loss = pg.sum() / total
            loss.backward()
            book.note(loss.detach(), targets_of(b), mask, {"policy_logprobs": lp, "old_logprobs": old, "entropy_nats": ent},
                      metrics={"pg_clipfrac": float((((ratio - 1 > high) | (1 - ratio > s["clip_low"])) & mask).sum() / mask.sum())})
        trace.append(snapshot(model))
        book.take()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s["max_grad_norm"])
        book.report({"actor/grad_norm": norm, "critic/score/mean": sum(r.reward for r in rows) / len(rows)})
        opt.step()
        opt.zero_grad(set_to_none=True)
    book.close()
    return trace


# ------------------------------------------------------------------------------------------------ 3. PPO-like, two epochs
def ppo_epochs(settings, fault, seed, precision, record=None):
    """Critic-free PPO (leave-one-out baseline), two epochs over a batch, tool output in the answers, dual clip, AdamW with
    warm-up and cosine, tied embeddings, a model configured with dropout that is trained without it."""
    s = dict(groups=3, n=4, micro_batches=2, pad_to=0, attention="sdpa", order="given", lr=4e-3, max_grad_norm=1.0, clip=0.2,
             dual=3.0, max_new_tokens=20, softmax="log_softmax", fused=None, temperature=1.0, d=48, vocab=56) | settings
    torch.manual_seed(seed)
    model = LearnedDecoder(s["vocab"], s["d"], 2, tied=True, dropout=0.1)
    model.eval()
    if fault == "dropout_on":
        model.train()
    data = draw(seed, 2, s["groups"], s["n"], s["vocab"], holes=True)
    opt = torch.optim.AdamW(model.parameters(), lr=s["lr"], weight_decay=0.01, fused=s["fused"])
    schedule = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda k: (k + 1) / 3 if k < 2 else 0.5 * (1 + math.cos(math.pi * min((k - 2) / 8, 1.0))))
    book = Book(record, model, opt, {"dp": 1, "micro_batches": s["micro_batches"], "order": s["order"], "ppo_epochs": 2,
                                     "temperature": s["temperature"], "max_grad_norm": s["max_grad_norm"],
                                     "denominator": "rows x max_new_tokens", "max_new_tokens": s["max_new_tokens"],
                                     "clip_ratio": s["clip"], "dual_clip": s["dual"], "schedule": "warmup 3, cosine"}, precision)
    trace = []
    for number, epoch in ((0, 0), (0, 1), (1, 0)):
        rows = data[number]
        n = s["n"]
        if fault == "groups_interleaved":     # rows come prompt by prompt; read as if the copies of a prompt were apart
            table = torch.tensor([r.reward for r in rows]).view(n, -1).t()
            base = ((table.sum(1, keepdim=True) - table) / (n - 1)).t().reshape(-1)
        else:
            table = torch.tensor([r.reward for r in rows]).view(-1, n)
            base = ((table.sum(1, keepdim=True) - table) / (n - 1)).reshape(-1)
        adv_of = {r.doc: r.reward - float(base[r.doc]) for r in rows}
        batches = [collate(m, to=s["pad_to"]) for m in portions(arrange(rows, s["order"]), s["micro_batches"])]
        if epoch == 0 or fault == "old_each_epoch":
            olds = []
            for b in batches:
                with torch.no_grad(), autocast(precision):
                    logits = model(b["ids"], b["pos"], allowed_pairs(b), s["attention"])
                olds.append(logprobs(logits[:, :-1], b["ids"][:, 1:], s["temperature"], how=s["softmax"])[0])
        longest = max(int(b["answer"].sum(1).max()) for b in batches)
        size = longest if fault == "longest_answer" else s["max_new_tokens"]
        kl, count = 0.0, 0
        for b, old in zip(batches, olds):
            with autocast(precision):
                logits = model(b["ids"], b["pos"], allowed_pairs(b), s["attention"])
            lp, ent = logprobs(logits[:, :-1], b["ids"][:, 1:], s["temperature"], how=s["softmax"])
            mask = b["answer" if fault == "train_tool_output" else "trained"][:, 1:]
            pg, _ = surrogate(lp, old, spread(b["doc"], adv_of)[:, 1:], s["clip"], s["clip"], s["dual"])
            loss = torch.where(mask, pg, 0.0).sum() / (len(rows) * size)
            loss.backward()
            kl += float(((old - lp.detach()) * mask).sum())
            count += int(mask.sum())
            book.note(loss.detach(), targets_of(b), mask, {"policy_logprobs": lp, "old_logprobs": old, "entropy_nats": ent})
            if fault == "schedule_per_micro_batch":
                schedule.step()
        trace.append(snapshot(model))
        book.take()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s["max_grad_norm"])
        book.report({"grad_norm": norm, "approx_kl": kl / count, "lr": opt.param_groups[0]["lr"]})
        opt.step()
        if fault != "schedule_per_micro_batch":
            schedule.step()
        opt.zero_grad()
    book.close()
    return trace


# ------------------------------------------------------------------------------------------------ 4. simulated data parallelism
def simulated_dp(settings, fault, seed, precision, record=None):
    """N replicas computed one after another, explicit all-reduce, GRPO normalised by the tokens of all ranks."""
    s = dict(dp=2, reduce="mean", reduce_order="forward", shard="strided", micro_batches=2, groups=4, n=4, lr=2e-3, clip=0.2,
             max_grad_norm=1.0, attention="sdpa", vocab=48, layers=3) | settings
    N = s["dp"]
    torch.manual_seed(seed)
    first = RopeDecoder(s["vocab"], 32, s["layers"], 4, kv=2)
    data = draw(seed, STEPS, s["groups"], s["n"], s["vocab"])
    rollout(first, data, seed, noise=0.15)
    replicas = [first] + [copy.deepcopy(first) for _ in range(N - 1)]
    opts = []
    for m in replicas:
        params = [p for n, p in m.named_parameters() if not (fault == "head_not_in_optimizer" and n in ("lm_head.weight", "norm.weight"))]
        opts.append(torch.optim.AdamW(params, lr=s["lr"], weight_decay=0.01, betas=(0.9, 0.95)))
    book = Book(record, first, opts[0], {"dp": N, "micro_batches": s["micro_batches"], "temperature": 1.0, "order": s["shard"],
                                         "max_grad_norm": s["max_grad_norm"], "denominator": "tokens",
                                         "reduce": s["reduce"], "clip_ratio": s["clip"]}, precision)
    trace = []
    for number, rows in enumerate(data):
        adv_of = group_advantages(rows, whole=fault == "whole_batch_statistics")
        shards = [rows[r::N] for r in range(N)] if s["shard"] == "strided" else portions(rows, N)
        if fault == "same_shard":
            shards = [shards[0]] * N
        total = sum(int(x.trained[1:].sum()) for shard in shards for x in shard)
        for r, (model, shard) in enumerate(zip(replicas, shards)):
            local = sum(int(x.trained[1:].sum()) for x in shard)
            for m in portions(shard, s["micro_batches"]):
                b = collate(m)
                with autocast(precision):
                    logits = model(b["ids"], b["pos"], allowed_pairs(b), s["attention"])
                lp, ent = logprobs(logits[:, :-1], b["ids"][:, 1:])
                old, mask = b["old"][:, 1:], b["trained"][:, 1:]
                adv = spread(b["doc"], adv_of)[:, 1:]
                if fault == "sequence_ratio":
                    mean = ((lp - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
                    pg, _ = surrogate(mean.expand_as(lp), torch.zeros_like(lp), adv, s["clip"], s["clip"])
                else:
                    pg, _ = surrogate(lp, old, adv, s["clip"], s["clip"])
                pg = torch.where(mask, pg, 0.0).sum()
                if fault == "local_tokens":
                    loss = pg / local if s["reduce"] == "mean" else pg / local / N
                elif s["reduce"] == "mean":
                    loss = pg / total * (1 if fault == "factor_missing" else N)
                else:
                    loss = pg / total
                loss.backward()
                book.note(loss.detach() / (N if s["reduce"] == "mean" else 1), targets_of(b), mask,
                          {"policy_logprobs": lp, "old_logprobs": old, "entropy_nats": ent})
        # all-reduce, bucket by bucket
        ranks = list(range(N))
        if s["reduce_order"] == "backward":
            ranks.reverse()
        if fault == "rank_left_out":
            ranks = [r for r in ranks if r != N - 1]
        named = [dict(m.named_parameters()) for m in replicas]
        for name in named[0]:
            if fault == "bucket_not_reduced" and name.startswith("blocks.1."):
                continue
            parts = [named[r][name].grad for r in ranks]
            if fault == "bf16_reduce":
                parts = [p.bfloat16() for p in parts]
            if s["reduce_order"] == "tree" and len(parts) == 4:
                summed = (parts[0] + parts[2]) + (parts[1] + parts[3])
            else:
                summed = parts[0].clone()
                for p in parts[1:]:
                    summed = summed + p
            if s["reduce"] == "mean" and fault != "sum_for_mean":
                summed = summed / N
            for r in range(N):
                named[r][name].grad = summed.float().clone()
        trace.append(snapshot(first))
        book.take()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), s["max_grad_norm"]) for m in replicas]
        book.report({"grad_norm": norms[0], "reward": sum(x.reward for x in rows) / len(rows)})
        for r in range(N - 1, -1, -1):          # rank 0 last: it writes the record
            if not (fault == "stale_replica" and r == 1 and number == 0):
                opts[r].step()
            if fault == "optimizer_state_dropped":
                opts[r].state.clear()
            replicas[r].zero_grad()
    book.close()
    return trace


# ------------------------------------------------------------------------------------------------ 5. Hugging Face
def hf_model(kind, seed, tied, attention, vocab=80):
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(seed)
    common = dict(vocab_size=vocab, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.12, tie_word_embeddings=tied,
                  use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_implementation=attention)
    model = Qwen2ForCausalLM(Qwen2Config(**common)) if kind == "qwen2" else LlamaForCausalLM(LlamaConfig(**common))
    return model


def hf_sft(settings, fault, seed, precision, record=None):
    """SFT of a tiny Qwen2 with masked prompts, gradient accumulation; weights are bfloat16 where the precision is."""
    s = dict(rows=12, micro_batches=3, attention="sdpa", pad_to=0, side="right", order="given", lr=2e-3, max_grad_norm=1.0,
             loss="model") | settings
    model = hf_model("qwen2", seed, True, s["attention"])
    if fault == "untied_head":
        weights = model.state_dict()
        model = hf_model("qwen2", seed, False, s["attention"])
        model.load_state_dict(weights)
    model.to(torch.bfloat16 if precision == "bf16" else torch.float32).train()
    data = draw(seed, STEPS, s["rows"], 1, 80)
    if fault == "first_batch_again":
        data = [data[0]] * STEPS
    opt = torch.optim.AdamW(model.parameters(), lr=s["lr"], weight_decay=0.0)
    book = Book(record, model, opt, {"dp": 1, "micro_batches": s["micro_batches"], "max_grad_norm": s["max_grad_norm"],
                                     "order": s["order"], "denominator": "tokens", "loss": "cross entropy",
                                     "attention": s["attention"]}, precision)
    trace = []
    for rows in data:
        batches = [collate(m, s["side"], s["pad_to"]) for m in portions(arrange(rows, s["order"]), s["micro_batches"])]
        items = sum(int((b["real"] if fault == "train_prompt" else b["answer"])[:, 1:].sum()) for b in batches)
        hits, seen = 0, 0
        for b in batches:
            keep = b["real"] if fault == "train_prompt" else b["answer"]
            labels = torch.where(keep, b["ids"], -100)
            if fault == "labels_shifted_twice":
                labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
            call = dict(input_ids=b["ids"], attention_mask=b["real"].long(), position_ids=b["pos"])
            if fault == "means_summed":
                out = model(**call, labels=labels)
                loss = out.loss
            elif s["loss"] == "weighted":       # mean of the micro-batch times its share of the trained tokens
                out = model(**call, labels=labels)
                loss = out.loss * (int((labels[:, 1:] != -100).sum()) / items)
            elif s["loss"] == "model":
                out = model(**call, labels=labels, num_items_in_batch=items)
                loss = out.loss
            else:
                out = model(**call)
                loss = F.cross_entropy(out.logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100,
                                       reduction="sum") / items
            loss.backward()
            mask = labels[:, 1:] != -100
            told = torch.where(mask, labels[:, 1:], b["ids"][:, 1:])
            with torch.no_grad():
                lp, ent = logprobs(out.logits[:, :-1], told)
                hits += int(((out.logits[:, :-1].argmax(-1) == told) & mask).sum())
                seen += int(mask.sum())
            book.note(loss.detach(), targets_of(b), mask, {"policy_logprobs": lp, "entropy_nats": ent})
        trace.append(snapshot(model))
        book.take()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s["max_grad_norm"])
        book.report({"grad_norm": norm, "mean_token_accuracy": hits / seen})
        opt.step()
        opt.zero_grad()
    book.close()
    return trace


def hf_dpo(settings, fault, seed, precision, record=None):
    """DPO of a tiny Llama against a frozen reference, gradient accumulation with a short last accumulation window."""
    s = dict(pairs=12, size=4, accumulation=4, attention="sdpa", forward="together", pad_to=0, order="given", lr=1e-3, beta=0.3,
             max_grad_norm=1.0, precompute=False) | settings
    model = hf_model("llama", seed, False, s["attention"])
    reference = copy.deepcopy(model)
    gen = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=gen))
    if fault == "layer_not_loaded":
        fresh = hf_model("llama", seed + 1000, False, s["attention"])
        model.model.layers[1].load_state_dict(fresh.model.layers[1].state_dict())
    reference.requires_grad_(False).eval()
    model.train()
    data = draw(seed, STEPS, s["pairs"], 2, 80)
    opt = torch.optim.AdamW(model.parameters(), lr=s["lr"], weight_decay=0.0)
    book = Book(record, model, opt, {"dp": 1, "micro_batches": s["pairs"] // s["size"], "beta": s["beta"], "loss": "dpo sigmoid",
                                     "max_grad_norm": s["max_grad_norm"], "denominator": "pairs", "order": s["order"],
                                     "gradient_accumulation_steps": s["accumulation"]}, precision)

    def scores(net, b):
        with autocast(precision):
            logits = net(input_ids=b["ids"], attention_mask=b["real"].long(), position_ids=b["pos"]).logits
        lp, ent = logprobs(logits[:, :-1], b["ids"][:, 1:])
        return (lp * b["answer"][:, 1:]).sum(1), lp, ent

    trace = []
    for rows in data:
        pairs = arrange([rows[i:i + 2] for i in range(0, len(rows), 2)], s["order"])
        micro = [pairs[i:i + s["size"]] for i in range(0, len(pairs), s["size"])]
        right = 0
        early = {}
        if s["precompute"]:
            with torch.no_grad():
                early = {r.doc: scores(reference, collate([r]))[0][0] for r in rows}
        for m in micro:
            good, bad = [p[0] for p in m], [p[1] for p in m]
            if s["forward"] == "together":
                sets = [collate(good + bad, to=s["pad_to"])]
            else:
                sets = [collate(good, to=s["pad_to"]), collate(bad, to=s["pad_to"])]
            got = [scores(model, b) for b in sets]
            policy = torch.cat([g[0] for g in got])
            if early:
                ref = torch.stack([early[r.doc] for r in good + bad])
            else:
                with torch.no_grad():
                    ref = torch.cat([scores(reference, b)[0] for b in sets])
            k = len(m)
            margin = s["beta"] * ((policy[:k] - ref[:k]) - (policy[k:] - ref[k:]))
            losses = -F.logsigmoid(margin)
            if fault == "configured_accumulation":
                loss = losses.mean() / s["accumulation"]
            else:
                loss = losses.sum() / len(pairs)
            loss.backward()
            right += int((margin > 0).sum())
            for i, (b, g) in enumerate(zip(sets, got)):
                book.note(loss.detach() if i == 0 else 0.0, targets_of(b), b["answer"][:, 1:], {"policy_logprobs": g[1], "entropy_nats": g[2]})
        trace.append(snapshot(model))
        book.take()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s["max_grad_norm"])
        book.report({"grad_norm": norm, "rewards/accuracies": right / len(pairs)})
        opt.step()
        if fault != "gradients_not_cleared":
            opt.zero_grad()
    book.close()
    return trace


# ------------------------------------------------------------------------------------------------ 6. KL, entropy, loss scale, sequence parallel
def kl_scaled(settings, fault, seed, precision, record=None):
    """GRPO with KL to a reference and an entropy bonus; bfloat16 weights with float32 masters, static loss scale, the
    sequence split over `sp` ranks computed one after another."""
    s = dict(sp=2, micro_batches=2, scale=1024.0, groups=3, n=4, kl=0.2, entropy=0.05, lr=2e-3, max_grad_norm=1.0, clip=0.2,
             attention="sdpa", order="given", multiple=4, vocab=96) | settings
    sp = s["sp"]
    torch.manual_seed(seed)
    master = RopeDecoder(s["vocab"], 32, 2, 2)
    data = draw(seed, STEPS, s["groups"], s["n"], s["vocab"])
    rollout(master, data, seed)
    reference = copy.deepcopy(master)
    gen = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.08 * torch.randn(p.shape, generator=gen))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = copy.deepcopy(master).to(dtype)
    reference.to(dtype).requires_grad_(False)
    opt = torch.optim.AdamW(master.parameters(), lr=s["lr"], weight_decay=0.01)
    # the gradients of the float32 masters are what the optimizer sees; the step is told by hand
    book = Book(record, master, None, {"dp": 1, "sp": sp, "micro_batches": s["micro_batches"], "temperature": 1.0, "optimizer": "AdamW",
                                       "learning_rate": s["lr"], "max_grad_norm": s["max_grad_norm"], "denominator": "tokens",
                                       "kl_coef": s["kl"], "entropy_coef": s["entropy"], "loss_scale": s["scale"],
                                       "order": s["order"], "clip_ratio": s["clip"]}, precision)
    trace = []
    for rows in data:
        adv_of = group_advantages(rows)
        batches = [collate(m, multiple=s["multiple"]) for m in portions(arrange(rows, s["order"]), s["micro_batches"])]
        total = sum(int(b["trained"].sum()) for b in batches)
        sums = {"kl": 0.0, "entropy": 0.0}
        for b in batches:
            T = b["ids"].shape[1]
            size = T // sp
            nxt = {k: b[k].roll(-1, 1) for k in ("trained", "doc", "source", "old")}
            for k, blank in (("trained", False), ("doc", -1), ("source", -1), ("old", 0.0)):
                nxt[k][:, -1] = blank
            adv = spread(nxt["doc"], adv_of)
            pos = b["pos"]
            if fault == "positions_restart":
                pos = torch.where(b["real"], torch.arange(T) % size, 0)
            for rank in range(sp):
                part = slice(rank * size, (rank + 1) * size)
                labels = b["ids"].roll(-1, 1)[:, part]
                if fault == "roll_in_chunk":
                    labels = b["ids"][:, part].roll(-1, 1)
                ok = allowed_pairs(b)
                logits = model(b["ids"], pos, ok, s["attention"])[:, part]
                lp, ent = logprobs(logits, labels)
                if fault == "reference_is_policy":
                    ref = lp.detach()
                else:
                    with torch.no_grad():
                        ref, _ = logprobs(reference(b["ids"], pos, ok, s["attention"])[:, part], labels)
                mask, old = nxt["trained"][:, part], nxt["old"][:, part]
                pg, _ = surrogate(lp, old, adv[:, part], s["clip"], s["clip"])
                kl = lp - ref if fault == "k1_estimator" else (ref - lp).exp() - (ref - lp) - 1
                full = logits.float().log_softmax(-1)
                live = -(full.exp() * full).sum(-1)
                bonus = s["entropy"] * live * (-1 if fault == "entropy_sign" else 1)
                whole = torch.where(mask, pg + s["kl"] * kl - bonus, 0.0).sum()
                loss = whole / total * (1 if fault == "sp_factor_missing" else sp)       # the ranks' gradients are averaged
                (loss * s["scale"]).backward()
                with torch.no_grad():
                    for p, q in zip(master.parameters(), model.parameters()):
                        g = q.grad.float() / sp
                        p.grad = g if p.grad is None else p.grad + g
                        q.grad = None
                sums["kl"] += float((kl.detach() * mask).sum())
                sums["entropy"] += float((ent * mask).sum())
                book.note(loss.detach() / sp, {"doc": nxt["doc"][:, part], "source": nxt["source"][:, part], "real": b["real"][:, part]}, mask,
                          {"policy_logprobs": lp, "old_logprobs": old, "entropy_nats": ent},
                          documents=len(b["ids"]) if rank == 0 else 0)      # a row is split: count it once
        if fault == "clip_before_unscale":
            torch.nn.utils.clip_grad_norm_(master.parameters(), s["max_grad_norm"])
        for p in master.parameters():
            p.grad /= s["scale"]
        trace.append(snapshot(master))
        book.take()
        norm = torch.nn.utils.clip_grad_norm_(master.parameters(), s["max_grad_norm"])
        book.report({"grad_norm": norm, "kl": sums["kl"] / total, "entropy": sums["entropy"] / total})
        book.step()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for p, q in zip(master.parameters(), model.parameters()):
                if fault == "no_master_weights":
                    p.copy_(p.bfloat16())
                q.copy_(p)
    book.close()
    return trace


LOOPS = {"padded_grpo": padded_grpo, "packed_dapo": packed_dapo, "ppo_epochs": ppo_epochs, "simulated_dp": simulated_dp,
         "hf_sft": hf_sft, "hf_dpo": hf_dpo, "kl_scaled": kl_scaled}
