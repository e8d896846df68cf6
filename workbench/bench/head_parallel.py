"""The head over several GPUs: the vocabulary cut over tensor-parallel ranks, against one GPU that has it all.

Efficiency is the time on one GPU over ranks times the time on each of them: 1 where communication costs nothing.
`python -m workbench.bench.head_parallel` is one rank.

Letters: T packed tokens | V vocabulary | D model dimension.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workbench.bench.head_contenders import TOKEN
from workbench.bench.head_workloads import DOCUMENT, SIZES, Size, Workload
from workbench.errors import LaunchError
from workbench.policy.logprobs.fused_loss import fused_loss
from workbench.sharding.mesh import Mesh, join, leave, make_mesh
from workbench.sharding.tensor_parallel import shard_range

PARALLEL_SIZES = tuple(size for size in SIZES if size.name in ("A", "B", "D"))
SAMPLES = 7
GIVE_UP_S = 300.0
OUT = "WORKBENCH_BENCH_OUT"


def vocabulary_parallel(told: Callable[[str], None]) -> dict[str, Any]:
    """Median time of `fused_loss` on 1, 2, 4, ... GPUs of this machine, and the efficiency.

    Raises:
        LaunchError: ranks that failed.
    """
    found: dict[str, Any] = {}
    ranks = 1
    while ranks <= torch.cuda.device_count():
        told(f"vocabulary over {ranks} GPUs")
        for name, samples in _on(ranks).items():
            entry = found.setdefault(name, {})
            median = statistics.median(samples)
            alone = entry["1"]["median_ms"] if ranks > 1 else median
            entry[str(ranks)] = {"samples_ms": samples, "median_ms": median, "efficiency": alone / (ranks * median)}
        ranks *= 2
    return found


def _on(ranks: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "samples.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m",
                   "workbench.bench.head_parallel"]
        done = subprocess.run(command, env=os.environ | {OUT: str(out)}, capture_output=True, text=True,
                              timeout=GIVE_UP_S, check=False)
        if done.returncode:
            raise LaunchError(f"vocabulary over {ranks} GPUs", found=done.stderr[-2000:],
                              rule="every rank ends with 0", fix="read the ranks' last words above")
        return json.loads(out.read_text())


def _sample(size: Size, mesh: Mesh) -> list[float]:
    """Milliseconds of forward and backward, on this rank's slice of the vocabulary."""
    axis = mesh["tp"]
    work = Workload.make(size, mesh.device, torch.bfloat16)
    first, last = shard_range(size.vocabulary, axis, what="vocabulary")
    local_VD = work.weight_VD.detach()[first:last].clone().requires_grad_()
    part = work.loss_of(TOKEN, work.documents(DOCUMENT))
    samples = []
    for number in range(SAMPLES + 2):
        work.hidden_TD.grad = local_VD.grad = None
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fused_loss(work.hidden_TD, local_VD, work.targets_T, part, accumulate="weight",
                   axis=axis if axis.size > 1 else None, first_token=first).loss.backward()
        end.record()
        end.synchronize()
        if number >= 2:
            samples.append(begin.elapsed_time(end))
    return samples


def main() -> None:
    """One rank."""
    device = join("cuda", timeout_s=GIVE_UP_S)
    mesh = make_mesh(tp=int(os.environ["WORLD_SIZE"]), device=device)
    found = {size.name: _sample(size, mesh) for size in PARALLEL_SIZES}
    if mesh["tp"].rank == 0:
        Path(os.environ[OUT]).write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
