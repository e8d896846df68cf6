"""What the loops share: one run's switches, documents, padded and packed batches, a small decoder, what is noted."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import workbench as wb

VOCAB = 48
PAD, EOS = 0, 1


@dataclass
class Run:
    """One run: where its record goes, its form, its fault (or none) and its layout."""

    folder: Path
    precision: str = "float32"
    rich: bool = True
    fault: str | None = None
    seed: int = 0
    layout: dict[str, Any] = field(default_factory=dict)
    keep: list[dict[str, Tensor]] | None = None
    losses: list[float] | None = None

    def bug(self, name: str) -> bool:
        return self.fault == name

    def get(self, key: str, default: Any) -> Any:
        return self.layout.get(key, default)

    def recorder(self, model: nn.Module, optimizer: torch.optim.Optimizer, **context: Any) -> wb.Recorder:
        settings = context if self.rich else {k: v for k, v in context.items() if k in ("dp", "micro_batches")}
        return wb.Recorder(self.folder, model, optimizer, context=settings, gradients="full" if self.rich else "norms")

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Mixed precision: float32 weights, products in bfloat16."""
        if self.precision == "bf16":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def weights(self, model: nn.Module) -> nn.Module:
        """Weights themselves in bfloat16, for the loops that train so."""
        return model.to(torch.bfloat16) if self.precision == "bf16" else model

    def seen(self, model: nn.Module, loss: float) -> None:
        """Keep a step's gradient and loss for `make.py --check`; nothing when records are made."""
        if self.keep is not None and self.losses is not None:
            self.losses.append(float(loss))
            self.keep.append({n: p.grad.double().clone() for n, p in model.named_parameters() if p.grad is not None})

    def add(self, values: Tensor) -> Tensor:
        """A sum over tokens, in float64 where the layout says so."""
        return values.double().sum().float() if self.get("sum", "float32") == "float64" else values.float().sum()


# --- documents ---------------------------------------------------------------------------------------------------


@dataclass
class Doc:
    number: int
    ids: Tensor
    prompt: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def answer(self) -> int:
        return len(self.ids) - self.prompt


def write_docs(
    seed: int, step: int, n: int, *, group: int = 1, prompt: tuple[int, int] = (3, 7), answer: tuple[int, int] = (3, 11)
) -> list[Doc]:
    """Documents of a prompt and an answer that ends in EOS; ``group`` neighbours share a prompt."""
    rng = np.random.default_rng([seed, step])
    docs = []
    for number in range(n):
        if number % group == 0:
            question = rng.integers(2, VOCAB, rng.integers(*prompt, endpoint=True))
        said = rng.integers(2, VOCAB, rng.integers(*answer, endpoint=True))
        docs.append(Doc(number, torch.tensor([*question, *said, EOS]), len(question)))
    return docs


def in_order(run: Run, docs: Sequence[Any]) -> list[Any]:
    order = run.get("order", "given")
    if order == "given":
        return list(docs)
    if order == "reversed":
        return list(docs)[::-1]
    return [docs[i] for i in np.random.default_rng(order).permutation(len(docs))]


def chunks(items: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(items[i : i + size]) for i in range(0, len(items), size)]


def dealt(items: Sequence[Any], ranks: int) -> list[list[Any]]:
    """What each rank of a simulated group gets, as a sampler deals it: every ranks-th one."""
    return [list(items[r::ranks]) for r in range(ranks)]


@dataclass
class Batch:
    """Rows of tokens; -1 in ``doc`` is padding; ``trained`` says which tokens are answers."""

    ids: Tensor
    doc: Tensor
    positions: Tensor
    answer: Tensor

    @property
    def real(self) -> Tensor:
        return self.doc >= 0

    @property
    def source(self) -> Tensor:
        return torch.where(self.real, self.doc * 1000 + self.positions, -1)

    @property
    def places(self) -> Tensor:
        return torch.arange(self.ids.shape[1]).expand_as(self.ids)

    @property
    def same_document(self) -> Tensor:
        """[rows, T, T]: key and query are of one document."""
        return (self.doc[:, :, None] == self.doc[:, None, :]) & self.real[:, None, :]


def blank(rows: int, width: int) -> Batch:
    ids = torch.full((rows, width), PAD)
    return Batch(ids, torch.full_like(ids, -1), torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool))


def put(batch: Batch, row: int, at: int, doc: Doc) -> None:
    span = slice(at, at + len(doc))
    batch.ids[row, span] = doc.ids
    batch.doc[row, span] = doc.number
    batch.positions[row, span] = torch.arange(len(doc))
    batch.answer[row, span] = torch.arange(len(doc)) >= doc.prompt


def padded(docs: Sequence[Doc], *, multiple: int = 1, left: bool = False) -> Batch:
    width = -(-max(map(len, docs)) // multiple) * multiple
    batch = blank(len(docs), width)
    for row, doc in enumerate(docs):
        put(batch, row, width - len(doc) if left else 0, doc)
    return batch


def packed(docs: Sequence[Doc], capacity: int) -> Batch:
    """First fit into rows of one capacity."""
    rows: list[list[Doc]] = []
    for doc in docs:
        for row in rows:
            if sum(map(len, row)) + len(doc) <= capacity:
                row.append(doc)
                break
        else:
            rows.append([doc])
    batch = blank(len(rows), capacity)
    for n, row in enumerate(rows):
        at = 0
        for doc in row:
            put(batch, n, at, doc)
            at += len(doc)
    return batch


def rows_of(batch: Batch, start: int, end: int) -> Batch:
    return Batch(batch.ids[start:end], batch.doc[start:end], batch.positions[start:end], batch.answer[start:end])


# --- model -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, rotary: bool, kernel: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)
        self.heads, self.rotary, self.kernel = heads, rotary, kernel

    def forward(self, x: Tensor, allowed: Tensor, positions: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        if self.rotary:
            q, k = rotate(q, positions), rotate(k, positions)
        if self.kernel == "eager":
            scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
            weights = scores.float().masked_fill(~allowed[:, None], float("-inf")).softmax(-1)
            seen = weights.to(v.dtype) @ v
        else:
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None])
        x = x + self.drop(self.out(seen.transpose(1, 2).reshape(b, t, w)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = positions[:, None, :, None].float() * (100.0 ** (-torch.arange(half) / half))
    sin, cos = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Decoder(nn.Module):
    """A causal decoder with learned or rotary positions; returns logits."""

    def __init__(
        self,
        width: int = 32,
        layers: int = 2,
        *,
        rotary: bool = False,
        dropout: float = 0.0,
        kernel: str = "sdpa",
        head: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.places = None if rotary else nn.Embedding(96, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, 2, dropout, rotary, kernel) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False) if head else None

    def hidden(self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        t = input_ids.shape[1]
        causal = torch.ones(t, t, dtype=torch.bool).tril().expand(len(input_ids), t, t)
        if attention_mask is None:
            allowed = causal
        else:
            mask = attention_mask[:, None, :] if attention_mask.dim() == 2 else attention_mask
            allowed = (causal & mask.bool()) | torch.eye(t, dtype=torch.bool)
        if position_ids is None:
            position_ids = torch.arange(t).expand_as(input_ids)
        x = self.embed(input_ids)
        if self.places is not None:
            x = x + self.places(position_ids)
        x = self.drop(x)
        for block in self.blocks:
            x = block(x, allowed, position_ids)
        return self.norm(x)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Any:
        return self.head(self.hidden(input_ids, attention_mask, position_ids))


def initialise(model: nn.Module, seed: int, spread: float = 0.5) -> nn.Module:
    """Weights large enough that predictions are far from uniform, as those of a trained model."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if p.dim() == 2:
                p.copy_(torch.randn(p.shape, generator=g) * (spread if "embed" in name or "places" in name else 0.25))
            elif "norm" in name and name.endswith("weight"):
                p.fill_(1.0)
            else:
                p.copy_(torch.randn(p.shape, generator=g) * 0.02)
    return model


def neighbour(model: nn.Module, seed: int, distance: float = 0.03) -> nn.Module:
    """A frozen copy whose weights are a little elsewhere: a reference from another stage of training."""
    other = copy.deepcopy(model)
    g = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn(p.shape, generator=g) * distance)
            p.requires_grad_(False)
    return other.eval()


# --- log-probabilities -------------------------------------------------------------------------------------------


def said(run: Run, logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """[rows, T] log-probability of each token given those before it; 0 for the first of a row."""
    logits = logits[:, :-1].float() / temperature
    targets = ids[:, 1:]
    kernel = run.get("logprobs", "log_softmax")
    if kernel == "cross_entropy":
        out = -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    elif kernel == "logsumexp":
        out = logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)
    else:
        out = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return F.pad(out, (1, 0))


def entropy_of(logits: Tensor, temperature: float = 1.0) -> Tensor:
    logp = (logits[:, :-1].float() / temperature).log_softmax(-1)
    return F.pad(-(logp.exp() * logp).sum(-1), (1, 0))


def by_document(batch: Batch, values: dict[int, float]) -> Tensor:
    """A number of each document at each of its tokens; 0 on padding."""
    out = torch.zeros(batch.ids.shape)
    for number, value in values.items():
        out[batch.doc == number] = value
    return out


def counts_of(batch: Batch, trained: Tensor) -> dict[str, float]:
    numbers = set(batch.doc[trained].tolist()) - {-1}
    present = set(batch.doc[batch.real].tolist())
    return {
        "documents": len(numbers),
        "masked_documents": len(present - numbers),
        "trained_tokens": int(trained.sum()),
        "all_tokens": int(batch.real.sum()),
        "padded_tokens": batch.ids.numel(),
    }


def where_of(batch: Batch, positions: Tensor | None = None) -> dict[str, Tensor]:
    """The names of a token's place that every loop can note."""
    return {
        "documents": batch.doc,
        "places": batch.places,
        "positions": batch.positions if positions is None else positions,
        "targets": batch.ids,
        "source": batch.source,
    }


def noise_of(docs: Sequence[Doc], seed: int, spread: float) -> dict[int, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {d.number: torch.randn(len(d), generator=g) * spread for d in docs}


def spread_out(batch: Batch, values: dict[int, Tensor]) -> Tensor:
    """A value of each token of each document, where the token lies."""
    out = torch.zeros(batch.ids.shape)
    for number, value in values.items():
        here = batch.doc == number
        if here.any():
            out[here] = value
    return out
