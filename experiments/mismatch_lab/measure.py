"""All corrections on one recorded gap between trainer and sampler, and in online runs over three seeds.

``workbench bench mismatch_lab`` writes ``mismatch_lab.json`` and ``report.html``. Finished runs stay in ``runs/``, so
an interrupted command continues. The gap has two causes: a bfloat16 sampler, and weights that are 0 to 3 optimizer
steps old; of the mixture of experts the first alone, with the routes that it changes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.mismatch_lab.page import write_page
from workbench.attribution import Credit, token_credit
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root, provenance
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.files import load
from workbench.specs.reading import merge
from workbench.specs.run import RunSpec
from workbench.train.worker import run_here

__all__ = ["format_record", "measure", "write_page"]

SEEDS = (0, 1, 2)
STEPS, LAST = 50, 10
"""Optimizer steps of a run, and how many of the last ones its reward is the mean of."""
GAP_STEPS = 12
"""Steps of the run whose last sampling is the recorded gap."""

DENSE: dict[str, Any] = {
    "model": {"source": "data/arithmetic/policy"},
    "online": {
        "task": "arithmetic",
        "prompts": 8,
        "answers": 4,
        "temperature": 1.5,
        "max_new_tokens": 16,
        "prompts_at_once": 2,
        "sampler_precision": "bfloat16",
    },
    "sync": {"queue": 3, "mixed": True},
    "data": {"advantages": {"name": "grpo"}},
    # five times that of experiments/online: weights of a few steps ago are then another policy
    "optimizer": {"learning_rate": 1e-3},
    "record": {"metrics": "basic", "gradients": "none", "tokens": False},
    "device": "cpu",
}
MIXTURE = merge(
    DENSE,
    {
        "model": {"source": "tiny-qwen3-moe"},
        "online": {"task": "experiments/mismatch_lab/task.py:Digits", "max_new_tokens": 8, "prompts_at_once": 8},
        "sync": {"queue": 0, "mixed": False},
    },
)
SYNCHRONOUS = {"online": {"sampler_precision": "float32"}, "sync": {"queue": 0, "mixed": False}}


def _corrected(**correction: Any) -> dict[str, Any]:
    return {"loss": {"correction": correction}}


CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "importance_sampling": _corrected(kind="importance_sampling"),
    "tis": _corrected(kind="tis"),
    "icepop": _corrected(kind="icepop"),
    "segment_tis": _corrected(kind="segment_tis"),
    "sequence_tis_sum": _corrected(kind="sequence_tis_sum"),
    "sequence_tis_mean": _corrected(kind="sequence_tis_mean"),
    "sequence_mask": _corrected(kind="sequence_mask"),
    "batch_normalized": _corrected(kind="batch_normalized"),
    "geometric_gate": _corrected(kind="geometric_gate"),
    # verl's seq_max_k3 of rollout_rs: a document is rejected as a whole
    "rejection": _corrected(kind="none", gate="k3", gate_level="document_max", gate_high=0.1),
    "opsm": _corrected(kind="opsm"),
    "m2po": _corrected(kind="m2po"),
    "staleness_gate": _corrected(kind="none", staleness_high=1),
}
"""Name -> its settings; those of `workbench.specs.losses.corrections` unless given."""
ANCHORS: dict[str, dict[str, Any]] = {
    "tis_behaviour": {"online": {"old_logprobs": "behaviour"}, **_corrected(kind="tis")},
    "tis_interpolated": {
        "online": {"old_logprobs": "sampler"},
        "loss": {"old_policy": "interpolated", "correction": {"kind": "tis"}},
    },
}
"""Corrections whose old policy knows the version of each token."""
ONLINE: dict[str, dict[str, dict[str, Any]]] = {
    "dense": {"synchronous": SYNCHRONOUS, **CORRECTIONS, **ANCHORS},
    "mixture": {
        "synchronous": {"online": {"sampler_precision": "float32"}},
        "none": {},
        "tis": CORRECTIONS["tis"],
        "icepop": CORRECTIONS["icepop"],
        "replayed_routes": {"routing": {"replay": "recorded"}},
    },
}
"""Model -> configuration -> settings."""
BASES = {"dense": DENSE, "mixture": MIXTURE}


def measure(
    *, pairs: int = 0, only: tuple[str, ...] = (), report_progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure everything, and return a record.

    Args:
        pairs: optimizer steps of an online run; 0 takes `STEPS`.
        only: models; all if none is named.
        report_progress: called with progress messages.
    """
    start, steps, folder = time.monotonic(), pairs or STEPS, Path(__file__).parent / "runs"
    torch.set_num_threads(1)  # runs of this size are faster on one thread, and repeatable
    report_progress("recorded gap")
    gap = gap_rows(recorded_gap(folder))
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    for model in only or tuple(ONLINE):
        runs[model] = {}
        for seed in SEEDS:
            for name, settings in ONLINE[model].items():
                run = finished(folder, f"{model}_{name}", BASES[model], settings, steps=steps, seed=seed)
                runs[model].setdefault(name, []).append(of_run(run))
                report_progress(f"{model}, {name}, seed {seed}: {time.monotonic() - start:.0f} s")
    return record_of(gap, runs, steps, time.monotonic() - start)


def finished(
    folder: Path, name: str, base: Mapping[str, Any], settings: Mapping[str, Any], *, steps: int, seed: int
) -> RunDirectory:
    """Return the finished run of these settings in a folder; run it if there is none."""
    spec = RunSpec.model_validate(merge(merge(base, settings), {"steps": steps, "seed": seed}))
    for earlier in RunDirectory.find(folder, name):
        if earlier.status == "succeeded" and earlier.spec == spec:
            return earlier
    run = RunDirectory.create(folder, name, spec)
    run_here(run, project_root())
    return run


# ---- one recorded gap ----------------------------------------------------------------------------------------------


def recorded_gap(folder: Path) -> RolloutBatch:
    """Sampling whose completions are 0 to 3 optimizer steps old, of a bfloat16 sampler, with the trainer's values."""
    larger = {"online": {"prompts": 32, "answers": 8, "prompts_at_once": 8}, "record": {"tokens": True}}
    run = finished(folder, "gap", DENSE, larger, steps=GAP_STEPS, seed=0)
    return load(run.path / "rollouts" / f"step{GAP_STEPS - 1:04d}")


def gap_rows(batch: RolloutBatch) -> list[dict[str, Any]]:
    """Effect of each correction on the credit of the tokens of one batch, at the first update on it."""
    specs = {name: RunSpec.model_validate(merge(DENSE, settings)).loss for name, settings in CORRECTIONS.items()}
    credits = {name: token_credit(batch, spec) for name, spec in specs.items()}
    return [
        gap_row(name, credit, credits["none"], credits["importance_sampling"], batch)
        for name, credit in credits.items()
    ]


def gap_row(name: str, credit: Credit, plain: Credit, weighted: Credit, batch: RolloutBatch) -> dict[str, Any]:
    """Effect of one correction on the credit of tokens.

    Shares are of trained tokens, or of the absolute credit without a correction; the cosine is that of the credit with
    the one of the exact ratio of each token.
    """
    trained_T, own_T, plain_T = credit.trained_T, credit.policy_T, plain.policy_T
    kept_T = credit.extras_T["kept"].bool() if "kept" in credit.extras_T else trained_T
    documents = credit.document_ids_T[trained_T].unique()
    left = credit.document_ids_T[trained_T & kept_T].unique()

    def share(where_T: torch.Tensor) -> float:
        total = float(plain_T[where_T].abs().sum())
        return float(own_T[where_T].abs().sum()) / total if total else 0.0

    likelier_T = batch.advantages_T > 0
    weights_T = credit.extras_T.get("applied_weight")
    weights = torch.ones(int(trained_T.sum())) if weights_T is None else weights_T[trained_T].double()
    effective = float(weights.sum() ** 2 / weights.square().sum()) if float(weights.sum()) else 0.0
    return {
        "name": name,
        "rejected_tokens": 1 - float((trained_T & kept_T).sum() / trained_T.sum()),
        "rejected_documents": 1 - len(left) / len(documents),
        "credit": share(trained_T),
        "credit_likelier": share(trained_T & likelier_T),
        "credit_unlikelier": share(trained_T & ~likelier_T),
        "effective_tokens": effective / int(trained_T.sum()),
        "cosine": float(torch.nn.functional.cosine_similarity(own_T, weighted.policy_T, dim=0)),
    }


# ---- online runs ---------------------------------------------------------------------------------------------------


def of_run(run: RunDirectory) -> dict[str, float]:
    """Numbers of an online run: reward at its end, the gap, and what its correction discards on the way."""
    steps = run.steps()

    def mean(key: str, of: Sequence[Mapping[str, Any]], default: float) -> float:
        return statistics.fmean(step.get(key, default) for step in of)

    return {
        "reward": mean("reward/all/mean", steps[-LAST:], 0.0),
        "start": mean("reward/all/mean", steps[:LAST], 0.0),
        "right": mean("reward/right/fraction", steps[-LAST:], 0.0),
        "gap_k3_nats": mean("kl/sampler_old/k3_mean", steps, 0.0),
        "kept": mean("weight/kept/fraction", steps, 1.0),
        "weight": mean("weight/applied/mean", steps, 1.0),
        "gradient_norm": mean("gradient/norm/global", steps, 0.0),
    }


def record_of(
    gap: Sequence[Mapping[str, Any]],
    runs: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]],
    steps: int,
    seconds: float,
) -> dict[str, Any]:
    """Record of what was measured, with the bars that must hold."""
    online = [
        online_row(model, name, of_seeds, configurations["none"])
        for model, configurations in runs.items()
        for name, of_seeds in configurations.items()
    ]
    by_name = {row["name"]: row for row in gap}
    bars = {
        "no correction discards nothing": by_name["none"]["rejected_tokens"] == 0.0
        and by_name["none"]["credit"] == 1.0,
        "a gate discards credit": by_name["geometric_gate"]["credit"] < 1.0,
        "every run has every seed": all(len(row["rewards"]) == len(SEEDS) for row in online),
    }
    return {
        "benchmark": "mismatch_lab",
        "command": "python -m workbench bench mismatch_lab",
        "device": "cpu",
        "steps": steps,
        "seeds": list(SEEDS),
        "gap": list(gap),
        "online": online,
        "bars": {name: {"holds": holds} for name, holds in bars.items()},
        "seconds": round(seconds),
        "provenance": provenance(project_root(), seed=SEEDS[0]),
    }


def online_row(
    model: str, name: str, of_seeds: Sequence[Mapping[str, float]], plain: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """One configuration over the seeds, and its effect against none.

    The effect is the mean over seeds of the difference of rewards to the run without a correction of the same seed; the
    spread is the standard deviation over seeds of that run's reward. An effect is *seen* if it has one sign in all
    seeds and is larger than the spread; three seeds show no smaller one.
    """
    rewards = [run["reward"] for run in of_seeds]
    differences = [own - run["reward"] for own, run in zip(rewards, plain, strict=True)]
    spread = statistics.stdev(run["reward"] for run in plain) if len(plain) > 1 else 0.0
    effect = statistics.fmean(differences)
    one_sign = all(d > 0 for d in differences) or all(d < 0 for d in differences)
    means = {key: statistics.fmean(run[key] for run in of_seeds) for key in of_seeds[0]}
    return {
        "model": model,
        "name": name,
        "rewards": rewards,
        **means,
        "effect": effect,
        "spread": spread,
        "seen": one_sign and abs(effect) > spread,
    }


def format_record(record: Mapping[str, Any]) -> str:
    """Lines for the terminal."""
    lines = [
        f"{row['name']}: {row['rejected_tokens']:.1%} of the tokens rejected, {row['credit']:.1%} of the credit left"
        for row in record["gap"]
    ]
    lines += [
        f"{row['model']}, {row['name']}: reward {row['reward']:.3f}, {row['effect']:+.3f} against none, seeds spread "
        f"{row['spread']:.3f}{', seen' if row['seen'] else ''}"
        for row in record["online"]
    ]
    return "\n".join(lines)
