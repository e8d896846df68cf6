"""Measure what each cause moves, and the noise of rounding: ``python measure.py OUT [ID ...]`` fills causes.yaml."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import make  # sets threads and silence
import torch
import yaml
from cases import AK, CASES, HP, LO, TO, TP, Case
from models import PLANS, Model, build
from sampler import Document, contexts, score, values
from torch import Tensor

ROUNDING = {AK, HP, TP, LO}
HERE = Path(__file__).parent


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Return the mean distance of two lists of values, where both are finite."""
    gap = (torch.cat(a) - torch.cat(b)).abs()
    return float(gap[torch.isfinite(gap)].mean())


def computed(
    case: Case, model: Model, cfg: dict[str, Any], documents: list[Document], ids: list[list[int]], mode: str
) -> list[Tensor]:
    windows, _ = score(model, cfg, documents, ids, mode)
    return values(windows, cfg, documents, ids, contexts(documents, cfg["prefix"]))


def measure(case: Case, model: Model) -> tuple[dict[str, float], float, float]:
    """Return what each factor moves alone, the noise, and the entropy."""
    made = make.produce(case, model, make.SIZES)
    mode = "rows" if case.mode == "rows" else "batch"
    base = make.planted(case, [], case.side)
    ids = {True: made.sampler_ids, False: made.completions}
    plain = computed(case, model, base, made.documents, ids[False], mode)
    moved = {}
    for factor in case.planted:
        cfg = make.planted(case, [factor], case.side)
        moved[factor] = distance(computed(case, model, cfg, made.documents, ids[factor == TO], mode), plain)
    cfg = make.planted(case, None, case.side)
    written = made.sampler if case.side == "sampler" else made.trainer or []
    tokens = ids[TO in case.planted]
    noise = max(
        distance(computed(case, model, cfg, made.documents, tokens, one), written)
        for one in ("rows", "batch")
        if one != case.mode
    )
    if case.mode != "cache" and (cfg["prefix"] or ("", 0))[0] != "document_before":
        seen = [one.window for one in made.documents if one.window is not None]
        cached = values(seen, cfg, made.documents, tokens, contexts(made.documents, cfg["prefix"]))
        noise = max(noise, distance(cached, written))
    cfg = make.planted(case)
    raw = torch.cat(score(model, cfg, made.documents, made.sampler_ids, mode)[0]).float()
    logp = (raw / cfg["temperature"]).log_softmax(-1)
    return moved, noise, float(-(logp.exp() * logp).sum(-1).mean())


def main(out: Path, only: list[str]) -> None:
    about = {one["id"]: one for one in yaml.safe_load((HERE / "causes.yaml").read_text())}
    for name in PLANS:
        wanted = [one for one in CASES if one.model == name and (not only or one.id in only)]
        if not wanted:
            continue
        model = build(name, out / "models")
        for case in wanted:
            moved, noise, entropy = measure(case, model)
            row = about[case.id]
            row["moved"] = {factor: float(f"{x:.3g}") for factor, x in moved.items()}
            row["noise"] = float(f"{noise:.3g}")
            low = [f for f, x in moved.items() if f not in ROUNDING and x < 5 * noise and not case.undecidable]
            uneven = len(moved) == 2 and min(moved.values()) < max(moved.values()) / 20
            flags = f"{'LOW ' + ', '.join(low) if low else ''}{' UNEVEN' if uneven else ''}"
            print(case.id, case.mode, row["moved"], f"noise {noise:.2g} entropy {entropy:.2f}", flags, flush=True)
    order = [one.id for one in CASES]
    rows = sorted(about.values(), key=lambda one: order.index(one["id"]))
    (HERE / "causes.yaml").write_text(yaml.safe_dump(rows, sort_keys=False, width=118, allow_unicode=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
