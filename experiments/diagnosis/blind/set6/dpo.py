"""DPO with length-normalised rewards: chosen and rejected halves of a batch padded right, RMSprop with warm-up."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from common import VOCAB, Doc, Gradients, Log, Run, chunks, counts, entropies, grids, late, logprobs, padded, single, text

STEPS, PAIRS, LONGEST, BETA = 3, 8, 20, 2.0


def dpo(run: Run) -> Gradients:
    torch.manual_seed(run.seed)
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_dropout=0.1,
        initializer_range=0.15,
        max_position_embeddings=64,
        attn_implementation=run.get("attention", "sdpa"),
        use_cache=False,
    )
    model = GPTNeoXForCausalLM(config)
    if run.bf16:
        model = model.bfloat16()
    if not run.has("dropout_on"):
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    model.train()
    ref = copy.deepcopy(model).requires_grad_(False).eval()
    named = list(model.named_parameters())
    groups = [{"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.01}]
    if not run.has("norms_not_optimized"):
        groups.append({"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0})
    optimizer = torch.optim.RMSprop(groups, lr=4e-3, eps=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 2))
    context = {"max_grad_norm": 1.0, "denominator": "pairs of the step", "beta": BETA, "max_length": LONGEST}
    log = Log(run, model, optimizer, context)
    micro, extra, kernel = run.get("micro", 2), run.get("extra", 0), run.get("loss", "gather")

    def forward(net: torch.nn.Module, b: dict[str, Tensor]) -> Tensor:
        def call(s: slice) -> Tensor:
            return net(input_ids=b["ids"][s], attention_mask=b["mask"][s].long()).logits.float()[:, :-1]

        half = len(b["ids"]) // 2
        return torch.cat([call(slice(0, half)), call(slice(half, None))]) if run.get("separate", False) else call(slice(None))

    def cut(doc: Doc) -> Doc:
        s = slice(-LONGEST, None) if run.has("truncated_left") else slice(0, LONGEST)
        return Doc(doc.ids[s], doc.response[s], doc.number, doc.values)

    for step in range(STEPS):
        rng = np.random.default_rng([run.seed, step])
        pairs = []
        for n in range(PAIRS):
            prompt = text(rng, int(rng.integers(3, 9)))
            both = [single(rng, 2 * n + k, prompt, 5, 17) for k in range(2)]
            pairs.append([cut(d) for d in both])
        # with a cache: what was computed at a place of the batch before the loader shuffled
        cached = [pairs[i] for i in np.roll(np.arange(PAIRS), 3)]
        batch = run.ordered(list(zip(pairs, cached, strict=True)), step)
        sums = {"loss": 0.0, "margin": 0.0, "right": 0.0}
        for part in chunks(batch, micro):
            docs = [p[0] for p, _ in part] + [p[1] for p, _ in part]
            b = padded(docs, "right", extra)
            logits = forward(model, b)
            logp = late(logprobs(logits, b["ids"][:, 1:], kernel))
            with torch.no_grad():
                if run.has("ref_cache_shuffled"):
                    other = padded([p[0] for _, p in part] + [p[1] for _, p in part], "right", extra)
                    found = late(logprobs(forward(ref, other), other["ids"][:, 1:], kernel))
                    short = b["ids"].shape[1] - found.shape[1]
                    reference = F.pad(found, (0, max(0, short)))[:, : b["ids"].shape[1]]
                else:
                    reference = late(logprobs(forward(model if run.has("ref_is_policy") else ref, b), b["ids"][:, 1:], kernel))
            if run.has("prompt_included"):
                b["trained"] = b["mask"].clone()
                b["trained"][:, 0] = False
            m = b["trained"]
            lengths = torch.ones(len(docs)) if run.has("no_length_norm") else m.sum(1)
            rewards, ref_rewards = (logp * m).sum(1) / lengths, (reference * m).sum(1) / lengths
            n = len(part)
            margin = rewards[:n] - rewards[n:]
            ref_margin = ref_rewards[:n] - ref_rewards[n:]
            inner = margin if run.has("reference_free") else margin - ref_margin
            loss = -F.logsigmoid(BETA * inner).sum() / PAIRS
            loss.backward()
            sums["loss"] += float(loss)
            sums["margin"] += float(BETA * (margin - ref_margin).sum()) / PAIRS
            sums["right"] += float((margin > ref_margin).sum()) / PAIRS
            tokens = {"policy_logprobs": logp, "ref_logprobs": reference, "entropy_nats": late(entropies(logits))}
            log.note(counts=counts(b), tokens=grids(b) | tokens)
        metrics = {"loss/preference": sums["loss"], "rewards/margins": sums["margin"], "rewards/accuracies": sums["right"]}
        log.note(metrics=metrics)
        log.take()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return log.close()
