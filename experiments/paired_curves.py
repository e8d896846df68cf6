"""Reward curves of two arms that share their random numbers: seeds that a verdict needs, paired and unpaired.

``python -m experiments.paired_curves`` writes ``paired_curves.json`` next to this file. The tiny policy of
`data/arithmetic` trains online in arms that differ in one setting. Runs of one seed draw the same problems and, token
by token, the same uniform numbers. Four arms, each with every seed:

* ``base``: the settings of `SPEC`;
* ``cp2``: the same mathematics on two simulated cp ranks, so that nothing but rounding may differ: a real null;
* ``near`` and ``fast``: learning rates 1.5 and 5 times as high: a small change and a large one.

The record has the share of right completions of every step; everything said about it is computed from these curves by
`workbench.compare.power`.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from workbench.atomic import to_json, write_whole
from workbench.compare.power import DIFFERENT, compare_arms
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root, provenance
from workbench.specs.run import RunSpec
from workbench.train.worker import run_here

RECORD = Path(__file__).with_suffix(".json")
METRIC = "reward/right/fraction"
SEEDS, STEPS = 20, 12
SPEC: Mapping[str, Any] = {
    "model": {"source": "data/arithmetic/policy"},
    "online": {"task": "arithmetic", "prompts": 16, "answers": 4, "temperature": 1.5, "max_new_tokens": 24},
    "data": {"advantages": {"name": "grpo"}, "micro_batch_tokens": 512},
    "loss": {"name": "grpo"},
    "optimizer": {"name": "adamw", "learning_rate": 2e-4},
    "record": {"gradients": "none", "tokens": False, "metrics": "basic"},
    "device": "cpu",
}
ARMS: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "cp2": {"layout": {"cp": 2}},
    "near": {"optimizer": {"learning_rate": 3e-4}},
    "fast": {"optimizer": {"learning_rate": 1e-3}},
}


def curve(arm: str, seed: int, steps: int) -> list[float]:
    """Train one run, and return its share of right completions by step."""
    spec = RunSpec.model_validate(dict(SPEC)).merged({**ARMS[arm], "seed": seed, "steps": steps})
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory.create(Path(folder), f"{arm}-{seed}", spec)
        run_here(run, project_root())
        return [float(record[METRIC]) for record in run.steps()]


def measure(
    seeds: Iterable[int] = range(SEEDS),
    steps: int = STEPS,
    *,
    arms: Iterable[str] = tuple(ARMS),
    report_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return the record: the curve of every arm and seed."""
    seeds, arms = list(seeds), list(arms)
    curves: dict[str, list[list[float]]] = {arm: [] for arm in arms}
    for seed in seeds:
        for arm in arms:
            curves[arm].append(curve(arm, seed, steps))
            report_progress(f"{arm}, seed {seed}: {curves[arm][-1][-1]:.3f}")
    return {
        "benchmark": "paired curves",
        "command": "python -m experiments.paired_curves",
        "metric": METRIC,
        "seeds": seeds,
        "settings": {"base": dict(SPEC), "arms": {arm: dict(ARMS[arm]) for arm in arms}},
        "curves": curves,
        "provenance": provenance(project_root()),
    }


def null_rate(record: Mapping[str, Any], *, draws: int = 2000) -> tuple[int, int]:
    """Return accusations, and comparisons, among runs that differ in nothing but seeds.

    In turn, each arm's runs are dealt at random to two arms of pairs: whatever differs is a false accusation.
    """
    rng, accused = random.Random(0), 0
    pools = list(record["curves"].values())
    for draw in range(draws):
        pool = list(pools[draw % len(pools)])
        rng.shuffle(pool)
        half = len(pool) // 2
        accused += compare_arms(pool[:half], pool[half : 2 * half]).verdict == DIFFERENT
    return accused, draws


def summary(record: Mapping[str, Any]) -> str:
    """Return a table of the arms against the first, and the false accusations, as Markdown."""
    base, *others = record["curves"]
    lines = [
        "| arm | verdict | difference | paired deviation | unpaired | variances | sees | seeds, unpaired |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm in others:
        result = compare_arms(record["curves"][base], record["curves"][arm])
        ratio, seeds = "", ""
        if math.isfinite(result.fewer):
            ratio, seeds = f"{result.fewer:.1f}", str(result.seeds_for(result.smallest_effect, paired=False))
        cells = (result.difference, result.deviation, result.unpaired_deviation)
        numbers = " | ".join(f"{value:.3f}" for value in cells)
        lines.append(f"| {arm} | {result.verdict} | {numbers} | {ratio} | {result.smallest_effect:.3f} | {seeds} |")
    accused, draws = null_rate(record)
    return "\n".join([*lines, "", f"{accused} of {draws} pairs of arms that differ in nothing but seeds are accused."])


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    record = measure(range(parser.parse_args(arguments).seeds), report_progress=lambda line: print(line, flush=True))
    write_whole(RECORD, to_json(record))
    print(summary(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
