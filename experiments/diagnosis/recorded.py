"""Runs of known settings on simulated ranks, with and without a fault, as the records that diagnose is given.

Runs are kept under ``runs/``, by a digest of the code that made them, and are not made twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.diagnose import Record
from workbench.diagnose.record import RecordedStep, whole
from workbench.faults import Fault, load_fault
from workbench.policy.model import load_policy
from workbench.prove.documents import draw_documents, to_batch
from workbench.records.directory import RunDirectory
from workbench.rollouts import files
from workbench.specs.run import RunSpec, merge
from workbench.train.worker import run_here

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]

SMALL = {
    "model": {"source": "tiny-qwen3", "seed": 3},
    "loss": {"name": "dapo", "kl": {"coefficient": 0.07}},
    "layout": {"block_tokens": 2},
    "record": {"metrics": "full", "gradients": "full", "tokens": True},
}
"""What the settings of a fault are laid over."""
COPRIME = {"layout": {"dp": 3, "cp": 2}, "data": {"micro_batches": 5}}
"""Sizes of which no product of some is that of others."""
OTHER_SIZES = {"denominator_of_another_batch": {"layout": {"dp": 1, "cp": 3}}}
"""Of faults with a number of their own that is one of those: its two steps a generation would pass for two ranks."""
PRECISIONS = ("float64", "float32", "bfloat16")

LOSSES = (
    "dapo",
    "grpo",
    "dual_clip",
    "dr_grpo",
    "cispo",
    "gspo",
    "gmpo",
    "luspo",
    "sapo",
    "reinforce",
    "dppo_tv",
    "vespo",
)
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"micro_batches": 4},
    {"dp": 2, "micro_batches": 2},
    {"dp": 3},
    {"cp": 2, "order": "zigzag"},
    {"cp": 2, "order": "striped", "micro_batches": 3},
    {"dp": 2, "cp": 2, "order": "balanced"},
    {"cp": 3, "attention": "ring"},
    {"cp": 2, "attention": "ulysses"},
    {"tp": 2},
    {"cp": 2, "tp": 2, "order": "document_zigzag"},
    {"tp": 2, "sequence_parallel": True},
)

SEEDS = 20
"""Of weights and documents of right pairs."""


def shown(name: str, precision: str, *, own_sizes: bool) -> dict[str, Any]:
    """Settings in which a fault acts: its own, with coprime sizes; or coprime sizes, with its own."""
    fault, sizes = load_fault(name), merge(COPRIME, OTHER_SIZES.get(name, {}))
    small = merge(SMALL, {"precision": precision, "data": {"path": _documents(3, _temperature(fault))}})
    order = (sizes, fault.shows_in) if own_sizes else (fault.shows_in, sizes)
    return merge(merge(small, order[0]), order[1])


def hidden(name: str, precision: str) -> dict[str, Any]:
    """Settings in which a fault acts, with the change under which it does nothing."""
    fault = load_fault(name)
    small = merge(SMALL, {"precision": precision, "data": {"path": _documents(1, _temperature(fault))}})
    return merge(merge(small, fault.shows_in), fault.hidden_in or {})


def drawn_pair(number: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Settings of two right runs that differ in their layout, and in short what was drawn."""
    rng = random.Random(f"right pair {number}")
    name = LOSSES[number % len(LOSSES)]
    precision = PRECISIONS[1 + number // len(LOSSES) % 2]
    seed, temperature, rate = rng.randrange(SEEDS), rng.choice((0.7, 1.0, 1.3)), rng.choice((1e-5, 1e-4, 1e-3))
    kl, advantages = rng.choice((0.0, 0.05)), rng.choice(("recorded", "grpo"))
    loss = {"name": name, "kl": {"coefficient": kl}} | ({"denominator_constant": 16.0} if name == "dr_grpo" else {})
    both = merge(
        SMALL,
        {
            "model": {"seed": seed},
            "precision": precision,
            "steps": 3,
            "optimizer": {"learning_rate": rate},
            "policy": {"temperature": temperature},
            "data": {"path": _documents(1, temperature, seed), "advantages": {"name": advantages}},
        },
    )
    both = {**both, "loss": loss}
    layouts = rng.sample(LAYOUTS, 2)
    said = {
        "precision": precision,
        "seed": seed,
        "loss": name,
        "learning_rate": rate,
        "temperature": temperature,
        "kl": kl,
        "advantages": advantages,
        "layouts": [words(layout) for layout in layouts],
    }
    one, other = (
        merge(
            both,
            {
                "layout": {k: v for k, v in layout.items() if k != "micro_batches"},
                "data": {"micro_batches": layout.get("micro_batches", 1)},
            },
        )
        for layout in layouts
    )
    return one, other, said


def words(layout: Mapping[str, Any]) -> str:
    """A layout in short, such as ``cp=2 zigzag``."""
    return (
        " ".join(
            str(value) if isinstance(value, str) else name.replace("_", "-") if value is True else f"{name}={value}"
            for name, value in layout.items()
        )
        or "one rank"
    )


Job = tuple[Mapping[str, Any], str | None]
"""Settings of a run, and the fault that is planted in it."""


def make(jobs: Sequence[Job]) -> None:
    """Do the runs that are not there yet, as many at a time as there are cores."""
    distinct = {json.dumps(job, sort_keys=True): job for job in jobs}.values()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_made, [job for job in distinct if not _is_there(_place(*job)[0])]))


def recorded(settings: Mapping[str, Any], fault: str | None = None) -> Record:
    """The record of a run, which is made unless it is there. Nothing in it tells which fault was planted."""
    path = _place(settings, fault)[0]
    if not _is_there(path):
        _made((settings, fault))
    return _read(path)


def _place(settings: Mapping[str, Any], fault: str | None) -> tuple[Path, str, RunSpec]:
    """Where a run lies, and by which name and spec it is made."""
    spec = RunSpec.model_validate(merge(settings, {"faults": [fault] if fault else []}))
    name = f"{fault}-{_of_source(fault)}" if fault else "right"
    return _runs() / f"{name}-{spec.content_hash()}", name, spec


def _is_there(path: Path) -> bool:
    return (path / "config.json").is_file() and RunDirectory.open(path).status == "succeeded"


def _made(job: Job) -> None:
    path, name, spec = _place(*job)
    shutil.rmtree(path, ignore_errors=True)
    run_here(RunDirectory.create(_runs(), name, spec), PROJECT)


def recorded_once(settings: Mapping[str, Any]) -> Record:
    """The record of a right run that is not kept."""
    root = _runs() / f"once-{os.getpid()}"
    shutil.rmtree(root, ignore_errors=True)
    run = RunDirectory.create(root, "right", RunSpec.model_validate(settings))
    run_here(run, PROJECT)
    record = _read(run.path)
    shutil.rmtree(root)
    return record


@cache
def _documents(tens: int, temperature: float, seed: int = 3) -> str:
    """Where so many times ten documents lie, near a policy at a temperature; relative to the project."""
    folder = _runs() / f"documents-{tens}-{temperature}-{seed}"
    if not folder.is_dir():
        policy = replace(load_policy("tiny-qwen3", precision="float64", seed=seed), temperature=temperature)
        drawn = [
            replace(document, group_id=document.group_id + 10 * ten, rollout_id=document.rollout_id + 20 * ten)
            for ten in range(tens)
            for document in draw_documents(f"diagnosis {seed} {ten}", policy)
        ]
        files.save(to_batch(drawn), folder)
    return str(folder.relative_to(PROJECT))


def _temperature(fault: Fault) -> float:
    return float(fault.shows_in.get("policy", {}).get("temperature", 1.0))


def _read(path: Path) -> Record:
    """A run's record, wholly in memory, without its name."""
    record = Record.of(path)
    return Record(
        record.context,
        tuple(
            replace(step, gradients=dict(whole(step.gradients)), tokens=dict(whole(step.tokens)))
            for step in record.steps
        ),
    )


@cache
def _runs() -> Path:
    """Where runs of this code lie."""
    package = PROJECT / "workbench"
    storeys = ("rollouts", "sharding", "policy", "losses", "reduction", "metrics", "runs")
    sources = [
        path
        for storey in storeys
        for path in sorted((package / storey).rglob("*.py"))
        if path.parent.name != "faults" or path.name == "__init__.py"
    ]
    root = HERE / "runs" / _digest([*sources, package / "prove/documents.py", Path(__file__)])
    root.mkdir(parents=True, exist_ok=True)
    return root


@cache
def _of_source(fault: str) -> str:
    return _digest([PROJECT / "workbench/runs/faults" / f"{fault}.py"])


def _digest(paths: list[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:8]


def of_pairs() -> Path:
    """Where diagnoses of right pairs are noted, by the code that made the runs and the code that diagnosed them."""
    return _runs() / f"pairs-{_digest(sorted((PROJECT / 'workbench/compare/diagnose').glob('*.py')))}.jsonl"


def acts(right: Record, wrong: Record) -> bool:
    """Whether anything recorded in float64 differs by more than rounding; no bar of diagnose is asked."""
    for one, two in zip(right.steps, wrong.steps, strict=True):
        mine, theirs = _numbers(one), _numbers(two)
        if mine.keys() != theirs.keys() or any(
            not torch.allclose(mine[name], theirs[name], rtol=1e-9, atol=1e-12, equal_nan=True) for name in mine
        ):
            return True
    return False


def _numbers(step: RecordedStep) -> dict[str, Tensor]:
    """Everything that a run measured in a step, as tensors."""
    scalars = {"loss": step.loss, **step.metrics, **{f"norm of {name}": v for name, v in step.gradient_norms.items()}}
    return (
        {
            name: torch.tensor(math.nan if value is None else value, dtype=torch.float64)
            for name, value in scalars.items()
        }
        | {name: v.double() for name, v in step.gradients.items()}
        | {f"token {name}": v.double() for name, v in step.tokens.items()}
    )
