"""The clean cases: drawn models, precisions, settings, lengths and ways to compute; all there is is stated."""

from __future__ import annotations

import random
from typing import Any

from cases import SIZES, Case

HOW_MANY = {"pebble": 21, "gravel": 18, "creek": 19, "delta": 16, "ridge": 15, "massif": 15}  # 104
MIXTURES = ("gravel", "delta", "massif")


def clean_cases() -> list[Case]:
    return [_drawn(model, i) for model, many in HOW_MANY.items() for i in range(many)]


def _drawn(model: str, i: int) -> Case:
    r = random.Random(f"clean {model} {i}")
    trainer: dict[str, Any] = {}
    sampler: dict[str, Any] = {}
    precision = r.choice(["float32", "float32", "bfloat16", "bfloat16", "float16"])
    if precision != "float32":
        trainer["precision"] = precision
    if precision == "bfloat16" and r.random() < 0.4:
        trainer["head"] = "float32"
    if precision == "float32" and r.random() < 0.5:
        sampler["precision"] = r.choice(["bfloat16", "bfloat16", "float16"])
    if r.random() < 0.5:
        side = trainer if r.random() < 0.4 else sampler  # both divide by it, or the sampler alone
        side["temperature"] = round(r.uniform(0.6, 1.3), 2)
    if r.random() < 0.35:
        name = r.choice(["top_k", "top_p", "min_p", "all"])
        sampler |= {
            "top_k": {"top_k": r.randint(10, 60)},
            "top_p": {"top_p": round(r.uniform(0.8, 0.98), 2)},
            "min_p": {"min_p": round(r.uniform(0.005, 0.05), 3)},
            "all": {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "order": r.choice(["vllm", "transformers"])},
        }[name]
    if r.random() < 0.3:
        sampler["logprobs"] = r.choice(["raw", "scaled", "processed"])
    how = r.choice(["cache", "cache", "padded", "rows", "kernel"])
    extra = r.random()
    if extra < 0.12:
        trainer["attention"] = "eager"
    elif extra < 0.2 and model not in MIXTURES:
        sampler["gemms"] = r.choice(["fp8_rowwise", "fp8_blockwise", "fp8_weights_rowwise"])
    elif extra < 0.35:
        trainer["lora"] = r.choice(["unmerged", "merged"])
    elif extra < 0.5 and model in MIXTURES:
        trainer["routes"] = "recorded"
        how = "rows"
    recorded = "routes" not in trainer and r.random() < 0.4
    return Case(f"{model}-{i:02d}", model, (), trainer=trainer, sampler=sampler, how=how, recorded=recorded,
                older=SIZES[model] == "small" and r.random() < 0.3)  # fmt: skip
