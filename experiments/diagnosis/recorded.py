"""Runs of known settings on simulated ranks, with and without a fault, as records for diagnose.

Runs are stored under ``runs/``, by a digest of the code, and are not repeated.
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
from workbench.specs.reading import merge
from workbench.specs.run import RunSpec
from workbench.train.routes import with_routes
from workbench.train.worker import run_here

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]

SMALL = {
    "model": {"source": "tiny-qwen3", "seed": 3},
    "loss": {"name": "dapo", "kl": {"coefficient": 0.07}},
    "layout": {"block_tokens": 2},
    "record": {"metrics": "full", "gradients": "full", "tokens": True},
}
"""Base settings, into which those of a fault are merged."""
COPRIME = {"layout": {"dp": 3, "cp": 2}, "data": {"micro_batches": 5}}
"""Coprime sizes: no two products of different sizes are equal."""
_STAGES, _EXPERTS = {"layout": {"dp": 1, "cp": 1}}, {"layout": {"dp": 2, "cp": 1}}
OTHER_SIZES = {
    "denominator_of_another_batch": {"layout": {"dp": 1, "cp": 3}},
    "expert_gradients_doubled_per_micro_batch": _EXPERTS,
    "pipeline_gradients_averaged_per_call": _STAGES,
    "pipeline_loss_divided_after_backward": _STAGES,
    "stage_layers_numbered_locally": _STAGES,
}
"""For faults with a number of their own that equals one of those (two steps per generation look like two ranks), for
experts that one rank alone has, and for pipeline stages, which multiply the ranks."""
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
    """Settings in which a fault acts: its own merged over coprime sizes, or the reverse."""
    fault, sizes = load_fault(name), merge(COPRIME, OTHER_SIZES.get(name, {}))
    small = merge(SMALL, {"precision": precision, "data": {"path": _documents(3, fault)}})
    order = (sizes, fault.shows_in) if own_sizes else (fault.shows_in, sizes)
    return merge(merge(small, order[0]), order[1])


def hidden(name: str, precision: str) -> dict[str, Any]:
    """Settings in which a fault acts, with the change that hides it."""
    fault = load_fault(name)
    small = merge(SMALL, {"precision": precision, "data": {"path": _documents(1, fault)}})
    return merge(merge(small, fault.shows_in), fault.hidden_in or {})


def drawn_pair(number: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Settings of two right runs that differ in their layout, and a summary of the draw."""
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
            "data": {"path": _near_policy(1, temperature, seed), "advantages": {"name": advantages}},
        },
    )
    both = {**both, "loss": loss}
    layouts = rng.sample(LAYOUTS, 2)
    summary = {
        "precision": precision,
        "seed": seed,
        "loss": name,
        "learning_rate": rate,
        "temperature": temperature,
        "kl": kl,
        "advantages": advantages,
        "layouts": [layout_label(layout) for layout in layouts],
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
    return one, other, summary


def layout_label(layout: Mapping[str, Any]) -> str:
    """Label of a layout, such as ``cp=2 zigzag``."""
    return (
        " ".join(
            str(value) if isinstance(value, str) else name.replace("_", "-") if value is True else f"{name}={value}"
            for name, value in layout.items()
        )
        or "one rank"
    )


Job = tuple[Mapping[str, Any], str | None]
"""Settings of a run, and the fault planted in it."""


def make(jobs: Sequence[Job]) -> None:
    """Run the missing jobs, one per core at a time."""
    distinct = {json.dumps(job, sort_keys=True): job for job in jobs}.values()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, [job for job in distinct if not _exists(_target(*job)[0])]))


def recorded(settings: Mapping[str, Any], fault: str | None = None) -> Record:
    """Return the record of a run, and run it if it is missing. The record does not name the fault."""
    path = _target(settings, fault)[0]
    if not _exists(path):
        _run((settings, fault))
    return _read(path)


def _target(settings: Mapping[str, Any], fault: str | None) -> tuple[Path, str, RunSpec]:
    """Path, name and spec of a run."""
    spec = RunSpec.model_validate(merge(settings, {"faults": [fault] if fault else []}))
    name = f"{fault}-{_of_faults()}" if fault else "right"
    return _runs() / f"{name}-{spec.content_hash()}", name, spec


def _exists(path: Path) -> bool:
    return (path / "config.json").is_file() and RunDirectory.open(path).status == "succeeded"


def _run(job: Job) -> None:
    path, name, spec = _target(*job)
    shutil.rmtree(path, ignore_errors=True)
    run_here(RunDirectory.create(_runs(), name, spec), PROJECT)


def recorded_once(settings: Mapping[str, Any]) -> Record:
    """Return the record of a right run whose folder is deleted."""
    root = _runs() / f"once-{os.getpid()}"
    shutil.rmtree(root, ignore_errors=True)
    run = RunDirectory.create(root, "right", RunSpec.model_validate(settings))
    run_here(run, PROJECT)
    record = _read(run.path)
    shutil.rmtree(root)
    return record


def _documents(tens: int, fault: Fault) -> str:
    """Folder of ``10 * tens`` documents for a fault, with drawn routes where it is of their replay."""
    temperature = float(fault.shows_in.get("policy", {}).get("temperature", 1.0))
    path = _near_policy(tens, temperature)
    if fault.shows_in.get("routing", {}).get("replay") != "recorded":
        return path
    folder = PROJECT / f"{path}-routes"
    if not folder.is_dir():
        batch, draw = files.load(PROJECT / path), torch.Generator().manual_seed(5)
        routes_SLk = torch.rand(batch.num_tokens, 2, 4, generator=draw).argsort(dim=-1)[..., :2]
        files.save(with_routes(batch, routes_SLk), folder)
    return str(folder.relative_to(PROJECT))


@cache
def _near_policy(tens: int, temperature: float, seed: int = 3) -> str:
    """Folder of ``10 * tens`` documents near a policy at a temperature, relative to the project."""
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


def _read(path: Path) -> Record:
    """Read a run's record into memory, without its name."""
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
    """Folder of the runs of this code."""
    package = PROJECT / "workbench"
    layers = ("rollouts", "sharding", "policy", "losses", "reduction", "metrics", "records", "train")
    sources = [path for layer in layers for path in sorted((package / layer).rglob("*.py"))]
    others = [package / "faults/__init__.py", package / "prove/documents.py", Path(__file__)]
    root = HERE / "runs" / _digest([*sources, *others])
    root.mkdir(parents=True, exist_ok=True)
    return root


@cache
def _of_faults() -> str:
    """Digest of all faults: those of a family share functions."""
    return _digest(sorted((PROJECT / "workbench/faults").glob("*.py")))


def _digest(paths: list[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:8]


def of_pairs() -> Path:
    """File of the diagnoses of right pairs, by the code of the runs and the code of diagnose."""
    return _runs() / f"pairs-{_digest(sorted((PROJECT / 'workbench/diagnose').glob('*.py')))}.jsonl"


def acts(right: Record, wrong: Record) -> bool:
    """True if any float64 value of the records differs by more than rounding, without the bars of diagnose."""
    for right_step, wrong_step in zip(right.steps, wrong.steps, strict=True):
        baseline, run = _numbers(right_step), _numbers(wrong_step)
        if baseline.keys() != run.keys() or any(
            not torch.allclose(baseline[name], run[name], rtol=1e-9, atol=1e-12, equal_nan=True) for name in baseline
        ):
            return True
    return False


def _numbers(step: RecordedStep) -> dict[str, Tensor]:
    """All values that a run measured in a step, as tensors."""
    scalars = {"loss": step.loss, **step.metrics, **{f"norm of {name}": v for name, v in step.gradient_norms.items()}}
    return (
        {
            name: torch.tensor(math.nan if value is None else value, dtype=torch.float64)
            for name, value in scalars.items()
        }
        | {name: v.double() for name, v in step.gradients.items()}
        | {f"token {name}": v.double() for name, v in step.tokens.items()}
    )
