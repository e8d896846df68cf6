"""GRPO on padded rows: two mini-batches for each rollout, micro-batches, a KL loss and a correction for the sampler."""

from __future__ import annotations

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from common import VOCAB, Doc, Log, Rows, Run, Text, batches, logprobs, padded

TEMPERATURE, LOW, HIGH, KL, CAP = 0.8, 0.15, 0.28, 0.05, 1.5


def build(seed: int, attention: str) -> Qwen2ForCausalLM:
    """A small Qwen2."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.18,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation=attention,
    )
    return Qwen2ForCausalLM(config)


def call(run: Run, model: Qwen2ForCausalLM, rows: Rows) -> torch.Tensor:
    """Logits of padded rows."""
    with run.autocast():
        return model(
            input_ids=rows.ids, attention_mask=rows.real.long(), position_ids=rows.positions, use_cache=False
        ).logits


def rollout(run: Run, step: int, policy: Qwen2ForCausalLM, reference: Qwen2ForCausalLM, micro: int) -> list[Doc]:
    """Sixteen responses with rewards, advantages and log-probabilities of the three policies."""
    text = Text(run.seed * 10 + step)
    docs = [doc for g in range(4) for doc in text.group(4 * g, g, 4)]
    score(run, policy, docs, micro, "old", TEMPERATURE)
    score(run, reference, docs, micro, "ref", 1.0 if run.has("ref_temperature") else TEMPERATURE)
    for doc in docs:
        doc.values["sampler"] = doc.values["old"] + 0.15 * torch.tensor(doc.noise, dtype=torch.float32)
        rewards = torch.tensor([d.reward for d in docs if d.group == doc.group])
        std = rewards.std(unbiased=run.has("std_population") is False)
        doc.values["advantage"] = float((doc.reward - rewards.mean()) / (std + 1e-6))
        doc.values["reward"] = doc.reward
    return docs


@torch.no_grad()
def score(run: Run, model: Qwen2ForCausalLM, docs: list[Doc], micro: int, name: str, temperature: float) -> None:
    """Compute log-probabilities of the responses."""
    for part in batches(docs, micro):
        rows = padded(part)
        rows.gather(name, logprobs(call(run, model, rows), rows.ids, temperature)[0])


def grpo(run: Run):
    """Run two rollouts of two mini-batches each."""
    attention = run.get("attention", "sdpa")
    policy, reference = build(run.seed, attention), build(run.seed, attention)
    generator = torch.Generator().manual_seed(run.seed)
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.03 * torch.randn(p.shape, generator=generator))
    reference.requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.01)
    micro, extra = run.get("micro", 4), run.get("extra", 0)
    context = {
        "dp": 1,
        "micro_batches": 8 // micro,
        "temperature": TEMPERATURE,
        "max_grad_norm": 1.0,
        "denominator": "tokens",
        "clip": [LOW, HIGH],
        "kl_coef": KL,
        "sampler_cap": CAP,
        "overlong_filter": False,
    }
    log = Log(run, policy, optimizer, context)
    for step in range(2):
        docs = rollout(run, step, policy, reference, micro)
        for half, mini in enumerate((docs[0:4] + docs[8:12], docs[4:8] + docs[12:16])):
            if run.has("old_recomputed"):
                score(run, policy, mini, micro, "old", TEMPERATURE)
            update(run, log, policy, run.permuted(mini, 2 * step + half), micro, extra)
            log.keep()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return log.done()


def update(run: Run, log: Log, policy: Qwen2ForCausalLM, mini: list[Doc], micro: int, extra: int) -> None:
    """Back-propagate the micro-batches of a mini-batch."""
    filtered = run.has("overlong_filter")
    tokens = sum(len(d.response) for d in mini if d.finished or not filtered)
    total = torch.zeros(3)
    for part in batches(mini, micro):
        rows = padded(part, extra=extra)
        if filtered:
            for doc in part:
                if not doc.finished:
                    rows.trained[rows.documents == doc.number] = False
        temperature = 1.0 if run.has("temperature_current") else TEMPERATURE
        policy_logs, entropy = logprobs(call(run, policy, rows), rows.ids, temperature)
        old, ref, sampler, advantage, reward = (
            rows.spread(n) for n in ("old", "ref", "sampler", "advantage", "reward")
        )
        ratio = torch.where(rows.trained, policy_logs - old, 0.0).exp()
        high = LOW if run.has("clip_symmetric") else HIGH
        plain, bound = ratio * advantage, ratio.clamp(1 - LOW, 1 + high) * advantage
        clipped = bound < plain
        weight = ((sampler - old) if run.has("tis_inverted") else (old - sampler)).exp().clamp(max=CAP)
        d = torch.where(rows.trained, ref - policy_logs, 0.0)
        if run.has("kl_swapped"):
            d = -d
        kl = d.exp() - d - 1
        loss_tokens = -torch.min(plain, bound) * weight + KL * kl
        if run.has("seq_mean"):
            lengths = rows.trained.sum(1).clamp(min=1)
            loss = ((loss_tokens * rows.trained).sum(1) / lengths).sum() / len(mini)
        else:
            loss = (loss_tokens * rows.trained).sum() / tokens
        loss.backward()
        mask = rows.trained
        total += torch.stack([(kl * mask).sum(), (clipped * mask).sum(), (entropy * mask).sum()]).detach() / tokens
        log.note(
            counts=rows.counts(),
            tokens={
                **rows.names(),
                "trained": rows.trained,
                "policy_logprobs": policy_logs,
                "old_logprobs": old,
                "ref_logprobs": ref,
                "sampler_logprobs": sampler,
                "entropy_nats": entropy,
                "losses": loss_tokens,
                "advantages": advantage,
                "rewards": reward,
                "ratios": ratio,
                "clipped": clipped,
            },
        )
    log.note(metrics={"loss/kl": KL * float(total[0]), "clip_fraction": float(total[1]), "entropy": float(total[2])})
