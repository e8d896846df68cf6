"""What a sampler and a trainer record of a case: prompts, draws, values, and the folder in the guide's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from cases import Case, Factor
from engine import KEYS, Engine, logprobs
from models import BOS, language, seed_of
from torch import Tensor

DEFAULTS: dict[str, Any] = {
    "older": None, "precision": "float32", "head": None, "attention": "sdpa", "gemms": "dense", "lora": "unmerged",
    "router": None, "experts": 0, "renorm": None, "bias": 0.0, "adapter": False,
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "order": "vllm", "logprobs": "processed",
    "offset": None, "prefix": None, "tokens": None, "evidence": None,
}  # fmt: skip
LENGTHS = {"small": (20, 48), "medium": (18, 40), "large": (16, 32)}
COUNTS = {"small": (16, 24), "medium": (14, 22), "large": (12, 16)}


class World:
    """The models' folder and the engines made from it, the last few kept."""

    def __init__(self, models: Path):
        self.models = models
        self.kept: dict[tuple[Any, ...], Engine] = {}

    def engine(self, model: str, s: dict[str, Any]) -> Engine:
        key = (model, *(s[name] for name in KEYS))
        if key not in self.kept:
            while len(self.kept) >= 6:
                self.kept.pop(next(iter(self.kept)))
            self.kept[key] = Engine(self.models / model, s)
        return self.kept[key]


@dataclass
class Record:
    """A case's documents, and the settings under which each side truly computed them."""

    prompts: list[list[int]]
    engine_ids: list[list[int]]  # of the engine
    completions: list[list[int]]  # as the trainer reads them
    values: list[list[float]]  # of the sampler
    true: list[dict[str, Any]]  # of the sampler, by document
    trainer_values: list[list[float]] | None = None
    routes: list[Any] | None = None


def chosen(case: Case, factor: Factor, documents: int) -> list[bool]:
    """Return in which documents a factor acts."""
    many = max(1, round(factor.some * documents))
    g = torch.Generator().manual_seed(seed_of(f"{case.id} {factor.name}"))
    acting = set(torch.randperm(documents, generator=g)[:many].tolist())
    return [i in acting for i in range(documents)]


def stated(case: Case, side: str) -> dict[str, Any]:
    """Return a side's settings as they are stated; what the sampler leaves out is as in the trainer."""
    adapter = any(one.name == "LoRA merge" for one in case.factors) or "lora" in case.trainer
    s = DEFAULTS | {k: v for k, v in case.trainer.items() if k != "routes"} | {"adapter": adapter}
    if side == "sampler":
        s |= {k: v for k, v in case.sampler.items() if k != "routes"}
    return s


def truth(case: Case, side: str, documents: int, factors: Sequence[Factor] | None = None) -> list[dict[str, Any]]:
    """Return the settings under which a side truly computes each document, with some of the factors or all."""
    out = [stated(case, side) for _ in range(documents)]
    for factor in case.factors if factors is None else factors:
        if factor.side == side:
            for s, acts in zip(out, chosen(case, factor, documents), strict=True):
                s |= factor.true if acts else {}
    return out


def seen(
    kind: tuple[str, int] | None, i: int, prompts: list[list[int]], completions: list[list[int]] | None
) -> list[int]:
    """Return what stands in front of a completion, for the side that is wrong about it."""
    prompt = prompts[i]
    if kind is None:
        return prompt
    name, n = kind
    if name == "drop_first":
        return prompt[n:]
    if name == "drop_last":
        return prompt[:-n]
    if name == "keep_last":
        return prompt[-n:]
    if name == "front":
        return [n, *prompt]
    if name == "end":
        return [*prompt, n]
    if name == "padding":
        return [n] * (max(map(len, prompts)) - len(prompt)) + prompt
    if name == "next":
        return prompts[(i + 1) % len(prompts)]
    if name == "document":
        return [*prompts[i - 1], *completions[i - 1], *prompt] if i else prompt
    raise ValueError(name)


def shifted(logits: Tensor, row: Sequence[int], begin: int, s: dict[str, Any]) -> list[float]:
    """Return the values of a row's tokens from ``begin`` on, as an offset has them; 0 without a neighbour."""
    tokens, at = torch.tensor(row), torch.arange(begin, len(row))
    of, by = {None: (0, 1), "next": (1, 0), "previous": (-1, 2), "own": (0, 0), "two": (0, 2)}[s["offset"]]
    at = at[at + of < len(row)]
    values = logprobs(logits[at - by], tokens[at + of], s).tolist()
    return values + [0.0] * (len(row) - begin - len(values))


def scored(
    world: World, model: str, settings: list[dict[str, Any]], prompts: list[list[int]], ids: list[list[int]], how: str
) -> tuple[list[list[float]], list[Any]]:
    """Score completions in passes over whole rows, each document under its settings; return values and routes."""
    values: list[Any] = [None] * len(ids)
    routes: list[Any] = [None] * len(ids)
    for group in groups(settings):
        engine = world.engine(model, settings[group[0]])
        fronts = [seen(settings[i]["prefix"], i, prompts, ids) for i in group]
        rows = [[*front, *ids[i]] for front, i in zip(fronts, group, strict=True)]
        logits, chosen_ = engine.passes(rows, how)
        for at, i in enumerate(group):
            values[i] = shifted(logits[at], rows[at], len(fronts[at]), settings[i])
            routes[i] = chosen_[at] if chosen_ else None
    return values, routes


def groups(settings: list[dict[str, Any]]) -> list[list[int]]:
    """Return documents by equal settings."""
    out: dict[str, list[int]] = {}
    for i, s in enumerate(settings):
        out.setdefault(repr(s), []).append(i)
    return list(out.values())


def prompts_of(case: Case, g: torch.Generator, documents: int) -> list[list[int]]:
    lang = language(case.model)
    lengths = torch.randint(9, 21, (documents,), generator=g).tolist()
    with_bos = any(one.true.get("prefix", ("",))[0] == "front" for one in case.factors) or seed_of(case.id) % 2
    return [[BOS, *lang.walk(n - 1, g)] if with_bos else lang.walk(n, g) for n in lengths]


def recorded(world: World, case: Case) -> Record:
    """Let the sampler draw and record, and the trainer record if it does."""
    g = torch.Generator().manual_seed(seed_of(case.id))
    low, high = COUNTS[case.size]
    documents = case.n or int(torch.randint(low, high + 1, (1,), generator=g))
    prompts = prompts_of(case, g, documents)
    low, high = LENGTHS[case.size]
    lengths = torch.randint(low, high + 1, (documents,), generator=g).tolist()
    true = truth(case, "sampler", documents)
    ids: list[Any] = [None] * documents
    values: list[Any] = [None] * documents
    for group in groups(true):
        s = true[group[0]]
        engine = world.engine(case.model, s)
        fronts = [seen(s["prefix"], i, prompts, None) for i in group]
        more = s["offset"] == "next"  # the stop token, whose value the record has and which is stripped
        drawn, vals = engine.draw(fronts, [lengths[i] + more for i in group], s, g)
        for at, i in enumerate(group):
            ids[i], values[i] = drawn[at], vals[at]
    routes = None
    if case.how != "cache":
        values, routes = scored(world, case.model, true, prompts, ids, case.how)
    if any(s["offset"] == "next" for s in true):
        ids, values = [row[:-1] for row in ids], [row[:-1] for row in values]
    lang = language(case.model)
    how = true[0]["tokens"]
    read = [lang.merged(row) if how == "merged" else lang.split(row) if how == "split" else row for row in ids]
    out = Record(prompts, ids, read, values, true)
    if case.recorded:
        out.trainer_values, _ = scored(
            world,
            case.model,
            truth(case, "trainer", documents),
            prompts,
            read,
            "rows" if case.how == "rows" else "padded",
        )
    if case.trainer.get("routes") == "recorded" or any(s["bias"] for s in true):
        out.routes = routes
    return out


def write_case(folder: Path, case: Case, record: Record) -> None:
    """Write a case's folder in the format of the guide."""
    folder.mkdir(parents=True)
    models = f"../../models/{case.model}"
    trainer: dict[str, Any] = {"model": f"{models}/v7"}
    if case.older or any(one.name == "stale weights" for one in case.factors):
        trainer["older"] = {"v6": f"{models}/v6", "v5": f"{models}/v5"}
    if stated(case, "trainer")["adapter"]:
        trainer["adapter"] = f"{models}/adapter"
    trainer |= {"precision": "float32"} | case.trainer
    sampler: dict[str, Any] = {"rollouts": "rollouts.jsonl"} | case.sampler
    evidence = record.true[0]["evidence"]
    if evidence == "vocabulary":
        sampler["vocabulary"] = f"{models}/vocabulary.json"
    (folder / "attribute.yaml").write_text(yaml.safe_dump({"trainer": trainer, "sampler": sampler}, sort_keys=False))
    with (folder / "rollouts.jsonl").open("w") as file:
        for i, completion in enumerate(record.completions):
            values, n = record.values[i], len(completion)
            line: dict[str, Any] = {"prompt_ids": record.prompts[i], "completion_ids": completion}
            line["sampler_logprobs"] = values[:n] + [0.0] * (n - len(values))
            if len(values) < n:  # more tokens than the engine had: their places have no value and are not compared
                line["loss_mask"] = [1] * len(values) + [0] * (n - len(values))
            if record.trainer_values is not None:
                line["trainer_logprobs"] = record.trainer_values[i]
                if any(s.get("offset") == "next" for s in truth(case, "trainer", 1)):
                    line["loss_mask"] = [1] * (n - 1) + [0]
            if evidence == "ids":
                line["sampler_ids"] = record.engine_ids[i]
            if record.routes is not None:
                line["sampler_routes"] = record.routes[i].tolist()
            file.write(json.dumps(line) + "\n")
