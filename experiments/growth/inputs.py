"""Commands with inputs of any size, for the verbs that compute, or that read rollouts and logs.

`COMMANDS` has them: each function writes its input of one size into a folder and returns the words after `workbench`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root
from workbench.specs.run import RunSpec

STEPS = 4
ARITHMETIC = project_root() / "data/arithmetic"
SHORT = ("--where", "here", "--no-notebook", "--fresh")
"""Of `run`: one rank in the process that is measured."""


def make_runs(experiment: Path, number: int, *, steps: int = STEPS, tensors: bool = False) -> None:
    """Write run directories like those of small runs that succeeded, without waiting for the disk."""
    import torch

    sync, os.fsync = os.fsync, lambda file: None
    try:
        for index in range(number):
            run = RunDirectory.create(experiment / "runs", f"c{index}", RunSpec(steps=steps, precision="float64"))
            run.set_state("running")
            for step in range(steps):
                numbers = {"loss/total/sum": 0.5, "gradient/norm/global": 1.0, "time/step_ms": 40.0}
                run.append_step({"step": step, **numbers, "gradient_norms": {"w": 1.0}})
                if tensors:
                    run.write_tensors(f"step{step:04d}.gradients", {"w": torch.full((64,), 0.125, dtype=torch.float64)})
            run.write_exit(0, {}, None)
            run.set_state("succeeded")
    finally:
        os.fsync = sync


def write_rollouts(folder: Path, documents: int) -> Path:
    """Write the rollout dataset of the experiments with its documents repeated, and return its folder."""
    from workbench.rollouts import files

    batch = files.load(ARITHMETIC / "rollouts")
    batch.select([at % batch.num_documents for at in range(documents)]).save(folder / "rollouts")
    return folder / "rollouts"


def settings(rollouts: Path, **other: Any) -> dict[str, Any]:
    """Return the settings of a run in float64 on the policy of the experiments."""
    return {
        "steps": 1,
        "precision": "float64",
        "data": {"path": str(rollouts)},
        "model": {"source": str(ARITHMETIC / "policy")},
        **other,
    }


def write_ablation(folder: Path, base: Mapping[str, Any], configurations: int) -> Path:
    """Write an ablation of configurations that are alike, on one rank, and return its file."""
    names = [f"c{at}" for at in range(configurations)]
    ablation = {"question": "?", "base": base, "reference": "c0", "configurations": {name: {} for name in names}}
    return write_json(folder / "ablation.yaml", ablation)


def write_json(path: Path, value: Any) -> Path:
    """Write JSON, which is YAML too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def write_lines(path: Path, documents: int) -> Path:
    """Write the documents of the experiments, repeated, as lines of JSON: what a sampler recorded."""
    from workbench.rollouts import files

    batch = files.load(ARITHMETIC / "rollouts")
    lines = []
    for at in range(batch.num_documents):
        own = batch.document_ids_T == at
        completion = own & batch.loss_mask_T
        line = {
            "advantage": float(batch.advantages_T[own][0]),
            "prompt_ids": batch.tokens_T[own & ~batch.loss_mask_T].tolist(),
            "completion_ids": batch.tokens_T[completion].tolist(),
            "sampler_logprobs": batch.sampler_logprobs_T[completion].tolist(),
            "old_logprobs": batch.old_logprobs_T[completion].tolist(),
        }
        lines.append(json.dumps(line))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines[at % len(lines)] for at in range(documents)))
    return path


def write_log(folder: Path, text: str) -> Path:
    """Write a run that has ended, with a log of one rank, and return its folder."""
    make_runs(folder / "experiments/one", 1)
    [run] = (folder / "experiments/one/runs").glob("c0-*")
    (run / "ranks").mkdir(exist_ok=True)
    (run / "ranks/rank00000.log").write_text(text)
    return run


# ---- a command for each verb ---------------------------------------------------------------------------


def run_configurations(folder: Path, size: int) -> list[str]:
    ablation = write_ablation(folder, settings(ARITHMETIC / "rollouts"), size)
    return ["run", str(ablation), *SHORT]


def run_steps(folder: Path, size: int) -> list[str]:
    ablation = write_ablation(folder, settings(ARITHMETIC / "rollouts", steps=size), 1)
    return ["run", str(ablation), *SHORT]


def bisect_documents(folder: Path, size: int) -> list[str]:
    spec = str(write_json(folder / "spec.yaml", settings(write_rollouts(folder, size))))
    return ["bisect", spec, spec]


def prove_rounds(folder: Path, size: int) -> list[str]:
    return ["prove", "grpo", "--rounds", str(size), "--budget-s", "1e6"]


def attribute_documents(folder: Path, size: int) -> list[str]:
    case = {"trainer": {"model": str(ARITHMETIC / "policy")}, "sampler": {"rollouts": "lines.jsonl"}}
    write_json(folder / "attribute.yaml", case)
    write_lines(folder / "lines.jsonl", size)
    return ["attribute", str(folder), "--draws", "1"]


def import_documents(folder: Path, size: int) -> list[str]:
    return ["rollouts", "import", str(write_lines(folder / "lines.jsonl", size)), "FRESH"]


def check_documents(folder: Path, size: int) -> list[str]:
    return ["rollouts", "check", str(write_rollouts(folder, size))]


def logs_lines(folder: Path, size: int) -> list[str]:
    return ["logs", str(write_log(folder, "step 17: loss 0.125, gradient norm 1.0, 40 ms\n" * size)), "--lines", "-1"]


def logs_last_lines(folder: Path, size: int) -> list[str]:
    return ["logs", str(write_log(folder, "step 17: loss 0.125, gradient norm 1.0, 40 ms\n" * size))]


def logs_progress(folder: Path, size: int) -> list[str]:
    return ["logs", str(write_log(folder, ("\r 17 % of 100 steps, 40 ms a step".ljust(1000)) * size))]


def doctor_runs(folder: Path, size: int) -> list[str]:
    write_json(folder / "data/rollouts/manifest.json", {})  # makes this folder the project
    make_runs(folder / "experiments/many", size)
    return ["doctor"]


COMMANDS: dict[str, tuple[tuple[int, ...], Callable[[Path, int], list[str]]]] = {
    "run, configurations": ((1, 10, 20), run_configurations),
    "run, steps": ((1, 20, 40), run_steps),
    "bisect, documents": ((72, 800, 1600), bisect_documents),
    "prove, rounds": ((1, 3, 5), prove_rounds),
    "attribute, documents": ((8, 200, 400), attribute_documents),
    "rollouts import, documents": ((1, 20_000, 40_000), import_documents),
    "rollouts check, documents": ((1, 40_000, 80_000), check_documents),
    "logs, all lines": ((0, 500_000, 1_000_000), logs_lines),
    "logs, last 50 lines": ((0, 500_000, 1_000_000), logs_last_lines),
    "logs, kB of one line": ((0, 50_000, 100_000), logs_progress),
    "doctor, runs": ((0, 500, 1000), doctor_runs),
}
"""Verb and what grows -> sizes, the smallest first, and the command."""
