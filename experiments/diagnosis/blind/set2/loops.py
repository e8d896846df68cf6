"""Six plain training loops for small language models on CPU; each can record itself and can be given one mistake."""
import contextlib, copy, math
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import GPT2Config, LlamaConfig, Qwen2Config, AutoModelForCausalLM
import workbench as wb

VOCAB, HIDDEN, MAXLEN = 48, 32, 20


# ---------------------------------------------------------------- models
class Block(nn.Module):
    def __init__(self, dim, heads, dropout, rope):
        super().__init__()
        self.heads, self.rope, self.drop = heads, rope, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def rotate(self, x, positions):
        half = x.shape[-1] // 2
        angle = positions[:, None, :, None] * (100.0 ** (-torch.arange(half) / half))
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)

    def forward(self, x, positions, mask, attn):
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.rope:
            q, k = self.rotate(q, positions), self.rotate(k, positions)
        if attn == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            score = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
            y = score.masked_fill(~mask, -1e9).softmax(-1).to(v.dtype) @ v
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(n, t, d)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class TinyLM(nn.Module):
    """Decoder with tied head; packed rows with a mask of documents."""
    def __init__(self, rope, dropout=0.0, attn="sdpa"):
        super().__init__()
        self.attn = attn
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.place = None if rope else nn.Embedding(64, HIDDEN)
        self.blocks = nn.ModuleList(Block(HIDDEN, 4, dropout, rope) for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, positions, documents, across=False):
        t = ids.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool).tril()[None].expand(len(ids), t, t)
        if not across:
            mask = mask & (documents[:, :, None] == documents[:, None, :])
        x = self.embed(ids)
        if self.place is not None:
            x = x + self.place(positions)
        for block in self.blocks:
            x = block(x, positions, mask[:, None], self.attn)
        return self.head(self.norm(x))


def shake(model, seed, std):
    """Weights as after some training: random, larger than at initialization."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g) * std)
    return model


def hf(kind, attn, seed):
    torch.manual_seed(seed)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=HIDDEN, n_layer=2, n_head=4, resid_pdrop=0.0,
                            embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.1)
    else:
        cls = {"qwen2": Qwen2Config, "llama": LlamaConfig}[kind]
        config = cls(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1,
                     tie_word_embeddings=kind == "qwen2")
    config.use_cache = False  # no cache in training
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, None, None
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn)


# ---------------------------------------------------------------- data
def documents(seed, count, group, observation=False, shuffle=None):
    """Prompts of 2-4 tokens, answers of 4-12; a group shares its prompt; rewards in steps of 1/4."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda lo, hi, n=1: torch.randint(lo, hi, (n,), generator=g)
    docs = []
    for i in range(count):
        if i % group == 0:
            prompt = rand(1, VOCAB, int(rand(2, 5)))
        answer = rand(1, VOCAB, int(rand(4, 13)))
        ids = torch.cat([prompt, answer])
        trained = torch.arange(len(ids)) >= len(prompt)
        if observation and len(answer) > 6:  # a tool's answer within
            trained[len(prompt) + 2:len(prompt) + 5] = False
        docs.append(dict(ids=ids, prompt=len(prompt), trained=trained, group=i // group,
                         reward=float(rand(0, 9)) / 4 + 0.1 * float((answer % 3 == 0).float().mean())))
    return docs


def number(docs):
    start = 0
    for n, d in enumerate(docs):
        d["n"], d["start"] = n, start
        start += len(d["ids"])
    return docs


def collate(rows, keys=(), side="right", width=0):
    """Rows of documents (one each: padded; several: packed) to tensors."""
    width = max(width, max(sum(len(d["ids"]) for d in row) for row in rows))
    b = {k: torch.zeros(len(rows), width) for k in keys}
    for k, empty in dict(ids=0, documents=-1, positions=0, source=-1).items():
        b[k] = torch.full((len(rows), width), empty)
    b["trained"] = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        at = 0 if side == "right" else width - sum(len(d["ids"]) for d in row)
        for d in row:
            n = len(d["ids"])
            part = (i, slice(at, at + n))
            b["ids"][part], b["trained"][part], b["documents"][part] = d["ids"], d["trained"], d["n"]
            b["positions"][part], b["source"][part] = torch.arange(n), torch.arange(n) + d["start"]
            for k in keys:
                b[k][part] = d[k]
            at += n
    return b


def ungather(b, values, docs, key):
    """Values of a batch back to its documents."""
    for d in docs:
        d[key] = values[b["documents"] == d["n"]].float().clone()


def pack(docs, width):
    rows = []
    for d in docs:
        if not rows or sum(len(e["ids"]) for e in rows[-1]) + len(d["ids"]) > width:
            rows.append([])
        rows[-1].append(d)
    return rows


def chunks(items, n):
    return [items[i:i + n] for i in range(0, len(items), n)]


def deal(docs, s):
    docs = docs[::-1] if s["order"] == "reversed" else docs
    return [docs[r::s["dp"]] for r in range(s["dp"])]


# ---------------------------------------------------------------- forward, reduction, record
def logprobs(logits, ids, temperature=1.0, form="log_softmax", entropy=True):
    """Log-probability and entropy of every token, where the token lies; zero at the first of a row."""
    x, y = logits[:, :-1].float() / temperature, ids[:, 1:]
    if form == "cross_entropy":
        lp = -F.cross_entropy(x.transpose(1, 2), y, reduction="none")
    elif form == "logsumexp":
        lp = x.gather(-1, y[..., None])[..., 0] - x.logsumexp(-1)
    else:
        lp = x.log_softmax(-1).gather(-1, y[..., None])[..., 0]
    ent = None
    if entropy:
        p = x.softmax(-1)
        ent = F.pad(x.logsumexp(-1) - (p * x).sum(-1), (1, 0))
    return F.pad(lp, (1, 0)), ent


def doc_mean(values, b, weight):
    """Per row (one document each): mean over its trained tokens."""
    return (values * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp(min=1)


def amp(on):
    return torch.autocast("cpu", torch.bfloat16) if on else contextlib.nullcontext()


def take(model):
    grads = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def reduce(model, ranks, s, how="mean"):
    ranks = ranks[::-1] if s.get("reduce") == "reversed" else ranks
    for k, p in model.named_parameters():
        given = [g[k] for g in ranks if k in g]
        if given:
            total = given[0].clone()
            for g in given[1:]:
                total += g
            p.grad = total / s["dp"] if how == "mean" else total


def adamw(params, s, **more):
    return torch.optim.AdamW(params, lr=s["lr"], fused=s["opt"] == "fused", foreach=s["opt"] == "foreach", **more)


class Log:
    """The record, in a rich or a poor form, and what a check of movement needs."""
    def __init__(self, place, model, optimizer, s, **context):
        self.model, self.rich, self.grads, self.recorder = model, bool(place) and place[1] == "rich", [], None
        if place:
            told = {k: s[k] for k in ("dp", "order", "side", "attn", "form", "opt") if k in s} | dict(rows_per_micro_batch=s["micro"])
            if "pack" not in s:  # packed: their number varies
                told["micro_batches"] = -(-(s.get("pairs") or s["docs"]) // (s["dp"] * s["micro"]))
            context = told | context if self.rich else {"dp": s["dp"]}
            self.recorder = wb.Recorder(place[0], model, optimizer, context=context, gradients="full" if self.rich else "norms")

    def note(self, loss, b=None, metrics=None, **tokens):
        if not self.recorder:
            return
        loss = loss.detach() if loss is not None else None
        if not self.rich:
            return self.recorder.note(loss) if loss is not None else None
        counts = None
        if b is not None:
            docs, trained = b["documents"], b["trained"]
            with_token = len(docs[trained].unique())
            counts = dict(documents=with_token, masked_documents=len(docs[docs >= 0].unique()) - with_token,
                          trained_tokens=int(trained.sum()), all_tokens=int((docs >= 0).sum()), padded_tokens=docs.numel())
            tokens |= dict(documents=docs, trained=trained, positions=b["positions"], source=b["source"], targets=b["ids"])
        self.recorder.note(loss, counts=counts, metrics=metrics,
                           tokens={k: v.detach().expand(docs.shape) for k, v in tokens.items()} if tokens else None)

    def gradients(self, own_clip=False):
        self.grads.append({k: p.grad.detach().float().clone() for k, p in self.model.named_parameters() if p.grad is not None})
        if own_clip and self.recorder:
            self.recorder.take_gradients()

    def done(self):
        if self.recorder:
            self.recorder.close()
        return self.grads, {k: p.detach().float().clone() for k, p in self.model.named_parameters()}


# ---------------------------------------------------------------- 1: GRPO/DAPO, Qwen2, padded rows
def grpo(settings, fault, seed, precision, place=None):
    s = dict(dp=2, micro=3, side="right", width=0, order="given", attn="sdpa", form="log_softmax", opt="foreach", lr=4e-3,
             temperature=1.0, low=0.2, high=0.28, kl=0.05, cap=2.0, docs=12, group=4, betas=(0.9, 0.999), clip=1.0) | settings
    model = shake(hf("qwen2", s["attn"], seed), seed + 1, 0.05)
    ref = shake(copy.deepcopy(model), seed + 2, 0.03)
    betas = (0.9, 0.9) if fault == "betas" else s["betas"]
    optimizer = adamw(model.parameters(), s, betas=betas, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 2))
    docs = documents(seed, 3 * s["docs"], s["group"])
    log = Log(place, model, optimizer, s, temperature=s["temperature"], denominator="tokens", max_grad_norm=s["clip"],
              clip_low=s["low"], clip_high=s["high"], kl_coef=s["kl"], tis_cap=s["cap"], loss_agg="token-mean")

    def forward(net, b, temperature):
        with amp(precision == "bf16"):
            logits = net(input_ids=b["ids"], attention_mask=(b["documents"] >= 0).long(), position_ids=b["positions"]).logits
        return logprobs(logits, b["ids"], temperature, s["form"])

    rewards = torch.tensor([d["reward"] for d in docs]).view(-1, s["group"])
    centred = rewards - rewards.mean(1, keepdim=True)
    spread = rewards.std() if fault == "batch_std" else rewards.std(1, keepdim=True)
    g = torch.Generator().manual_seed(seed + 3)
    for d, a in zip(docs, (centred / (spread + 1e-6)).flatten()):
        d["advantages"], d["rewards"] = a.expand(len(d["ids"])), torch.full((len(d["ids"]),), d["reward"])
    batches = [number(x) for x in chunks(docs, s["docs"])]
    with torch.no_grad():  # one rollout for the three steps
        for batch in batches:
            b = collate([[d] for d in batch], side=s["side"], width=s["width"])
            ungather(b, forward(model, b, s["temperature"])[0], batch, "old")
            ungather(b, forward(ref, b, s["temperature"])[0], batch, "ref")
            for d in batch:
                d["sampler"] = d["old"] + 0.25 * torch.randn(len(d["ids"]), generator=g)
                if fault == "eos_masked":
                    d["trained"][-1] = False
    for batch in batches:
        total = sum(int(d["trained"].sum()) for d in batch)
        ranks, terms = [], dict(policy=0.0, kl=0.0)
        for mine in deal(batch, s):
            parts = chunks([[d] for d in mine], s["micro"])
            for rows in parts:
                b = collate(rows, ("old", "ref", "sampler", "advantages", "rewards"), s["side"], s["width"])
                lp, ent = forward(model, b, 1.0 if fault == "no_temperature" else s["temperature"])
                w = b["trained"].float()
                ratio, adv = (lp - b["old"]).exp(), b["advantages"]
                clip = ratio.clamp(1 - s["low"], 1 + s["high"])
                policy = -torch.min(ratio * adv, clip * adv)
                tis = (b["sampler"] - b["old"] if fault == "tis_inverted" else b["old"] - b["sampler"]).exp().clamp(max=s["cap"])
                policy = policy * tis
                d = lp - b["ref"] if fault == "kl_direction" else b["ref"] - lp
                kl = d.exp() - d - 1
                token = policy + s["kl"] * kl
                if fault == "micro_mean":
                    loss = (token * w).sum() / w.sum() / len(parts)
                elif fault == "sequence_mean":
                    loss = doc_mean(token, b, w).sum() / len(batch) * s["dp"]
                else:
                    loss = (token * w).sum() / total * s["dp"]
                if fault == "no_accumulation_factor":
                    loss = loss * len(parts)
                loss.backward()
                terms["policy"] += float((policy.detach() * w).sum() / total)
                terms["kl"] += float((kl.detach() * w).sum() / total)
                out = torch.where(adv > 0, ratio > 1 + s["high"], ratio < 1 - s["low"]) & b["trained"] & (adv != 0)
                log.note(loss / s["dp"], b, policy_logprobs=lp, old_logprobs=b["old"], ref_logprobs=b["ref"], losses=token,
                         sampler_logprobs=b["sampler"], advantages=adv, rewards=b["rewards"], ratios=ratio, clipped=out,
                         entropy_nats=ent)
            ranks.append(take(model))
        reduce(model, ranks, s)
        log.note(None, metrics={"loss/policy": terms["policy"], "loss/kl": s["kl"] * terms["kl"]})
        log.gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), s["clip"])
        optimizer.step(); schedule.step(); optimizer.zero_grad()
    return log.done()


# ---------------------------------------------------------------- 2: PPO epochs, own decoder with rotary positions, packed rows
def ppo(settings, fault, seed, precision, place=None):
    s = dict(dp=2, micro=2, pack=36, width=0, order="given", attn="sdpa", form="log_softmax", opt="foreach", lr=6e-3, low=0.1,
             high=0.3, entropy=0.02, gamma=0.9, docs=14, clip=0.5, reduce="given") | settings
    torch.manual_seed(seed)
    model = shake(TinyLM(rope=True, attn=s["attn"], dropout=0.1 if fault == "dropout" else 0.0), seed + 1, 0.05)
    with torch.no_grad():
        model.embed.weight.mul_(0.3)
    optimizer = adamw(model.parameters(), s, weight_decay=0.0)
    log = Log(place, model, optimizer, s, temperature=1.0, denominator="tokens", max_grad_norm=s["clip"], pack=s["pack"],
              epochs=3, clip_low=s["low"], clip_high=s["high"], entropy_coef=s["entropy"], gamma=s["gamma"])
    batch = number(documents(seed, s["docs"], 1))

    def forward(b):
        with amp(precision == "bf16"):
            logits = model(b["ids"], b["positions"], b["documents"], across=fault == "across_documents")
        return logprobs(logits, b["ids"], 1.0, s["form"])

    baseline = sum(d["reward"] for d in batch) / len(batch)
    for d in batch:
        left = torch.arange(len(d["ids"])).flip(0)
        d["rewards"] = torch.full((len(d["ids"]),), d["reward"])
        d["advantages"] = d["reward"] * s["gamma"] ** left - baseline * s["gamma"] ** left.float().mean()
    chosen = torch.cat([d["advantages"][slice(None) if fault == "whiten_all" else d["trained"]] for d in batch])
    for d in batch:
        d["advantages"] = (d["advantages"] - chosen.mean()) / (chosen.std() + 1e-8)
    if fault == "drop_last":
        shares = [mine[:len(mine) // 3 * 3] for mine in deal(batch, s)]
    else:
        shares = deal(batch, s)
    total = sum(int((d["ids"] if fault == "all_tokens" else d["ids"][d["trained"]]).numel()) for mine in shares for d in mine)

    def old():
        model.eval()
        with torch.no_grad():
            for mine in shares:
                b = collate(pack(mine, s["pack"]), width=s["width"])
                ungather(b, forward(b)[0], mine, "old")
        model.train()

    old()
    for epoch in range(3):
        if fault == "old_recomputed" and epoch:
            old()
        ranks = []
        for mine in shares:
            for rows in chunks(pack(mine, s["pack"]), s["micro"]):
                b = collate(rows, ("old", "advantages", "rewards"), width=s["width"])
                lp, ent = forward(b)
                w, adv = b["trained"].float(), b["advantages"]
                ratio = (lp - b["old"]).exp()
                high = s["low"] if fault == "symmetric_clip" else s["high"]
                policy = -torch.min(ratio * adv, ratio.clamp(1 - s["low"], 1 + high) * adv)
                token = policy + (s["entropy"] if fault == "entropy_sign" else -s["entropy"]) * ent
                loss = (token * w).sum() / total * s["dp"]
                loss.backward()
                out = torch.where(adv > 0, ratio > 1 + high, ratio < 1 - s["low"]) & b["trained"]
                log.note(loss / s["dp"], b, policy_logprobs=lp, old_logprobs=b["old"], losses=token, advantages=adv,
                         rewards=b["rewards"], ratios=ratio, clipped=out, entropy_nats=ent)
            ranks.append(take(model))
        reduce(model, ranks, s)
        log.gradients(own_clip=True)
        grads = [p.grad for p in model.parameters()]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for g in grads:
            g.mul_((s["clip"] / ((g.norm() if fault == "clip_each" else norm) + 1e-6)).clamp(max=1.0))
        optimizer.step(); optimizer.zero_grad()
    return log.done()


# ---------------------------------------------------------------- 3: GSPO or CISPO, Llama, left-padded rows, bfloat16 weights
def gspo(settings, fault, seed, precision, place=None):
    s = dict(dp=1, micro=4, side="left", width=0, order="given", attn="eager", form="logsumexp", opt="for-loop", lr=4e-3,
             objective="gspo", eps=0.05, docs=12, group=4, clip=1.0, temperature=0.8) | settings
    model = shake(hf("llama", s["attn"], seed), seed + 1, 0.05)
    if fault == "layer_not_loaded":
        torch.manual_seed(seed + 9)
        for p in model.model.layers[1].mlp.parameters():
            nn.init.normal_(p, std=0.1)
    if precision == "bf16":
        model = model.to(torch.bfloat16)
    optimizer = adamw(model.parameters(), s, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    docs = documents(seed, 3 * s["docs"], s["group"])
    log = Log(place, model, optimizer, s, temperature=s["temperature"], max_grad_norm=s["clip"], objective=s["objective"],
              denominator="documents" if s["objective"] == "gspo" else "tokens", eps=s["eps"], precision="bfloat16" if precision == "bf16" else "float32")

    def forward(b):
        seen = ((b["documents"] >= 0) | (fault == "padding_attended")).long()
        logits = model(input_ids=b["ids"], attention_mask=seen, position_ids=b["positions"]).logits
        if fault == "low_logits":
            logits = logits.to(torch.bfloat16)
            lp = (logits[:, :-1] / s["temperature"]).log_softmax(-1).gather(-1, b["ids"][:, 1:, None])[..., 0]
            return F.pad(lp, (1, 0)).float(), logprobs(logits, b["ids"], s["temperature"])[1]
        return logprobs(logits, b["ids"], s["temperature"], s["form"])

    rewards = torch.tensor([d["reward"] for d in docs]).view(-1, s["group"])
    for d, a in zip(docs, (rewards - rewards.mean(1, keepdim=True)).flatten()):
        d["advantages"], d["rewards"] = a.expand(len(d["ids"])), torch.full((len(d["ids"]),), d["reward"])
        if fault == "mask_shifted":
            d["trained"] = torch.cat([d["trained"][1:], torch.tensor([False])])
    batches = [number(x) for x in chunks(docs, s["docs"])]
    with torch.no_grad():
        for batch in batches:
            b = collate([[d] for d in batch], side=s["side"], width=s["width"])
            ungather(b, forward(b)[0], batch, "old")
    for batch in batches:
        total = sum(int(d["trained"].sum()) for d in batch)
        ranks = []
        for mine in deal(batch, s):
            for rows in chunks([[d] for d in mine], s["micro"]):
                b = collate(rows, ("old", "advantages", "rewards"), s["side"], s["width"])
                lp, ent = forward(b)
                w, adv = b["trained"].float(), b["advantages"]
                log_ratio = (lp - b["old"]) * w
                if s["objective"] == "gspo":
                    ratio = (log_ratio.sum(1, keepdim=True) if fault == "ratio_sum" else doc_mean(log_ratio, b, w)).exp().expand_as(lp)
                    token = -torch.min(ratio * adv, ratio.clamp(1 - s["eps"], 1 + s["eps"]) * adv)
                    out = torch.where(adv > 0, ratio > 1 + s["eps"], ratio < 1 - s["eps"]) & b["trained"]
                    if fault == "fixed_length":
                        loss = (token * w).sum() / MAXLEN / len(batch) * s["dp"]
                    else:
                        loss = doc_mean(token, b, w).sum() / len(batch) * s["dp"]
                else:
                    ratio = log_ratio.exp()
                    weight = ratio.clamp(max=1 + s["eps"])
                    token = -(weight if fault == "not_detached" else weight.detach()) * adv * lp
                    out = torch.zeros_like(b["trained"])
                    loss = (token * w).sum() / total * s["dp"]
                loss.backward()
                log.note(loss / s["dp"], b, policy_logprobs=lp, old_logprobs=b["old"], losses=token, advantages=adv,
                         rewards=b["rewards"], ratios=ratio, clipped=out, entropy_nats=ent)
            ranks.append(take(model))
        reduce(model, ranks[:-1] if fault == "rank_lost" else ranks, s)
        log.gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), s["clip"])
        optimizer.step(); schedule.step(); optimizer.zero_grad()
    return log.done()


# ---------------------------------------------------------------- 4: RLOO, GPT-2, left padding, KL in the reward, SGD
def rloo(settings, fault, seed, precision, place=None):
    s = dict(dp=1, micro=4, side="left", width=0, order="given", attn="eager", form="cross_entropy", opt="foreach", lr=0.05,
             docs=12, group=3, kl=0.1, clip=5.0) | settings
    model = shake(hf("gpt2", s["attn"], seed), seed + 1, 0.05)
    ref = shake(copy.deepcopy(model), seed + 2, 0.03)
    make = lambda: torch.optim.SGD(model.parameters(), lr=s["lr"], momentum=0.9, foreach=s["opt"] == "foreach", fused=s["opt"] == "fused")
    optimizer = make()
    log = Log(place, model, optimizer, s, temperature=1.0, denominator="documents", max_grad_norm=s["clip"], kl_in_reward=s["kl"])
    docs = documents(seed, 4 * s["docs"], s["group"], observation=True)
    order = torch.randperm(len(docs) // s["group"], generator=torch.Generator().manual_seed(seed + (fault == "shuffle_seed")))
    docs = [docs[g * s["group"] + i] for g in order.tolist() for i in range(s["group"])]

    def forward(net, b):
        positions = b["positions"]
        if fault == "row_positions":
            positions = torch.arange(b["ids"].shape[1]).expand_as(b["ids"])
        with amp(precision == "bf16"):
            logits = net(input_ids=b["ids"], attention_mask=(b["documents"] >= 0).long(), position_ids=positions).logits
        return *logprobs(logits, b["ids"], 1.0, s["form"]), positions

    for batch in [number(x) for x in chunks(docs, s["docs"])][:3]:
        with torch.no_grad():
            b = collate([[d] for d in batch], side=s["side"], width=s["width"])
            ungather(b, forward(model, b)[0], batch, "old")
            ungather(b, forward(ref, b)[0], batch, "ref")
        for d in batch:
            kl = float((d["old"] - d["ref"])[d["trained"]].sum())
            d["score"] = d["reward"] + (s["kl"] if fault == "kl_reward_sign" else -s["kl"]) * kl
        for rows in chunks(batch, s["group"]):
            scores = [d["score"] for d in rows]
            for d in rows:
                others = sum(scores) - d["score"]
                base = sum(scores) / len(rows) if fault == "baseline_of_all" else others / (len(rows) - 1)
                d["advantages"] = torch.full((len(d["ids"]),), d["score"] - base)
                d["rewards"] = torch.full((len(d["ids"]),), d["score"])
                if fault == "observation_trained":
                    d["trained"] = torch.arange(len(d["ids"])) >= d["prompt"]
        ranks = []
        for mine in deal(batch, s):
            for rows in chunks([[d] for d in mine], s["micro"]):
                if fault == "zeroed_between":
                    optimizer.zero_grad()
                b = collate(rows, ("old", "ref", "advantages", "rewards"), s["side"], s["width"])
                lp, ent, positions = forward(model, b)
                token = -b["advantages"] * lp
                loss = (token * b["trained"]).sum() / len(batch) * s["dp"]
                loss.backward()
                log.note(loss / s["dp"], b | dict(positions=positions), policy_logprobs=lp, old_logprobs=b["old"],
                         ref_logprobs=b["ref"], losses=token, advantages=b["advantages"], rewards=b["rewards"], entropy_nats=ent)
            ranks.append(take(model))
        reduce(model, ranks, s)
        log.gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), s["clip"])
        if fault == "momentum_lost":
            optimizer.state.clear()
        optimizer.step(); optimizer.zero_grad()
    return log.done()


# ---------------------------------------------------------------- 5: DPO, Llama, right padding, bfloat16 weights
def dpo(settings, fault, seed, precision, place=None):
    s = dict(dp=1, micro=2, side="right", width=0, order="given", attn="sdpa", form="log_softmax", opt="fused", lr=2e-3, beta=0.5,
             pairs=6, decay=0.1, clip=10.0) | settings
    model = shake(hf("llama", s["attn"], seed), seed + 1, 0.05)
    if precision == "bf16":
        model = model.to(torch.bfloat16)
    ref = copy.deepcopy(model)
    if fault == "reference_moves":
        ref = model
    plain = [p for k, p in model.named_parameters() if "norm" in k]
    groups = [dict(params=[p for k, p in model.named_parameters() if "norm" not in k], weight_decay=s["decay"]),
              dict(params=plain, weight_decay=s["decay"] if fault == "norms_decayed" else 0.0)]
    optimizer = adamw(groups[:1] if fault == "norms_not_given" else groups, s)
    log = Log(place, model, optimizer, s, temperature=1.0, denominator="pairs", max_grad_norm=s["clip"], beta=s["beta"], decay=s["decay"])
    docs = documents(seed, 6 * s["pairs"], 2)

    def forward(net, b):
        logits = net(input_ids=b["ids"], attention_mask=(b["documents"] >= 0).long(), position_ids=b["positions"]).logits
        return logprobs(logits, b["ids"], 1.0, s["form"])

    for batch in [number(x) for x in chunks(docs, 2 * s["pairs"])]:
        for i, pair in enumerate(chunks(batch, 2)):  # the better one first
            chosen = max(pair, key=lambda d: d["reward"])
            for d in pair:
                d["sign"] = 1.0 if (d is chosen) != (fault == "some_swapped" and i % 3 == 0) else -1.0
                d["rewards"] = torch.full((len(d["ids"]),), d["sign"])
        ranks = []
        for mine in deal(chunks(batch, 2), s):
            for part in chunks(mine, s["micro"]):
                rows = [[d] for pair in part for d in sorted(pair, key=lambda d: -d["sign"])]
                b = collate(rows, ("rewards",), s["side"], s["width"])
                lp, ent = forward(model, b)
                with torch.no_grad():
                    ref_lp, _ = forward(ref, b)
                w = b["trained"].float()
                value = (lp * w).sum(1) if fault == "no_reference" else ((lp - ref_lp) * w).sum(1)
                margin = value[0::2] - value[1::2]
                loss = -F.logsigmoid(s["beta"] * margin).sum() / s["pairs"] * s["dp"]
                loss.backward()
                log.note(loss / s["dp"], b, policy_logprobs=lp, ref_logprobs=ref_lp, entropy_nats=ent)
            ranks.append(take(model))
        reduce(model, ranks, s)
        log.gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), s["clip"])
        optimizer.step(); optimizer.zero_grad(); model.zero_grad()
    return log.done()


# ---------------------------------------------------------------- 6: SFT, own decoder with learned positions, packed rows
def sft(settings, fault, seed, precision, place=None):
    s = dict(dp=2, micro=2, pack=34, width=0, order="given", attn="sdpa", form="cross_entropy", opt="foreach", lr=3e-3, docs=13,
             clip=1.0, decay=0.05, reduce="given") | settings
    torch.manual_seed(seed)
    model = shake(TinyLM(rope=False, attn=s["attn"]), seed + 1, 0.05)
    with torch.no_grad():
        model.embed.weight.mul_(0.3)
    if fault == "head_untied":
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    optimizer = adamw(model.parameters(), s, weight_decay=s["decay"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: max(0.1, 1 - i / 8))
    log = Log(place, model, optimizer, s, temperature=1.0, denominator="tokens", max_grad_norm=s["clip"], pack=s["pack"], schedule="linear")
    data = documents(seed, 3 * s["docs"], 1)
    for batch in chunks(data, s["docs"]):
        if fault == "sampler_pads":  # to an even number a rank, from the beginning
            batch = batch + [dict(d) for d in batch[:-len(batch) % s["dp"]]]
        number(batch)
        shares = deal(batch, s)
        total = sum(int(d["trained"].sum()) for d in batch)
        ranks = []
        for mine in shares:
            here = sum(int(d["trained"].sum()) for d in mine)
            for rows in chunks(pack(mine, s["pack"]), s["micro"]):
                b = collate(rows, width=s["width"])
                if fault == "running_positions":
                    b["positions"] = torch.arange(b["ids"].shape[1]).expand_as(b["ids"])
                with amp(precision == "bf16"):
                    logits = model(b["ids"], b["positions"], b["documents"])
                labels = b["ids"]
                if fault == "shifted_twice":  # the collator has shifted already, the loss shifts again
                    labels = torch.cat([labels[:, 1:], labels[:, :1]], 1)
                lp, ent = logprobs(logits, labels, 1.0, s["form"])
                loss = -(lp * b["trained"]).sum() / (here if fault == "rank_mean" else total / s["dp"])
                loss.backward()
                log.note(loss / s["dp"], b | dict(ids=labels), policy_logprobs=lp, losses=-lp, entropy_nats=ent)
                if fault == "schedule_each_micro":
                    schedule.step()
            ranks.append(take(model))
        reduce(model, ranks, s, "sum" if fault == "ranks_summed" else "mean")
        log.gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), s["clip"])
        optimizer.step(); optimizer.zero_grad()
        if fault != "schedule_each_micro":
            schedule.step()
        if fault == "low_weights":
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.to(torch.bfloat16))
    return log.done()


LOOPS = dict(grpo=grpo, ppo=ppo, gspo=gspo, rloo=rloo, dpo=dpo, sft=sft)
