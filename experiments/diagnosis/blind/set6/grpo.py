"""GRPO on batches padded left: two rollouts of two mini-batches each, k3 KL in the loss, truncated responses left out."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from common import Doc, Gradients, Log, Run, VOCAB, chunks, counts, disturb, entropies, grids, groups, late, logprobs
from common import padded, per_token

ROLLOUTS, PROMPTS, SIZE, MINI = 2, 4, 4, 2
TEMPERATURE, BETA, LOW, HIGH = 0.7, 0.15, 0.2, 0.2


def model_of(run: Run) -> Qwen3ForCausalLM:
    torch.manual_seed(run.seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.15,
        tie_word_embeddings=False,
        attn_implementation=run.get("attention", "sdpa"),
        pad_token_id=0,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config)


def grpo(run: Run) -> Gradients:
    model, ref = model_of(run), model_of(run).requires_grad_(False).eval()
    disturb(model, run.seed, 0.04)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0, eps=1e-4)
    context = {"temperature": TEMPERATURE, "max_grad_norm": 1.0, "denominator": "responses of the mini-batch", "beta": BETA}
    log = Log(run, model, optimizer, context | {"clip": [LOW, HIGH], "group_size": SIZE})
    micro, extra, kernel = run.get("micro", 4), run.get("extra", 0), run.get("loss", "gather")

    def forward(net: torch.nn.Module, b: dict[str, Tensor], temperature: float, masked: bool = True) -> Tensor:
        with run.autocast():
            mask = b["mask"].long() if masked else torch.ones_like(b["ids"])
            logits = net(input_ids=b["ids"], attention_mask=mask, position_ids=b["positions"]).logits
        return logits.float()[:, :-1] / temperature

    for rollout in range(ROLLOUTS):
        rng = np.random.default_rng([run.seed, rollout])
        docs = groups(rng, PROMPTS, SIZE, 4, 17, cut=16)
        rewards = torch.tensor([d.values["reward"] for d in docs], dtype=torch.float64).float()
        if run.has("groups_interleaved"):
            table = rewards.view(SIZE, PROMPTS)
            advantages = ((table - table.mean(0)) / (table.std(0) + 1e-4)).reshape(-1)
        else:
            table = rewards.view(PROMPTS, SIZE)
            advantages = ((table - table.mean(1, keepdim=True)) / (table.std(1, keepdim=True) + 1e-4)).reshape(-1)
        for d, a in zip(docs, advantages.tolist(), strict=True):
            d.values["advantage"] = a
        # log-probabilities of the rollout, by response, as they are stored between phases
        old: dict[int, Tensor] = {}
        reference: dict[int, Tensor] = {}
        for part in chunks(run.ordered(docs, rollout), micro):
            b = padded(part, "left", extra)
            with torch.no_grad():
                x, y = (late(logprobs(forward(net, b, TEMPERATURE), b["ids"][:, 1:], kernel)) for net in (model, ref))
            for i, d in enumerate(part):
                old[d.number], reference[d.number] = x[i][b["mask"][i]], y[i][b["mask"][i]]
        shuffled = [docs[i] for i in rng.permutation(len(docs))]
        for n, mini in enumerate(chunks(shuffled, len(docs) // MINI)):
            # the responses of the rollout that lie where those of the mini-batch do
            others = {d.number: docs[n * len(mini) + i].number for i, d in enumerate(mini)}
            total = sum(not d.values["truncated"] for d in mini)
            all_tokens = sum(sum(d.response) for d in mini if not d.values["truncated"])
            parts = chunks(run.ordered(mini, 10 * rollout + n), micro)
            kl_sum = 0.0
            for part in parts:
                b = padded(part, "left", extra)
                for i, d in enumerate(part):
                    if d.values["truncated"]:
                        b["trained"][i] = False
                spread = {}
                for name, stored in (("old", old), ("ref", reference)):
                    grid = torch.zeros(b["ids"].shape)
                    for i, d in enumerate(part):
                        number = others[d.number] if name == "old" and run.has("old_misaligned") else d.number
                        value = stored[number]
                        if number != d.number:  # stored padded on the left, as the batch is: ends lie upon each other
                            value = torch.nn.functional.pad(value, (max(0, len(d) - len(value)), 0))[-len(d) :]
                        grid[i, b["mask"][i]] = value
                    spread[name] = grid
                scale = 1.0 if run.has("temperature_missing") else TEMPERATURE
                logits = forward(model, b, scale, not run.has("padding_attended"))
                logp = late(logprobs(logits, b["ids"][:, 1:], kernel))
                a = per_token(b, part, "advantage")
                ratio = (logp - spread["old"]).exp()
                bounded = ratio.clamp(1 - LOW, 1 + HIGH)
                policy = -(bounded * a) if run.has("clip_without_min") else -torch.minimum(ratio * a, bounded * a)
                outside = (ratio < 1 - LOW) | (ratio > 1 + HIGH)
                clipped = outside if run.has("clip_without_min") else outside & ((ratio > 1) == (a > 0)) & (a != 0)
                d_ref = spread["ref"] - logp
                kl = -d_ref if run.has("kl_k1") else d_ref.exp() - d_ref - 1
                losses = (policy + BETA * kl) * b["trained"]
                lengths = b["trained"].sum(1).clamp(min=1)
                if run.has("token_mean"):
                    loss = losses.sum() / all_tokens
                elif run.has("no_division"):
                    loss = (losses.sum(1) / lengths).sum() / max(1, int((b["trained"].sum(1) > 0).sum()))
                else:
                    loss = (losses.sum(1) / lengths).sum() / total
                loss.backward()
                kl_sum += float((kl * b["trained"]).sum()) / all_tokens
                tokens = {
                    "policy_logprobs": logp,
                    "old_logprobs": spread["old"],
                    "ref_logprobs": spread["ref"],
                    "entropy_nats": late(entropies(logits)),
                    "losses": losses,
                    "advantages": a,
                    "rewards": per_token(b, part, "reward"),
                    "ratios": ratio,
                    "clipped": clipped & b["trained"],
                }
                log.note(counts=counts(b), tokens=grids(b) | tokens)
            log.note(metrics={"loss/kl": BETA * kl_sum, "objective/kl": kl_sum})
            log.take()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return log.close()
