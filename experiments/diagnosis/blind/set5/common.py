"""Documents, padding, a small model, and the recorder of a run."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import workbench as wb

VOCAB, PAD, EOS = 48, 0, 1


@dataclass
class Run:
    """One run of a loop: where it is recorded, and which fault it has."""

    folder: Path | None = None
    precision: str = "float32"
    rich: bool = True
    fault: str | None = None
    seed: int = 0
    layout: dict[str, Any] = field(default_factory=dict)

    def has(self, fault: str) -> bool:
        """Tell whether the run has the fault."""
        return self.fault == fault

    def get(self, name: str, default: Any) -> Any:
        """Return a setting of the layout (or of the loop)."""
        return self.layout.get(name, default)

    @property
    def bf16(self) -> bool:
        """Whether the run is in bfloat16."""
        return self.precision == "bf16"

    def autocast(self) -> Any:
        """Return the autocast context of loops whose weights stay in float32."""
        return torch.autocast("cpu", torch.bfloat16) if self.bf16 else contextlib.nullcontext()

    def permuted(self, items: list, step: int) -> list:
        """Return the items in the order of the layout."""
        if "order" not in self.layout:
            return list(items)
        order = np.random.default_rng(1000 * self.layout["order"] + step).permutation(len(items))
        return [items[i] for i in order]


class Log:
    """A recorder of a run, or without a folder a collector of its gradients."""

    def __init__(self, run: Run, model: nn.Module, optimizer: Any, context: dict[str, Any], **options: Any):
        self.run, self.model, self.gradients = run, model, []
        self.recorder = None
        if run.folder is not None:
            context = {**context, "precision": "bfloat16" if run.bf16 else "float32"}
            kept = "full" if run.rich else "norms"
            self.recorder = wb.Recorder(run.folder, model, optimizer, context=context, gradients=kept, **options)

    def note(self, loss: Any = None, **values: Any) -> None:
        """Note a micro-batch; of a poor record the loss alone, if it is given."""
        if self.recorder is None:
            return
        if self.run.rich:
            self.recorder.note(loss, **values)
        elif loss is not None:
            self.recorder.note(loss)

    def take(self, max_norm: float | None = None) -> None:
        """Take gradients before a clipping by hand."""
        if self.recorder is not None:
            self.recorder.take_gradients(max_norm=max_norm)

    def keep(self) -> None:
        """Keep the step's gradients for the measurement of movements."""
        if self.recorder is None:
            named = self.model.named_parameters()
            self.gradients.append({k: p.grad.detach().float().clone() for k, p in named if p.grad is not None})

    def done(self) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Close the recorder and return gradients of all steps and the weights."""
        if self.recorder is not None:
            self.recorder.close()
        return self.gradients, {k: p.detach().float().clone() for k, p in self.model.named_parameters()}


@dataclass
class Doc:
    """A prompt and its response."""

    number: int
    group: int
    prompt: list[int]
    response: list[int]
    reward: float = 0.0
    finished: bool = True
    noise: np.ndarray | None = None
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return self.prompt + self.response


class Text:
    """A source of random text with the statistics of a fixed bigram table."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        table = np.random.default_rng(77).gumbel(size=(VOCAB, VOCAB)) * 1.2
        table[:, :2] = -np.inf
        self.table = np.exp(table) / np.exp(table).sum(1, keepdims=True)

    def words(self, length: int, last: int = 2) -> list[int]:
        """Return some tokens, none of them special."""
        out = []
        for _ in range(length):
            last = int(self.rng.choice(VOCAB, p=self.table[last]))
            out.append(last)
        return out

    def group(self, number: int, group: int, size: int, longest: int = 12, cut: float = 0.2) -> list[Doc]:
        """Return the responses to one prompt, with rewards; some of them are cut at the longest length."""
        prompt, docs = self.words(int(self.rng.integers(3, 8))), []
        for i in range(size):
            finished = bool(self.rng.random() >= cut)
            length = int(self.rng.integers(3, longest)) if finished else longest
            response = self.words(length - finished, prompt[-1]) + [EOS] * finished
            reward = float(np.round(self.rng.random() + (self.rng.random() < 0.4), 2))
            noise = self.rng.normal(size=length)
            docs.append(Doc(number + i, group, prompt, response, reward, finished, noise))
        return docs


@dataclass
class Rows:
    """Padded or packed rows: [rows, width] each."""

    ids: Tensor
    documents: Tensor
    positions: Tensor
    trained: Tensor
    source: Tensor
    docs: list[Doc]

    @property
    def real(self) -> Tensor:
        """Whether a token is no padding."""
        return self.documents >= 0

    def spread(self, name: str, response: bool = True, shift: int = 0) -> Tensor:
        """Return the documents' values (numbers, or one for each token of the response) at their tokens."""
        out = torch.zeros(self.ids.shape, dtype=torch.float32)
        for doc in self.docs:
            value = doc.values[name]
            rows, columns = torch.nonzero(self.documents == doc.number, as_tuple=True)
            if response and torch.is_tensor(value) and value.dim():
                first = len(doc.prompt)
                columns = columns[first : first + len(value)] + shift
                keep = columns < self.ids.shape[1]
                out[rows[0], columns[keep]] = value[: len(columns)][keep].float()
            else:
                out[rows, columns] = float(value)
        return out

    def gather(self, name: str, values: Tensor) -> None:
        """Give each document the values at its response's tokens."""
        for doc in self.docs:
            rows, columns = torch.nonzero(self.documents == doc.number, as_tuple=True)
            doc.values[name] = values[rows, columns][len(doc.prompt) :].detach()

    def counts(self) -> dict[str, float]:
        """Return what a note counts."""
        some = {int(d) for d in self.documents[self.trained].unique()}
        here = {int(d) for d in self.documents[self.real].unique()}
        return {
            "documents": len(some),
            "masked_documents": len(here - some),
            "trained_tokens": int(self.trained.sum()),
            "all_tokens": int(self.real.sum()),
            "padded_tokens": self.ids.numel(),
        }

    def names(self) -> dict[str, Tensor]:
        """Return the values of tokens that every loop has."""
        return {
            "documents": self.documents,
            "positions": self.positions,
            "targets": self.ids,
            "source": self.source,
        }


def fill(lines: list[list[tuple[int, Doc]]], width: int) -> Rows:
    """Lay documents into rows, each at its column."""
    shape = (len(lines), width)
    ids, trained = torch.full(shape, PAD), torch.zeros(shape, dtype=torch.bool)
    documents, source = torch.full(shape, -1), torch.full(shape, -1)
    positions = torch.zeros(shape, dtype=torch.long)
    for i, line in enumerate(lines):
        for start, doc in line:
            tokens = doc.ids[: width - start]
            end = start + len(tokens)
            ids[i, start:end] = torch.tensor(tokens)
            documents[i, start:end] = doc.number
            positions[i, start:end] = torch.arange(len(tokens))
            source[i, start:end] = doc.number * 1000 + torch.arange(len(tokens))
            trained[i, start + len(doc.prompt) : end] = True
    return Rows(ids, documents, positions, trained, source, [doc for line in lines for _, doc in line])


def padded(docs: list[Doc], left: bool = True, extra: int = 0) -> Rows:
    """One document a row; with `left`, prompts end and responses begin in the same column."""
    before = max(len(d.prompt) for d in docs) if left else 0
    starts = [before - len(d.prompt) if left else 0 for d in docs]
    width = max(s + len(d.ids) for s, d in zip(starts, docs, strict=True)) + extra
    return fill([[(s, d)] for s, d in zip(starts, docs, strict=True)], width)


def logprobs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and entropy of its distribution, where the token lies; a row's first has none."""
    logs = F.log_softmax(logits[:, :-1].float() / temperature, -1)
    token = logs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    return F.pad(token, (1, 0)), F.pad(entropy, (1, 0))


def norm(parameters: Any) -> Tensor:
    """Norm of all gradients."""
    return torch.stack([p.grad.float().pow(2).sum() for p in parameters if p.grad is not None]).sum().sqrt()


def batches(items: list, size: int) -> list[list]:
    """Cut a list into pieces."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [rows, heads, tokens, width]."""
    half = x.shape[-1] // 2
    angle = positions[:, None, :, None].float() * 100.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).to(x.dtype)


class Mixer(nn.Module):
    """Causal attention under a Boolean mask."""

    def __init__(self, width: int, heads: int, rotary: bool):
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Attend."""
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.rotary:
            q, k = rotate(q, positions), rotate(k, positions)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class Wide(nn.Module):
    """A feed-forward layer."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both matrices."""
        return self.down(F.gelu(self.up(x)))


class Tiny(nn.Module):
    """A small transformer with rotary or learned positions."""

    def __init__(self, width: int = 32, layers: int = 2, outputs: int = VOCAB, rotary: bool = True, wide: Any = Wide):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.place = None if rotary else nn.Embedding(64, width)
        self.mixers = nn.ModuleList(Mixer(width, 4, rotary) for _ in range(layers))
        self.wides = nn.ModuleList(wide(width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, outputs, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.5 if "embed" in name or "place" in name else 1.4 / math.sqrt(p.shape[1]))

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return logits of the token that follows each token."""
        x = self.embed(ids)
        if self.place is not None:
            x = x + self.place(positions)
        for i, (mixer, wide) in enumerate(zip(self.mixers, self.wides, strict=True)):
            x = x + mixer(self.norms[2 * i](x), positions, mask)
            x = x + wide(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


def causal(documents: Tensor, across: bool = False) -> Tensor:
    """Boolean mask [rows, tokens, tokens]: tokens before, of the same document."""
    t = documents.shape[1]
    before = torch.ones(t, t, dtype=torch.bool).tril()
    if across:
        real = documents >= 0
        same = (real[:, :, None] & real[:, None]) | (~real[:, :, None] & ~real[:, None])
    else:
        same = documents[:, :, None] == documents[:, None]
    return before & same
