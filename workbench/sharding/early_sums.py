"""Sums of gradients over ranks that travel while backward computes the gradients before them.

Gradients are summed in the buckets of `collectives.all_sum_`, last parameters first, as backward completes them. A
bucket starts once its gradients are complete *and* all later buckets have started, so that the order of the sums is
that of the parameters, on every rank, whatever the order in which a rank's gradients come, and whether they come: a
rank whose row trains no token has none of the head. Buckets that backward leaves behind start when it ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from workbench.sharding.collectives import BUCKET_BYTES, buckets, start_all_sum_
from workbench.sharding.mesh import Axis


class EarlySums:
    """Sums over an axis of the gradients of some parameters, started during the last backward of a step.

    Use once, on every rank: `during` around that backward, which may begin before it, then `finish`. From the backward
    to `finish` nothing may read or write these gradients, and the group of the axis must have no other collective
    inside the backward.

    Args:
        parameters: that are whole on every rank of the axis, in one order on all of them.
        axis: over which their gradients are summed.
        dtype: of the sum; None: that of each gradient.
        bucket_bytes: as of `all_sum_`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        axis: Axis,
        dtype: torch.dtype | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        def measure(parameter: nn.Parameter) -> tuple[torch.dtype, int]:
            summed_in = dtype or parameter.dtype
            return summed_in, parameter.numel() * summed_in.itemsize

        self.axis, self.dtype = axis, dtype
        self._buckets = list(buckets(parameters, bucket_bytes, measure))[::-1]
        self._bucket_of = {one: number for number, bucket in enumerate(self._buckets) for one in bucket}
        self._awaited = [len(bucket) for bucket in self._buckets]
        self._arrivals: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def during(self, last: bool) -> Iterator[None]:
        """Start sums in the backward inside if it is the ``last`` of the step, and the remaining ones at its end.

        A backward that raises starts no further sum.
        """
        if not last:
            yield
            return
        hooks = [parameter.register_post_accumulate_grad_hook(self._completed) for parameter in self._bucket_of]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._start(len(self._buckets))

    def finish(self) -> None:
        """Wait for all sums, and write them to the gradients."""
        assert len(self._arrivals) == len(self._buckets), "`during` the last backward starts all sums"
        while self._arrivals:
            self._arrivals.pop(0)()  # and release its bucket

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._bucket_of

    def _completed(self, parameter: Tensor) -> None:
        """Note a complete gradient, and start the sums that waited for it; a hook of autograd."""
        number = self._bucket_of[parameter]  # type: ignore[index]  # hooks get the parameter itself, typed as a tensor
        assert number >= len(self._arrivals), "one backward completes a gradient once"
        self._awaited[number] -= 1
        ready = len(self._arrivals)
        while ready < len(self._buckets) and not self._awaited[ready]:
            ready += 1
        self._start(ready)

    @torch.no_grad()
    def _start(self, end: int) -> None:
        """Start the sums of the buckets before ``end`` that have not started."""
        for bucket in self._buckets[len(self._arrivals) : end]:
            self._arrivals.append(self._started(bucket))

    def _started(self, bucket: Sequence[nn.Parameter]) -> Callable[[], None]:
        gradients = [_gradient_or_zeros(parameter) for parameter in bucket]
        summed = [gradient.to(self.dtype or gradient.dtype) for gradient in gradients]
        arrive = start_all_sum_(summed, self.axis)
        versions = [gradient._version for gradient in gradients]

        def complete() -> None:
            unchanged = [gradient._version for gradient in gradients] == versions
            assert unchanged, "nothing writes to gradients while their sum travels"
            arrive()
            for gradient, total in zip(gradients, summed, strict=True):
                if total is not gradient:
                    gradient.copy_(total)

        return complete


def _gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad.detach()
