"""Spread of the error of a correct layout relative to one rank's in float32, by rounding alone.

    python -m tests.parity.rounding     measures it (simulated ranks) and writes experiments/float32_rounding.json

The setting is that of experiments/layout_parity, with other weights for every seed (the shipped ones, each off by about
a thousandth), so that the runs measured here are not those judged there. Layouts are of four ranks, whose errors
have little to do with one rank's; those of two contiguous halves round mostly as one rank does.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from workbench.compare.align import Subject, compare_runs
from workbench.compare.distances import PARAMETER_FACTOR, WHOLE_FACTOR
from workbench.records.directory import RunDirectory
from workbench.specs.run import RunSpec
from workbench.train.worker import run_here

PROJECT = Path(__file__).parents[2]
RECORD = PROJECT / "experiments/float32_rounding.json"
SEEDS = range(1, 11)
STEPS = 4
LAYOUTS = {
    "gathered": {"cp": 4, "order": "document_zigzag"},
    "ring": {"cp": 4, "order": "document_zigzag", "attention": "ring"},
    "hybrid": {"cp": 4, "order": "balanced", "block_tokens": 16, "attention": "hybrid", "ulysses": 2},
    "tensor_parallel": {"cp": 2, "tp": 2, "order": "zigzag"},
}
COMPARISONS = 64
"""Whole gradients that a report judges: sixteen configurations of four steps."""
FALSE_ALARM = 0.01
"""Reports in which a right layout may be called different."""


def required(measured: dict, comparisons: int) -> float:
    """The factor that so many right comparisons all keep, but for half of `FALSE_ALARM`.

    Formula:  exp(mean + z sd) of the logarithms, taken as normal; z leaves FALSE_ALARM / 2 / comparisons above it.
    """
    z = statistics.NormalDist().inv_cdf(1 - FALSE_ALARM / 2 / comparisons)
    return math.exp(measured["mean_log"] + z * measured["sd_log"])


def weights(seed: int, folder: Path) -> Path:
    """The shipped policy, each weight off by about a thousandth."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(PROJECT / "data/arithmetic/policy", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def ratios(seed: int, folder: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Return by layout the distances to the ground truth relative to one rank's, of gradients and of parameters."""
    model = {"source": str(weights(seed, folder / "policy"))}
    base = {
        "model": model,
        "steps": STEPS,
        "optimizer": {"name": "adamw", "learning_rate": 1e-4},
        "loss": {"name": "grpo", "surrogate": {"clip_low": 0.2, "clip_high": 0.28}, "kl": {"coefficient": 0.05}},
    }
    asked = {"truth": {"precision": "float64"}, "one_rank": {"frozen_clip": "truth"}}
    asked |= {name: {"layout": layout, "frozen_clip": "truth"} for name, layout in LAYOUTS.items()}
    subjects = []
    for name, more in asked.items():
        run = RunDirectory.create(folder / "runs", name, RunSpec.model_validate(base | more))
        run_here(run, PROJECT)
        subjects.append(Subject(name, run, "one_rank" if name in LAYOUTS else "", "truth"))
    comparison = compare_runs(subjects, experiment="float32 rounding", question="How far does rounding alone go?")
    return {
        name: (
            [step["distance"] / step["budget"] * WHOLE_FACTOR for step in comparison[name].whole_gradient],
            [row.distance / row.budget * PARAMETER_FACTOR for row in comparison[name].parameters],
        )
        for name in LAYOUTS
    }


def summary(values: list[float]) -> dict:
    logs = [math.log(value) for value in values]
    return {
        "comparisons": len(values),
        "mean_log": statistics.mean(logs),
        "sd_log": statistics.stdev(logs),
        "median": statistics.median(values),
        "largest": max(values),
    }


def record(found: dict[str, list[tuple[list[float], list[float]]]]) -> dict:
    """Return the saved summary of the ratios of all seeds, by layout."""
    made = {
        "command": "python -m tests.parity.rounding",
        "seeds": len(SEEDS),
        "steps": STEPS,
        "layouts": LAYOUTS,
        "unit": "distance to the float64 truth in one rank's, as workbench.compare.align counts it",
    }
    for at, kind in enumerate(("whole_gradient", "parameter")):
        by_layout = {name: [value for both in seeds for value in both[at]] for name, seeds in found.items()}
        made[kind] = summary([value for values in by_layout.values() for value in values]) | {
            "median_by_layout": {name: statistics.median(values) for name, values in by_layout.items()}
        }
    return made


def main() -> None:
    torch.set_num_threads(1)
    results: dict[str, list[tuple[list[float], list[float]]]] = {name: [] for name in LAYOUTS}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            for name, both in ratios(seed, Path(folder)).items():
                results[name].append(both)
        worst = {name: [f"{max(values):.2f}" for values in seeds[-1]] for name, seeds in results.items()}
        sys.stdout.write(f"seed {seed}: {worst}\n")
    RECORD.write_text(json.dumps(record(results), indent=1) + "\n")


if __name__ == "__main__":
    main()
