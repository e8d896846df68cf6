"""Write all cases of the set: ``python make.py OUT``."""

# ruff: noqa: E402  threads and warnings are set before torch is imported
from __future__ import annotations

import json
import logging
import os
import random
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import torch
import yaml
from cases import CASES, Case
from clean import CLEAN
from models import FAMILIES, PLANS, Model, build
from sampler import (
    DEFAULTS,
    Document,
    contexts,
    draw,
    encode_again,
    prompts,
    score,
    trainer_windows,
    values,
)
from torch import Tensor
from transformers import logging as transformers_logging

torch.set_num_threads(1)
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
logging.disable(logging.WARNING)

SIZES = {  # completions, their lengths, text of the prompts
    "small": ((12, 20), (20, 40), (5, 16)),
    "medium": ((10, 16), (20, 32), (5, 14)),
    "large": ((8, 11), (16, 24), (5, 12)),
}
CLEAN_SIZES = {
    "small": ((8, 24), (16, 48), (4, 20)),
    "medium": ((8, 18), (16, 40), (4, 16)),
    "large": ((8, 10), (16, 24), (4, 12)),
}


@dataclass
class Made:
    """A case's documents and what is written of them."""

    documents: list[Document]
    completions: list[list[int]]  # as the trainer reads them, with one id beyond the last
    sampler_ids: list[list[int]]
    sampler: list[Tensor]
    routes: list[Tensor | None]
    trainer: list[Tensor] | None


def believed(case: Case, side: str = "sampler") -> dict[str, Any]:
    """Return the settings of a side as they are stated."""
    stated = {**case.trainer, **(case.sampler if side == "sampler" else {})}
    return {**DEFAULTS, **({"lora": "unmerged"} if "adapter" in case.record else {}), **stated}


def planted(case: Case, factors: list[str] | None = None, side: str = "sampler") -> dict[str, Any]:
    """Return the settings that were in force: those stated, with some of the case's causes or all."""
    cfg = believed(case, side)
    if side == case.side:
        for factor in case.planted if factors is None else factors:
            cfg |= case.planted[factor]
    return cfg


def produce(case: Case, model: Model, sizes: Any) -> Made:
    """Draw a case's completions and compute what both sides write down."""
    rng = random.Random(f"set1 {case.id}")
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    counts, lengths, text = sizes[case.size]
    cfg = planted(case)
    documents = prompts(rng, model, rng.randint(*counts), lengths, text)
    if cfg["some"]:
        late = set(rng.sample(range(len(documents)), round(cfg["some"] * len(documents))))
        for i, document in enumerate(documents):
            document.stale = i in late
    draw(model, cfg, documents, rng.choice((4, 5, 6, 8)), generator)
    drawn = [document.drawn for document in documents]
    completions = [
        [*encode_again(one.tokens, model.texts, rng), one.drawn[-1]] if cfg["retokenised"] else one.drawn
        for one in documents
    ]
    if any(len(one) != document.length + 1 for one, document in zip(completions, documents, strict=True)):
        raise AssertionError(f"{case.id}: another number of tokens")
    if case.mode == "cache":
        windows = [document.window for document in documents]
        routes: list[Tensor | None] = [None] * len(documents)
    else:
        windows, routes = score(model, cfg, documents, drawn, case.mode)
    found = values(windows, cfg, documents, drawn, contexts(documents, cfg["prefix"]))
    trainer = None
    if "trainer" in case.record:
        settings = planted(case, side="trainer")
        loaded = FAMILIES[model.plan.family][1].from_pretrained(
            model.folder / model.name,
            dtype=getattr(torch, settings["precision"]),
            attn_implementation=settings["attention"],
        )
        windows = trainer_windows(loaded.eval(), documents, completions, rng.choice((1, 4)))
        trainer = values(windows, settings, documents, completions, [one.prompt for one in documents])
    for value in [*found, *(trainer or ())]:
        if not torch.isfinite(value).all():
            raise AssertionError(f"{case.id}: a value that is not finite")
    return Made(documents, completions, drawn, found, routes, trainer)


def write(case: Case, made: Made, folder: Path, older: tuple[str, ...]) -> None:
    """Write a case in the format of the guide."""
    folder.mkdir(parents=True)
    models = f"../../models/{case.model}"
    trainer: dict[str, Any] = {"model": models}
    if "older" in case.record:
        trainer["older"] = {step: f"{models}-{step}" for step in older}
    if "adapter" in case.record:
        trainer["adapter"] = f"{models}-adapter"
    sampler: dict[str, Any] = {"rollouts": "rollouts.jsonl", **case.sampler}
    if "vocabulary" in case.record:
        sampler["vocabulary"] = f"{models}-vocabulary.json"
    stated = {"trainer": {**trainer, **case.trainer}, "sampler": sampler}
    (folder / "attribute.yaml").write_text(yaml.safe_dump(stated, sort_keys=False))
    lines = []
    for i, document in enumerate(made.documents):
        n = document.length
        row: dict[str, Any] = {
            "prompt_ids": document.prompt,
            "completion_ids": made.completions[i][:n],
            "sampler_logprobs": made.sampler[i].tolist(),
        }
        if made.trainer is not None:
            row["trainer_logprobs"] = made.trainer[i].tolist()
        if "ids" in case.record:
            row["sampler_ids"] = made.sampler_ids[i][:n]
        if "routes" in case.record:
            row["sampler_routes"] = made.routes[i].tolist()
        lines.append(json.dumps(row))
    (folder / "rollouts.jsonl").write_text("\n".join(lines) + "\n")


def main(out: Path) -> None:
    """Write the models once, and each case."""
    for name, plan in PLANS.items():
        begun = time.process_time()
        model = build(name, out / "models")
        count = 0
        for kind, cases, sizes in (("planted", CASES, SIZES), ("clean", CLEAN, CLEAN_SIZES)):
            for case in cases:
                if case.model == name:
                    write(case, produce(case, model, sizes), out / kind / case.id, plan.keep)
                    count += 1
        print(f"{name}: {count} cases, {time.process_time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
