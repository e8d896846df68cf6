"""What a step cost: wall time and peak memory of this rank."""

from __future__ import annotations

import resource
import time

import torch


class StepClock:
    """Times a region on a device, finished work only.

    Example:
        >>> with StepClock(torch.device("cpu")) as clock:
        ...     pass
        >>> clock.step_ms >= 0
        True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step_ms = 0.0

    def __enter__(self) -> StepClock:
        self._wait()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.step_ms = (time.perf_counter() - self._start) * 1e3

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def peak_bytes(device: torch.device) -> int:
    """Most memory this process has held so far: of the GPU where there is one, else resident (whole process)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
