# ruff: noqa: E501, E701, E731
"""Seven small training loops, each with planted faults; see README.md."""
import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from parts import (grads_of, weights_of, recorder, cast, shuffled, chunks, deal, zipf, pad, unpad, logp_of, entropy_of, hf, adamw, Decoder,
    pack, causal, clip, grpo_data)

# ---------------------------------------------------------------- 1. GRPO / DAPO, padded rows, HF Qwen2

def grpo(settings, fault, seed, precision, record):
    s = dict(lr=4e-3, temperature=0.7, kl=0.05, eps_low=0.2, eps_high=0.28, cap=2.0, group=4, rollouts=1, prompts=6, minis=3, micro=4,
        ranks=1, order=None, side="right", extra=0, attn="sdpa", impl="foreach", lse="log_softmax", denominator="token",
        max_norm=1.0, betas=(0.9, 0.95)) | settings
    torch.manual_seed(seed)
    model, reference = hf("qwen2", seed, s["attn"]), hf("qwen2", seed, s["attn"], noise=0.03)
    opt = adamw(model.parameters(), s["impl"], lr=s["lr"], weight_decay=0.01, betas=tuple(s["betas"]))
    rec, rich = recorder(record, model, opt, dp=s["ranks"], micro_batches=s["prompts"] * s["group"] // s["minis"] // s["micro"],
        temperature=s["temperature"], max_grad_norm=s["max_norm"], kl_coef=s["kl"], clip_low=s["eps_low"],
        clip_high=s["eps_high"], tis_cap=s["cap"], denominator=s["denominator"], algorithm="dapo")

    def forward(net, docs, temperature):
        ids = pad([d["ids"] for d in docs], s["side"], s["extra"])
        attention = pad([torch.ones_like(d["ids"]) for d in docs], s["side"], s["extra"])
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        with cast(precision):
            logits = net(input_ids=ids, attention_mask=attention, position_ids=positions).logits
        logits = logits.float() / temperature
        if fault == "log_softmax_bf16" and net is model: logits = logits.bfloat16()
        lp = F.pad(logp_of(logits[:, :-1], ids[:, 1:], s["lse"]).float(), (1, 0))
        return lp, F.pad(entropy_of(logits[:, :-1]).float(), (1, 0)), ids, attention, positions
    temperature = 1.0 if fault == "temperature_missing" else s["temperature"]
    history = []
    for docs in grpo_data(seed, s):
        if fault == "group_twice": docs[s["group"]:2 * s["group"]] = [dict(d) for d in docs[:s["group"]]]
        rewards = torch.tensor([d["reward"] for d in docs]).view(-1, s["group"])
        std = rewards.std() if fault == "std_over_batch" else rewards.std(1, keepdim=True)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (std + 1e-4)).flatten()
        for n, d in enumerate(docs):
            d["adv"] = advantages[n].item()
        with torch.no_grad():
            for part in chunks(docs, s["micro"]):
                lengths = [len(d["ids"]) for d in part]
                old = unpad(forward(model, part, temperature)[0], lengths, s["side"])
                ref = unpad(forward(reference, part, s["temperature"])[0], lengths, s["side"])
                for d, a, b in zip(part, old, ref):
                    d["old"], d["ref"] = a, b
        for mini in deal(docs, s["minis"]):
            for n, d in enumerate(mini):
                d["n"] = n
                m = torch.arange(len(d["ids"])) >= d["plen"]
                if fault == "eos_not_trained": m[-1] = False
                d["mask"] = m
            total = sum(int(d["mask"].sum()) for d in mini)
            ranks = deal(shuffled(mini, s["order"]), s["ranks"])
            opt.zero_grad()
            for mine in ranks:
                parts = chunks(mine, s["micro"])
                for part in parts:
                    put = lambda key: pad([d[key] for d in part], s["side"], s["extra"])
                    lp, entropy, ids, attention, positions = forward(model, part, temperature)
                    mask, old, ref, sampler = put("mask"), put("old"), put("ref"), put("sampler")
                    adv = torch.tensor([d["adv"] for d in part])[:, None].expand_as(lp)
                    if fault == "ratio_one": old = lp.detach()
                    ratio = (lp - old).exp()
                    high = s["eps_low"] if fault == "clip_high_ignored" else s["eps_high"]
                    kept, cut = ratio * adv, ratio.clamp(1 - s["eps_low"], 1 + high) * adv
                    gap = sampler - old if fault == "tis_inverted" else old - sampler
                    tis = gap.exp().clamp(max=s["cap"]).detach()
                    d_ref = lp - ref if fault == "kl_swapped" else ref - lp
                    kl = d_ref.exp() - d_ref - 1
                    per_token = -torch.min(kept, cut) * tis + s["kl"] * kl
                    if fault == "mean_per_micro":
                        loss = (per_token * mask).sum() / mask.sum() / len(parts) / s["ranks"]
                    elif s["denominator"] == "document":
                        loss = ((per_token * mask).sum(1) / mask.sum(1)).sum() / len(mini)
                    else:
                        loss = (per_token * mask).sum() / total
                    loss.backward()
                    if rich:
                        real = attention.bool()
                        number = torch.tensor([d["n"] for d in part])[:, None].expand_as(ids)
                        wide = lambda x: torch.tensor([d[x] for d in part])[:, None].expand_as(lp)
                        rec.note(loss.detach(), counts=dict(documents=len(part), trained_tokens=int(mask.sum()),
                            all_tokens=int(real.sum()), padded_tokens=ids.numel()),
                            tokens=dict(policy_logprobs=lp.detach(), old_logprobs=old, ref_logprobs=ref, sampler_logprobs=sampler,
                            entropy_nats=entropy, trained=mask, documents=number.where(real, torch.tensor(-1)),
                            positions=positions, losses=per_token.detach(), advantages=adv, rewards=wide("reward"),
                            ratios=ratio.detach(), clipped=(cut < kept), targets=ids, source=(number * 64 + positions).where(real, torch.tensor(-1))),
                            metrics={"loss/kl": float((kl.detach() * mask).sum() / mask.sum())})
            history.append(grads_of(model))
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s["max_norm"])
            if rich: rec.note(metrics={"grad_norm": float(norm)})
            opt.step()
    return history, weights_of(model)

# ---------------------------------------------------------------- 2. PPO, own decoder, packed, GAE, simulated ranks

def ppo(settings, fault, seed, precision, record):
    c = dict(lr=2e-3, vlr=5e-3, gamma=0.99, lam=0.9, clip=0.2, vclip=0.2, vcoef=0.5, ent=0.02, kl=0.1, rollouts=1, docs=18, minis=3, ranks=2,
        width=32, micro=1, order=None, attn="sdpa", impl="foreach", lse="log_softmax", max_norm=0.5) | settings
    torch.manual_seed(seed)
    actor = Decoder(value=True, eager=c["attn"] == "eager")
    sft = copy.deepcopy(actor)
    with torch.no_grad():
        for p in sft.parameters():
            p.add_(0.03 * torch.randn_like(p))
    if fault == "embedding_frozen": actor.embed.weight.requires_grad_(False)
    head = list(actor.value.parameters())
    body = [p for n, p in actor.named_parameters() if not n.startswith("value") and p.requires_grad]
    groups = [dict(params=body, lr=c["lr"])] + ([] if fault == "value_head_forgotten" else [dict(params=head, lr=c["vlr"])])
    opt = torch.optim.Adam(groups, betas=(0.9, 0.95), foreach=c["impl"] == "foreach", fused=c["impl"] == "fused")
    rec, rich = recorder(record, actor, opt, dp=c["ranks"], algorithm="ppo", gamma=c["gamma"], lam=c["lam"],
        clip=c["clip"], value_coef=c["vcoef"], entropy_coef=c["ent"], kl_in_reward=c["kl"],
        max_grad_norm=c["max_norm"], temperature=1.0, denominator="tokens of the step")
    rng = np.random.RandomState(seed)

    def packed(batch):
        cat = lambda f, v: pad([torch.cat([f(b) for b in row]) for row in batch], "right", 0, v)
        ids, seg = cat(lambda b: b["ids"], 0), cat(lambda b: torch.full_like(b["ids"], b["n"]), -1)
        pos = cat(lambda b: torch.arange(len(b["ids"])), 0)
        if fault == "positions_not_reset": pos = torch.arange(ids.shape[1]).expand_as(ids)
        return ids, seg, pos, causal(seg), cat

    def logps(net, batch):
        ids, seg, pos, mask, cat = packed(batch)
        with cast(precision):
            logits, values = net(ids, pos, mask)
        logits, values = logits.float(), values.float()
        lp = F.pad(logp_of(logits[:, :-1], ids[:, 1:], c["lse"]), (1, 0))
        p = logits.log_softmax(-1)
        # the value before token t is that of the state at t - 1
        return lp, F.pad(-(p.exp() * p).sum(-1)[:, :-1], (1, 0)), F.pad(values[:, :-1], (1, 0)), ids, seg, pos, cat

    def split(x, row):
        return x[:sum(len(b["ids"]) for b in row)].split([len(b["ids"]) for b in row])
    history = []
    for _ in range(c["rollouts"]):
        buffer = []
        for i in range(c["docs"]):
            plen, n = rng.randint(2, 6), rng.randint(3, 12)
            buffer.append(dict(ids=zipf(rng, plen + n), plen=plen, n=i % (c["docs"] // c["minis"]), score=float(rng.randn())))
        with torch.no_grad():
            for row in chunks(buffer, 3):
                old, _, values, *_ = logps(actor, [row])
                ref = logps(sft, [row])[0]
                for b, o, v, r in zip(row, split(old[0], row), split(values[0], row), split(ref[0], row)):
                    b["old"], b["v"], b["ref"] = o, v, r
        after = (0.0, 0.0)
        for b in reversed(buffer):
            b["mask"] = torch.arange(len(b["ids"])) >= b["plen"]
            reward = -c["kl"] * (b["old"] - b["ref"])
            if fault == "kl_reward_sign": reward = -reward
            reward[-1] += b["score"]
            gamma, lam = (c["lam"], c["gamma"]) if fault == "gamma_lambda_swapped" else (c["gamma"], c["lam"])
            nextv, gae = after if fault == "gae_across_documents" else (0.0, 0.0)
            adv = torch.zeros(len(reward))
            for t in range(len(reward) - 1, b["plen"] - 1, -1):
                delta = reward[t] + gamma * nextv - b["v"][t]
                gae = delta + gamma * lam * gae
                nextv, adv[t] = b["v"][t], gae
            after = (nextv, gae)
            b["ret"], b["adv"] = adv + b["v"], adv
        for part in deal(buffer, c["ranks"]) if fault == "whiten_per_rank" else [buffer]:
            flat = torch.cat([b["adv"][b["mask"]] for b in part])
            for b in part:
                b["adv"] = torch.where(b["mask"], (b["adv"] - flat.mean()) / (flat.std() + 1e-8), torch.zeros(()))
        # each rank has a part of the buffer; a mini-batch takes from every rank
        for mini in range(c["minis"]):
            batch = shuffled(deal(buffer, c["minis"])[mini], c["order"])
            tokens = sum(int(b["mask"].sum()) for b in batch)
            opt.zero_grad(set_to_none=True)
            for rank in deal(batch, c["ranks"]):
                rows = [[rank[i] for i in r] for r in pack([(i, len(b["ids"])) for i, b in enumerate(rank)], c["width"])]
                mine = sum(int(b["mask"].sum()) for b in rank)
                for batch_rows in chunks(rows, c["micro"]):
                    lp, ent, values, ids, seg, pos, cat = logps(actor, batch_rows)
                    m, adv, old = cat(lambda b: b["mask"], 0), cat(lambda b: b["adv"], 0), cat(lambda b: b["old"], 0)
                    v_old, ret, ref = cat(lambda b: b["v"], 0), cat(lambda b: b["ret"], 0), cat(lambda b: b["ref"], 0)
                    ratio = torch.exp(lp - old)
                    pg1, pg2 = -adv * ratio, -adv * torch.clamp(ratio, 1 - c["clip"], 1 + c["clip"])
                    pg = torch.max(pg1, pg2)
                    vc = v_old + (values - v_old).clamp(-c["vclip"], c["vclip"])
                    vl = 0.5 * torch.max((values - ret) ** 2, (vc - ret) ** 2)
                    bonus = c["ent"] * ent if fault == "entropy_sign" else -c["ent"] * ent
                    each = pg + c["vcoef"] * vl + bonus
                    if fault == "mean_per_rank":
                        loss = (each * m).sum() / mine / c["ranks"]
                    else:
                        loss = (each * m).sum() / tokens
                    loss.backward()
                    if rich:
                        score = cat(lambda b: torch.full((len(b["ids"]),), b["score"]), 0)
                        mean = lambda x: float((x.detach() * m).sum() / m.sum())
                        place = torch.arange(ids.shape[1]).expand_as(ids)
                        true = cat(lambda b: torch.arange(len(b["ids"])), 0)
                        rec.note(counts=dict(documents=sum(map(len, batch_rows)), trained_tokens=int(m.sum()),
                            all_tokens=int((seg >= 0).sum()), padded_tokens=ids.numel()),
                            metrics={"loss/policy": mean(pg), "loss/value": mean(vl), "loss/entropy": mean(bonus)},
                            tokens=dict(policy_logprobs=lp.detach(), old_logprobs=old, ref_logprobs=ref, entropy_nats=ent.detach(),
                            trained=m.bool(), documents=seg, places=place, positions=pos, losses=each.detach(),
                            advantages=adv, rewards=score, ratios=ratio.detach(), clipped=(pg2 > pg1), targets=ids,
                            source=(seg * 64 + true).where(seg >= 0, torch.tensor(-1))))
            history.append(grads_of(actor))
            nn.utils.clip_grad_norm_(actor.parameters(), c["max_norm"])
            opt.step()
    return history, weights_of(actor)

# ---------------------------------------------------------------- 3. GSPO / CISPO, HF Llama with tied embeddings, left padding

def gspo(settings, fault, seed, precision, record):
    cfg = dict(objective="gspo", lr=2e-3, eps=0.2, cispo_high=0.1, prompts=2, n=4, epochs=3, rollouts=1, micro_bs=4, ranks=1, order=None,
        padding_side="left", extra=0, attn="sdpa", impl="foreach", lse="log_softmax") | settings
    gen = np.random.RandomState(seed)
    policy = hf("llama-tied", seed, cfg["attn"])
    if precision == "bf16": policy = policy.bfloat16()
    if fault == "untied": policy.lm_head.weight = nn.Parameter(policy.lm_head.weight.detach().clone())
    optim = adamw(policy.parameters(), cfg["impl"], lr=cfg["lr"], weight_decay=0.0, eps=1e-6)
    rec, rich = recorder(record, policy, optim, dp=cfg["ranks"], objective=cfg["objective"], micro_batch_size=cfg["micro_bs"],
        rollout_n=cfg["n"], eps=cfg["eps"] if cfg["objective"] == "gspo" else cfg["cispo_high"], temperature=1.0,
        denominator="documents" if cfg["objective"] == "gspo" else "tokens")

    def run(samples):
        side, extra = cfg["padding_side"], cfg["extra"]
        ids = pad([x["ids"] for x in samples], side, extra)
        labels = pad([x["labels"] for x in samples], side, extra, -100)
        am = pad([torch.ones_like(x["ids"]) for x in samples], side, extra)
        out = policy(input_ids=ids, attention_mask=torch.ones_like(am) if fault == "attention_to_padding" else am,
            position_ids=(am.cumsum(-1) - 1).clamp(min=0))
        logits = out.logits[:, :-1].float()
        return F.pad(logp_of(logits, ids[:, 1:], cfg["lse"]), (1, 0)), F.pad(entropy_of(logits), (1, 0)), ids, labels, am
    steps = []
    for _ in range(cfg["rollouts"]):
        samples = []
        for q in range(cfg["prompts"]):
            question = zipf(gen, gen.randint(3, 8))
            for k in range(cfg["n"]):
                answer = zipf(gen, gen.randint(3, 13))
                samples.append(dict(ids=torch.cat([question, answer]), labels=torch.cat([torch.full_like(question, -100), answer]),
                    score=float(gen.randn()), uid=len(samples)))
        scores = torch.tensor([x["score"] for x in samples])
        if fault == "groups_tiled":     # groups are taken with a stride: the prompts were tiled, not repeated
            grouped = scores.view(cfg["n"], cfg["prompts"])
            a = ((grouped - grouped.mean(0)) / (grouped.std(0) + 1e-6)).flatten()
        else:
            grouped = scores.view(cfg["prompts"], cfg["n"])
            a = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-6)).flatten()
        with torch.no_grad():
            for part in chunks(samples, cfg["micro_bs"]):
                for x, old in zip(part, unpad(run(part)[0], [len(x["ids"]) for x in part], cfg["padding_side"])):
                    x["old"], x["a"] = old, a[x["uid"]]
        n_tok = sum(int((x["labels"] != -100).sum()) for x in samples)
        for _epoch in range(cfg["epochs"]):
            for rank in deal(shuffled(samples, cfg["order"]), cfg["ranks"]):
                for part in chunks(rank, cfg["micro_bs"]):
                    logp, ent, ids, labels, am = run(part)
                    old = pad([x["old"] for x in part], cfg["padding_side"], cfg["extra"])
                    m = labels != -100
                    adv = torch.stack([x["a"] for x in part])[:, None].expand_as(logp)
                    diff = (logp - old) * m
                    if cfg["objective"] == "gspo":
                        length = 1 if fault == "sum_ratio" else m.sum(1)
                        if fault == "width_denominator": length = m.shape[1]
                        ratio = (diff.sum(1) / length).exp()[:, None].expand_as(logp)
                        free, bound = ratio * adv, ratio.clamp(1 - cfg["eps"], 1 + cfg["eps"]) * adv
                        each, clipped = -torch.minimum(free, bound), bound < free
                        loss = ((each * m).sum(1) / m.sum(1)).sum() / len(samples)
                    else:
                        ratio = diff.exp()
                        w = ratio.clamp(max=1 + cfg["cispo_high"])
                        if fault != "weight_not_detached": w = w.detach()
                        each, clipped = -w * adv * logp, ratio > 1 + cfg["cispo_high"]
                        loss = (each * m).sum() / n_tok
                    loss.backward()
                    if rich:
                        real, uid = am.bool(), torch.tensor([x["uid"] for x in part])[:, None]
                        none = torch.tensor(-1)
                        rec.note(counts=dict(documents=len(part), trained_tokens=int(m.sum()), all_tokens=int(real.sum()), padded_tokens=am.numel()),
                            tokens=dict(policy_logprobs=logp.detach(), old_logprobs=old, entropy_nats=ent, trained=m,
                            documents=torch.where(real, uid, none), losses=each.detach(), advantages=adv,
                            rewards=scores[uid].expand_as(logp), ratios=ratio.detach(), clipped=clipped, targets=ids,
                            positions=am.cumsum(-1) - 1, source=torch.where(real, uid * 100 + am.cumsum(-1), none)))
            steps.append(grads_of(policy))
            optim.step()
            if fault != "grads_not_cleared": optim.zero_grad()
    return steps, weights_of(policy)

# ---------------------------------------------------------------- 4. DPO and variants, pairs, RMSprop, ranks averaged by hand

def dpo(settings, fault, seed, precision, record):
    args = dict(loss="sigmoid", beta=0.3, smoothing=0.0, lr=4e-4, warmup=6, steps=3, pairs=8, micro=2, world=2, order=None,
        side="right", extra=0, attn="sdpa", lse="log_softmax", foreach=True, max_norm=10.0) | settings
    torch.manual_seed(seed)
    model = hf("llama-drop", seed, args["attn"])
    ref_model = hf("llama-drop", seed, args["attn"], noise=0.02).eval()
    if fault != "dropout_on":
        model.config.attention_dropout = 0.0
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.0
    model.train()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=args["lr"], foreach=args["foreach"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / args["warmup"]))
    rec, rich = recorder(record, model, optimizer, dp=args["world"], micro_batches=args["pairs"] // args["world"] // args["micro"],
        loss_type=args["loss"], beta=args["beta"], label_smoothing=args["smoothing"], max_grad_norm=args["max_norm"], warmup=args["warmup"])
    rng = np.random.RandomState(seed)

    def forward(net, rows):
        ids = pad([r["ids"] for r in rows], args["side"], args["extra"])
        mask = pad([torch.ones_like(r["ids"]) for r in rows], args["side"], args["extra"])
        answer = pad([torch.arange(len(r["ids"])) >= r["plen"] for r in rows], args["side"], args["extra"])
        with cast(precision):
            logits = net(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
        logits = logits[:, :-1].float()
        token = F.pad(logp_of(logits, ids[:, 1:], args["lse"]), (1, 0))
        total = (token * answer).sum(1)
        if fault == "mean_logps" or args["loss"] == "ipo": total = total / answer.sum(1)
        return total, token, F.pad(entropy_of(logits), (1, 0)), ids, mask, answer
    history = []
    for _ in range(args["steps"]):
        pairs = []
        for i in range(args["pairs"]):
            prompt = zipf(rng, rng.randint(3, 8))
            good, bad = zipf(rng, rng.randint(3, 12)), zipf(rng, rng.randint(3, 12))
            pairs.append([dict(ids=torch.cat([prompt, x]), plen=len(prompt), n=2 * i + k) for k, x in enumerate([good, bad])])
        shards = deal(shuffled(pairs, args["order"]), args["world"])
        if fault == "ranks_same_data": shards = [shards[0]] * args["world"]
        optimizer.zero_grad()
        summed, logs = None, []
        for shard in shards:
            model.zero_grad()
            for part in chunks(shard, args["micro"]):
                rows = [p[0] for p in part] + [p[1] for p in part]
                total, token, entropy, ids, mask, answer = forward(model, rows)
                with torch.no_grad():
                    ref_total, ref_token, *_ = forward(ref_model, rows)
                win, lose = (total - ref_total).chunk(2)
                margin = win - lose
                if args["loss"] == "ipo":
                    losses = (margin - 1 / (2 * args["beta"])) ** 2
                else:
                    e = args["smoothing"]
                    losses = -F.logsigmoid(args["beta"] * margin) * (1 - e) - F.logsigmoid(-args["beta"] * margin) * e
                loss = losses.sum() / len(shard)
                loss.backward()
                if fault == "schedule_per_micro": scheduler.step()
                told = dict(loss=float(loss.detach()) / args["world"])
                if rich:
                    real, n = mask.bool(), torch.tensor([r["n"] for r in rows])[:, None]
                    none, pos = torch.tensor(-1), mask.cumsum(1) - 1
                    told |= dict(counts=dict(documents=len(rows), trained_tokens=int(answer.sum()), all_tokens=int(real.sum()),
                        padded_tokens=ids.numel()), metrics={"rewards/margins": float(margin.detach().mean())},
                        tokens=dict(policy_logprobs=token.detach(), ref_logprobs=ref_token, entropy_nats=entropy, trained=answer,
                        documents=torch.where(real, n, none), targets=ids, positions=pos, source=torch.where(real, n * 64 + pos, none)))
                logs.append(told)
            mine = [p.grad.clone() for p in model.parameters()]
            summed = mine if summed is None else [a + b for a, b in zip(summed, mine)]
        for p, g in zip(model.parameters(), summed):
            p.grad = g / args["world"]
        for told in logs if rec else []:
            rec.note(**told)
        history.append(grads_of(model))
        torch.nn.utils.clip_grad_norm_(model.parameters(), args["max_norm"])
        optimizer.step()
        if fault != "schedule_per_micro": scheduler.step()
    return history, weights_of(model)

# ---------------------------------------------------------------- 5. SFT, packed, own decoder with rotary positions

def sft(settings, fault, seed, precision, record):
    o = dict(lr=3e-3, wd=0.1, docs=8, width=36, rows=1, dp=2, order=None, steps=3, attn="sdpa", impl="foreach", lse="ce",
        clip=1.0, rope=500.0, total=4) | settings
    torch.manual_seed(seed)
    checkpoint = Decoder(rope=o["rope"], eager=o["attn"] == "eager")
    model = Decoder(rope=10000.0 if fault == "rope_base" else o["rope"], eager=o["attn"] == "eager")
    state = checkpoint.state_dict()
    if fault == "layer_not_loaded": state = {k: v for k, v in state.items() if not k.startswith("blocks.1.up")}
    model.load_state_dict(state, strict=False)
    plain = [] if fault == "decay_on_norms" else [p for n, p in model.named_parameters() if "norm" in n]
    decayed = [p for p in model.parameters() if all(p is not q for q in plain)]
    groups = [dict(params=decayed, weight_decay=o["wd"])] + ([dict(params=plain, weight_decay=0.0)] if plain else [])
    opt = adamw(groups, o["impl"], lr=o["lr"], betas=(0.9, 0.95))
    rec, rich = recorder(record, model, opt, dp=o["dp"], max_grad_norm=o["clip"], packed_width=o["width"], schedule="cosine",
        weight_decay=o["wd"], denominator="trained tokens of the step", loss="cross entropy")
    rng = np.random.RandomState(seed)
    steps = [[dict(ids=zipf(rng, n), start=int(rng.randint(1, n // 2)), n=i) for i, n in enumerate(rng.randint(6, 17, o["docs"]))]
        for _ in range(o["steps"])]
    if fault == "steps_swapped": steps[1], steps[2] = steps[2], steps[1]
    history = []
    for k, batch in enumerate(steps):
        for group in opt.param_groups:
            group["lr"] = o["lr"] * 0.5 * (1 + math.cos(math.pi * k / o["total"]))
        if fault == "counts_prompt":
            tokens = sum(len(d["ids"]) - 1 for d in batch)
        else:
            tokens = sum(len(d["ids"]) - d["start"] for d in batch)
        for rank in deal(shuffled(batch, o["order"]), o["dp"]):
            packs = pack([(i, len(d["ids"])) for i, d in enumerate(rank)], o["width"])
            micro_batches = chunks(packs, o["rows"])
            if fault == "last_micro_lost": micro_batches = micro_batches[:-1]
            for micro in micro_batches:
                rows = [[rank[i] for i in row] for row in micro]
                ids = pad([torch.cat([d["ids"] for d in row]) for row in rows])
                seg = pad([torch.cat([torch.full_like(d["ids"], d["n"]) for d in row]) for row in rows], value=-1)
                pos = pad([torch.cat([torch.arange(len(d["ids"])) for d in row]) for row in rows])
                labels = torch.full_like(ids, -100)
                for r, row in enumerate(rows):
                    at = 0
                    for d in row:
                        n = len(d["ids"])
                        labels[r, at + d["start"] - 1:at + n - 1] = d["ids"][d["start"]:]
                        if fault == "next_start_trained" and d is not row[-1]: labels[r, at + n - 1] = ids[r, at + n]
                        at += n
                if fault == "shift_twice": labels = F.pad(labels[:, 1:], (0, 1), value=-100)
                mask = causal(torch.where(seg >= 0, 0, -1) if fault == "attention_across_documents" else seg)
                with cast(precision):
                    logits = model(input_ids=ids, position_ids=pos, mask=mask)
                logits = logits.float()
                logp, use = logp_of(logits, labels.clamp(min=0), o["lse"]), labels != -100
                loss = -(logp * use).sum() / tokens * o["dp"]
                loss.backward()
                if fault == "grads_bf16":
                    for p in model.parameters():
                        p.grad = p.grad.bfloat16().float()
                if fault == "clip_per_micro": clip(model, o["clip"])
                if rec:
                    extra = {}
                    if rich:
                        right = lambda x, v=0: F.pad(x[:, :-1].detach(), (1, 0), value=v)  # (value of label t lies at t + 1)
                        extra = dict(counts=dict(documents=sum(map(len, rows)), trained_tokens=int(use.sum()),
                            all_tokens=int((seg >= 0).sum()), padded_tokens=ids.numel()),
                            tokens=dict(policy_logprobs=right(logp), entropy_nats=right(entropy_of(logits)), trained=right(use),
                            documents=seg, positions=pos, places=torch.arange(ids.shape[1]).expand_as(ids), losses=right(-logp),
                            targets=torch.where(right(use), right(labels), ids), source=torch.where(seg >= 0, seg * 32 + pos, torch.tensor(-1))))
                    rec.note(loss.detach() / o["dp"], **extra)
        if fault != "ranks_summed":
            for p in model.parameters():
                p.grad.div_(o["dp"])
        history.append(grads_of(model))
        if rec: rec.take_gradients()
        clip(model, o["clip"])
        opt.step()
        opt.zero_grad()
    return history, weights_of(model)

# ---------------------------------------------------------------- 6. REINFORCE++ / RLOO / Dr. GRPO, several turns, HF GPT-NeoX

def reinforce(settings, fault, seed, precision, record):
    cfg = dict(advantage="rloo", lr=2e-3, kl=0.1, max_tokens=24, groups=2, k=4, steps=2, workers=2, mbs=2, order=None, side="right",
        extra=0, attn="sdpa", impl="foreach", lse="log_softmax", max_norm=1.0, temperature=1.0) | settings
    actor, frozen = hf("neox", seed, cfg["attn"]), hf("neox", seed, cfg["attn"], noise=0.03)
    optim = adamw(actor.parameters(), cfg["impl"], lr=cfg["lr"], weight_decay=0.0)
    rec, rich = recorder(record, actor, optim, dp=cfg["workers"], micro_batches=cfg["groups"] * cfg["k"] // cfg["workers"] // cfg["mbs"],
        advantage=cfg["advantage"], samples_per_prompt=cfg["k"], max_grad_norm=cfg["max_norm"],
        temperature=cfg["temperature"], kl_coef=cfg["kl"] if cfg["advantage"] == "rpp" else 0.0)
    rng = np.random.RandomState(seed)

    def episode(prompt):
        ids, mask = [prompt], [torch.zeros(len(prompt), dtype=torch.bool)]
        for turn in range(rng.randint(2, 4)):
            for tool in ([True] if turn else []) + [False]:
                part = zipf(rng, rng.randint(2, 5))
                ids.append(part)
                mask.append(torch.full((len(part),), not tool))
        return dict(ids=torch.cat(ids), mask=torch.cat(mask), prompt=len(prompt), reward=float(rng.randn()))

    def score(net, eps):
        ids = pad([e["ids"] for e in eps], cfg["side"], cfg["extra"])
        attend = pad([torch.ones_like(e["ids"]) for e in eps], cfg["side"], cfg["extra"])
        with cast(precision):
            logits = net(input_ids=ids, attention_mask=attend, position_ids=(attend.cumsum(1) - 1).clamp(min=0)).logits
        logits = logits[:, :-1].float() / cfg["temperature"]
        return F.pad(logp_of(logits, ids[:, 1:], cfg["lse"]), (1, 0)), F.pad(entropy_of(logits), (1, 0)), ids, attend
    out = []
    for _ in range(cfg["steps"]):
        batch = [episode(p) for p in [zipf(rng, rng.randint(3, 7)) for _ in range(cfg["groups"])] for _ in range(cfg["k"])]
        for i, e in enumerate(batch):
            e["i"], e["group"] = i, i // cfg["k"]
            if fault == "tool_tokens_trained": e["mask"] = torch.arange(len(e["ids"])) >= e["prompt"]
            if fault == "mask_off_by_one": e["mask"] = F.pad(e["mask"][1:], (0, 1))
            if fault == "retokenised" and i % 3 == 0:
                e["ids"] = torch.where((e["ids"] % 5 == 0) & (torch.arange(len(e["ids"])) >= e["prompt"]), e["ids"] - 1, e["ids"])
        rewards = torch.tensor([e["reward"] for e in batch])
        by_length = sorted(range(len(batch)), key=lambda i: len(batch[i]["ids"]))      # balance the workers by length
        if fault == "rewards_not_reordered": rewards = rewards[torch.tensor(by_length).argsort()]
        r = rewards.view(-1, cfg["k"])
        if cfg["advantage"] == "rloo":
            base = r.mean(1, keepdim=True) if fault == "rloo_includes_self" else (r.sum(1, keepdim=True) - r) / (cfg["k"] - 1)
            adv = (r - base).flatten()
        else:
            adv = (r - r.mean(1, keepdim=True)).flatten()
        for i, e in enumerate(batch):
            e["adv"], e["r"] = adv[i] * torch.ones(len(e["ids"])), rewards[i].item()
        if cfg["advantage"] == "rpp":
            for part in chunks(batch, cfg["mbs"]):
                with torch.no_grad():
                    lengths = [len(e["ids"]) for e in part]
                    old, ref = (unpad(score(net, part)[0], lengths, cfg["side"]) for net in (actor, frozen))
                for e, a, b in zip(part, old, ref):
                    e["old"], e["ref"] = a, b
                    reward = -cfg["kl"] * (a - b) * e["mask"]
                    reward[-1] += e["r"]
                    e["adv"] = reward.flip(0).cumsum(0).flip(0)
            every = torch.cat([e["adv"][e["mask"]] for e in batch])
            for e in batch:
                e["adv"] = (e["adv"] - every.mean()) / every.std()
        for w in range(cfg["workers"]):
            mine = shuffled([batch[i] for i in by_length[w::cfg["workers"]]], cfg["order"])
            saved = [None if p.grad is None else p.grad.clone() for p in actor.parameters()]
            for j, part in enumerate(chunks(mine, cfg["mbs"])):
                if fault == "only_last_micro_synced":
                    for p, g in zip(actor.parameters(), saved):
                        p.grad = None if g is None else g.clone()
                lp, entropy, ids, attend = score(actor, part)
                mask = pad([e["mask"] for e in part], cfg["side"], cfg["extra"])
                adv = pad([e["adv"] for e in part], cfg["side"], cfg["extra"])
                pg = -adv * lp
                if cfg["advantage"] == "drgrpo":
                    scale = mask.sum(1) if fault == "length_denominator" else cfg["max_tokens"]
                    loss = ((pg * mask).sum(1) / scale).sum() / len(batch)
                elif cfg["advantage"] == "rpp":
                    loss = (pg * mask).sum() / sum(int(e["mask"].sum()) for e in batch)
                else:
                    loss = (pg * mask).sum(1).sum() / len(batch)
                loss.backward()
                if rich:
                    real, i = attend.bool(), torch.tensor([e["i"] for e in part])[:, None]
                    position, none = attend.cumsum(1) - 1, torch.tensor(-1)
                    tokens = dict(policy_logprobs=lp.detach(), entropy_nats=entropy, trained=mask, documents=torch.where(real, i, none),
                        losses=pg.detach(), advantages=adv, positions=position, targets=ids,
                        rewards=torch.tensor([e["r"] for e in part])[:, None].expand_as(lp), source=torch.where(real, i * 50 + position, none))
                    if cfg["advantage"] == "rpp":
                        tokens |= {k: pad([e[f] for e in part], cfg["side"], cfg["extra"]) for k, f in
                            [("old_logprobs", "old"), ("ref_logprobs", "ref")]}
                    rec.note(tokens=tokens, counts=dict(documents=len(part), trained_tokens=int(mask.sum()),
                        all_tokens=int(real.sum()), padded_tokens=ids.numel()))
        out.append(grads_of(actor))
        nn.utils.clip_grad_norm_(actor.parameters(), cfg["max_norm"])
        optim.step()
        optim.zero_grad()
        if fault == "weights_bf16":
            with torch.no_grad():
                for p in actor.parameters():
                    p.copy_(p.bfloat16())
    return out, weights_of(actor)

# ---------------------------------------------------------------- 7. distillation of whole distributions, SGD

def distill(settings, fault, seed, precision, record):
    h = dict(lr=0.1, T=2.0, direction="reverse", docs=8, steps=3, bs=2, order=None, side="right", extra=0, attn="sdpa",
        foreach=True, decay=0.0) | settings
    torch.manual_seed(seed)
    student, teacher = Decoder(d=24, layers=1, rope=1e4, eager=h["attn"] == "eager"), Decoder(d=32, layers=2, rope=1e4).eval()
    if precision == "bf16": student, teacher = student.to(torch.bfloat16), teacher.to(torch.bfloat16)
    sgd = torch.optim.SGD(student.parameters(), lr=h["lr"], momentum=0.9, nesterov=True, foreach=h["foreach"], weight_decay=h["decay"])
    rec, rich = recorder(record, student, sgd, dp=1, micro_batches=h["docs"] // h["bs"], temperature=h["T"], kl=h["direction"])
    rng = np.random.RandomState(seed)
    data = [[dict(x=zipf(rng, rng.randint(7, 16)), p=int(rng.randint(2, 6)), n=i) for i in range(h["docs"])] for _ in range(h["steps"])]
    if fault == "batch_repeated": data = [data[0], data[0], data[1]]
    history = []
    for step, docs in enumerate(data):
        if fault == "momentum_lost" and step == 1: sgd.state.clear()
        n_tok = sum(len(d["x"]) - d["p"] for d in docs)
        micros = chunks(shuffled(docs, h["order"]), h["bs"])
        for docs_ in micros:
            x, real = (pad(y, h["side"], h["extra"]) for y in ([d["x"] for d in docs_], [torch.ones(len(d["x"]), dtype=torch.bool) for d in docs_]))
            trained = pad([torch.arange(len(d["x"])) >= d["p"] for d in docs_], h["side"], h["extra"])
            pos, mask = (real.cumsum(1) - 1).clamp(min=0), causal(torch.where(real, 0, -1))
            s_logits = student(x, pos, mask).float()[:, :-1]
            with torch.no_grad():
                t_logits = teacher(x, pos, mask).float()
                t_logits = t_logits[:, 1:] if fault == "teacher_off_by_one" else t_logits[:, :-1]
            s_lp = (s_logits / h["T"]).log_softmax(-1)
            t_lp = (t_logits / (1.0 if fault == "teacher_temperature" else h["T"])).log_softmax(-1)
            if (h["direction"] == "forward") != (fault == "direction_swapped"):
                kl = F.kl_div(s_lp, t_lp, log_target=True, reduction="none")
            else:
                kl = F.kl_div(t_lp, s_lp, log_target=True, reduction="none")
            kl = (kl.mean(-1) if fault == "mean_over_vocabulary" else kl.sum(-1)) * h["T"] ** 2
            kl = F.pad(kl, (1, 0))
            loss = (kl * trained).sum() / n_tok
            loss.backward()
            if rich:
                at = lambda lp: F.pad(lp.detach().gather(-1, x[:, 1:, None])[..., 0], (1, 0))
                doc = torch.tensor([d["n"] for d in docs_])[:, None].expand_as(x)
                rec.note(loss.detach(), counts=dict(documents=len(docs_), trained_tokens=int(trained.sum())),
                    tokens=dict(policy_logprobs=at(s_lp), ref_logprobs=at(t_lp), entropy_nats=F.pad(entropy_of(s_logits / h["T"]), (1, 0)),
                    trained=trained, documents=doc.where(real, torch.tensor(-1)), positions=pos, losses=kl.detach(), targets=x,
                    source=(doc * 20 + pos).where(real, torch.tensor(-1))))
        history.append(grads_of(student))
        sgd.step()
        sgd.zero_grad()
    return history, weights_of(student)

LOOPS = dict(grpo=grpo, ppo=ppo, gspo=gspo, dpo=dpo, sft=sft, reinforce=reinforce, distill=distill)
