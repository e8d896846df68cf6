"""The cost of a step, in wall time and peak memory of this rank."""

from __future__ import annotations

import resource
import time

import torch


class StepClock:
    """Wall-clock timer of a region on a device; waits for the device at both ends.

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
        self._synchronize()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._synchronize()
        self.step_ms = (time.perf_counter() - self._start) * 1e3

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process so far: allocated on the GPU if there is one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
