"""Commands with inputs of any size, for the verbs that compute, or that read rollouts, logs and ranks.

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
COMPARE = """
import sys
from pathlib import Path
from workbench.compare.align import Subject, compare_runs
from workbench.records.directory import RunDirectory
paths = sorted(Path(sys.argv[1], "runs").glob("c*"), key=lambda path: int(path.name.partition("-")[0][1:]))
runs = [RunDirectory.open(path) for path in paths]
subjects = [Subject(run.name, run, runs[0].name if run is not runs[0] else None, None) for run in runs]
verdicts = [c.verdict for c in compare_runs(subjects, experiment="many", question="").configurations]
assert verdicts == ["reference"] + ["equal"] * (len(runs) - 1), verdicts[:9]
"""
"""What `run` does with its runs at the end, as a program."""

SHORT = ("--where", "here", "--no-notebook", "--fresh")
"""Of `run`: one rank in the process that is measured."""


def make_runs(
    experiment: Path, number: int, *, steps: int = STEPS, tensors: bool = False, ranks: int = 1, failed: bool = False
) -> None:
    """Write run directories like those of small runs that have ended, without waiting for the disk.

    Every rank of several has a log, the record of a collective and an exit; if ``failed``, the last rank has raised an
    error, and each other lost its peer.
    """
    import torch

    sync, os.fsync = os.fsync, lambda file: None
    try:
        for index in range(number):
            spec = RunSpec(steps=steps, precision="float64", layout={"dp": ranks})
            run = RunDirectory.create(experiment / "runs", f"c{index}", spec, world_size=ranks)
            run.set_state("running")
            for step in range(steps):
                numbers = {"loss/total/sum": 0.5, "gradient/norm/global": 1.0, "time/step_ms": 40.0}
                run.append_step({"step": step, **numbers, "gradient_norms": {"w": 1.0}})
                if tensors:
                    run.write_tensors(f"step{step:04d}.gradients", {"w": torch.full((64,), 0.125, dtype=torch.float64)})
            for rank in range(ranks):
                if ranks > 1:
                    _write_rank(run, rank, ranks)
                lost = ConnectionError("connection closed by peer") if rank < ranks - 1 else ValueError("a bad row")
                run.write_exit(rank, {}, lost if failed else None)
            run.set_state("failed" if failed else "succeeded")
    finally:
        os.fsync = sync


def _write_rank(run: RunDirectory, rank: int, ranks: int) -> None:
    from workbench.sharding import flight

    run.log_path(rank).write_text("step 17: loss 0.125, gradient norm 1.0, 40 ms\n")
    flight.start(run.path / "ranks" / f"rank{rank:05d}.flight", rank)
    with flight.entering("all_sum", "dp_cp", range(ranks), "0", (32, 64), "float64", caller="gradients.py:28"):
        pass
    flight.stop()


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


def write_ablation(
    folder: Path, base: Mapping[str, Any], configurations: int, *, layout: Mapping[str, int] | None = None
) -> Path:
    """Write an ablation of configurations that are alike, the last in the layout, and return its file."""
    named: dict[str, Any] = {f"c{at}": {} for at in range(configurations)}
    if layout is not None:
        named[f"c{configurations - 1}"] = {"layout": dict(layout)}
    ablation = {"question": "?", "base": base, "reference": "c0", "configurations": named}
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


def bisect_ranks(folder: Path, size: int) -> list[str]:
    spec = str(write_json(folder / "spec.yaml", settings(ARITHMETIC / "rollouts", layout={"dp": size})))
    return ["bisect", spec, spec]


def sensitivity_documents(folder: Path, size: int) -> list[str]:
    ablation = write_ablation(folder, settings(write_rollouts(folder, size)), 2, layout={"cp": 2})
    return ["sensitivity", str(ablation), "--configurations", "c1", "--no-remedies", "--faults", "shift_after_shard"]


def _sensitivity(ablation: Path) -> list[str]:
    return ["sensitivity", str(ablation), "--configurations", "c1", "--no-remedies", "--faults"]


def sensitivity_faults(folder: Path, size: int) -> list[str]:
    from workbench.faults import fault_names

    ablation = write_ablation(folder, settings(ARITHMETIC / "rollouts"), 2, layout={"cp": 2})
    return [*_sensitivity(ablation), *fault_names()[:size]]


def sensitivity_ranks(folder: Path, size: int) -> list[str]:
    ablation = write_ablation(folder, settings(ARITHMETIC / "rollouts"), 2, layout={"dp": size})
    return [*_sensitivity(ablation), "whitening_per_rank"]


def verify_steps(folder: Path, size: int) -> list[str]:
    return ["verify", "--gpus", "0", "--steps", str(size), "--record", str(folder / "verify.json")]


def verify_ranks(folder: Path, size: int) -> list[str]:
    return ["-c", f"from workbench.launch import verify; verify.measure(gpus=0, steps=10, tokens=1024, ranks={size})"]


def score_documents(folder: Path, size: int) -> list[str]:
    return ["rollouts", "score", str(write_rollouts(folder, size)), "FRESH", "ENGINE", "--kind", "sglang"]


def record_answers(folder: Path, size: int) -> list[str]:
    return ["rollouts", "record", "--folder", "FRESH", "--answers", str(size)]


def _of_ranks(folder: Path, size: int, *, failed: bool = False) -> None:
    write_json(folder / "data/rollouts/manifest.json", {})  # makes this folder the project
    make_runs(folder / "experiments/one", 1, ranks=size, failed=failed)


def ls_ranks(folder: Path, size: int) -> list[str]:
    _of_ranks(folder, size)
    return ["ls"]


def status_ranks(folder: Path, size: int) -> list[str]:
    _of_ranks(folder, size)
    return ["status", "c0"]


def status_failed_ranks(folder: Path, size: int) -> list[str]:
    _of_ranks(folder, size, failed=True)
    return ["status", "c0"]


def logs_ranks(folder: Path, size: int) -> list[str]:
    _of_ranks(folder, size)
    return ["logs", "c0"]


def compare_ranks(folder: Path, size: int) -> list[str]:
    make_runs(folder / "experiments/two", 2, ranks=size, tensors=True)
    return ["-c", COMPARE, "experiments/two"]


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
    "sensitivity, documents": ((72, 800, 1600), sensitivity_documents),
    "sensitivity, faults": ((1, 40, 80), sensitivity_faults),
    "verify, steps": ((1, 40, 80), verify_steps),
    "rollouts score, documents": ((1, 1000, 2000), score_documents),
    "rollouts record, answers": ((1, 800, 1600), record_answers),
    "verify, ranks": ((2, 4, 8), verify_ranks),
    "bisect, ranks": ((8, 32, 64), bisect_ranks),
    "sensitivity, ranks": ((1, 8, 16), sensitivity_ranks),
    "ls, ranks": ((8, 64, 512), ls_ranks),
    "status, ranks": ((8, 64, 512), status_ranks),
    "status, ranks of a failed run": ((8, 64, 512), status_failed_ranks),
    "logs, ranks": ((8, 64, 512), logs_ranks),
    "compare, ranks": ((8, 64, 512), compare_ranks),
}
"""Verb and what grows -> sizes, the smallest first, and the command."""
