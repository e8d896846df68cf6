"""Which device a run gets on this machine, decided before it starts and without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.errors import LaunchError
from workbench.runs.spec import RunSpec


@dataclass(frozen=True)
class Placement:
    """Where a run runs.

    Attributes:
        device: "cpu" or "cuda".
        note: why it runs there, "" if that is what was asked for.
        gpus: ids for CUDA_VISIBLE_DEVICES, one a rank; empty on CPU.
    """

    device: str
    note: str = ""
    gpus: tuple[str, ...] = ()


def visible_gpus() -> list[str]:
    """Ids of the GPUs that a run may use, as CUDA_VISIBLE_DEVICES takes them; [] without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    count = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    present = [str(index) for index in range(count)]
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None or not present:
        return present
    chosen: list[str] = []
    for name in (part.strip() for part in allowed.split(",")):
        if not name or name == "-1":
            break  # CUDA ignores everything after the first id that is none
        chosen.append(name)
    return chosen


def place(name: str, spec: RunSpec, gpus: Sequence[str]) -> Placement:
    """Give a run its device: `auto` takes GPUs if there are as many as ranks, and CPU with gloo otherwise.

    Args:
        name: of the run, for the message.
        spec: what will run.
        gpus: ids of the GPUs that are there.

    Raises:
        LaunchError: the spec insists on cuda and there are too few GPUs.
    """
    ranks = spec.layout.world_size
    if spec.device == "cpu":
        return Placement("cpu")
    if len(gpus) >= ranks:
        return Placement("cuda", gpus=tuple(gpus[:ranks]))
    wanted = f"{ranks} GPU{'s' if ranks > 1 else ''}"
    if spec.device == "cuda":
        raise LaunchError(f"run {name} on cuda", found=f"{len(gpus)} of {wanted} here",
                          rule="one GPU for each rank",
                          fix="set device: auto to run on CPU where GPUs are missing, or use another machine")
    return Placement("cpu", note=f"asked for {wanted}, {len(gpus)} here" if gpus else "no GPU here")
