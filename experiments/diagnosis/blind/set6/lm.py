"""Continued pretraining on windows of a stream: DDP over gloo processes, accumulation under no_sync, z-loss."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common import EOS, Decoder, Gradients, Log, Run, chunks, entropies, in_processes, late, logprobs, text

STEPS, WINDOWS, LENGTH, Z = 3, 16, 24, 0.02


def lm(run: Run) -> Gradients:
    return in_processes(run.get("world", 2), lambda rank, world: work(run, rank, world))


def stream(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Windows of ids, and the number of the document of each token."""
    ids: list[int] = []
    numbers: list[int] = []
    n = 0
    while len(ids) < WINDOWS * LENGTH:
        document = [*text(rng, int(rng.integers(5, 20))), EOS]
        ids += document
        numbers += [n] * len(document)
        n += 1
    return tuple(torch.tensor(x[: WINDOWS * LENGTH]).view(WINDOWS, LENGTH) for x in (ids, numbers))


def work(run: Run, rank: int, world: int) -> Gradients:
    inner = Decoder(run.seed, rotary=False, kernel=run.get("attention", "sdpa"))
    if run.has("embedding_reinitialised"):
        with torch.no_grad():
            inner.embed.weight.normal_(0, 0.6, generator=torch.Generator().manual_seed(run.seed + 7))
    model = DistributedDataParallel(inner)
    decayed = [p for n, p in inner.named_parameters() if p.dim() > 1 and "embed" not in n]
    rest = [p for n, p in inner.named_parameters() if p.dim() <= 1 or "embed" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-3, betas=(0.9, 0.95))
    micro, kernel = run.get("micro", 2), run.get("loss", "ce")
    accumulation = WINDOWS // world // micro
    context = {"dp": world, "micro_batches": accumulation, "max_grad_norm": 1.0, "z_loss": Z, "window": LENGTH}
    log = Log(run, inner, optimizer, context)
    for step in range(STEPS):
        rng = np.random.default_rng([run.seed, step])
        ids, numbers = stream(rng)
        order = run.ordered(list(range(WINDOWS)), step)
        mine = order[0 if run.has("same_windows") else rank :: world]
        z_sum = 0.0
        parts = chunks(mine, micro)
        for n, part in enumerate(parts):
            x, documents = ids[part], numbers[part]
            places = torch.arange(LENGTH).expand(x.shape)
            mask = documents[:, :, None] == documents[:, None, :] if run.has("documents_isolated") else None
            last = n == len(parts) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                with run.autocast():
                    logits = model(x, attention_mask=mask, position_ids=places)
                logits = logits.bfloat16() if run.has("logits_bf16") else logits.float()
                trained = torch.ones(x.shape, dtype=torch.bool)
                if run.has("labels_unshifted"):
                    logp, z, h = logprobs(logits, x, kernel), logits.logsumexp(-1) ** 2, entropies(logits)
                else:
                    logits, trained[:, 0] = logits[:, :-1], False
                    logp, z = late(logprobs(logits, x[:, 1:], kernel)), late(logits.logsumexp(-1) ** 2)
                    h = late(entropies(logits))
                z = 0.0 * z if run.has("z_loss_dropped") else Z * z
                losses = (z - logp).float() * trained
                loss = losses.sum() / int(trained.sum())
                if not run.has("accumulation_missing"):
                    loss = loss / accumulation
                loss.backward()
            z_sum += float((z.detach().float() * trained).sum()) / int(trained.sum()) / accumulation / world
            tokens = {
                "policy_logprobs": logp.float(),
                "entropy_nats": h.float(),
                "losses": losses,
                "trained": trained,
                "documents": documents,
                "positions": places,
                "targets": x,
                "source": torch.tensor(part)[:, None] * 1000 + places,
            }
            values = {"trained_tokens": int(trained.sum()), "all_tokens": x.numel(), "padded_tokens": x.numel()}
            log.note(counts=values | {"windows": len(part)}, tokens=tokens)
        total = torch.tensor(z_sum, dtype=torch.float64)
        dist.all_reduce(total)
        log.note(metrics={"loss/z": float(total)})
        log.take()
        torch.nn.utils.clip_grad_norm_(inner.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if run.has("state_cleared") and step == 0:
            optimizer.state.clear()
    return log.close()
