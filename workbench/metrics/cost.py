"""What a step cost, wall time and peak memory of this rank; and what measuring it costs."""

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


@dataclass(frozen=True)
class MetricsCost:
    """What measuring one micro-batch costs, beside the step that it measures.

    Attributes:
        device: where.
        tokens: T of the micro-batch.
        level: what was measured.
        metrics: how many numbers came out.
        issue_ms: until the host has issued the work, which a device does while the host goes on.
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
        """The cost as a share of a step's time, at most: nothing overlaps."""
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
    """Measure what the metrics of one micro-batch cost, with a reference, a sampler and a correction to look at.

    Medians of ``repeats`` after a warm-up; the forward and backward pass are not part of it.

    Args:
        device: where.
        tokens: T; 16384 is what the budget of 1 % of a Qwen3-0.6B step is stated for.
        documents: N, of equal lengths.
        level: "basic" or "full".
        spec: the loss; None: GRPO with truncated importance sampling and a KL penalty.
        repeats: how often.
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
    issued, finished, found = [], [], {}
    for _ in range(3 + repeats):
        with StepClock(device) as clock:
            begin = time.perf_counter()
            unfinished = policy_metrics(inputs, terms, mask_T, level, spec, slots)
            issued.append((time.perf_counter() - begin) * 1e3)
            found = finish_metrics([unfinished], Axis("dp_cp"))
        finished.append(clock.step_ms)
    with _Launches() as launches:
        finish_metrics([policy_metrics(inputs, terms, mask_T, level, spec, slots)], Axis("dp_cp"))
    return MetricsCost(
        str(device),
        tokens,
        level,
        len(found),
        statistics.median(issued[3:]),
        statistics.median(finished[3:]),
        launches.count,
    )


class _Launches(TorchDispatchMode):
    """Counts operations that touch numbers; views cost the host only."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
