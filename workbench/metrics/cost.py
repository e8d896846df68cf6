"""The cost of a step, in wall time and peak memory of this rank; and the cost of its metrics."""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.losses.build import make_loss
from workbench.losses.terms import LossInputs
from workbench.metrics.definitions import Level
from workbench.metrics.policy import policy_metrics
from workbench.metrics.quantities import DocumentSlots
from workbench.metrics.values import finish_metrics
from workbench.sharding.mesh import Axis
from workbench.specs.losses import LossSpec


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


@dataclass(frozen=True)
class MetricsCost:
    """The cost of the metrics of one micro-batch, in addition to the step.

    Attributes:
        device: of the tensors.
        tokens: T of the micro-batch.
        level: of the metrics.
        metrics: number of metrics.
        issue_ms: until the host has issued the work, which a device executes asynchronously.
        total_ms: until the numbers are on the host, alone on an idle device.
        launches: operations sent to the device.
    """

    device: str
    tokens: int
    level: str
    metrics: int
    issue_ms: float
    total_ms: float
    launches: int

    def share_of(self, step_ms: float) -> float:
        """Return the cost as a share of a step's time; an upper bound, without overlap."""
        return self.total_ms / step_ms


def metrics_cost(
    device: torch.device | str = "cpu",
    *,
    tokens: int = 16384,
    documents: int = 32,
    level: Level = "basic",
    spec: LossSpec | None = None,
    repeats: int = 20,
) -> MetricsCost:
    """Measure the cost of the metrics of one micro-batch that has a reference, a sampler and a correction.

    Medians of ``repeats`` after a warm-up; the forward and backward pass are not part of it.

    Args:
        device: of the tensors.
        tokens: T; the budget of 1 % of a Qwen3-0.6B step is stated for 16384.
        documents: N, of equal lengths.
        level: "basic" or "full".
        spec: the loss; None: GRPO with truncated importance sampling and a KL penalty.
        repeats: number of timed repetitions.
    """
    device = torch.device(device)
    spec = spec or LossSpec(correction={"kind": "tis"}, kl={"coefficient": 0.01})
    g = torch.Generator().manual_seed(0)
    policy_T = -torch.rand(tokens, generator=g)
    other = [(policy_T + 0.1 * torch.randn(tokens, generator=g)).to(device) for _ in range(3)]
    ids_T = torch.arange(tokens, device=device) * documents // tokens
    mask_T = (torch.rand(tokens, generator=g) < 0.8).to(device)
    lengths_T = torch.bincount(ids_T, weights=mask_T.double(), minlength=documents)[ids_T]
    inputs = LossInputs(
        policy_T.to(device),
        other[0],
        torch.randn(tokens, generator=g).to(device),
        sampler_logprobs_T=other[1],
        ref_logprobs_T=other[2],
        entropy_T=-policy_T.to(device),
        loss_mask_T=mask_T,
        document_ids_T=ids_T,
        lengths_T=lengths_T,
    )
    terms = make_loss(spec)(inputs)
    slots = DocumentSlots(0, documents, lengths_T)
    issued, finished, numbers = [], [], {}
    for _ in range(3 + repeats):
        with StepClock(device) as clock:
            start = time.perf_counter()
            unfinished = policy_metrics(inputs, terms, mask_T, level, spec, slots)
            issued.append((time.perf_counter() - start) * 1e3)
            numbers = finish_metrics([unfinished], Axis("dp_cp"))
        finished.append(clock.step_ms)
    with _Launches() as launches:
        finish_metrics([policy_metrics(inputs, terms, mask_T, level, spec, slots)], Axis("dp_cp"))
    return MetricsCost(
        str(device),
        tokens,
        level,
        len(numbers),
        statistics.median(issued[3:]),
        statistics.median(finished[3:]),
        launches.count,
    )


class _Launches(TorchDispatchMode):
    """Counter of operations that touch numbers; views cost the host only."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
