"""DPO with padded pairs, SFT in packed rows with Muon, a mixture of experts trained on documents."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import BOS, EOS, PAD, Log, Muon, block_mask, compute, fill_rows, gathered, gen, hugging, own, padded, perturbed, tokens
from rl import shuffled


# ================================================================ DPO: chosen and rejected rows in one call, padded
def preferences(seed, n):
    g, pairs = gen(seed), []
    for i in range(n):
        prompt = [BOS] + tokens(int(torch.randint(4, 10, (1,), generator=g)), g)
        answers = [tokens(int(torch.randint(4, 16, (1,), generator=g)), g) + [EOS] for _ in range(2)]
        pairs.append({"n": i, "prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    return pairs


def dpo(settings, fault, seed, precision, folder, mode="rich"):
    s = {"pairs": 7, "steps": 2, "micro": 2, "side": "right", "extra": 0, "order": 0, "kernel": "sdpa", "lr": 2e-3, "beta": 0.3, "smooth": 0.1, "nll": 0.2,
         "apart": 0.02, "max_norm": 1.0, **settings}
    bug = lambda name: fault == name  # noqa: E731
    policy = hugging("llama", seed, s["kernel"], tie_word_embeddings=True)
    reference = perturbed(policy, s["apart"], seed + 1)
    if bug("untied"):   # another class loads the same weights, and the head becomes a parameter of its own
        policy.config.tie_word_embeddings = False
        policy.lm_head.weight = nn.Parameter(policy.lm_head.weight.detach().clone())
    if bug("reference_follows"):
        reference = policy
    if precision == "bf16":
        policy, reference = policy.to(torch.bfloat16), reference.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=s["lr"], betas=(0.9, 0.999), weight_decay=0.0)
    count = -(-s["pairs"] // s["micro"])
    log = Log(folder, policy, optimizer, {"dp": 1, "micro_batches": count, "max_grad_norm": s["max_norm"], "denominator": "pairs", "beta": s["beta"],
                                          "label_smoothing": s["smooth"], "nll": s["nll"]}, mode, precision)
    for step in range(s["steps"]):
        pairs = shuffled(preferences(seed + 3 + step, s["pairs"]), s["order"])
        if bug("double_bos"):   # the template has one already, the tokenizer adds another
            pairs = [{**p, "prompt": [BOS, *p["prompt"]]} for p in pairs]
        likely = sum(len(p["chosen"]) for p in pairs)
        if bug("nll_of_both"):
            likely += sum(len(p["rejected"]) for p in pairs)
        optimizer.zero_grad()
        for at in range(0, len(pairs), s["micro"]):
            part = pairs[at : at + s["micro"]]
            n = len(part)
            rows = [p["prompt"] + p["chosen"] for p in part] + [p["prompt"] + p["rejected"] for p in part]
            prompt = [len(p["prompt"]) for p in part] * 2
            number = [2 * p["n"] for p in part] + [2 * p["n"] + 1 for p in part]
            ids = padded(rows, s["side"], s["extra"], PAD)
            mask = padded([[1] * len(r) for r in rows], s["side"], s["extra"])
            trained = padded([[0] * k + [1] * (len(r) - k) for r, k in zip(rows, prompt)], s["side"], s["extra"]).bool()[:, 1:]
            documents = padded([[d] * len(r) for r, d in zip(rows, number)], s["side"], s["extra"], -1)[:, 1:]
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            seen = {"attention_mask": None if bug("pad_attended") else mask, "position_ids": positions}
            lp, entropy = gathered(policy(input_ids=ids, **seen).logits, ids)
            with torch.no_grad():
                ref, _ = gathered(reference(input_ids=ids, **seen).logits, ids)
            both, base = (lp * trained).sum(-1), (ref * trained).sum(-1)
            margin = s["beta"] * ((both[:n] - base[:n]) - (both[n:] - base[n:]))
            losses = -F.logsigmoid(margin) * (1 - s["smooth"]) - F.logsigmoid(-margin) * s["smooth"]
            if bug("micro_of_one"):
                preference = losses.mean() / count
            else:
                preference = losses.sum() / s["pairs"]
            nll = -(both.sum() if bug("nll_of_both") else both[:n].sum()) / likely
            loss = preference + s["nll"] * nll
            loss.backward()
            log.note(counts={"documents": 2 * n, "trained_tokens": int(trained.sum()), "all_tokens": int(mask.sum()), "padded_tokens": ids.numel()},
                     metrics={"loss/preference": float(preference.detach()), "loss/nll": float(s["nll"] * nll.detach())},
                     tokens={"policy_logprobs": lp, "ref_logprobs": ref, "entropy_nats": entropy, "trained": trained, "documents": documents,
                             "positions": positions[:, 1:], "targets": ids[:, 1:],
                             "source": (documents * 1000 + positions[:, 1:]).masked_fill(documents < 0, -1)})
            if bug("clip_each") and at + s["micro"] < len(pairs):
                torch.nn.utils.clip_grad_norm_(policy.parameters(), s["max_norm"])
        log.keep()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), s["max_norm"])
        optimizer.step()
    return log.done()


# ================================================================ SFT in packed rows, Muon and AdamW, two ranks by turns
def chats(seed, n):
    g, docs = gen(seed), []
    for i in range(n):
        ids, roles = [BOS], [0]
        for k in range(int(torch.randint(1, 4, (1,), generator=g))):
            user, answer = (tokens(int(torch.randint(2, 7, (1,), generator=g)), g) for _ in range(2))
            ids += user + answer + [EOS]
            roles += [0] * len(user) + [k + 1] * (len(answer) + 1)
        docs.append({"n": i, "ids": ids, "roles": roles})
    return docs


def sft(settings, fault, seed, precision, folder, mode="rich"):
    s = {"docs": 14, "steps": 3, "dp": 2, "micro": 1, "row": 56, "order": 0, "kernel": "sdpa", "lr": 4e-3, "muon_lr": 0.01, "z": 1e-3, "decay": 0.05,
         "max_norm": 0.0, **settings}
    bug = lambda name: fault == name  # noqa: E731
    model = own(seed, width=32, heads=4, rope=False, kernel=s["kernel"], eps=1e-5 if bug("norm_eps") else 1e-6, std=0.02)
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("blocks")]
    outer = [p for n, p in model.named_parameters() if p.ndim < 2 or not n.startswith("blocks")]
    muon = Muon(inner, lr=s["muon_lr"], weight_decay=s["decay"], scale=not bug("muon_unscaled"))
    adam = torch.optim.AdamW(outer, lr=s["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    log = Log(folder, model, [muon, adam], {"dp": s["dp"], "max_grad_norm": s["max_norm"] or None, "denominator": "tokens", "row": s["row"], "z_loss": s["z"]},
              mode, precision)
    for step in range(s["steps"]):
        batch = 0 if bug("replayed_batch") and step == 2 else step
        docs = shuffled(chats(seed + 3 + batch, s["docs"]), s["order"])
        rows = fill_rows([len(d["ids"]) for d in docs], s["row"])
        ranks = [rows[r :: s["dp"]] for r in range(s["dp"])]
        muon.zero_grad()
        if not bug("adam_not_cleared"):
            adam.zero_grad()
        batches = []
        for mine in ranks:
            for at in range(0, len(mine), s["micro"]):
                part = [[docs[i] for i in row] for row in mine[at : at + s["micro"]]]
                flat = lambda value, fill: padded([[v for d in row for v in value(d)] for row in part], "right", 0, fill, s["row"])  # noqa: B023, E731
                ids, number = flat(lambda d: d["ids"], PAD), flat(lambda d: [d["n"]] * len(d["ids"]), -1)
                place = flat(lambda d: range(len(d["ids"])), 0)
                roles = flat(lambda d: [int(r == max(d["roles"])) for r in d["roles"]] if bug("last_turn") else d["roles"], 0)
                if bug("next_document"):   # the first token of a document is a target of the last one of the document before
                    follows = (number[:, 1:] >= 0) & (number[:, 1:] != number[:, :-1])
                    roles[:, 1:] = torch.where(follows, 1, roles[:, 1:])
                labels = torch.where(roles > 0, ids, -100)
                batches.append((ids, number, place, labels, part))
        total = sum(int((b[3][:, 1:] >= 0).sum()) for b in batches)
        for ids, number, place, labels, part in batches:
            trained = labels[:, 1:] >= 0
            positions = torch.arange(s["row"]).expand(ids.shape) if bug("row_positions") else place
            with compute(precision):
                logits = model(ids, positions, block_mask(number))
            logits = logits.float()
            lp, entropy = gathered(logits, ids)
            z = logits[:, :-1].logsumexp(-1) ** 2
            losses = -lp + s["z"] * z
            loss = (losses * trained).sum() / total
            loss.backward()
            docs_here = number[:, 1:]
            log.note(counts={"documents": sum(len(r) for r in part), "trained_tokens": int(trained.sum()), "all_tokens": int((number >= 0).sum()),
                             "padded_tokens": number.numel()},
                     tokens={"policy_logprobs": lp, "entropy_nats": entropy, "trained": trained, "documents": docs_here, "positions": positions[:, 1:],
                             "losses": losses, "targets": ids[:, 1:], "places": torch.arange(1, s["row"]).expand(docs_here.shape),
                             "source": (docs_here * 1000 + place[:, 1:]).masked_fill(docs_here < 0, -1)})
        log.keep()
        if s["max_norm"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), s["max_norm"])
        muon.step()
        adam.step()
        if bug("no_master_weights"):
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.to(torch.bfloat16))
    return log.done()


# ================================================================ Mixture of experts on documents, two ranks of data and of experts by turns
def moe(settings, fault, seed, precision, folder, mode="rich"):
    s = {"docs": 12, "steps": 2, "dp": 2, "micro": 3, "extra": 0, "order": 0, "kernel": "sdpa", "lr": 3e-3, "aux": 0.05, "decay": 0.3, "max_norm": 2.0,
         **settings}
    bug = lambda name: fault == name  # noqa: E731
    options = {"renormalize": not bug("not_renormalized"), "router_dtype": torch.bfloat16 if bug("router_in_bf16") else torch.float32}
    model = own(seed, width=24, heads=2, kernel=s["kernel"], std=0.5, moe=options)
    cls = torch.optim.Adam if bug("decay_in_gradient") else torch.optim.AdamW
    optimizer = cls(model.parameters(), lr=s["lr"], betas=(0.9, 0.95), weight_decay=s["decay"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    count = s["docs"] // s["dp"] // s["micro"]
    log = Log(folder, model, optimizer, {"dp": s["dp"], "ep": s["dp"], "micro_batches": count, "max_grad_norm": s["max_norm"], "denominator": "tokens",
                                         "aux": s["aux"]}, mode, precision)
    for step in range(s["steps"]):
        g, docs = gen(seed + 3 + step), []
        for i in range(s["docs"]):
            docs.append({"n": i, "ids": [BOS] + tokens(int(torch.randint(5, 30, (1,), generator=g)), g) + [EOS]})
        docs = shuffled(docs, s["order"])
        total = sum(len(d["ids"]) - 1 for d in docs)
        optimizer.zero_grad()
        share = len(docs) // s["dp"]
        for rank in range(s["dp"]):
            mine = docs[rank :: s["dp"]]
            for at in range(0, share, s["micro"]):
                rows = mine[at : at + s["micro"]]
                ids = padded([d["ids"] for d in rows], "right", s["extra"], PAD)
                mask = padded([[1] * len(d["ids"]) for d in rows], "right", s["extra"])
                positions = torch.arange(ids.shape[1]).expand(ids.shape)
                number = padded([[d["n"]] * len(d["ids"]) for d in rows], "right", s["extra"], -1)[:, 1:]
                with compute(precision):
                    logits = model(ids, positions, mask)
                lp, entropy = gathered(logits, ids)
                trained = mask[:, 1:].bool()
                aux = 0.0
                for block in model.blocks:   # balance inside of each row, so that it does not depend on the division
                    probs, chosen = block.mlp.told
                    w = torch.ones_like(mask).float() if bug("aux_of_padding") else mask.float()
                    w = (w / w.sum(1, keepdim=True))[..., None]
                    load, mean = (w * chosen).sum(1), (w * probs).sum(1)
                    aux = aux + probs.shape[-1] * (load * mean).sum() / len(model.blocks)
                aux = s["aux"] * aux / (len(rows) if bug("aux_not_divided") else share)
                nll = -(lp * trained).sum() / total * s["dp"]
                loss = (nll + aux) / s["dp"]
                loss.backward()
                log.note(counts={"documents": len(rows), "trained_tokens": int(trained.sum()), "all_tokens": int(mask.sum()), "padded_tokens": mask.numel()},
                         metrics={"loss/lm": float(nll.detach()) / s["dp"], "loss/balance": float(aux.detach()) / s["dp"]},
                         tokens={"policy_logprobs": lp, "entropy_nats": entropy, "trained": trained, "documents": number, "positions": positions[:, 1:],
                                 "losses": -lp, "targets": ids[:, 1:], "source": (number * 1000 + positions[:, 1:]).masked_fill(number < 0, -1)})
        if bug("experts_divided_twice"):   # averaged over ranks, and divided by the expert group again
            for name, p in model.named_parameters():
                if ".experts." in name:
                    p.grad /= s["dp"]
        log.keep()
        torch.nn.utils.clip_grad_norm_(model.parameters(), s["max_norm"])
        optimizer.step()
        schedule.step()
    return log.done()
