"""Drawing and scoring: what an engine's service does around its forward."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from engine import Engine
from models import BOS, FIRST, PAD, Model
from torch import Tensor

DEFAULTS: dict[str, Any] = {
    "weights": "now", "some": None, "precision": "float32", "head": None, "attention": "sdpa", "gemms": "dense",
    "router": None, "experts": 0, "renormalise": None, "routes_of": None, "lora": None, "temperature": 1.0,
    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "logprobs": "processed", "offset": None, "prefix": None,
    "retokenised": None, "routes": "own",
}  # fmt: skip


@dataclass
class Document:
    """A prompt, the ids that the sampler drew (one more than the completion has), and what it saw of logits."""

    prompt: list[int]
    length: int
    drawn: list[int] = field(default_factory=list)
    window: Tensor | None = None  # logits [length + 2, V]: of the prompt's last but one position and on
    stale: bool = True
    routes: Tensor | None = None

    @property
    def tokens(self) -> list[int]:
        return self.drawn[: self.length]


def engine_of(model: Model, cfg: dict[str, Any], weights: str, grouped: bool) -> Engine:
    """Return the engine of some settings."""
    select = None
    if cfg["routes_of"]:
        select = {key: w for key, w in model.weights[cfg["routes_of"]].items() if key.endswith("mlp.gate.weight")}
    return Engine(
        model.weights[weights], model.shape, cfg["precision"], cfg["head"], cfg["attention"], cfg["gemms"],
        cfg["router"], cfg["experts"], cfg["renormalise"], model.adapter if cfg["lora"] else None,
        cfg["lora"] or "unmerged", select, grouped,
    )  # fmt: skip


def contexts(documents: Sequence[Document], prefix: tuple[str, int] | None) -> list[list[int]]:
    """Return the ids that stand before each completion in the sampler."""
    prompts = [one.prompt for one in documents]
    if prefix is None:
        return prompts
    how, n = prefix
    longest = max(map(len, prompts))
    if how == "document_before":
        return [(prompts[i - 1] + documents[i - 1].tokens if i else []) + prompt for i, prompt in enumerate(prompts)]
    return {
        "without_first": lambda: [one[n:] for one in prompts],
        "without_last": lambda: [one[:-n] for one in prompts],
        "front": lambda: [[BOS] * n + one for one in prompts],
        "prompt_of": lambda: [prompts[(i + n) % len(prompts)] for i in range(len(prompts))],
        "padded": lambda: [[PAD] * (longest - len(one)) + one for one in prompts],
    }[how]()


def _groups(documents: Sequence[Document], cfg: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """Return which documents are computed by which weights."""
    everything = list(range(len(documents)))
    if cfg["weights"] == "now" or cfg["some"] is None:
        return [(cfg["weights"], everything)]
    late = [i for i in everything if documents[i].stale]
    return [(cfg["weights"], late), ("now", [i for i in everything if i not in late])]


def distribution(logits: Tensor, cfg: dict[str, Any], mode: str = "processed") -> Tensor:
    """Return log-probabilities [..., V] of a mode: temperature, min_p, top_k, top_p."""
    if mode in ("raw", "divided"):
        logp = logits.log_softmax(-1)
        return logp / cfg["temperature"] if mode == "divided" else logp
    if cfg["temperature"] != 1:
        logits = logits / cfg["temperature"]
    if mode == "processed":
        if cfg["min_p"]:
            p = logits.softmax(-1)
            logits = logits.masked_fill(p < cfg["min_p"] * p.amax(-1, keepdim=True), -torch.inf)
        if cfg["top_k"]:
            logits = logits.masked_fill(logits < logits.topk(cfg["top_k"], -1).values[..., -1:], -torch.inf)
        if cfg["top_p"] < 1:
            p, order = logits.softmax(-1).sort(-1, descending=True)
            out = (p.cumsum(-1) - p) >= cfg["top_p"]
            logits = logits.masked_fill(torch.zeros_like(out).scatter(-1, order, out), -torch.inf)
    return logits.log_softmax(-1)


@torch.no_grad()
def draw(
    model: Model, cfg: dict[str, Any], documents: Sequence[Document], rows: int, generator: torch.Generator
) -> None:
    """Draw completions in batches of some rows, padded on the left, with a cache; keep the logits that were seen."""
    prefix = cfg["prefix"] if cfg["prefix"] and cfg["prefix"][0] != "document_before" else None
    before = contexts(documents, prefix)
    for weights, members in _groups(documents, cfg):
        engine = engine_of(model, cfg, weights, grouped=False)
        for start in range(0, len(members), rows):
            _draw_batch(engine, cfg, [(documents[i], before[i]) for i in members[start : start + rows]], generator)


def _draw_batch(
    engine: Engine, cfg: dict[str, Any], batch: list[tuple[Document, list[int]]], generator: torch.Generator
) -> None:
    longest = max(len(context) for _, context in batch)
    ids = torch.tensor([[PAD] * (longest - len(context)) + context for _, context in batch])
    real = torch.tensor([[False] * (longest - len(context)) + [True] * len(context) for _, context in batch])
    steps = max(document.length for document, _ in batch)
    cache: list[tuple[Tensor, Tensor]] = []
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    mask = (causal & real[:, None]) | torch.eye(longest, dtype=torch.bool)
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    hidden, _ = engine.forward(ids, mask[:, None], positions, cache)
    seen = [engine.logits(hidden[:, -2]), engine.logits(hidden[:, -1])]
    drawn = []
    for step in range(steps + 1):
        probabilities = distribution(seen[-1].float(), cfg).exp()
        token = torch.multinomial(probabilities, 1, generator=generator)
        drawn.append(token)
        if step == steps:
            break
        real = torch.cat([real, torch.ones(len(batch), 1, dtype=torch.bool)], 1)
        positions = (real.sum(-1) - 1)[:, None]
        mask = None if bool(real.all()) else real[:, None, None]
        hidden, _ = engine.forward(token, mask, positions, cache)
        seen.append(engine.logits(hidden[:, -1]))
    window, tokens = torch.stack(seen, 1), torch.cat(drawn, 1)
    for row, (document, _) in enumerate(batch):
        document.drawn = tokens[row, : document.length + 1].tolist()
        document.window = window[row, : document.length + 2]


@torch.no_grad()
def score(
    model: Model, cfg: dict[str, Any], documents: Sequence[Document], ids: Sequence[list[int]], mode: str
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the logits and routes of completions in one pass: a row each, or batches padded on the right."""
    before = contexts(documents, cfg["prefix"])
    windows: dict[int, Tensor] = {}
    routes: dict[int, Tensor | None] = {}
    for weights, members in _groups(documents, cfg):
        engine = engine_of(model, cfg, weights, grouped=mode == "rows")
        members = sorted(members, key=lambda i: len(before[i]) + len(ids[i]))
        rows = 1 if mode == "rows" else 5
        for start in range(0, len(members), rows):
            batch = members[start : start + rows]
            texts = [before[i] + ids[i][: documents[i].length] for i in batch]
            longest = max(map(len, texts))
            mask = None
            if len(batch) > 1:
                mask = torch.ones(longest, longest, dtype=torch.bool).tril()[None, None]
            hidden, chosen = engine.forward(torch.tensor([one + [PAD] * (longest - len(one)) for one in texts]), mask)
            for row, i in enumerate(batch):
                p, n = len(before[i]), documents[i].length
                logits = engine.logits(hidden[row : row + 1] if mode == "rows" else hidden[row, p - 2 : p + n])
                windows[i] = logits[0, p - 2 : p + n] if mode == "rows" else logits
                routes[i] = None if chosen is None else chosen[row, : p + n]
    return [windows[i] for i in range(len(documents))], [routes[i] for i in range(len(documents))]


def values(
    windows: Sequence[Tensor],
    cfg: dict[str, Any],
    documents: Sequence[Document],
    ids: Sequence[list[int]],
    before: Sequence[list[int]],
) -> list[Tensor]:
    """Return the value of each completion token that a service writes down."""
    out = []
    for window, document, tokens, context in zip(windows, documents, ids, before, strict=True):
        n = document.length
        logp = distribution(window, cfg, cfg["logprobs"]).float()
        first, targets = {
            None: (1, tokens[:n]),
            "next": (2, tokens[1 : n + 1]),
            "before": (0, [context[-1], *tokens[: n - 1]]),
            "own": (2, tokens[:n]),
            "two_before": (0, tokens[:n]),
        }[cfg["offset"]]
        out.append(logp[first : first + n].gather(-1, torch.tensor(targets)[:, None])[:, 0])
    return out


def trainer_windows(trainer: Any, documents: Sequence[Document], ids: Sequence[list[int]], rows: int) -> list[Tensor]:
    """Return logits of the trainer's own forward, in batches padded on the right."""
    out = []
    for start in range(0, len(documents), rows):
        batch = range(start, min(start + rows, len(documents)))
        texts = [documents[i].prompt + ids[i][: documents[i].length] for i in batch]
        longest = max(map(len, texts))
        padded = torch.tensor([one + [PAD] * (longest - len(one)) for one in texts])
        mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in texts])
        with torch.no_grad():
            logits = trainer(input_ids=padded, attention_mask=mask if rows > 1 else None).logits.float()
        for row, i in enumerate(batch):
            p = len(documents[i].prompt)
            out.append(logits[row, p - 2 : p + documents[i].length])
    return out


def encode_again(tokens: Sequence[int], texts: Sequence[str], rng: random.Random) -> list[int]:
    """Return other ids of the same text: where two neighbours can be split elsewhere, they often are."""
    ids = {text: i for i, text in enumerate(texts)}
    out, i = list(tokens), 0
    while i + 1 < len(out):
        if min(out[i], out[i + 1]) >= FIRST:
            a, b = texts[out[i]], texts[out[i + 1]]
            text = a + b
            other = [
                (ids[text[:cut]], ids[text[cut:]])
                for cut in range(1, len(text))
                if cut != len(a) and text[:cut] in ids and text[cut:] in ids
            ]
            if other and rng.random() < 0.6:
                out[i], out[i + 1] = rng.choice(other)
                i += 1
        i += 1
    return out


def prompts(
    rng: random.Random, model: Model, count: int, lengths: tuple[int, int], of: tuple[int, int]
) -> list[Document]:
    """Return documents to draw: prompts of random text behind a bos, and lengths."""
    out = []
    for _ in range(count):
        text = [rng.randrange(FIRST, model.plan.vocabulary) for _ in range(rng.randint(*of))]
        out.append(Document([BOS, *text], rng.randint(*lengths)))
    return out
