"""Copies of small device tensors to the host, queued now and waited for when the host needs their values."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor to the host that may be under way.

    Between its making and `wait` the host queues more work, so that the device has some when the values arrive. A
    tensor of the host is not copied.
    """

    def __init__(self, values: Tensor) -> None:
        self._values, self._copied = values, None
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(values.device))

    def wait(self) -> Tensor:
        """Wait until the device has done all that was queued before the copy; return the values."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values
