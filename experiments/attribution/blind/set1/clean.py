"""The clean cases: drawn lengths, precisions and settings, all of them stated."""

from __future__ import annotations

import random
from typing import Any

from cases import BF, FH, FL, Case

PLAN = [("llama-s", 26), ("moe-s", 22), ("qwen-m", 22), ("mix-m", 20), ("llama-l", 8), ("moe-l", 6)]
MIXTURES = ("moe-s", "mix-m", "moe-l")


def _drawn(name: str, model: str, rng: random.Random) -> Case:
    trainer: dict[str, Any] = {}
    sampler: dict[str, Any] = {}
    record: list[str] = []
    mixture = model in MIXTURES
    precision = rng.choice([FL, FL, FL, BF, BF, FH])
    if precision != FL:
        trainer["precision"] = precision
        if rng.random() < 0.3:
            trainer["head"] = FL
    temperature = rng.choice([1.0, 1.0, 0.6, 0.7, 0.8, 0.9, 1.1])
    if temperature != 1:
        (trainer if rng.random() < 0.6 else sampler)["temperature"] = temperature
    cut = rng.choice([None, None, None, ("top_k", 20), ("top_k", 50), ("top_p", 0.9), ("top_p", 0.95), ("min_p", 0.05)])
    if cut:
        sampler[cut[0]] = cut[1]
    if rng.random() < 0.25:
        sampler["logprobs"] = rng.choice(["raw", "scaled"])
    if rng.random() < 0.3 and precision == FL:
        sampler["precision"] = rng.choice([BF, BF, FH])
        sampler["head"] = rng.choice([sampler["precision"], FL])
    if rng.random() < 0.15:
        trainer["attention"] = "eager"
        if rng.random() < 0.5:
            sampler["attention"] = "sdpa"
    mode = rng.choice(["cache", "cache", "cache", "batch", "rows"])
    extra = rng.random()
    if extra < 0.12 and not mixture:
        sampler["gemms"] = rng.choice(["fp8_rowwise", "fp8_weights_rowwise", "fp8_weights_blockwise", "fp8_blockwise"])
    elif extra < 0.27 and model != "moe-l":
        record.append("adapter")
        if rng.random() < 0.5:
            sampler["lora"] = rng.choice(["merged", "merged_rounded"])
    elif extra < 0.55 and mixture:
        record.append("routes")
        mode = rng.choice(["batch", "rows"])
        if rng.random() < 0.7:
            sampler["routes"] = "recorded"
    if rng.random() < 0.3 and model != "mix-m":
        record.append("older")
    if rng.random() < 0.2:
        record.append("ids")
    if rng.random() < 0.2 and "adapter" not in record:
        record.append("trainer")
    if rng.random() < 0.15:
        record.append("vocabulary")
    if cut and "routes" in record:
        del sampler[cut[0]]
    elif cut:
        mode = "cache"  # a token at the edge may fall out when it is scored once more
    if "trainer" in record and trainer.get("head", trainer.get("precision", FL)) != trainer.get("precision", FL):
        del trainer["head"]
    return Case(name, model, "", "", "", {}, trainer, sampler, mode, tuple(record))


def _all() -> list[Case]:
    out = []
    for model, count in PLAN:
        for i in range(count):
            name = f"{model[-1]}_{model[:-2]}_{i:02d}"
            out.append(_drawn(name, model, random.Random(f"clean {name}")))
    return out


CLEAN = _all()
