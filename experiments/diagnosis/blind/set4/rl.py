"""GRPO with padded rows, PPO with a critic, GSPO / CISPO in packed rows, REINFORCE over turns."""
import torch

from common import EOS, PAD, Log, block_mask, compute, fill_rows, gathered, gen, hugging, own, padded, perturbed, tokens


def shuffled(items, seed):
    if not seed:
        return list(items)
    return [items[i] for i in torch.randperm(len(items), generator=gen(seed)).tolist()]


# ================================================================ GRPO / DAPO, padded rows, micro-batches
def rollout(seed, groups, size, longest=18):
    """Documents of a rollout: prompt, response, group, reward of the answer."""
    g, docs = gen(seed), []
    for group in range(groups):
        prompt = tokens(int(torch.randint(4, 10, (1,), generator=g)), g)
        for _ in range(size):
            n = int(torch.randint(5, longest, (1,), generator=g))
            done = float(torch.rand(1, generator=g)) < 0.8
            docs.append({"n": len(docs), "group": group, "prompt": prompt, "response": tokens(n, g) + ([EOS] if done else []),
                         "correct": float(torch.rand(1, generator=g) < 0.5), "noise": (0.15 * torch.randn(n + 1, generator=g)).tolist()})
    return docs


def collate(docs, side="right", extra=0):
    rows = [d["prompt"] + d["response"] for d in docs]
    ids = padded(rows, side, extra, PAD)
    mask = padded([[1] * len(r) for r in rows], side, extra)
    trained = padded([[0] * len(d["prompt"]) + [1] * len(d["response"]) for d in docs], side, extra)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    number = padded([[d["n"]] * len(r) for d, r in zip(docs, rows)], side, extra, -1)
    source = padded([[d["n"] * 1000 + t for t in range(len(r))] for d, r in zip(docs, rows)], side, extra, -1)
    return {"ids": ids, "mask": mask, "trained": trained.bool(), "positions": positions, "documents": number, "source": source}


def spread(values, batch):
    """One value a document -> one a token."""
    return torch.tensor(values)[:, None].expand(batch["ids"].shape)[:, 1:]


def per_token(lists, batch, side, extra):
    """Values of the response's tokens, 0 elsewhere; aligned with ids[:, 1:]."""
    return padded(lists, side, extra, 0, width=batch["ids"].shape[1] - extra)[:, 1:].float()


def grpo(settings, fault, seed, precision, folder, mode="rich"):
    s = {"groups": 6, "size": 4, "steps": 3, "micro": 4, "side": "right", "extra": 0, "order": 0, "kernel": "sdpa", "lr": 1.4e-3, "kl": 0.1,
         "low": 0.2, "high": 0.28, "cap": 2.0, "temperature": 0.8, "overlong": 10, "max_norm": 1.0, **settings}
    bug = lambda name: fault == name  # noqa: E731
    policy = hugging("qwen2", seed, s["kernel"])
    reference = perturbed(policy, 0.03, seed + 1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=s["lr"], betas=(0.9, 0.99), weight_decay=0.01)
    docs, longest = rollout(seed + 2, s["groups"], s["size"]), 18

    def logprobs(model, batch, temperature):
        with compute(precision):
            logits = model(input_ids=batch["ids"], attention_mask=batch["mask"], position_ids=batch["positions"]).logits
        if bug("bf16_logits"):
            logp = (logits[:, :-1].to(torch.bfloat16) / temperature).log_softmax(-1)
            lp = logp.gather(-1, batch["ids"][:, 1:, None])[..., 0].float()
            return lp, -(logp.detach().exp() * logp.detach()).sum(-1).float()
        return gathered(logits, batch["ids"], temperature)

    # what came from the sampler: fixed data, with a small mismatch
    with torch.no_grad():
        batch = collate(docs)
        logits = policy(input_ids=batch["ids"], attention_mask=batch["mask"], position_ids=batch["positions"]).logits
        sampled = gathered(logits.float(), batch["ids"], s["temperature"])[0]
    for i, d in enumerate(docs):
        a, b = len(d["prompt"]), len(d["prompt"]) + len(d["response"])
        d["sampler"] = [0.0] * a + [float(v) + e for v, e in zip(sampled[i, a - 1 : b - 1], d["noise"])]

    # rewards with a soft penalty of overlong answers, advantages of groups
    for d in docs:
        length = len(d["response"]) + (len(d["prompt"]) if bug("overlong_prompt") else 0)
        d["reward"] = d["correct"] - min(max((length - (longest - s["overlong"])) / s["overlong"], 0.0), 1.0)
    rewards = torch.tensor([d["reward"] for d in docs]).view(-1, s["size"])
    centred = rewards - rewards.mean(1, keepdim=True)
    deviation = rewards.std() if bug("std_batch") else rewards.std(1, keepdim=True)
    for d, a in zip(docs, (centred / (deviation + 1e-6)).flatten().tolist()):
        d["advantage"] = a

    per_step = len(docs) // s["steps"]
    steps = [shuffled(docs[i * per_step : (i + 1) * per_step], s["order"]) for i in range(s["steps"])]
    if bug("reordered_rows"):   # rows are balanced by length; advantages keep the order of before
        for k, part in enumerate(steps):
            order = sorted(range(len(part)), key=lambda i: len(part[i]["response"]))
            steps[k] = [{**part[i], "advantage": part[j]["advantage"]} for j, i in enumerate(order)]
    micro = [[part[i : i + s["micro"]] for i in range(0, len(part), s["micro"])] for part in steps]

    # log-probabilities of the policy at the start, and of the reference
    for part in micro:
        for rows in part:
            batch = collate(rows, s["side"], s["extra"])
            with torch.no_grad():
                old = logprobs(policy, batch, s["temperature"])[0]
                ref = logprobs(reference, batch, 1.0 if bug("ref_temperature") else s["temperature"])[0]
            for i, d in enumerate(rows):
                d["old"], d["ref"] = old[i], ref[i]

    log = Log(folder, policy, optimizer, {"dp": 1, "micro_batches": len(micro[0]), "temperature": s["temperature"], "max_grad_norm": s["max_norm"],
                                          "denominator": "tokens", "clip_low": s["low"], "clip_high": s["high"], "kl": s["kl"], "cap": s["cap"]},
              mode, precision)
    for part in micro:
        total = sum(len(d["response"]) for rows in part for d in rows)
        optimizer.zero_grad()
        for rows in part:
            batch = collate(rows, s["side"], s["extra"])
            trained = batch["trained"][:, 1:]
            if bug("eos_masked"):
                trained = trained & (batch["ids"][:, 1:] != EOS)
            old, ref = torch.stack([d["old"] for d in rows]), torch.stack([d["ref"] for d in rows])
            sampler = per_token([d["sampler"] for d in rows], batch, s["side"], s["extra"])
            lp, entropy = logprobs(policy, batch, s["temperature"])
            advantage = spread([d["advantage"] for d in rows], batch)
            ratio = (lp - old).exp()
            bounded = ratio.clamp(1 - s["low"], 1 + s["high"])
            surrogate = -torch.min(ratio * advantage, bounded * advantage)
            upper = lp.detach() if bug("tis_current") else old
            correction = (upper - sampler).exp().clamp(max=s["cap"])
            kl = lp - ref if bug("kl_k1") else (ref - lp).exp() - (ref - lp) - 1
            losses = surrogate * correction + s["kl"] * kl
            if bug("micro_mean"):
                loss = (losses * trained).sum() / trained.sum() / len(part)
            elif bug("eos_masked"):
                loss = (losses * trained).sum() / sum((len(d["response"]) - d["response"].count(EOS)) for r in part for d in r)
            else:
                loss = (losses * trained).sum() / total
            loss.backward()
            clipped = ((advantage > 0) & (ratio > 1 + s["high"])) | ((advantage < 0) & (ratio < 1 - s["low"]))
            log.note(counts={"documents": len(rows), "trained_tokens": int(trained.sum()), "all_tokens": int(batch["mask"].sum()),
                             "padded_tokens": batch["ids"].numel()},
                     metrics={"reward": sum(d["reward"] for r in part for d in r) / per_step},
                     tokens={"policy_logprobs": lp, "old_logprobs": old, "ref_logprobs": ref, "sampler_logprobs": sampler, "entropy_nats": entropy,
                             "trained": trained, "documents": batch["documents"][:, 1:], "positions": batch["positions"][:, 1:], "losses": losses,
                             "advantages": advantage, "rewards": spread([d["reward"] for d in rows], batch), "ratios": ratio,
                             "clipped": clipped & trained, "targets": batch["ids"][:, 1:], "source": batch["source"][:, 1:]})
        log.keep()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), s["max_norm"])
        optimizer.step()
    return log.done()


# ================================================================ PPO with a critic on the same trunk
def ppo(settings, fault, seed, precision, folder, mode="rich"):
    s = {"docs": 12, "steps": 3, "micro": 4, "left": 0, "right": 0, "order": 0, "kernel": "sdpa", "lr": 2e-4, "gamma": 0.99, "lam": 0.95,
         "kl_reward": 0.1, "clip": 0.2, "value_clip": 0.2, "value": 0.5, "entropy": 0.01, "decay": 0.1, "max_norm": 1.0, **settings}
    bug = lambda name: fault == name  # noqa: E731
    model = own(seed, width=32, value=True, kernel=s["kernel"], std=0.3, drop=0.1 if bug("dropout") else 0.0)
    reference = perturbed(model, 0.03, seed + 1)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": s["decay"]}, {"params": vectors, "weight_decay": s["decay"] if bug("decay_vectors") else 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=s["lr"], betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - 0.2 * k)

    docs = shuffled(rollout(seed + 2, s["docs"], 1), s["order"])
    width_p, width_r = max(len(d["prompt"]) for d in docs), max(len(d["response"]) for d in docs)
    prompts = padded([d["prompt"] for d in docs], "left", s["left"], PAD, width_p)
    responses = padded([d["response"] for d in docs], "right", s["right"], PAD, width_r)
    r_mask = padded([[1] * len(d["response"]) for d in docs], "right", s["right"], 0, width_r).bool()
    p_mask = padded([[1] * len(d["prompt"]) for d in docs], "left", s["left"], 0, width_p).bool()
    ids, mask, first = torch.cat([prompts, responses], 1), torch.cat([p_mask, r_mask], 1), prompts.shape[1]
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    number = torch.tensor([d["n"] for d in docs])[:, None].expand(r_mask.shape)
    place = positions[:, first:]
    scores = torch.tensor([d["correct"] * 2 - 1 + 0.3 * d["noise"][0] for d in docs])

    def forward(net, rows):
        with compute(precision):
            logits, values = net(ids[rows], positions[rows], mask[rows])
        lp, entropy = full(logits, ids[rows])
        return lp[:, first - 1 :], entropy[:, first - 1 :], values[:, first - 1 : -1].float()

    def full(logits, tokens_):
        logp = logits[:, :-1].float().log_softmax(-1)
        return logp.gather(-1, tokens_[:, 1:, None])[..., 0], -(logp.exp() * logp).sum(-1)

    parts = [list(range(i, min(i + s["micro"], len(docs)))) for i in range(0, len(docs), s["micro"])]
    model.eval()
    with torch.no_grad():
        old, _, values = (torch.cat(x) for x in zip(*[forward(model, rows) for rows in parts]))
        ref = torch.cat([forward(reference, rows)[0] for rows in parts])
    model.train()
    lengths = r_mask.sum(1)
    rewards = -s["kl_reward"] * (old - ref) * r_mask
    last = torch.full_like(lengths, r_mask.shape[1] - 1) if bug("score_last_column") else lengths - 1
    rewards[torch.arange(len(docs)), last] += scores
    advantage, carried, after = torch.zeros_like(rewards), torch.zeros(len(docs)), torch.zeros(len(docs))
    for t in reversed(range(rewards.shape[1])):
        here = r_mask[:, t].float()
        delta = rewards[:, t] + s["gamma"] * after - values[:, t]
        carried = (delta + s["gamma"] * s["lam"] * carried) * here
        after = values[:, t] if bug("gae_past_end") else values[:, t] * here
        advantage[:, t] = carried
    returns = advantage + values
    chosen = advantage[r_mask]
    advantage = (advantage - chosen.mean()) * (chosen.var() + 1e-8).rsqrt() * r_mask

    log = Log(folder, model, optimizer, {"dp": 1, "micro_batches": len(parts), "temperature": 1.0, "max_grad_norm": s["max_norm"], "denominator": "tokens",
                                         "clip": s["clip"], "value_clip": s["value_clip"], "gamma": s["gamma"], "lam": s["lam"]}, mode, precision)
    total = int(r_mask.sum())
    for _ in range(s["steps"]):
        optimizer.zero_grad()
        if bug("old_recomputed"):   # the trainer asks for the log-probabilities of the "old" policy once an epoch
            with torch.no_grad():
                old = torch.cat([forward(model, rows)[0] for rows in parts])
        terms = {"loss/policy": 0.0, "loss/value": 0.0, "loss/entropy": 0.0}
        for k, rows in enumerate(parts):
            trained, a = r_mask[rows], advantage[rows]
            lp, entropy, value = forward(model, rows)
            ratio = torch.where(trained, (lp - old[rows]).exp(), 1.0)
            policy = torch.max(-ratio * a, -ratio.clamp(1 - s["clip"], 1 + s["clip"]) * a)
            near = values[rows] + (value - values[rows]).clamp(-s["value_clip"], s["value_clip"])
            pick = torch.min if bug("value_clip_min") else torch.max
            critic = 0.5 * pick((value - returns[rows]) ** 2, (near - returns[rows]) ** 2)
            if bug("entropy_all"):
                bonus = entropy.sum() / r_mask.numel()
            else:
                bonus = (entropy * trained).sum() / total
            pg, vf = (policy * trained).sum() / total, (critic * trained).sum() / total
            loss = pg + s["value"] * vf - s["entropy"] * bonus
            loss.backward()
            for key, v in zip(terms, (pg, s["value"] * vf, -s["entropy"] * bonus)):
                terms[key] += float(v.detach())
            losses = policy + s["value"] * critic - s["entropy"] * entropy
            clipped = (((a > 0) & (ratio > 1 + s["clip"])) | ((a < 0) & (ratio < 1 - s["clip"]))) & trained
            log.note(counts={"documents": len(rows), "trained_tokens": int(trained.sum()), "all_tokens": int(mask[rows].sum()), "padded_tokens": mask[rows].numel()},
                     metrics=dict(terms) if k == len(parts) - 1 else None,
                     tokens={"policy_logprobs": lp, "old_logprobs": old[rows], "ref_logprobs": ref[rows], "entropy_nats": entropy, "trained": trained,
                             "documents": number[rows].masked_fill(~trained, -1), "positions": place[rows], "losses": losses, "advantages": a,
                             "rewards": scores[rows][:, None].expand(trained.shape), "ratios": ratio, "clipped": clipped,
                             "targets": responses[rows], "source": (number[rows] * 1000 + place[rows]).masked_fill(~trained, -1)})
        log.keep()
        torch.nn.utils.clip_grad_norm_(model.parameters(), s["max_norm"])
        optimizer.step()
        schedule.step()
    return log.done()


# ================================================================ GSPO / CISPO in packed rows, ranks by turns, gradients averaged by hand
def pack(settings, fault, seed, precision, folder, mode="rich"):
    s = {"loss": "gspo", "groups": 4, "size": 4, "steps": 2, "dp": 2, "micro": 1, "row": 64, "order": 0, "kernel": "sdpa", "lr": 0.02, "low": 0.02,
         "high": 0.03, "cispo": 0.2, "stale": 0.005, "max_norm": 0.0, **settings}
    bug = lambda name: fault == name  # noqa: E731
    policy = own(seed, width=32, heads=4, kernel=s["kernel"], std=0.3)
    behind = perturbed(policy, s["stale"] if s["loss"] == "gspo" else 2.5 * s["stale"], seed + 1)
    if precision == "bf16":
        policy = policy.to(torch.bfloat16)
    optimizer = torch.optim.SGD(policy.parameters(), lr=s["lr"], momentum=0.9)
    ranks = s["dp"]

    log = None
    for step in range(s["steps"]):
        docs = rollout(seed + 10 + step, s["groups"], s["size"])
        with torch.no_grad():   # an asynchronous sampler, a few updates behind: its values are data
            batch = collate(docs)
            sampled = gathered(behind(batch["ids"], batch["positions"], batch["mask"]), batch["ids"])[0]
        for i, d in enumerate(docs):
            d["old"] = [0.0] + sampled[i, : len(d["prompt"]) + len(d["response"]) - 1].tolist()
            d["reward"] = d["correct"] + 0.5 * d["noise"][0]
        docs = shuffled(docs, seed + 77)   # groups lie across rows and ranks
        docs = shuffled(docs, s["order"])
        lengths = [len(d["prompt"]) + len(d["response"]) for d in docs]
        rows = fill_rows(lengths, s["row"])
        mine = [rows[r::ranks] for r in range(ranks)]
        if bug("drop_row"):   # every rank takes as many rows as the one with the fewest
            mine = [m[: len(rows) // ranks] for m in mine]
        for r, m in enumerate(mine):
            held = [docs[i] for row in m for i in row]
            for d in held:
                group = [o for o in (held if bug("group_local") else docs) if o["group"] == d["group"]]
                d["advantage"] = d["reward"] - sum(o["reward"] for o in group) / len(group)
        present = [docs[i] for m in mine for row in m for i in row]
        total_docs, total_tokens = len(present), sum(len(d["response"]) for d in present)
        if log is None:
            log = Log(folder, policy, optimizer, {"dp": ranks, "temperature": 1.0, "max_grad_norm": s["max_norm"] or None, "loss": s["loss"],
                                                  "denominator": "documents" if s["loss"] == "gspo" else "tokens", "row": s["row"]}, mode, precision)
        optimizer.zero_grad()
        for m in mine:
            rank_docs = sum(len(row) for row in m)
            rank_tokens = sum(len(docs[i]["response"]) for row in m for i in row)
            for at in range(0, len(m), s["micro"]):
                part = [[docs[i] for i in row] for row in m[at : at + s["micro"]]]
                flat = lambda value, fill: padded([[v for d in row for v in value(d)] for row in part], "right", 0, fill, s["row"])  # noqa: B023, E731
                size = lambda d: len(d["prompt"]) + len(d["response"])  # noqa: E731
                ids, number = flat(lambda d: d["prompt"] + d["response"], PAD), flat(lambda d: [d["n"]] * size(d), -1)
                positions = flat(lambda d: range(size(d)), 0)
                trained = flat(lambda d: [0] * len(d["prompt"]) + [1] * len(d["response"]), 0).bool()[:, 1:]
                old = flat(lambda d: d["old"], 0.0)
                old = old[:, :-1] if bug("old_shift") else old[:, 1:]
                a = flat(lambda d: [float(d["advantage"])] * size(d), 0.0)[:, 1:]
                allowed = block_mask(number)
                if bug("causal_only"):
                    allowed = block_mask(torch.zeros_like(number))
                lp, entropy = gathered(policy(ids, positions, allowed), ids)
                docs_here = number[:, 1:]
                one = (docs_here[:, :, None] == docs_here[:, None, :]) & trained[:, None, :]    # tokens of the same document
                if bug("row_ratio"):
                    one = trained[:, None, :].expand_as(one)
                counted = one.sum(-1).clamp(min=1)
                if s["loss"] == "gspo":
                    mean = (one * (lp - old)[:, None, :]).sum(-1)
                    mean = mean if bug("gspo_sum") else mean / counted
                    ratio = (lp - lp.detach() + mean.detach()).exp()
                    bounded = ratio.clamp(1 - s["low"], 1 + s["high"])
                    losses = -torch.min(ratio * a, bounded * a)
                    clipped = ((a > 0) & (ratio > 1 + s["high"])) | ((a < 0) & (ratio < 1 - s["low"]))
                    n = ((docs_here[:, :, None] == docs_here[:, None, :]) & trained[:, None, :]).sum(-1).clamp(min=1)
                    weighted, whole, local = losses / n, total_docs, rank_docs
                else:
                    ratio = (lp - old).exp()
                    weight = ratio.clamp(max=1 + s["cispo"])
                    if not bug("cispo_gradient"):
                        weight = weight.detach()
                    losses, clipped = -weight * a * lp, None
                    weighted, whole, local = losses, total_tokens, rank_tokens
                if bug("rank_mean"):
                    loss = (weighted * trained).sum() / local
                else:
                    loss = (weighted * trained).sum() * ranks / whole
                loss.backward()
                noted = {"policy_logprobs": lp, "old_logprobs": old, "entropy_nats": entropy, "trained": trained, "documents": docs_here, "positions": positions[:, 1:],
                         "losses": losses, "advantages": a, "rewards": flat(lambda d: [float(d["reward"])] * size(d), 0.0)[:, 1:], "ratios": ratio,
                         "targets": ids[:, 1:], "source": (docs_here * 1000 + positions[:, 1:]).masked_fill(docs_here < 0, -1),
                         "places": torch.arange(1, s["row"]).expand(docs_here.shape)}
                if clipped is not None:
                    noted["clipped"] = clipped & trained
                log.note(float(loss.detach()) / ranks, counts={"documents": sum(len(r) for r in part), "trained_tokens": int(trained.sum()),
                                                               "all_tokens": int((number >= 0).sum()), "padded_tokens": number.numel()}, tokens=noted)
        if not bug("ranks_summed"):
            for p in policy.parameters():
                p.grad /= ranks
        log.keep()
        if s["max_norm"]:
            torch.nn.utils.clip_grad_norm_(policy.parameters(), s["max_norm"])
        optimizer.step()
    return log.done()


# ================================================================ REINFORCE over turns with a leave-one-out baseline, padded left
def conversations(seed, groups, size, dead):
    g, docs = gen(seed), []
    for group in range(groups):
        prompt = tokens(int(torch.randint(3, 8, (1,), generator=g)), g)
        for _ in range(size):
            turns = [(tokens(int(torch.randint(2, 7, (1,), generator=g)), g), tokens(int(torch.randint(2, 5, (1,), generator=g)), g)) for _ in range(3)]
            rewards = torch.rand(3, generator=g).round(decimals=1).tolist()
            docs.append({"n": len(docs), "group": group, "prompt": prompt, "turns": turns, "rewards": [0.5] * 3 if group in dead else rewards})
    for d in docs:
        d["ids"], d["turn"] = list(d["prompt"]), [-1] * len(d["prompt"])
        for k, (said, tool) in enumerate(d["turns"]):
            d["ids"] += said + [EOS]
            d["turn"] += [k] * (len(said) + 1)
            if k < 2:   # the tool's answer
                d["ids"] += tool
                d["turn"] += [-2 - k] * len(tool)
    return docs


def rloo(settings, fault, seed, precision, folder, mode="rich"):
    s = {"groups": 4, "size": 3, "steps": 2, "dp": 2, "micro": 3, "side": "left", "extra": 0, "order": 0, "kernel": "sdpa", "lr": 2e-3, "gamma": 0.9,
         "temperature": 0.7, "longest": 24, "warmup": 3, "max_norm": 0.5, "dead": False, **settings}
    bug = lambda name: fault == name  # noqa: E731
    policy = hugging("gpt2", seed, s["kernel"])
    if precision == "bf16":
        policy = policy.to(torch.bfloat16)
    policy.train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=s["lr"], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k if bug("warmup_offset") else k + 1) / s["warmup"]))
    log = Log(folder, policy, optimizer, {"dp": s["dp"], "micro_batches": s["groups"] * s["size"] // s["dp"] // s["micro"], "temperature": s["temperature"],
                                          "max_grad_norm": s["max_norm"], "denominator": "documents * longest", "gamma": s["gamma"]}, mode, precision)
    for step in range(s["steps"]):
        docs = conversations(seed + 5 + step, s["groups"], s["size"], (2, 3) if s["dead"] and step == 1 else ())
        for d in docs:
            r = d["rewards"]
            d["returns"] = list(r) if bug("own_turn") else [sum(s["gamma"] ** (j - k) * r[j] for j in range(k, 3)) for k in range(3)]
        for d in docs:
            group = [o for o in docs if o["group"] == d["group"]]
            d["advantages"] = []
            for k in range(3):
                others = [o["returns"][k] for o in group if bug("baseline_self") or o is not d]
                d["advantages"].append(d["returns"][k] - sum(others) / len(others))
        share = len(docs) // s["dp"]
        ranks = [shuffled(docs[r * share : (r + 1) * share], s["order"]) for r in range(s["dp"])]
        gathered_grads = []
        for mine in ranks:
            optimizer.zero_grad()
            if bug("skip_rank") and all(abs(a) < 1e-9 for d in mine for a in d["advantages"]):
                continue   # nothing to learn from here
            for at in range(0, len(mine), s["micro"]):
                rows = mine[at : at + s["micro"]]
                ids = padded([d["ids"] for d in rows], s["side"], s["extra"], PAD)
                mask = padded([[1] * len(d["ids"]) for d in rows], s["side"], s["extra"])
                turn = padded([d["turn"] for d in rows], s["side"], s["extra"], -1)
                positions = (mask.cumsum(-1) - 1).clamp(min=0)
                place = positions
                if bug("arange_positions"):
                    positions = torch.arange(ids.shape[1]).expand(ids.shape)
                number = padded([[d["n"]] * len(d["ids"]) for d in rows], s["side"], s["extra"], -1)[:, 1:]
                trained = (turn >= 0) | ((turn < -1) if bug("tool_trained") else False)
                turn_of = torch.where(turn < -1, -2 - turn, turn)
                a = torch.zeros(ids.shape)
                for i, d in enumerate(rows):
                    for k in range(3):
                        a[i, turn_of[i] == k] = d["advantages"][k]
                a, trained = a[:, 1:], trained[:, 1:]
                logits = policy(input_ids=ids, attention_mask=mask, position_ids=positions).logits
                lp, entropy = gathered(logits, ids, 1.0 if bug("no_temperature") else s["temperature"])
                losses = -a * lp
                longest = int(trained.sum(1).max()) if bug("longest_of_batch") else s["longest"]
                loss = (losses * trained).sum() / (share * longest)
                loss.backward()
                log.note(float(loss.detach()) / s["dp"],
                         counts={"documents": len(rows), "trained_tokens": int(trained.sum()), "all_tokens": int(mask.sum()), "padded_tokens": ids.numel()},
                         metrics={"reward/mean": sum(sum(d["rewards"]) for d in docs) / len(docs)},
                         tokens={"policy_logprobs": lp, "entropy_nats": entropy, "trained": trained, "documents": number, "positions": positions[:, 1:],
                                 "losses": losses, "advantages": a, "targets": ids[:, 1:],
                                 "rewards": torch.tensor([sum(d["rewards"]) for d in rows])[:, None].expand(lp.shape),
                                 "source": (number * 1000 + place[:, 1:]).masked_fill(number < 0, -1)})
            gathered_grads.append([p.grad.clone() for p in policy.parameters()])
        for i, p in enumerate(policy.parameters()):
            p.grad = torch.stack([g[i] for g in gathered_grads]).sum(0) / len(gathered_grads)
        log.keep()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), s["max_norm"])
        optimizer.step()
        schedule.step()
    return log.done()
