"""Blind set 1: dumps of a small trainer of its own, some with one historical mistake, the others without.

    python make.py OUT        writes OUT/faults/<id>/ and OUT/clean/<name>/, and prints what each mistake moved

Plain torch. A tiny policy gives log-probabilities; the step goes over ranks and micro-batches as a trainer does, and
autograd gives the coefficients. Nothing of the project is imported.
"""

import json
import random
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace as S

import torch
from safetensors.torch import save_file

torch.set_num_threads(1)
SEED = 20261126
VOCAB, WIDTH = 24, 6


# ------------------------------------------------------------------------------------ policy and batch


def draw_batch(
    g,
    *,
    groups=3,
    size=4,
    lengths=(4, 14),
    layout="padded",
    dp=1,
    micro_batches=1,
    cp=1,
    tools=False,
    masked_documents=0,
    dtype="float32",
    temperature=1.0,
    drift=0.25,
    mismatch=0.08,
    ref_drift=0.3,
    rewards="binary",
    shuffle=True,
    pad=None,
    equal_rows=True,
    sizes=None,
    padding_entropy=0.0,
    interleave=False,
    offset=0.0,
    confident=1.0,
):
    """A batch of documents, laid out flat: padded rows one after the other, or packed."""
    r = random.Random(g)
    t = torch.Generator().manual_seed(g)

    def rand(*shape):
        return torch.randn(*shape, generator=t, dtype=torch.float64)

    group_of = [k for k in range(groups) for _ in range(size if sizes is None else sizes[k])]
    if interleave:  # P1 P2 P3 P1 P2 P3
        group_of = [k % groups for k in range(len(group_of))]
    elif shuffle:
        r.shuffle(group_of)
    n = len(group_of)
    while True:
        length = [r.randint(*lengths) for _ in range(n)]
        if len(set(length)) > 1 or n == 1 or lengths[0] == lengths[1]:
            break
    emb, pos = rand(VOCAB, WIDTH), 0.5 * rand(256, WIDTH)
    w_old = confident * rand(WIDTH, VOCAB)
    w = {
        "old": w_old,
        "policy": w_old + drift * rand(WIDTH, VOCAB),
        "sampler": w_old + mismatch * rand(WIDTH, VOCAB),
        "ref": w_old + ref_drift * rand(WIDTH, VOCAB),
    }
    prompts = [r.randrange(VOCAB) for _ in range(groups)]
    documents = []
    for i in range(n):
        trained = [1] * length[i]
        if tools:  # turns: trained, tool, trained, ...
            trained, turn = [], 1
            while len(trained) < length[i]:
                trained += [turn] * r.randint(2, 4)
                turn = 1 - turn
            trained = trained[: length[i]]
            trained[0] = 1
        previous, ids, values = prompts[group_of[i]], [], {k: [] for k in (*w, "entropies")}
        for p in range(length[i]):
            h = torch.tanh(emb[previous] + pos[p])
            logp = {k: torch.log_softmax(h @ m / temperature, -1) for k, m in w.items()}
            probability = torch.softmax(h @ w_old / temperature, -1)
            token = int(torch.multinomial(probability, 1, generator=t)) if trained[p] else r.randrange(VOCAB)
            for k in w:
                values[k].append(float(logp[k][token]))
            values["entropies"].append(float(-(logp["policy"].exp() * logp["policy"]).sum()))
            ids.append(token)
            previous = token
        documents.append(S(ids=ids, trained=trained, values=values))
    for i in r.sample(range(n), masked_documents):
        documents[i].trained = [0] * length[i]
    # rewards: exactly representable where a group may have no spread
    if rewards == "binary":
        reward = [float(r.random() < 0.5) for _ in range(n)]
        for k in range(groups):  # at least one group with a spread
            members = [i for i in range(n) if group_of[i] == k and any(documents[i].trained)]
            if k != groups - 1 or groups == 1 or r.random() < 0.5:
                reward[members[0]], reward[members[1]] = 1.0, 0.0
    elif rewards == "quarters":
        reward = [r.randint(-4, 4) / 4 for _ in range(n)]
        for k in range(groups):
            members = [i for i in range(n) if group_of[i] == k and any(documents[i].trained)]
            reward[members[0]], reward[members[1]] = 0.75, -0.5
    else:
        reward = [r.gauss(0, 1) for _ in range(n)]
    reward = torch.tensor([x + offset for x in reward], dtype=torch.float32)
    # ranks and micro-batches
    rows = dp * micro_batches
    if equal_rows:
        assert n % rows == 0, (n, rows)
        row_of = [k for k in range(rows) for _ in range(n // rows)]
    else:
        row_of = list(range(rows)) + [r.randrange(rows) for _ in range(n - rows)]
        row_of.sort()
    f = getattr(torch, dtype)
    b = S(
        layout=layout,
        dtype=dtype,
        n=n,
        dp=dp,
        cp=cp,
        micro_batches=micro_batches,
        temperature=temperature,
        rewards=reward,
        group_ids=torch.tensor(group_of),
        rows=torch.tensor(row_of),
        seed=g,
    )
    order = list(range(n))
    if layout == "padded":
        b.width = max(length) + (r.randint(0, 3) if pad is None else pad)
        spaces = [(i, p if p < length[i] else -1) for i in order for p in range(b.width)]
    else:
        if shuffle:
            r.shuffle(order)
        spaces = [(i, p) for i in order for p in range(length[i])]
        spaces += [(-1, -1)] * (r.randint(0, 7) if pad is None else pad)

    def lay(get, empty):
        return [get(documents[i], p) if p >= 0 else empty for i, p in spaces]

    b.doc = torch.tensor([i for i, _ in spaces])
    b.pos = torch.tensor([p for _, p in spaces])
    b.length = torch.tensor(length)
    b.token_ids = torch.tensor(lay(lambda d, p: d.ids[p], 0))
    b.token_mask = b.pos >= 0
    b.loss_mask = torch.tensor(lay(lambda d, p: d.trained[p], 0)).bool()
    garbage = r.choice([0.0, 0.0, 0.0, -1.5])  # what a forward pass leaves on padding
    for name in ("policy", "old", "sampler", "ref", "entropies"):
        empty = padding_entropy if name == "entropies" else garbage
        setattr(b, name, torch.tensor(lay(lambda d, p, name=name: d.values[name][p], empty), dtype=torch.float64).to(f))
    b.prompt_logprobs = (-rand(n).abs() - 0.3).to(f)  # of the last prompt token: nobody records it
    # context parallel: 2 * cp chunks of each document, rank c has chunks c and 2 cp - 1 - c
    chunk = [0 if p < 0 else min(p // -(-length[i] // (2 * cp)), 2 * cp - 1) for i, p in spaces]
    b.cp_rank = torch.tensor([min(c, 2 * cp - 1 - c) for c in chunk])
    return b


# ------------------------------------------------------------------------------------------ advantages


def counted(b):
    """Documents that train."""
    return by_document(b, b.loss_mask.float()) > 0


def by_document(b, x, mask=None):
    x = x if mask is None else torch.where(mask, x, torch.zeros_like(x))
    out = torch.zeros(b.n, dtype=torch.float32)
    keep = b.doc >= 0
    return out.index_add(0, b.doc[keep], x[keep].float())


def spread(b, per_document):
    return per_document[b.doc.clamp(min=0)]


def estimate(b, a, bug=""):
    """Advantages of documents [n] in float32; a document that does not train is in no group and has 0."""
    rewards, groups, live = b.rewards, b.group_ids.clone(), counted(b)
    out = torch.zeros(b.n)
    if bug == "rewards_on_every_cp_rank":
        rewards = rewards * b.cp
    if bug == "masked_rows_in_baseline":
        live = torch.ones_like(live)
    if bug == "baseline_of_rank":
        groups = groups + 1000 * (b.rows // b.micro_batches)
    if bug == "baseline_of_micro_batch":
        groups = groups + 1000 * b.rows
    if bug == "groups_by_reshape":  # reshape(-1, size), though one group is incomplete
        k = int(torch.bincount(groups).max())  # or though the samples are dealt P1 P2 P3 P1 P2 P3
        groups = torch.arange(b.n) // k
    if bug == "prompts_with_equal_text":  # the key of a group is its text, and two prompts have the same
        groups = torch.where(groups == 1, torch.zeros_like(groups), groups)
    if bug == "whole_batch":
        groups = torch.zeros_like(groups)
    for k in groups.unique():
        m = (groups == k) & live
        r = rewards[m]
        if not len(r):
            continue
        if a["name"] == "rloo":
            out[m] = r - (r.sum() - r) / (len(r) - 1) if bug != "mean_of_all" else r - r.mean()
            continue
        center = r - r.mean()
        if bug == "leave_one_out":
            center = r - (r.sum() - r) / (len(r) - 1)
        scale = a.get("scale", "std")
        if a["name"] == "dr_grpo":
            scale = "none"
        if bug == "std_though_dr_grpo":
            scale = "std"
        if scale == "none":
            out[m] = center
            continue
        ddof = a.get("ddof", 1)
        if bug == "population_std":
            ddof = 0
        deviation = ((r - r.mean()).square().sum() / (len(r) - ddof)).sqrt() if len(r) > ddof else torch.tensor(0.0)
        if bug == "variance_by_squares":
            deviation = ((r.square().mean() - r.mean().square()).clamp(min=0) * len(r) / (len(r) - 1)).sqrt()
        epsilon = a.get("epsilon", 1e-6 if a.get("verl") else 1e-4)
        out[m] = center / (deviation + epsilon)
        if bug == "missing_parentheses":
            out[m] = r - r.mean() / (deviation + epsilon)
    if bug == "normalised_again":
        out = (out - out.mean()) / (out.std() + 1e-8)
    return out


def token_advantages(b, g):
    """Of a critic, by another part of the trainer: taken as they are."""
    t = torch.Generator().manual_seed(g + 1)
    x = torch.randn(len(b.doc), generator=t)
    return torch.where(b.loss_mask, x, torch.zeros_like(x))


# ------------------------------------------------------------------------------------------------ step


def late(b, x, first):
    """The value of the token before, in each document; its first token takes `first`."""
    out = x.clone()
    keep = b.pos > 0
    out[keep] = x[torch.nonzero(keep).flatten() - 1]
    start = b.pos == 0
    out[start] = first[b.doc[start]] if torch.is_tensor(first) else torch.full_like(out[start], first)
    return out


def run(b, s, bug=""):
    """One optimizer step: what a hook records of it."""
    f = getattr(torch, b.dtype)
    up = (lambda x: x.float()) if s.get("upcast") else (lambda x: x)
    d = b.doc.clamp(min=0)
    lp = b.policy.clone().requires_grad_()
    ent = b.entropies.clone().requires_grad_() if s.get("entropy") else None
    old, sampler, ref, mask = b.old, b.sampler, b.ref, b.loss_mask.clone()
    R = S()
    # advantages
    if s.get("critic"):
        adv = token_advantages(b, b.seed)
        R.advantages = adv
        used_adv = adv
    else:
        doc_adv = estimate(b, s["advantages"], bug)
        R.advantages = doc_adv
        used_adv = spread(b, doc_adv)
    if s.get("advantage_of_tokens") and not s.get("critic"):
        R.advantages = torch.where(mask, spread(b, doc_adv), torch.zeros(len(d)))

    # ---- values in the hands of the trainer
    if bug == "tool_tokens_train":
        mask = b.token_mask.clone()
    if bug == "first_token_lost":
        mask &= b.pos != 0
    if bug == "last_token_lost":
        mask &= b.pos != b.length[d] - 1
    if bug == "mask_of_neighbour":  # padded: mask[:, :-1] where mask[:, 1:] was meant
        m = mask.view(b.n, b.width)
        mask = torch.cat([torch.zeros(b.n, 1, dtype=torch.bool), m[:, :-1]], 1).flatten() & b.token_mask
    if bug == "mask_rolled_over_row":  # packed: rolled over the whole row
        mask = torch.roll(mask, 1) & b.token_mask
    if bug == "old_one_late":
        old = late(b, old, b.prompt_logprobs)
    if bug == "ref_one_late":
        ref = late(b, ref, 0.0)
    if bug == "advantage_one_late":
        used_adv = late(b, used_adv, 0.0)
    if bug == "old_rolled_over_row":
        n = int((b.doc >= 0).sum())
        old = torch.cat([torch.roll(old[:n], -1), old[n:]])
    if bug == "old_packed_to_front":  # generated tokens only, one after the other, then zeros
        x = torch.zeros_like(old).view(b.n, b.width)
        for i in range(b.n):
            v = old.view(b.n, b.width)[i][b.loss_mask.view(b.n, b.width)[i]]
            x[i, : len(v)] = v
        old = x.flatten()
    if bug == "sampler_packed_to_front":
        x = torch.zeros_like(sampler).view(b.n, b.width)
        for i in range(b.n):
            v = sampler.view(b.n, b.width)[i][b.loss_mask.view(b.n, b.width)[i]]
            x[i, : len(v)] = v
        sampler = x.flatten()
    if bug == "advantages_of_other_split":  # advantages dealt out round robin, log-probabilities in blocks
        k = b.dp * b.micro_batches
        deal = torch.arange(b.n).view(b.n // k, k).T.flatten()
        used_adv = spread(b, doc_adv[deal])
    if bug == "old_in_order_of_length":  # sorted by length for a forward pass, and never put back
        perm = torch.sort(b.length, stable=True).indices
        old = old.view(b.n, b.width)[perm].flatten()
    if bug == "sampler_as_old":
        old = sampler
    if bug == "sampler_in_bfloat16":
        sampler = sampler.bfloat16().to(f)
    if bug == "advantages_sorted":  # put next to a batch that a forward pass has sorted by length
        used_adv = spread(b, doc_adv[torch.sort(b.length, stable=True).indices])
    x = up(lp)
    old, sampler, ref = up(old), up(sampler), up(ref)
    if bug == "logprobs_over_temperature":
        x = x / b.temperature
    work = x.dtype
    A = used_adv.to(work)

    # ---- counts
    counting = (
        mask
        if bug in ("first_token_lost", "last_token_lost", "mask_of_neighbour", "mask_rolled_over_row")
        else b.loss_mask
    )
    tokens_of = by_document(b, counting.float())
    n_tokens, n_documents = int(counting.sum()), int((tokens_of > 0).sum())
    row = torch.where(b.doc >= 0, b.rows[d], torch.full_like(d, -1))
    rank = torch.where(row >= 0, row // b.micro_batches, row)
    anchor = sampler if s.get("anchor") == "sampler" else old
    if bug == "ratio_of_itself":
        anchor = x.detach()

    # ---- weights of the sampler's mismatch
    correction = s.get("correction")
    omega = torch.ones(len(d), dtype=work)
    if correction:
        mu = old - sampler
        if bug == "weights_of_current_policy":
            mu = x.detach() - sampler
        level = correction["ratio"]
        if bug == "sum_though_mean":
            level = "document_sum"
        if level != "token":
            total = by_document(b, mu, b.loss_mask)
            if level == "document_mean":
                total = total / tokens_of.clamp(min=1)
            mu = spread(b, total).to(work)
        w = mu.exp()
        lo, hi = correction.get("ratio_low"), correction.get("ratio_high")
        inside = torch.ones_like(w, dtype=torch.bool)
        if lo is not None:
            inside &= w >= lo
        if hi is not None:
            inside &= w <= hi
        if correction.get("outside", "truncate") == "zero":
            omega = torch.where(inside, w, torch.zeros_like(w))
        else:
            omega = w.clamp(min=lo, max=hi)
        if bug == "no_correction":
            omega = torch.ones_like(w)
        if bug == "not_truncated":
            omega = w

    # ---- per-token weight of the mean
    def weights(den):
        a = torch.zeros(len(d))
        if den == "token":
            a += 1 / n_tokens
        elif den == "document":
            a += 1 / (n_documents * tokens_of[d].clamp(min=1))
        elif den == "document_sum":
            a += 1 / n_documents
        elif den == "constant":
            a += 1 / (n_documents * s["constant"])
        elif den == "raw":
            a += 1
        elif den == "local":  # mean of each micro-batch, averaged over micro-batches and ranks
            for k in range(b.dp * b.micro_batches):
                a[row == k] = 1 / max(int((b.loss_mask & (row == k)).sum()), 1) / (b.dp * b.micro_batches)
        return a

    a = weights(s["den"])
    counts = {
        "token": {"tokens": n_tokens},
        "document": {"documents": n_documents},
        "document_sum": {"documents": n_documents},
    }.get(s["den"], {})
    a_kl = a
    if bug == "mean_of_micro_batches":
        a = a_kl = weights("local")
    if bug == "mean_of_micro_batches_summed":
        a = a_kl = weights("local") * b.micro_batches
    if bug == "tokens_of_rank":
        for k in range(b.dp):
            a[rank == k] = 1 / int((b.loss_mask & (rank == k)).sum()) / b.dp
        a_kl = a
    if bug == "tokens_of_cp_rank":
        for k in range(b.dp):
            for c in range(b.cp):
                here = (rank == k) & (b.cp_rank == c)
                a[here] = 1 / max(int((b.loss_mask & here).sum()), 1) / (b.dp * b.cp)
        a_kl = a
    if bug in ("all_completion_tokens", "clamped_counts", "generation_batch", "survivors"):
        count = {
            "all_completion_tokens": int(b.token_mask.sum()),
            "clamped_counts": int(tokens_of.clamp(min=1).sum()),
            "generation_batch": 2 * n_tokens + 37,  # of the batch that was generated, of which this step is a part
            "survivors": int((b.loss_mask & (omega != 0)).sum()),
        }[bug]
        a = a_kl = torch.full_like(a, 1 / count)
        counts = {"tokens": count}
    if bug == "all_rows":
        a = a_kl = a * n_documents / b.n
        counts = {"documents": b.n}
    if bug == "per_document_mean":
        a = a_kl = weights("document")
    if bug == "token_mean":
        a = a_kl = weights("token")
    if bug == "width_of_micro_batch":
        for k in range(b.dp * b.micro_batches):
            here = row == k
            a[here] = 1 / (n_documents * int(b.length[b.rows == k].max()))
        a_kl = a
    if bug == "penalty_mean_of_micro_batches":
        a_kl = weights("local")
    if bug == "penalty_over_padding":
        a_kl = torch.full_like(a, 1 / len(d))
    a_ent = a_kl if bug.startswith("penalty") else a

    # ---- the loss, over ranks and micro-batches
    eps_lo, eps_hi, dual = s.get("clip_low", 0.2), s.get("clip_high", 0.2), s.get("dual")
    if bug == "low_bound_of_dual_clip":  # 3.0, meant for the other option
        eps_lo = 3.0
    if bug == "dual_clip_by_default":
        dual = 3.0
    bound_lo, bound_hi = 1 - eps_lo, 1 + eps_hi
    if bug == "bounds_without_one":
        bound_lo, bound_hi = 0.0, eps_hi
    kind = s["loss"]
    total = {"policy": 0.0, "kl": 0.0, "entropy": 0.0}
    per_row = {}
    delta = x - anchor
    if kind == "gspo":
        over = b.loss_mask if bug != "sequence_over_all_tokens" else b.token_mask
        sums = by_document_graph(b, delta, over)
        mean = sums / by_document(b, over.float()).clamp(min=1)
        ratio = mean[d].exp()
    else:
        ratio = delta.exp()
    if kind in ("ppo", "gspo"):
        clipped_ratio = ratio.clamp(bound_lo, bound_hi)
        plain, bounded = -A * ratio, -A * clipped_ratio
        value = torch.maximum(plain, bounded)
        ended = ((A > 0) & (ratio > bound_hi)) | ((A < 0) & (ratio < bound_lo))
        if bug == "never_clipped":  # the maximum is computed, and not used
            value = plain
            ended = torch.zeros_like(mask)
        if dual is not None:
            value = torch.where(A < 0, torch.minimum(-A * dual, value), value)
            ended |= (A < 0) & (ratio > dual)
    elif kind == "cispo":
        value = -A * ratio.detach().clamp(bound_lo, bound_hi) * x
        ended = torch.zeros_like(mask)
    elif kind == "importance_sampling":
        value = -A * ratio
        ended = torch.zeros_like(mask)
    elif kind == "reinforce":
        value = -A * x
        ended = torch.zeros_like(mask)
    value = value * omega
    if bug == "sign":
        value = -value
    k = s.get("kl")
    pen = None
    if k:
        gap = ref.float() - x.float()  # a penalty is computed in float32
        if bug == "kl_of_the_other":
            gap = -gap
        estimator = k["estimator"]
        if bug == "k1_in_loss":
            estimator = "k1"
        pen = {"k1": -gap, "k2": gap.square() / 2, "k3": gap.exp() - gap - 1}[estimator]
        through = k.get("gradient") == "straight_through" and bug != "suffix_dropped"
        if through:
            half = gap.square() / 2
            pen = pen.detach() + half - half.detach()
        if bug == "kl_without_gradient":
            pen = pen.detach()

    def sum_of(v, w, m):
        return (torch.where(m, v, torch.zeros_like(v)).float() * w).sum()

    scale = torch.ones(b.dp * b.micro_batches)
    engine = float(b.dp)  # averages gradients over ranks
    times = float(b.dp)  # so the trainer multiplies by their number
    if bug == "no_ranks_factor":
        times = 1.0
    if bug == "times_micro_batches":
        times *= b.micro_batches
    if bug == "over_micro_batches_twice":
        times /= b.micro_batches
    if bug == "times_cp":
        times *= b.cp
    if bug == "over_ranks_and_cp":
        engine *= b.cp
    if bug == "last_micro_batch_trains":
        scale = (torch.arange(b.dp * b.micro_batches) % b.micro_batches == b.micro_batches - 1).float()
    if bug == "buffer_added_twice":
        scale = 2.0 ** (b.micro_batches - 1 - torch.arange(b.dp * b.micro_batches) % b.micro_batches)
    for m in range(b.dp * b.micro_batches):
        here = row == m
        policy = sum_of(value, a, mask & here)
        loss = policy
        parts = {"policy": policy}
        if k:
            everywhere = here if bug == "penalty_over_padding" else mask & here
            parts["kl"] = (-k["coefficient"] if bug == "kl_maximised" else k["coefficient"]) * sum_of(
                pen, a_kl, everywhere
            )
            loss = loss + parts["kl"]
        if ent is not None:
            where = here & (torch.ones_like(mask) if bug == "entropy_of_padding" else mask)
            coefficient = {"entropy_lost": 0.0, "entropy_sign": -s["entropy"]}.get(bug, s["entropy"])
            parts["entropy"] = -coefficient * sum_of(up(ent), a_ent, where)
            loss = loss + parts["entropy"]
        (loss * times * scale[m]).backward(retain_graph=True)
        for key, part in parts.items():
            total[key] += float(part.detach()) * times / engine
        per_row[m] = float(loss.detach()) * times / engine
    grad = lp.grad / engine
    if bug == "gradient_over_documents_again":
        grad = grad / n_documents
    R.coefficients = grad.to(f)
    R.ratios = ratio.detach()
    R.correction_weights = omega.detach()
    R.clipped = ended & mask
    R.loss_weights = torch.where(mask, a * times / engine, torch.zeros_like(a))
    R.counts = counts
    R.losses = {"total": sum(per_row.values()), "policy": total["policy"]}
    if k:
        R.losses["kl"] = total["kl"]
        R.losses["kl_without_coefficient"] = total["kl"] / k["coefficient"]
    if bug == "loss_of_last_micro_batch":
        R.losses = {"total": per_row[b.dp * b.micro_batches - 1]}
    if bug == "reported_times_cp":
        R.losses = {key: v * b.cp for key, v in R.losses.items()}

    # metrics of one rank with one micro-batch
    def mean(v):
        return float(torch.where(mask, v.float(), torch.zeros(len(d))).sum() / mask.sum())

    R.metrics = {}
    if kind == "ppo" and s.get("system") == "verl":
        difference = (x - old).detach()
        R.metrics = {
            "actor/pg_clipfrac": mean(bounded.detach() > plain.detach()),
            "actor/ppo_kl": mean(-difference) if bug != "kl_metric_absolute" else mean(difference.abs()),
            "actor/pg_clipfrac_lower": mean((torch.maximum(plain, bounded).detach() > -A * dual) & (A < 0)),
            "actor/pg_loss": R.losses["policy"],
        }
        if bug == "clip_fraction_compared_the_wrong_way":
            R.metrics["actor/pg_clipfrac"] = mean(bounded.detach() < plain.detach())
    if kind == "ppo" and s.get("system") == "trl":
        low, high = (ratio.detach() < bound_lo) & (A < 0), (ratio.detach() > bound_hi) & (A > 0)
        R.metrics = {
            "clip_ratio/low_mean": mean(low),
            "clip_ratio/high_mean": mean(high),
            "clip_ratio/region_mean": mean(low | high),
        }
        if bug == "clip_fraction_compared_the_wrong_way":
            R.metrics["clip_ratio/region_mean"] = mean(bounded.detach() < plain.detach())
    return R


def by_document_graph(b, x, mask):
    keep = mask & (b.doc >= 0)
    return torch.zeros(b.n, dtype=torch.float32).index_add(0, b.doc[keep], x[keep].float())


# -------------------------------------------------------------------------------------------- settings


def settings_of(s):
    """Settings as the dump declares them."""
    if s.get("system") == "verl":
        out = {
            "loss_agg_mode": {
                "token": "token-mean",
                "document": "seq-mean-token-mean",
                "document_sum": "seq-mean-token-sum",
            }[s["den"]],
            "clip_ratio": 0.2,
            "clip_ratio_low": s["clip_low"],
            "clip_ratio_high": s["clip_high"],
            "clip_ratio_c": s["dual"],
            "entropy_coeff": s.get("entropy", 0.0),
            "use_kl_loss": bool(s.get("kl")),
        }
        if s.get("kl"):
            out |= {
                "kl_loss_coef": s["kl"]["coefficient"],
                "kl_loss_type": {"k1": "k1", "k2": "k2", "k3": "low_var_kl"}[s["kl"]["estimator"]],
            }
        return out
    if s.get("system") == "trl":
        return {
            "loss_type": {"token": "dapo", "document": "grpo", "local": "bnpo", "constant": "dr_grpo"}[s["den"]],
            "epsilon": s["clip_low"],
            "epsilon_high": s["clip_high"],
            "beta": s["kl"]["coefficient"] if s.get("kl") else 0.0,
            "num_iterations": 2,
            "importance_sampling_level": "token",
            **({"max_completion_length": s["constant"]} if s["den"] == "constant" else {}),
        }
    out = {"name": s["name"], "denominator": s["den"]}
    if s["den"] == "constant":
        out["denominator_constant"] = s["constant"]
    if s["loss"] in ("ppo", "gspo", "cispo"):
        out["surrogate"] = {"clip_low": s["clip_low"], "clip_high": s["clip_high"]}
        if s.get("dual"):
            out["surrogate"]["dual_clip"] = s["dual"]
    if s.get("anchor"):
        out.setdefault("surrogate", {})["anchor"] = s["anchor"]
    if s.get("kl"):
        out["kl"] = dict(s["kl"])
    if s.get("correction"):
        out["correction"] = dict(s["correction"])
    if s.get("entropy"):
        out["entropy_coefficient"] = s["entropy"]
    return out


# ----------------------------------------------------------------------------------------- interchange


def contents(b, s, R, record):
    """Tensors by name, and the rest of step.json."""
    tokens = {"loss_mask": b.loss_mask.to(torch.uint8), "policy_logprobs": b.policy}
    left_out = s.get("on_policy") and not record.get("old", True)
    if (s["loss"] != "reinforce" or s.get("correction")) and not left_out:
        tokens["old_logprobs"] = b.old
    if record.get("token_mask", True):
        tokens["token_mask"] = b.token_mask.to(torch.uint8)
    if record.get("token_ids"):
        tokens["token_ids"] = b.token_ids.to(torch.int32)
    if s.get("correction") or s.get("anchor") == "sampler" or record.get("sampler"):
        tokens["sampler_logprobs"] = b.sampler
    if s.get("kl"):
        tokens["ref_logprobs"] = b.ref
    if s.get("entropy"):
        tokens["entropies"] = b.entropies
    documents = {}
    if len(R.advantages) == b.n and not s.get("critic") and not s.get("advantage_of_tokens"):
        documents["advantages"] = R.advantages
    else:
        tokens["advantages"] = R.advantages
    if record.get("coefficients", True):
        tokens["coefficients"] = R.coefficients
    if record.get("ratios") and s["loss"] not in ("gspo", "reinforce") and s.get("anchor") != "sampler":
        tokens["ratios"] = torch.where(b.token_mask, R.ratios, torch.ones_like(R.ratios))
    if record.get("clipped") and s["loss"] == "ppo":
        tokens["clipped"] = R.clipped.to(torch.uint8)
    if record.get("loss_weights"):
        tokens["loss_weights"] = R.loss_weights
    if record.get("correction_weights", True) and s.get("correction"):
        tokens["correction_weights"] = torch.where(
            b.token_mask, R.correction_weights, torch.ones_like(R.correction_weights)
        )
    if not s.get("critic") and s.get("system") != "trl":
        documents["rewards"] = b.rewards
    documents["group_ids"] = b.group_ids.to(torch.int32)
    if b.dp * b.micro_batches > 1:
        documents["rows"] = b.rows.to(torch.int32)
    about = {
        "settings": settings_of(s),
        "layout": {"dp": b.dp, "cp": b.cp, "micro_batches": b.micro_batches},
        "dtype": b.dtype,
        "losses": {k: v for k, v in R.losses.items() if k in record.get("losses", ("total",))},
    }
    if s.get("system"):
        about["system"] = s["system"]
    if not s.get("critic") and s.get("system") != "trl":
        about["advantages"] = {"estimator": "grpo"} if s.get("system") == "verl" else s["advantages"]
    if record.get("counts") and R.counts:
        about["counts"] = R.counts
    if record.get("metrics") and R.metrics and b.dp * b.micro_batches == 1:
        about["metrics"] = R.metrics
    if b.temperature != 1.0:
        about["temperature"] = b.temperature
    if s.get("on_policy"):
        about["on_policy"] = True
    return tokens, documents, about


def write(folder, b, s, R, record):
    tokens, documents, about = contents(b, s, R, record)
    folder.mkdir(parents=True)

    def plain(t):
        return t.detach().contiguous().clone()

    files = []
    if record.get("files"):
        for r in range(b.dp):
            for c in range(b.cp):
                name = f"rank{r * b.cp + c}.safetensors"
                mine = b.rows // b.micro_batches == r
                number = torch.nonzero(mine).flatten()
                if b.layout == "padded":
                    out = {k: plain(v.view(b.n, b.width)[mine]) for k, v in tokens.items()}
                else:
                    keep = (b.doc >= 0) & mine[b.doc.clamp(min=0)] & (b.cp_rank == c)
                    out = {k: plain(v[keep]) for k, v in tokens.items()}
                    out["document_ids"], out["positions"] = (
                        plain(b.doc[keep].to(torch.int32)),
                        plain(b.pos[keep].to(torch.int32)),
                    )
                out |= {k: plain(v[mine]) for k, v in documents.items()}
                out["document_numbers"] = number.to(torch.int32)
                save_file(out, folder / name)
                files.append(name)
    else:
        shape = (lambda t: t.view(b.n, b.width)) if b.layout == "padded" else (lambda t: t)
        out = {k: plain(shape(v)) for k, v in tokens.items()} | {k: plain(v) for k, v in documents.items()}
        if b.layout == "packed":
            out["document_ids"] = plain(b.doc.to(torch.int32))
        save_file(out, folder / "step.safetensors")
        files = ["step.safetensors"]
    about = {"format": "rl step", "version": 1, "files": files, **about}
    (folder / "step.json").write_text(json.dumps(about, indent=1) + "\n")


def moved(b, s, right, wrong, record):
    """The largest difference of a recorded quantity, in roundings of its largest value at the precision of the dump."""
    eps = torch.finfo(getattr(torch, b.dtype)).eps
    out = {}
    (t0, d0, a0), (t1, d1, a1) = (contents(b, s, x, record) for x in (right, wrong))
    for k in {**t0, **d0}:
        x, y = (t0 | d0)[k].double(), (t1 | d1)[k].double()
        if k in ("clipped",):
            n = int((x != y).sum())
            if n:
                out[k] = n / eps
            continue
        top = float(torch.maximum(x.abs().max(), y.abs().max()))
        if top and float((x - y).abs().max()):
            out[k] = float((x - y).abs().max()) / (eps * top)
    for key in ("losses", "counts", "metrics"):
        for k in a0.get(key, {}):
            x, y = a0[key][k], a1.get(key, {}).get(k, 0.0)
            if x != y:
                out[f"{key}.{k}"] = abs(x - y) / (eps * max(abs(x), abs(y)))
    return out


# ----------------------------------------------------------------------------------------- clean steps


def spread_of(r, dp, micro_batches, most=12):
    """Sizes of groups for so many rows."""
    rows = dp * micro_batches
    while True:
        groups, size = r.randint(2, 5), r.randint(2, 6)
        n = groups * size
        if n % rows == 0 and n <= max(most, rows * 2):
            return {"groups": groups, "size": size}


def drawn_record(r, *extra):
    out = {
        "coefficients": r.random() < 0.9,
        "ratios": r.random() < 0.6,
        "clipped": r.random() < 0.5,
        "counts": r.random() < 0.5,
        "loss_weights": r.random() < 0.3,
        "token_ids": r.random() < 0.3,
        "correction_weights": r.random() < 0.7,
        "metrics": r.random() < 0.7,
        "losses": r.choice(
            [("total",), ("total", "policy"), ("total", "policy", "kl"), ("total", "kl_without_coefficient")]
        ),
    }
    return out | dict(extra)


def drawn_clip(r):
    return r.choice(
        [
            {"clip_low": 0.2, "clip_high": 0.2},
            {"clip_low": 0.2, "clip_high": 0.28},
            {"clip_low": 0.1, "clip_high": 0.3},
            {"clip_low": 0.25, "clip_high": 0.2},
        ]
    )


def drawn_estimator(r):
    return r.choice(
        [
            {"name": "grpo"},
            {"name": "grpo", "epsilon": 1e-6},
            {"name": "grpo", "ddof": 0},
            {"name": "grpo", "scale": "none"},
            {"name": "dr_grpo"},
            {"name": "rloo"},
            {"name": "grpo", "epsilon": 0.01, "ddof": 0},
        ]
    )


def drawn_kl(r, kinds=("k1", "k2", "k3"), gradient=True):
    out = {"coefficient": r.choice([0.001, 0.01, 0.05, 0.1]), "estimator": r.choice(kinds)}
    if gradient and r.random() < 0.6:
        out["gradient"] = r.choice(["path", "straight_through"])
    return out


def clean_padded(r):
    dp, m = 1, r.choice([1, 2, 3])
    return (
        dict(
            layout="padded",
            micro_batches=m,
            dp=dp,
            **spread_of(r, dp, m),
            rewards=r.choice(["binary", "quarters", "normal"]),
            dtype=r.choice(["float32", "float32", "bfloat16"]),
            drift=r.choice([0.05, 0.25, 0.5]),
        ),
        dict(
            name=r.choice(["grpo", "ppo", "dapo"]),
            loss="ppo",
            den=r.choice(["token", "document"]),
            **drawn_clip(r),
            advantages=drawn_estimator(r),
            upcast=r.random() < 0.5,
        ),
        drawn_record(r),
    )


def clean_packed(r):
    dp, m = r.choice([(1, 1), (2, 1), (2, 3), (3, 2), (1, 4)])
    return (
        {
            "layout": "packed",
            "micro_batches": m,
            "dp": dp,
            "equal_rows": False,
            "groups": r.randint(3, 5),
            "size": r.randint(3, 4),
            "rewards": r.choice(["binary", "normal"]),
            "drift": r.choice([0.1, 0.3]),
        },
        dict(
            name="grpo",
            loss="ppo",
            den=r.choice(["token", "document", "document_sum", "raw"]),
            **drawn_clip(r),
            advantages=drawn_estimator(r),
            kl=drawn_kl(r),
        ),
        drawn_record(r),
    )


def clean_tools(r):
    dp, m = r.choice([(1, 1), (2, 2), (1, 3)])
    den = r.choice(["token", "constant", "document_sum", "document"])
    return (
        {
            "layout": r.choice(["padded", "packed"]),
            "micro_batches": m,
            "dp": dp,
            "equal_rows": False,
            "groups": 3,
            "size": 4,
            "tools": True,
            "lengths": (6, 18),
            "masked_documents": r.choice([0, 0, 1, 2]),
            "rewards": r.choice(["binary", "normal"]),
        },
        dict(
            name="dr_grpo" if den == "constant" else "grpo",
            loss="ppo",
            den=den,
            constant=r.choice([32, 64, 100]),
            **drawn_clip(r),
            advantages=drawn_estimator(r),
        ),
        drawn_record(r),
    )


def clean_mismatch(r):
    dp, m = r.choice([(1, 1), (1, 2), (2, 2)])
    level = r.choice(["token", "token", "document_mean", "document_sum"])
    correction = {"ratio": level}
    correction |= r.choice(
        [
            {"ratio_high": 2.0, "outside": "truncate"},
            {"ratio_low": 0.5, "ratio_high": 1.5, "outside": "truncate"},
            {"ratio_low": 0.9, "ratio_high": 1.1, "outside": "zero"},
            {"ratio_low": 0.5, "ratio_high": 2.0, "outside": "zero"},
        ]
    )
    s = dict(
        name="grpo",
        loss="ppo",
        den=r.choice(["token", "document"]),
        **drawn_clip(r),
        advantages=drawn_estimator(r),
        dual=r.choice([None, 3.0, 1.5]),
        upcast=r.random() < 0.5,
    )
    if r.random() < 0.25:
        s["anchor"] = "sampler"
    else:
        s["correction"] = correction
    return (
        dict(
            layout=r.choice(["padded", "packed"]),
            micro_batches=m,
            dp=dp,
            **spread_of(r, dp, m),
            tools=r.random() < 0.3,
            mismatch=r.choice([0.05, 0.2]),
            drift=r.choice([0.2, 0.6]),
            dtype=r.choice(["float32", "float32", "bfloat16"]),
            temperature=r.choice([1.0, 0.7]),
        ),
        s,
        drawn_record(r),
    )


def clean_sequence(r):
    dp, m = r.choice([(1, 1), (1, 3), (2, 2)])
    return (
        {
            "layout": r.choice(["padded", "packed"]),
            "micro_batches": m,
            "dp": dp,
            "equal_rows": False,
            "groups": 3,
            "size": 4,
            "tools": r.random() < 0.4,
            "drift": r.choice([0.05, 0.2]),
            "rewards": r.choice(["binary", "normal"]),
        },
        dict(
            name="gspo",
            loss="gspo",
            den="document",
            **r.choice([{"clip_low": 0.003, "clip_high": 0.004}, {"clip_low": 0.05, "clip_high": 0.05}]),
            advantages=drawn_estimator(r),
        ),
        drawn_record(r),
    )


def clean_other_losses(r):
    loss = r.choice(["cispo", "reinforce", "importance_sampling"])
    s = {
        "name": loss,
        "loss": loss,
        "den": r.choice(["token", "document", "document_sum"]),
        "advantages": drawn_estimator(r),
        "upcast": r.random() < 0.5,
    }
    if loss == "cispo":
        s |= r.choice(
            [
                {"clip_low": 0.2, "clip_high": 0.28},
                {"clip_low": 1.0, "clip_high": 2.0},
                {"clip_low": 0.3, "clip_high": 0.2},
            ]
        )
    if loss == "importance_sampling":
        s["anchor"] = "old"
    if r.random() < 0.6:
        s["entropy"] = r.choice([0.001, 0.01])
    m = r.choice([1, 2, 4])
    return (
        dict(
            layout=r.choice(["padded", "packed"]),
            micro_batches=m,
            dp=1,
            **spread_of(r, 1, m),
            dtype=r.choice(["float32", "bfloat16"]),
            drift=r.choice([0.1, 0.4]),
            rewards=r.choice(["binary", "quarters"]),
        ),
        s,
        drawn_record(r),
    )


def clean_critic(r):
    dp, m = r.choice([(1, 1), (2, 2), (1, 3)])
    s = dict(
        name="ppo",
        loss="ppo",
        den=r.choice(["token", "document"]),
        **drawn_clip(r),
        critic=True,
        dual=r.choice([None, 3.0]),
    )
    if r.random() < 0.4:
        s["kl"] = drawn_kl(r)
    return (
        dict(
            layout=r.choice(["padded", "packed"]),
            micro_batches=m,
            dp=dp,
            **spread_of(r, dp, m),
            tools=r.random() < 0.4,
            drift=r.choice([0.2, 0.5]),
        ),
        s,
        drawn_record(r),
    )


def clean_verl(r):
    dp, m = r.choice([(1, 1), (1, 1), (2, 2), (1, 3)])
    s = dict(
        system="verl",
        loss="ppo",
        den=r.choice(["token", "document", "document_sum"]),
        **drawn_clip(r),
        dual=r.choice([3.0, 2.0]),
        advantages={"name": "grpo", "verl": True},
        advantage_of_tokens=r.random() < 0.5,
    )
    if r.random() < 0.5:
        s["kl"] = drawn_kl(r, ("k1", "k2", "k3"), gradient=False)
    if r.random() < 0.3:
        s["entropy"] = 0.001
    return (
        dict(
            layout="padded",
            micro_batches=m,
            dp=dp,
            **spread_of(r, dp, m),
            tools=r.random() < 0.3,
            drift=r.choice([0.2, 0.6]),
        ),
        s,
        drawn_record(r),
    )


def clean_trl(r):
    dp, m = r.choice([(1, 1), (1, 1), (2, 2), (1, 3)])
    s = dict(
        system="trl",
        loss="ppo",
        den=r.choice(["token", "document", "local", "constant"]),
        constant=32,
        **drawn_clip(r),
        advantages={"name": "grpo"},
    )
    if r.random() < 0.5:
        s["kl"] = drawn_kl(r, ("k3",), gradient=False)
    return (
        dict(
            layout="padded",
            micro_batches=m,
            dp=dp,
            **spread_of(r, dp, m),
            tools=r.random() < 0.3,
            drift=r.choice([0.2, 0.6]),
        ),
        s,
        drawn_record(r),
    )


def clean_files(r):
    layout = r.choice(["padded", "packed"])
    dp, m = r.choice([(2, 1), (2, 2), (3, 1)])
    cp = r.choice([1, 2]) if layout == "packed" else 1
    s = dict(
        name="grpo", loss="ppo", den=r.choice(["token", "document"]), **drawn_clip(r), advantages=drawn_estimator(r)
    )
    if r.random() < 0.5:
        s["kl"] = drawn_kl(r)
    return (
        dict(layout=layout, micro_batches=m, dp=dp, cp=cp, **spread_of(r, dp, m), lengths=(4, 14)),
        s,
        drawn_record(r, ("files", True)),
    )


def clean_on_policy(r):
    m = r.choice([1, 2, 3])
    s = dict(
        name=r.choice(["grpo", "ppo"]),
        loss="ppo",
        den=r.choice(["token", "document_sum"]),
        **drawn_clip(r),
        advantages=drawn_estimator(r),
        on_policy=True,
        upcast=r.random() < 0.5,
    )
    if r.random() < 0.5:
        s["kl"] = drawn_kl(r)
    if r.random() < 0.4:
        s["correction"] = {"ratio": "token", "ratio_high": 2.0, "outside": "truncate"}
    return (
        dict(
            layout=r.choice(["padded", "packed"]),
            micro_batches=m,
            dp=1,
            **spread_of(r, 1, m),
            drift=0.0,
            dtype=r.choice(["float32", "bfloat16"]),
        ),
        s,
        drawn_record(r, ("old", bool(s.get("correction")) or r.random() < 0.5)),
    )


CLEAN = {
    "padded": clean_padded,
    "packed": clean_packed,
    "tools": clean_tools,
    "mismatch": clean_mismatch,
    "sequence": clean_sequence,
    "losses": clean_other_losses,
    "critic": clean_critic,
    "verl": clean_verl,
    "trl": clean_trl,
    "files": clean_files,
    "on_policy": clean_on_policy,
}
EACH = 12


# ---------------------------------------------------------------------------------------------- faults

GRPO = {
    "name": "grpo",
    "loss": "ppo",
    "den": "token",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "advantages": {"name": "grpo"},
}
DR = {"name": "dr_grpo"}
TOKEN_TIS = {"ratio": "token", "ratio_high": 2.0, "outside": "truncate"}
K3 = {"coefficient": 0.05, "estimator": "k3"}
ALL = {"ratios": True, "clipped": True, "counts": True}
LOSSES = {"losses": ("total", "policy", "kl")}
VERL = {
    "system": "verl",
    "loss": "ppo",
    "den": "token",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual": 3.0,
    "advantages": {"name": "grpo", "verl": True},
}
TRL = {
    "system": "trl",
    "loss": "ppo",
    "den": "token",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "advantages": {"name": "grpo"},
    "constant": 32,
}

# id: (batch, loss, what is recorded, mistake in the code)
FAULTS = {
    # denominators
    "denominator_micro_batch_means": ({"micro_batches": 4, "groups": 3}, GRPO, {}, "mean_of_micro_batches"),
    "denominator_rank_tokens": (
        {"layout": "packed", "dp": 3, "micro_batches": 2, "groups": 3},
        GRPO | {"kl": K3},
        LOSSES,
        "tokens_of_rank",
    ),
    "denominator_completion_tokens": ({"tools": True, "lengths": (6, 18)}, GRPO, {}, "all_completion_tokens"),
    "denominator_clamped_counts": (
        {"layout": "packed", "groups": 4, "size": 4, "masked_documents": 3},
        GRPO,
        ALL,
        "clamped_counts",
    ),
    "denominator_masked_rows": (
        {"groups": 3, "size": 4, "masked_documents": 2},
        GRPO | {"den": "document"},
        {},
        "all_rows",
    ),
    "denominator_survivors": (
        {"layout": "packed", "mismatch": 0.2, "micro_batches": 2, "groups": 3},
        GRPO | {"correction": {"ratio": "token", "ratio_low": 0.8, "ratio_high": 1.25, "outside": "zero"}},
        ALL,
        "survivors",
    ),
    "denominator_document_slipped_in": ({"groups": 4, "size": 3}, GRPO | {"name": "dapo"}, {}, "per_document_mean"),
    "denominator_token_mean_instead": (
        {"groups": 3, "size": 4, "micro_batches": 2},
        VERL | {"den": "document"},
        {},
        "token_mean",
    ),
    "denominator_padded_width": (
        {"groups": 3, "size": 4, "micro_batches": 3, "lengths": (3, 16)},
        GRPO | {"name": "dr_grpo", "den": "constant", "constant": 48, "advantages": DR},
        {},
        "width_of_micro_batch",
    ),
    "denominator_generation_batch": (
        {"groups": 3, "size": 4, "micro_batches": 2},
        TRL,
        {"counts": True},
        "generation_batch",
    ),
    # factors of ranks and micro-batches
    "factor_ranks_missing": (
        {"layout": "packed", "dp": 3, "micro_batches": 2, "groups": 3},
        GRPO | {"den": "document_sum"},
        {},
        "no_ranks_factor",
    ),
    "factor_micro_batches_summed": (
        {"dp": 1, "micro_batches": 5, "groups": 5, "size": 3, "dtype": "bfloat16"},
        GRPO | {"den": "document", "kl": K3},
        LOSSES,
        "times_micro_batches",
    ),
    "factor_local_means_summed": ({"micro_batches": 3, "groups": 3}, GRPO, {}, "mean_of_micro_batches_summed"),
    "factor_micro_batches_twice": (
        {"dp": 2, "micro_batches": 5, "groups": 5, "size": 4},
        VERL,
        {},
        "over_micro_batches_twice",
    ),
    "factor_cp_times": (
        {"layout": "packed", "cp": 4, "micro_batches": 3, "groups": 3, "lengths": (8, 18)},
        GRPO,
        {},
        "times_cp",
    ),
    "factor_cp_over": (
        {"layout": "packed", "dp": 2, "cp": 4, "groups": 3, "lengths": (8, 18)},
        GRPO | {"kl": K3},
        {"files": True},
        "over_ranks_and_cp",
    ),
    "factor_cp_reported_only": (
        {"layout": "packed", "cp": 4, "micro_batches": 2, "groups": 3, "lengths": (8, 18)},
        GRPO | {"name": "gspo", "loss": "gspo", "den": "document", "clip_low": 0.02, "clip_high": 0.03},
        {},
        "reported_times_cp",
    ),
    "factor_cp_local_means": (
        {"layout": "packed", "dp": 1, "cp": 2, "groups": 3, "lengths": (6, 17), "tools": True},
        GRPO,
        {"files": True},
        "tokens_of_cp_rank",
    ),
    "factor_documents_again": (
        {"layout": "packed", "groups": 4, "size": 4, "micro_batches": 2},
        GRPO | {"den": "document"},
        {},
        "gradient_over_documents_again",
    ),
    "factor_sign": ({"groups": 3, "size": 4}, GRPO | {"kl": K3}, LOSSES, "sign"),
    "factor_buffer_twice": ({"layout": "packed", "micro_batches": 4, "groups": 3}, GRPO, {}, "buffer_added_twice"),
    # masks
    "mask_tool_tokens": (
        {"tools": True, "lengths": (6, 18), "micro_batches": 2, "groups": 3},
        TRL,
        {},
        "tool_tokens_train",
    ),
    "mask_end_of_text": ({"groups": 3, "size": 4}, GRPO | {"den": "document"}, {}, "last_token_lost"),
    "mask_first_token": ({"layout": "packed", "dp": 2, "micro_batches": 2, "groups": 3}, GRPO, {}, "first_token_lost"),
    "mask_shifted": ({"tools": True, "lengths": (6, 18)}, GRPO, {"counts": True}, "mask_of_neighbour"),
    "mask_rolled_in_pack": (
        {"layout": "packed", "tools": True, "lengths": (6, 18)},
        GRPO | {"advantages": DR},
        {},
        "mask_rolled_over_row",
    ),
    "mask_last_micro_batch": ({"micro_batches": 4, "groups": 4, "size": 3}, GRPO, {}, "last_micro_batch_trains"),
    "mask_entropy_padding": (
        {"groups": 3, "size": 4, "lengths": (3, 16), "drift": 0.1, "padding_entropy": 1.75},
        {"name": "reinforce", "loss": "reinforce", "den": "token", "entropy": 0.01, "advantages": {"name": "rloo"}},
        {},
        "entropy_of_padding",
    ),
    "mask_sequence_ratio": (
        {"tools": True, "lengths": (6, 18), "drift": 0.2},
        GRPO | {"name": "gspo", "loss": "gspo", "den": "document", "clip_low": 0.1, "clip_high": 0.1},
        {},
        "sequence_over_all_tokens",
    ),
    # shifts
    "shift_old_late": ({"groups": 3, "size": 4}, GRPO, ALL, "old_one_late"),
    "shift_ref_late": (
        {"groups": 3, "size": 4, "micro_batches": 2},
        GRPO | {"kl": {"coefficient": 0.1, "estimator": "k2"}},
        LOSSES,
        "ref_one_late",
    ),
    "shift_advantage_late": (
        {"layout": "packed", "dp": 2, "micro_batches": 2, "groups": 3},
        {"name": "ppo", "loss": "ppo", "den": "token", "clip_low": 0.2, "clip_high": 0.2, "critic": True},
        {},
        "advantage_one_late",
    ),
    "shift_pack_rolled": ({"layout": "packed", "groups": 4, "size": 3, "pad": 5}, GRPO, ALL, "old_rolled_over_row"),
    "shift_turns_closed_up": (
        {"tools": True, "lengths": (8, 20), "mismatch": 0.1},
        GRPO | {"correction": TOKEN_TIS},
        {},
        "sampler_packed_to_front",
    ),
    # orders
    "order_advantages_dealt": (
        {"dp": 2, "micro_batches": 3, "groups": 4, "size": 3, "rewards": "normal"},
        GRPO,
        {},
        "advantages_of_other_split",
    ),
    "order_sorted_by_length": ({"groups": 4, "size": 3, "lengths": (3, 16)}, VERL, ALL, "old_in_order_of_length"),
    "order_advantages_sorted": (
        {"layout": "packed", "groups": 4, "size": 3, "rewards": "normal", "lengths": (3, 16)},
        GRPO | {"den": "document"},
        {},
        "advantages_sorted",
    ),
    # advantages
    "estimator_parentheses": ({"groups": 3, "size": 4, "rewards": "normal"}, GRPO, {}, "missing_parentheses"),
    "estimator_std_kept": (
        {"layout": "packed", "groups": 3, "size": 5, "rewards": "normal"},
        GRPO | {"advantages": DR, "den": "constant", "constant": 64, "name": "dr_grpo"},
        {},
        "std_though_dr_grpo",
    ),
    "estimator_leave_one_out": (
        {"groups": 3, "size": 4, "rewards": "quarters", "dp": 2, "micro_batches": 2},
        VERL,
        {},
        "leave_one_out",
    ),
    "estimator_rloo_mean": (
        {"groups": 3, "size": 4, "rewards": "normal"},
        GRPO | {"advantages": {"name": "rloo"}},
        {},
        "mean_of_all",
    ),
    "estimator_cancellation": (
        {"groups": 3, "size": 4, "rewards": "quarters", "offset": 4096.0},
        GRPO,
        {},
        "variance_by_squares",
    ),
    "estimator_population": (
        {"groups": 3, "size": 3, "rewards": "binary", "layout": "packed"},
        GRPO,
        {},
        "population_std",
    ),
    "estimator_normalised_again": (
        {"groups": 4, "size": 3, "rewards": "normal", "layout": "packed"},
        GRPO,
        {},
        "normalised_again",
    ),
    "group_of_rank": (
        {"dp": 3, "micro_batches": 2, "groups": 4, "size": 6, "lengths": (3, 8)},
        GRPO | {"advantages": DR},
        {},
        "baseline_of_rank",
    ),
    "group_masked_rows": (
        {"layout": "packed", "groups": 3, "size": 5, "masked_documents": 3, "rewards": "normal"},
        GRPO,
        {},
        "masked_rows_in_baseline",
    ),
    "group_incomplete": (
        {"groups": 4, "sizes": (4, 3, 4, 4), "shuffle": False, "rewards": "normal"},
        GRPO | {"advantages": DR},
        {},
        "groups_by_reshape",
    ),
    "group_equal_prompts": ({"groups": 4, "size": 3, "rewards": "normal"}, VERL, {}, "prompts_with_equal_text"),
    "group_interleaved": (
        {"groups": 3, "size": 4, "interleave": True, "rewards": "normal"},
        GRPO | {"advantages": {"name": "rloo"}},
        {},
        "groups_by_reshape",
    ),
    "group_whole_batch": ({"layout": "packed", "groups": 4, "size": 3, "rewards": "quarters"}, GRPO, {}, "whole_batch"),
    "factor_reward_cp": (
        {
            "layout": "packed",
            "cp": 2,
            "dp": 1,
            "micro_batches": 3,
            "groups": 3,
            "lengths": (6, 14),
            "rewards": "normal",
        },
        GRPO | {"advantages": DR},
        {},
        "rewards_on_every_cp_rank",
    ),
    # policies
    "stale_sampler": (
        {"layout": "packed", "groups": 3, "size": 4, "mismatch": 0.15},
        GRPO,
        ALL | {"sampler": True},
        "sampler_as_old",
    ),
    "stale_weights": (
        {"groups": 3, "size": 4, "mismatch": 0.15},
        GRPO | {"correction": TOKEN_TIS},
        {},
        "weights_of_current_policy",
    ),
    "stale_ratio_one": (
        {"groups": 3, "size": 4, "dtype": "bfloat16", "drift": 0.6},
        GRPO,
        {"ratios": True},
        "ratio_of_itself",
    ),
    "rounded_sampler": (
        {"groups": 3, "size": 4, "micro_batches": 2, "mismatch": 0.15},
        GRPO | {"correction": TOKEN_TIS},
        {},
        "sampler_in_bfloat16",
    ),
    "temperature_twice": (
        {"layout": "packed", "groups": 3, "size": 4, "temperature": 0.7},
        GRPO,
        {"ratios": True},
        "logprobs_over_temperature",
    ),
    # clips
    "clip_never": (
        {"layout": "packed", "groups": 3, "size": 4, "drift": 0.6},
        GRPO | {"clip_high": 0.3},
        {"clipped": True},
        "never_clipped",
    ),
    "clip_low_bound": ({"groups": 4, "size": 3, "drift": 0.6, "lengths": (8, 16)}, GRPO, {}, "low_bound_of_dual_clip"),
    "clip_cispo_bounds": (
        {"groups": 3, "size": 4, "drift": 0.5},
        {
            "name": "cispo",
            "loss": "cispo",
            "den": "token",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "advantages": {"name": "grpo"},
        },
        {},
        "bounds_without_one",
    ),
    "clip_dual_default": ({"groups": 4, "size": 3, "drift": 1.4, "lengths": (8, 16)}, GRPO, {}, "dual_clip_by_default"),
    # corrections
    "correction_missing": (
        {"layout": "packed", "groups": 3, "size": 4, "mismatch": 0.15, "micro_batches": 2},
        GRPO | {"correction": TOKEN_TIS},
        {"correction_weights": False},
        "no_correction",
    ),
    "correction_sum": (
        {"groups": 3, "size": 4, "mismatch": 0.1},
        GRPO | {"correction": {"ratio": "document_mean", "ratio_low": 0.5, "ratio_high": 2.0, "outside": "truncate"}},
        {},
        "sum_though_mean",
    ),
    "correction_unmasked": (
        {"groups": 3, "size": 4, "mismatch": 0.25},
        GRPO | {"correction": {"ratio": "token", "ratio_low": 0.8, "ratio_high": 1.25, "outside": "zero"}},
        {},
        "not_truncated",
    ),
    "correction_not_truncated": (
        {"layout": "packed", "groups": 3, "size": 4, "mismatch": 0.7, "dtype": "bfloat16"},
        GRPO | {"correction": {"ratio": "token", "ratio_high": 1.5, "outside": "truncate"}},
        {},
        "not_truncated",
    ),
    # penalties
    "penalty_no_gradient": (
        {"groups": 3, "size": 4, "micro_batches": 2},
        GRPO | {"kl": {"coefficient": 0.1, "estimator": "k3"}},
        LOSSES,
        "kl_without_gradient",
    ),
    "penalty_sign": (
        {"groups": 3, "size": 4, "micro_batches": 2},
        VERL | {"kl": {"coefficient": 0.05, "estimator": "k3"}},
        {},
        "kl_maximised",
    ),
    "penalty_suffix": (
        {"layout": "packed", "groups": 3, "size": 4},
        GRPO | {"kl": {"coefficient": 0.1, "estimator": "k3", "gradient": "straight_through"}},
        LOSSES,
        "suffix_dropped",
    ),
    "penalty_k1": ({"groups": 3, "size": 4}, VERL | {"kl": {"coefficient": 0.01, "estimator": "k3"}}, {}, "k1_in_loss"),
    "penalty_reversed": (
        {"groups": 3, "size": 4, "ref_drift": 0.6},
        GRPO | {"kl": {"coefficient": 0.1, "estimator": "k3"}},
        LOSSES,
        "kl_of_the_other",
    ),
    "penalty_local_mean": (
        {"dp": 2, "micro_batches": 2, "groups": 3, "size": 4},
        GRPO | {"kl": {"coefficient": 0.1, "estimator": "k2"}},
        LOSSES,
        "penalty_mean_of_micro_batches",
    ),
    "penalty_over_padding": (
        {"groups": 3, "size": 4, "lengths": (3, 16)},
        GRPO | {"kl": {"coefficient": 0.1, "estimator": "k3"}},
        LOSSES,
        "penalty_over_padding",
    ),
    "penalty_entropy_lost": (
        {"groups": 3, "size": 4, "micro_batches": 2},
        {
            "name": "importance_sampling",
            "loss": "importance_sampling",
            "den": "document",
            "anchor": "old",
            "entropy": 0.01,
            "advantages": {"name": "grpo"},
        },
        {},
        "entropy_lost",
    ),
    # reports
    "report_kl_absolute": ({"groups": 3, "size": 4}, VERL, {"metrics": True}, "kl_metric_absolute"),
    "report_clip_fraction": (
        {"groups": 3, "size": 4, "drift": 0.5},
        TRL,
        {"metrics": True},
        "clip_fraction_compared_the_wrong_way",
    ),
    "report_last_micro_batch": ({"micro_batches": 4, "groups": 3}, GRPO, {}, "loss_of_last_micro_batch"),
}


def seed_of(text):
    return SEED + zlib.crc32(text.encode()) % 10**6


def main(out):
    out = Path(out)
    table = {}
    for name, (batch, s, record, bug) in FAULTS.items():
        b = draw_batch(seed_of(name), **batch)
        right, wrong = run(b, s), run(b, s, bug)
        write(out / "faults" / name, b, s, wrong, record)
        table[name] = moved(b, s, right, wrong, record)
        top = sorted(table[name].items(), key=lambda kv: -kv[1])
        print(f"{name:34s}", ", ".join(f"{k} {v:.3g}" for k, v in top[:4]) or "NOTHING")
    for kind, draw in CLEAN.items():
        for k in range(EACH):
            name = f"{kind}_{k:02d}"
            for attempt in range(9):  # a step in which no token has a gradient is drawn again
                seed = seed_of(name) + attempt
                batch, s, record = draw(random.Random(seed))
                b = draw_batch(seed, **batch)
                R = run(b, s)
                if int((R.coefficients != 0).sum()) > 3:
                    break
            write(out / "clean" / name, b, s, R, record)
    return table


if __name__ == "__main__":
    main(sys.argv[1])
