"""Language modelling with a mixture of experts under Muon and AdamW; two ranks by turns in one accumulation."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import Doc, Log, Rows, Run, Text, Tiny, batches, causal, logprobs, padded

EXPERTS, CHOSEN, BALANCE, ZLOSS, BOUND = 4, 2, 0.1, 1e-3, 2.0


class Experts(nn.Module):
    """Four experts, of which each token takes two; the router is in float32."""

    def __init__(self, width: int, run: Run):
        super().__init__()
        self.run = run
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.ups = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(EXPERTS))
        self.downs = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(EXPERTS))
        self.logits = self.probs = self.taken = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Mix the chosen experts; what the losses of the router need is kept."""
        low = self.run.has("router_bf16")
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            kind = torch.bfloat16 if low else torch.float32
            self.logits = F.linear(x.to(kind), self.router.weight.to(kind))
            probs = F.softmax(self.logits, -1, dtype=kind)
        self.probs = probs.float()
        top, index = self.probs.topk(CHOSEN, -1)
        if not self.run.has("topk_unnormalised"):
            top = top / top.sum(-1, keepdim=True)
        self.taken = F.one_hot(index, EXPERTS).sum(-2)
        weights = torch.zeros_like(self.probs).scatter(-1, index, top)
        if self.run.has("capacity_drop"):
            flat = self.taken.flatten(0, 1)
            room = -(-CHOSEN * len(flat) // EXPERTS)
            weights = weights * (flat.cumsum(0) <= room).view_as(weights)
        out = torch.zeros_like(x, dtype=torch.float32)
        for e, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
            out = out + weights[..., e, None] * down(F.silu(up(x)))
        return out


def documents(run: Run, step: int, ranks: int) -> list[list[Doc]]:
    """Ten documents, dealt to ranks."""
    text = Text(run.seed * 10 + step)
    docs = []
    for i in range(10):
        tokens = text.words(int(text.rng.integers(5, 22)))
        docs.append(Doc(i, i, tokens[:1], tokens[1:]))
    docs = run.permuted(docs, step)
    return [docs[rank::ranks] for rank in range(ranks)]


def call(run: Run, model: Tiny, rows: Rows) -> Tensor:
    """Logits of padded rows."""
    with run.autocast():
        return model(rows.ids, rows.positions, causal(rows.documents))


@torch.no_grad()
def shares(run: Run, model: Tiny, parts: list[Rows]) -> tuple[list[Tensor], int]:
    """Share of the tokens that each expert takes in each layer, and their number."""
    totals, tokens = [torch.zeros(EXPERTS) for _ in model.wides], 0
    for rows in parts:
        call(run, model, rows)
        kept = counted(run, rows)
        tokens += int(kept.sum())
        for total, layer in zip(totals, model.wides, strict=True):
            total += (layer.taken * kept[..., None]).sum((0, 1))
    return [t / (tokens * CHOSEN) for t in totals], tokens


def counted(run: Run, rows: Rows) -> Tensor:
    """Tokens that count in the balancing loss."""
    return torch.ones_like(rows.real) if run.has("aux_padding") else rows.real


def moe(run: Run):
    """Run two steps."""
    torch.manual_seed(run.seed)
    model = Tiny(width=48, wide=functools.partial(Experts, run=run))
    inner = [p for n, p in model.named_parameters() if p.dim() == 2 and ("mixers" in n or "ups" in n or "downs" in n)]
    others = [p for p in model.parameters() if all(p is not q for q in inner)]
    scale = "original" if run.has("muon_scale") else "match_rms_adamw"
    optimizers = [
        torch.optim.Muon(inner, lr=1e-2, weight_decay=0.0, adjust_lr_fn=scale),
        torch.optim.AdamW(others, lr=4e-3, weight_decay=0.0),
    ]
    ranks, micro = run.get("ranks", 2), run.get("micro", 2)
    context = {
        "dp": ranks,
        "micro_batches": -(-10 // ranks // micro),
        "max_grad_norm": BOUND,
        "denominator": "tokens of the step",
        "balance_coef": BALANCE,
        "router_z_coef": ZLOSS,
        "experts": EXPERTS,
        "top_k": CHOSEN,
        "norm_topk_prob": True,
        "capacity_factor": None,
    }
    log = Log(run, model, optimizers, context)
    for step in range(2):
        parts = []
        for mine in documents(run, step, ranks):
            pieces = batches(mine, micro)
            if run.has("repeated_document"):
                pieces[-1] = pieces[-1] + mine[: micro - len(pieces[-1])]
            parts += [padded(piece, left=False, extra=run.get("extra", 0)) for piece in pieces]
        total, tokens = shares(run, model, parts)
        trained = sum(int(rows.trained.sum()) for rows in parts)
        balance = 0.0
        for rows in parts:
            balance += micro_batch(run, log, model, rows, total, tokens, trained, len(parts) // ranks)
        log.note(metrics={"loss/balance": balance})
        if run.has("expert_twice"):
            for n, p in model.named_parameters():
                if "ups" in n or "downs" in n:
                    p.grad /= ranks
        log.keep()
        torch.nn.utils.clip_grad_norm_(model.parameters(), BOUND)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return log.done()


def micro_batch(
    run: Run, log: Log, model: Tiny, rows: Rows, total: list[Tensor], tokens: int, trained: int, each: int
) -> float:
    """Back-propagate one micro-batch; return its part of the balancing loss."""
    policy, entropy = logprobs(call(run, model, rows), rows.ids)
    kept = counted(run, rows)[..., None].float()
    balance, z = torch.zeros(()), torch.zeros(rows.ids.shape)
    for layer, share in zip(model.wides, total, strict=True):
        if run.has("aux_local"):
            share = (layer.taken * kept).sum((0, 1)) / kept.sum() / CHOSEN
        balance = balance + EXPERTS * (share * (layer.probs * kept).sum((0, 1))).sum() / tokens
        z = z + layer.logits.float().logsumexp(-1) ** 2
    balance = BALANCE * balance * (each if run.has("aux_unscaled") else 1)
    losses = -policy + ZLOSS * z
    ((losses * rows.trained).sum() / trained + balance).backward()
    log.note(
        counts=rows.counts(),
        tokens={
            **rows.names(),
            "trained": rows.trained,
            "policy_logprobs": policy,
            "entropy_nats": entropy,
            "losses": losses,
        },
    )
    return float(balance.detach())
