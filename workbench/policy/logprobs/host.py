"""Copies of small device tensors to the host, queued now and waited for when the host needs their values."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of tensors of one device to the host that may be under way.

    Between its making and `wait` the host queues more work, so that the device has some when the values arrive. A
    tensor of the host is not copied.
    """

    def __init__(self, *values: Tensor) -> None:
        self._values, self._copied = values, None
        on_device = [one for one in values if one.is_cuda]
        if on_device:
            self._values = tuple(
                torch.empty_like(one, device="cpu", pin_memory=True).copy_(one, non_blocking=True)
                if one.is_cuda
                else one
                for one in values
            )
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(on_device[0].device))

    def wait(self) -> tuple[Tensor, ...]:
        """Wait until the device has done all that was queued before the copy; return the values."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values
