"""Placement of runs on this machine's devices, decided before they start and without importing torch."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.errors import LaunchError
from workbench.specs.run import RunSpec


@dataclass(frozen=True)
class Placement:
    """Device of a run.

    Attributes:
        device: "cpu" or "cuda".
        note: the reason, "" if it is the requested device.
        gpus: ids for CUDA_VISIBLE_DEVICES, one a rank; empty on CPU.
    """

    device: str
    note: str = ""
    gpus: tuple[str, ...] = ()


def visible_gpus() -> list[str]:
    """Ids of the GPUs that a run may use, as CUDA_VISIBLE_DEVICES takes them; [] without a driver."""
    present = [str(index) for index in range(len(_uuids()))]
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None or not present:
        return present
    chosen: list[str] = []
    for name in (part.strip() for part in allowed.split(",")):
        if not name or name == "-1":
            break  # CUDA ignores everything after the first invalid id
        chosen.append(name)
    return chosen


def gpu_uuid(device: str) -> str:
    """Canonical name of a GPU, given its index, its UUID or the beginning of that.

    A name that the driver does not list, such as a MIG instance's, is returned as it is.
    """
    uuids = _uuids()
    if device.isdecimal() and int(device) < len(uuids):
        return uuids[int(device)]
    matches = [uuid for uuid in uuids if device and uuid.startswith(device)]
    return matches[0] if len(matches) == 1 else device


def place(name: str, spec: RunSpec, gpus: Sequence[str]) -> Placement:
    """Assign a device to a run: `auto` takes GPUs if there are as many as ranks, and CPU with gloo otherwise.

    Args:
        name: of the run, for the message.
        spec: settings of the run.
        gpus: ids of the available GPUs.

    Raises:
        LaunchError: the spec requires cuda and there are too few GPUs.
    """
    ranks = spec.layout.world_size
    if spec.device == "cpu":
        return Placement("cpu")
    if len(gpus) >= ranks:
        return Placement("cuda", gpus=tuple(gpus[:ranks]))
    needed = f"{ranks} GPU{'s' if ranks > 1 else ''}"
    if spec.device == "cuda":
        raise LaunchError(
            f"run {name} on cuda",
            found=f"{len(gpus)} of {needed} here",
            rule="one GPU for each rank",
            fix="set device: auto to run on CPU where GPUs are missing, or use another machine",
        )
    return Placement("cpu", note=f"asked for {needed}, {len(gpus)} here" if gpus else "no GPU here")


def _uuids() -> list[str]:
    """UUID of every GPU, by index; [] without a driver. A query takes up to a second, so the result is cached."""
    tool = shutil.which("nvidia-smi")
    return [] if tool is None else list(_uuids_by(tool))


@functools.cache
def _uuids_by(tool: str) -> tuple[str, ...]:
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    gpus = (line for line in done.stdout.splitlines() if line.startswith("GPU "))
    return tuple(uuid[1] if (uuid := re.search(r"UUID: ([\w-]+)", line)) else line.split(":")[0] for line in gpus)
