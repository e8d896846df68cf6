"""CISPO on packed rows of one document budget: ranks by turns in one process, a sampler one update behind."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor

from common import Decoder, Doc, Gradients, Log, Run, chunks, counts, disturb, entropies, grids, groups, late, logprobs
from common import pack, packed, padded, per_token

ROLLOUTS, PROMPTS, SIZE, MINI, WIDTH = 2, 4, 4, 2, 44
TEMPERATURE, LOW, HIGH, CAP = 0.8, 0.3, 0.3, 1.5


def cispo(run: Run) -> Gradients:
    model = Decoder(run.seed, kernel=run.get("attention", "sdpa"))
    sampler = copy.deepcopy(model).requires_grad_(False)
    disturb(sampler, run.seed, 0.03)
    if run.bf16:
        model, sampler = model.bfloat16(), sampler.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9)
    ranks, width, kernel = run.get("ranks", 2), run.get("width", WIDTH), run.get("loss", "gather")
    context = {"dp": ranks, "temperature": TEMPERATURE, "denominator": "trained tokens of the mini-batch", "max_grad_norm": 1.0}
    log = Log(run, model, optimizer, context | {"clip": [LOW, HIGH], "sampler_weight_cap": CAP})

    def forward(net: torch.nn.Module, b: dict[str, Tensor], temperature: float = TEMPERATURE, low: bool = False) -> Tensor:
        logits = net(b["ids"], attention_mask=b.get("block", b["mask"]), position_ids=b["positions"])[:, :-1]
        return (logits.bfloat16() if low else logits.float()) / temperature

    def positions(b: dict[str, Tensor], docs: list[Doc]) -> dict[str, Tensor]:
        if run.has("positions_restart"):
            for d in docs:
                prompt = len(d) - sum(d.response)
                own = b["documents"] == d.number
                b["positions"][own] = torch.cat([torch.arange(prompt), torch.arange(len(d) - prompt)])
        return b

    for rollout in range(ROLLOUTS):
        rng = np.random.default_rng([run.seed, rollout])
        docs = groups(rng, PROMPTS, SIZE, 4, 16)
        rewards = torch.tensor([d.values["reward"] for d in docs]).view(PROMPTS, SIZE)
        advantages = (rewards - rewards.mean(1, keepdim=True)).reshape(-1).tolist()
        for d, a in zip(docs, advantages, strict=True):
            d.values["advantage"] = a
        if run.has("advantages_unsorted"):
            for d, a in zip(sorted(docs, key=lambda d: -len(d)), advantages, strict=True):
                d.values["advantage"] = a
        seen: dict[int, Tensor] = {}
        for part in chunks(run.ordered(docs, rollout), run.get("engine", 8)):  # the engine's own batches, padded left
            b = padded(part, "left")
            with torch.no_grad():
                x = late(logprobs(forward(sampler, b), b["ids"][:, 1:]))
            for i, d in enumerate(part):
                seen[d.number] = x[i][b["mask"][i]]
        sampler.load_state_dict(model.state_dict())  # the engine's weights of the next rollout

        def rows_of(docs: list[Doc]) -> list[list[Doc]]:
            return pack(sorted(docs, key=lambda d: -len(d)), width)

        old: dict[int, Tensor] = {}
        for row in rows_of(run.ordered(docs, rollout)):
            b = positions(packed([row], width), row)
            with torch.no_grad():
                logits = forward(model, b, 1.0 if run.has("old_temperature") else TEMPERATURE)
                x = late(logprobs(logits, b["ids"][:, 1:], kernel))[0]
            for d in row:
                old[d.number] = x[b["documents"][0] == d.number]
        for n, mini in enumerate(chunks([docs[i] for i in rng.permutation(len(docs))], len(docs) // MINI)):
            mini = run.ordered(mini, 10 * rollout + n)
            dealt = [rows_of(mini[r::ranks]) for r in range(ranks)]
            if run.has("row_repeated"):
                most = max(map(len, dealt))
                dealt = [rows + rows[:1] * (most - len(rows)) for rows in dealt]
            micro = [[positions(packed([row], width), row) for row in rows] for rows in dealt]
            if run.has("last_token_dropped"):
                for b in (b for rank in micro for b in rank):
                    last = b["documents"] != torch.nn.functional.pad(b["documents"], (0, 1), value=-1)[:, 1:]
                    b["trained"] &= ~last
            total = sum(sum(d.response) for d in mini)
            if run.has("last_token_dropped"):
                total -= len(mini)
            for rank, rows in zip(micro, dealt, strict=True):
                own = sum(int(b["trained"].sum()) for b in rank)
                for b, row in zip(rank, rows, strict=True):
                    stored = []
                    for values in (old, seen):
                        grid = torch.zeros(b["ids"].shape)
                        for d in row:
                            grid[b["documents"] == d.number] = values[d.number]
                        stored.append(grid)
                    before, sampled = stored
                    logits = forward(model, b, low=run.has("head_bf16"))
                    logp = late(logprobs(logits, b["ids"][:, 1:], kernel)).float()
                    a = per_token(b, row, "advantage")
                    ratio = (logp - before).exp()
                    weight = ratio.clamp(1 - LOW, 1 + HIGH)
                    if not run.has("weight_not_detached"):
                        weight = weight.detach()
                    correction = (before - sampled).exp().clamp(max=CAP)
                    losses = -weight * a * logp
                    if not run.has("correction_dropped"):
                        losses = losses * correction
                    losses = losses * b["trained"]
                    loss = losses.sum() / own / ranks if run.has("local_tokens") else losses.sum() / total
                    loss.backward()
                    tokens = {
                        "policy_logprobs": logp,
                        "old_logprobs": before,
                        "sampler_logprobs": sampled,
                        "entropy_nats": late(entropies(logits.float())),
                        "losses": losses,
                        "advantages": a,
                        "rewards": per_token(b, row, "reward"),
                        "ratios": ratio,
                        "places": torch.arange(width).expand(b["ids"].shape),
                    }
                    log.note(counts=counts(b), tokens=grids(b) | tokens)
            log.take()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return log.close()
