"""The output head over several GPUs: its vocabulary sharded over tensor-parallel ranks, against one GPU.

Efficiency is the time on one GPU over ranks times the time on each of them: 1 if communication costs nothing.
Without GPUs one tiny head is sharded over two processes, which shows that it runs but nothing about speed.
`python -m experiments.head.measure_parallel` is one rank.

Units: milliseconds of `fused_loss` forward and backward, weight gradient in the weight's precision.

Letters: T packed tokens | V vocabulary | D model dimension.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.entries import JOB_S, OUT, job_output
from experiments.head.contenders import TOKEN
from experiments.head.page import write_head_report
from experiments.head.workloads import SIZES, SIZES_WITHOUT_GPU, Size, Workload
from workbench.metrics.step import StepClock
from workbench.policy.logprobs.fused_loss import fused_loss
from workbench.records.provenance import project_root, provenance
from workbench.sharding.mesh import Mesh, join, leave, make_mesh
from workbench.sharding.tensor_parallel import shard_range

PARALLEL_SIZES = tuple(size for size in SIZES if size.name in ("A", "B", "D"))
SAMPLES = 7


def measure(
    *, pairs: int = SAMPLES, later: int = 0, report_progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure on 1, 2, 4, ... GPUs of this machine and return a record.

    Args:
        pairs: samples on each number of ranks, after two that are not counted.
        later: not used; every benchmark takes it.
        report_progress: called with progress messages.

    Raises:
        LaunchError: ranks that failed.
    """
    gpus = torch.cuda.device_count()
    heads: dict[str, Any] = {}
    ranks = 1
    while ranks <= max(gpus, 2 if not gpus else 1):
        report_progress(f"vocabulary over {ranks} {'GPUs' if gpus else 'processes'}")
        for name, samples in _on(ranks, pairs).items():
            entry = heads.setdefault(name, {})
            median = statistics.median(samples)
            one_rank = entry["1"]["median_ms"] if ranks > 1 else median
            entry[str(ranks)] = {"samples_ms": samples, "median_ms": median, "efficiency": one_rank / (ranks * median)}
        ranks *= 2
    sizes = {size.name: dataclasses.asdict(size) for size in _sizes()}
    return {
        "benchmark": "head_parallel",
        "device": torch.cuda.get_device_name() if gpus else "cpu",
        "heads": heads,
        "sizes": sizes,
        "bars": {},
        "provenance": provenance(project_root()),
    }


def format_record(record: dict[str, Any]) -> str:
    """Format a record as lines of text."""
    return "\n".join(
        [f"vocabulary over ranks on {record['device']}"]
        + [
            f"{name}, {ranks}: {entry['median_ms']:.2f} ms, efficiency {entry['efficiency']:.3f}"
            for name, by_ranks in record["heads"].items()
            for ranks, entry in by_ranks.items()
        ]
    )


def write_page(record: dict[str, Any], folder: Path) -> Path | None:
    """Write the folder's records, this one included, as one page with figures; None without the one of one GPU."""
    return write_head_report(folder) if (folder / "head.json").exists() else None


def _sizes() -> Sequence[Size]:
    return PARALLEL_SIZES if torch.cuda.is_available() else SIZES_WITHOUT_GPU


def _on(ranks: int, samples: int) -> dict[str, list[float]]:
    return job_output("experiments.head.measure_parallel", ranks, samples, what=f"vocabulary over {ranks} GPUs")


def _sample(size: Size, mesh: Mesh, count: int) -> list[float]:
    """Milliseconds of forward and backward, on this rank's slice of the vocabulary."""
    axis, on_gpu = mesh["tp"], mesh.device.type == "cuda"
    work = Workload.make(size, mesh.device, torch.bfloat16 if on_gpu else torch.float32)
    first, last = shard_range(size.vocabulary, axis, what="vocabulary")
    local_VD = work.weight_VD.detach()[first:last].clone().requires_grad_()
    part = work.loss_of(TOKEN)
    samples = []
    for number in range(count + 2):
        work.hidden_TD.grad = local_VD.grad = None
        with StepClock(mesh.device) as clock:
            fused_loss(
                work.hidden_TD,
                local_VD,
                work.targets_T,
                part,
                expected_rows=size.tokens,
                accumulate="weight",
                axis=axis if axis.size > 1 else None,
                first_token=first,
            ).loss.backward()
        if number >= 2:
            samples.append(clock.step_ms)
    return samples


def main(arguments: Sequence[str]) -> None:
    """One rank."""
    device = join("cuda" if torch.cuda.is_available() else "cpu", timeout_s=JOB_S)
    mesh = make_mesh(tp=int(os.environ["WORLD_SIZE"]), device=device)
    samples = {size.name: _sample(size, mesh, int(arguments[0])) for size in _sizes()}
    if mesh["tp"].rank == 0:
        Path(os.environ[OUT]).write_text(json.dumps(samples))
    leave()


if __name__ == "__main__":
    main(sys.argv[1:])
