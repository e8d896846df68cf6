"""Documents, padding and packing, a small decoder, and the recorder of a run."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # an optimizer imports it: once here, not in every forked process
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import workbench as wb

VOCAB, PAD, EOS = 40, 0, 1
Gradients = list[dict[str, Tensor]]


@dataclass
class Run:
    """One run of a loop: where it is recorded, which fault it has, and its layout."""

    folder: Path | None = None
    precision: str = "float32"
    rich: bool = True
    fault: str | None = None
    seed: int = 0
    layout: dict[str, Any] = field(default_factory=dict)

    def has(self, fault: str) -> bool:
        return self.fault == fault

    def get(self, name: str, default: Any) -> Any:
        return self.layout.get(name, default)

    @property
    def bf16(self) -> bool:
        return self.precision == "bf16"

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.bf16 else contextlib.nullcontext()

    def ordered(self, items: list, step: int) -> list:
        """Put items in the order of the layout, where it has one."""
        if "order" not in self.layout:
            return list(items)
        order = np.random.default_rng([self.layout["order"], step]).permutation(len(items))
        return [items[i] for i in order]


class Log:
    """The recorder of a run; its gradients are also kept here, to measure a fault."""

    def __init__(self, run: Run, model: nn.Module, optimizer: Any, context: dict[str, Any], **options: Any):
        self.run, self.model, self.gradients = run, model, []
        self.recorder = None
        if run.folder is not None:
            self.recorder = wb.Recorder(
                run.folder, model, optimizer, context=context, gradients="full" if run.rich else "norms", **options
            )

    def note(self, **values: Any) -> None:
        if self.recorder is not None and self.run.rich:
            self.recorder.note(**values)

    def take(self) -> None:
        """Keep the gradients as they are before clipping."""
        self.gradients.append(
            {n: p.grad.detach().float().clone() for n, p in self.model.named_parameters() if p.grad is not None}
        )

    def close(self) -> Gradients:
        if self.recorder is not None:
            self.recorder.close()
        return self.gradients


# ---------------------------------------------------------------------------------------------------- documents


@dataclass
class Doc:
    """A document: ids, which of them are of a response, and its number in the step."""

    ids: list[int]
    response: list[bool]
    number: int
    values: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)


def text(rng: np.random.Generator, n: int) -> list[int]:
    """Draw tokens that are worth learning: often the last one plus three."""
    out = [int(rng.integers(2, VOCAB))]
    while len(out) < n:
        out.append((out[-1] + 1) % (VOCAB - 2) + 2 if rng.random() < 0.6 else int(rng.integers(2, VOCAB)))
    return out


def single(rng: np.random.Generator, number: int, prompt: list[int], low: int, high: int, cut: int = 10**6) -> Doc:
    """One prompt and one response, which ends with EOS unless it was cut."""
    n = int(rng.integers(low, high + 1))
    answer = text(rng, n)
    truncated = n >= cut
    answer = answer[:cut] if truncated else [*answer, EOS]
    doc = Doc(prompt + answer, [False] * len(prompt) + [True] * len(answer), number)
    doc.values["truncated"] = truncated
    return doc


def groups(rng: np.random.Generator, prompts: int, size: int, low: int, high: int, cut: int = 10**6) -> list[Doc]:
    """Draw responses to prompts, with a reward each; prompts differ in how easy they are."""
    docs = []
    for p in range(prompts):
        prompt, ease = text(rng, int(rng.integers(3, 9))), float(rng.normal(0, 1.0))
        for _ in range(size):
            doc = single(rng, len(docs), prompt, low, high, cut)
            answer = [t for t, r in zip(doc.ids, doc.response, strict=True) if r]
            doc.values["reward"] = ease + float(np.mean([t % 3 == 0 for t in answer])) * 2 + float(rng.normal(0, 0.5))
            doc.values["prompt"] = p
            docs.append(doc)
    return docs


def padded(docs: list[Doc], side: str = "right", extra: int = 0) -> dict[str, Tensor]:
    """A padded batch: ids, mask, positions, and the grids that a note takes."""
    width = max(len(d) for d in docs) + extra
    shape = (len(docs), width)
    b = {
        "ids": torch.full(shape, PAD),
        "mask": torch.zeros(shape, dtype=torch.bool),
        "trained": torch.zeros(shape, dtype=torch.bool),
        "documents": torch.full(shape, -1),
        "positions": torch.zeros(shape, dtype=torch.long),
        "source": torch.full(shape, -1),
    }
    for i, d in enumerate(docs):
        start = width - len(d) if side == "left" else 0
        s = slice(start, start + len(d))
        b["ids"][i, s] = torch.tensor(d.ids)
        b["mask"][i, s] = True
        b["trained"][i, s] = torch.tensor(d.response)
        b["documents"][i, s] = d.number
        b["positions"][i, s] = torch.arange(len(d))
        b["source"][i, s] = d.number * 1000 + torch.arange(len(d))
        b["trained"][i, start] = False
    return b


def pack(docs: list[Doc], width: int) -> list[list[Doc]]:
    """First fit."""
    rows: list[list[Doc]] = []
    for d in docs:
        for row in rows:
            if sum(map(len, row)) + len(d) <= width:
                row.append(d)
                break
        else:
            rows.append([d])
    return rows


def packed(rows: list[list[Doc]], width: int) -> dict[str, Tensor]:
    """Packed rows, as `padded`; `block` is which tokens see which; padding sees itself."""
    shape = (len(rows), width)
    b = {
        "ids": torch.full(shape, PAD),
        "trained": torch.zeros(shape, dtype=torch.bool),
        "documents": torch.full(shape, -1),
        "positions": torch.zeros(shape, dtype=torch.long),
        "source": torch.full(shape, -1),
    }
    for i, row in enumerate(rows):
        at = 0
        for d in row:
            s = slice(at, at + len(d))
            b["ids"][i, s] = torch.tensor(d.ids)
            b["trained"][i, s] = torch.tensor(d.response)
            b["documents"][i, s] = d.number
            b["positions"][i, s] = torch.arange(len(d))
            b["source"][i, s] = d.number * 1000 + torch.arange(len(d))
            b["trained"][i, at] = False
            at += len(d)
    b["mask"] = b["documents"] >= 0
    b["block"] = b["documents"][:, :, None] == b["documents"][:, None, :]
    return b


def per_token(b: dict[str, Tensor], docs: list[Doc], name: str) -> Tensor:
    """A document's value at each of its tokens."""
    out = torch.zeros(b["ids"].shape)
    for d in docs:
        out[b["documents"] == d.number] = float(d.values[name])
    return out


def counts(b: dict[str, Tensor]) -> dict[str, float]:
    numbers = set(b["documents"][b["mask"]].tolist())
    trained = set(b["documents"][b["trained"]].tolist())
    return {
        "documents": len(trained),
        "masked_documents": len(numbers - trained),
        "trained_tokens": int(b["trained"].sum()),
        "all_tokens": int(b["mask"].sum()),
        "padded_tokens": b["ids"].numel(),
    }


def grids(b: dict[str, Tensor]) -> dict[str, Tensor]:
    """What every loop notes of its tokens, beside their values."""
    return {k: b[k] for k in ("trained", "documents", "positions", "source")} | {"targets": b["ids"]}


def chunks(items: list, n: int) -> list[list]:
    return [items[i : i + n] for i in range(0, len(items), n)]


# ------------------------------------------------------------------------------------------------- likelihoods


def logprobs(logits: Tensor, targets: Tensor, kernel: str = "gather") -> Tensor:
    """Log-probabilities of targets, in the dtype of the logits; three kernels of the same value."""
    if kernel == "lse":
        return logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)
    if kernel == "ce":
        flat = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none")
        return -flat.reshape(targets.shape)
    return logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def entropies(logits: Tensor) -> Tensor:
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def late(values: Tensor) -> Tensor:
    """Put values of predictions where their tokens lie: the first token has none."""
    return F.pad(values, (1, 0))


# ------------------------------------------------------------------------------------------------------- model


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, d: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Block(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, d: int, heads: int, rotary: bool, kernel: str):
        super().__init__()
        self.heads, self.rotary, self.kernel = heads, rotary, kernel
        self.norm1, self.norm2 = Norm(d), Norm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(d, 2 * d, bias=False),
            nn.Linear(d, 2 * d, bias=False),
            nn.Linear(2 * d, d, bias=False),
        )

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = positions[:, None, :, None].float() * 50.0 ** (-torch.arange(half) / half)
        sin, cos = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        r, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(r, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.rotary:
            q, k = self.rotate(q, positions), self.rotate(k, positions)
        if self.kernel == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
            y = scores.float().masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype) @ v
        x = x + self.out(y.transpose(1, 2).reshape(r, t, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """A decoder of two blocks; `attention_mask` is [rows, tokens] or [rows, tokens, tokens], True: seen."""

    def __init__(self, seed: int, d: int = 32, layers: int = 2, heads: int = 2, rotary: bool = True, kernel="sdpa"):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCAB, d)
            self.places = None if rotary else nn.Embedding(128, d)
            self.blocks = nn.ModuleList(Block(d, heads, rotary, kernel) for _ in range(layers))
            self.norm = Norm(d)
            self.head = nn.Linear(d, VOCAB, bias=False)
            for p in self.parameters():
                if p.dim() > 1:
                    nn.init.normal_(p, 0, 0.12)
            nn.init.normal_(self.embed.weight, 0, 0.6)
            nn.init.normal_(self.head.weight, 0, 0.25)
            if self.places is not None:
                nn.init.normal_(self.places.weight, 0, 0.4)

    def hidden(self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        r, t = input_ids.shape
        causal = torch.ones(t, t, dtype=torch.bool).tril()[None]
        mask = causal.expand(r, t, t)
        if attention_mask is not None:
            seen = attention_mask if attention_mask.dim() == 3 else attention_mask[:, None, :]
            mask = (causal & seen) | torch.eye(t, dtype=torch.bool)[None]
        positions = torch.arange(t).expand(r, t) if position_ids is None else position_ids
        x = self.embed(input_ids)
        if self.places is not None:
            x = x + self.places(positions)
        for block in self.blocks:
            x = block(x, mask[:, None], positions)
        return self.norm(x)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None):
        return self.head(self.hidden(input_ids, attention_mask, position_ids))


def disturb(model: nn.Module, seed: int, size: float) -> None:
    """Move weights by noise, as some updates would have."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=g).to(p.dtype) * size)


# --------------------------------------------------------------------------------------------------- processes


def in_processes(world: int, function: Callable[[int, int], Gradients]) -> Gradients:
    """Run a function in forked gloo processes; returns what the first one does."""
    with tempfile.TemporaryDirectory() as folder:

        def work(rank: int) -> None:
            torch.set_num_threads(1)
            store = dist.FileStore(f"{folder}/store", world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
            result = function(rank, world)
            if rank == 0:
                torch.save(result, f"{folder}/result")
            dist.destroy_process_group()

        processes = [torch.multiprocessing.get_context("fork").Process(target=work, args=(r,)) for r in range(world)]
        for p in processes:
            p.start()
        for p in processes:
            p.join()
        if any(p.exitcode for p in processes):
            raise RuntimeError("a process failed")
        return torch.load(f"{folder}/result")
