"""REINFORCE with a leave-one-out baseline and a constant denominator, on two gloo processes with DDP."""

from __future__ import annotations

import contextlib
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # imported here once, else by DDP in every process
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from common import Doc, Log, Run, Text, Tiny, batches, causal, logprobs, norm, padded

LONGEST, BOUND = 12, 0.5


def baseline(run: Run, docs: list[Doc], rank: int, ranks: int) -> None:
    """Give each document its reward less the mean of its group's others."""
    for doc in docs:
        others = [d.reward for d in docs if d.group == doc.group and d is not doc]
        if run.has("local_baseline"):
            mine = docs[rank::ranks]
            others = [d.reward for d in mine if d.group == doc.group and d is not doc] or [0.0]
        doc.values["advantage"] = doc.reward - sum(others) / len(others)
        doc.values["reward"] = doc.reward


def compressed(_, bucket):
    """Average a bucket's gradients in bfloat16, as torch's own hook does on GPUs."""
    low = bucket.buffer().bfloat16().div_(dist.get_world_size())
    done = dist.all_reduce(low, async_op=True).get_future()
    return done.then(lambda future: bucket.buffer().copy_(future.value()[0]))


def worker(rank: int, ranks: int, run: Run, meeting: str, result: str | None = None):
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    torch.manual_seed(run.seed)
    inner = Tiny(width=24)
    if run.has("ignored_head"):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["head.weight"])
    model = DistributedDataParallel(inner)
    if run.has("bf16_hook"):
        model.register_comm_hook(None, compressed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    per_rank = 12 // ranks
    micro = run.get("micro", 3)
    context = {
        "dp": ranks,
        "micro_batches": -(-per_rank // micro),
        "temperature": 1.0,
        "max_grad_norm": BOUND,
        "denominator": f"documents * {LONGEST}",
        "baseline": "leave one out",
    }
    log = Log(run, inner, optimizer, context)
    for step in range(3):
        text = Text(run.seed * 10 + step)
        docs = [doc for g in range(3) for doc in text.group(4 * g, g, 4, LONGEST, 0.1)]
        docs = run.permuted(docs, step)
        baseline(run, docs, rank, ranks)
        mine = docs[0::ranks] if run.has("same_shard") else docs[rank::ranks]
        parts = batches(mine, micro)
        for i, part in enumerate(parts):
            rows = padded(part, left=False, extra=run.get("extra", 0))
            if run.has("zero_grad_inside"):
                optimizer.zero_grad()
            wait = i < len(parts) - 1 or run.has("no_sync_last")
            with model.no_sync() if wait else contextlib.nullcontext():
                with run.autocast():
                    logits = model(rows.ids, rows.positions, causal(rows.documents))
                policy, entropy = logprobs(logits, rows.ids)
                advantage = rows.spread("advantage")
                losses = -advantage * policy
                longest = max(len(d.response) for d in part) if run.has("longest_denominator") else LONGEST
                loss = (losses * rows.trained).sum() / (per_rank * longest)
                if run.has("world_twice"):
                    loss = loss * ranks
                loss.backward()
            log.note(
                counts=rows.counts(),
                tokens={
                    **rows.names(),
                    "trained": rows.trained,
                    "policy_logprobs": policy,
                    "entropy_nats": entropy,
                    "losses": losses,
                    "advantages": advantage,
                    "rewards": rows.spread("reward"),
                },
            )
        log.keep()
        log.take(max_norm=BOUND)
        clip(run, model)
        optimizer.step()
        optimizer.zero_grad()
    done = log.done()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0 and result:
        torch.save(done, result)


@torch.no_grad()
def clip(run: Run, model: torch.nn.Module) -> None:
    """Scale gradients by hand so that their norm is at most the bound."""
    parameters = list(model.parameters())
    for some in [[p] for p in parameters] if run.has("clip_each") else [parameters]:
        factor = (BOUND / (norm(some) + 1e-6)).clamp(max=1.0)
        for p in some:
            p.grad.mul_(factor)


def ddp(run: Run):
    """Start the ranks and return what the first one measured."""
    ranks = run.get("ranks", 2)
    with tempfile.TemporaryDirectory() as folder:
        meeting, result = str(Path(folder) / "meeting"), str(Path(folder) / "result")
        mp.start_processes(worker, args=(ranks, run, meeting, result), nprocs=ranks, start_method="fork")
        return torch.load(result)
