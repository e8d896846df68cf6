"""Cost of metrics: whole optimizer steps with metrics switched off, basic and full, one after another.

On a GPU the model is the published Qwen3-0.6B architecture with seeded weights in bfloat16, and a step trains on 16 384
tokens; the budget of 1 % is stated for this setting. Without a GPU it is the tiny policy, without a bar.

Units: milliseconds of the wall clock, device work finished; samples are in the order of measurement.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.losses.build import build_loss
from workbench.losses.terms import LossInputs
from workbench.metrics.definitions import Level
from workbench.metrics.policy import policy_metrics
from workbench.metrics.quantities import DocumentSlots
from workbench.metrics.step import StepClock
from workbench.metrics.values import finish_metrics
from workbench.policy.decoder import published_qwen3
from workbench.policy.model import Policy, load_policy
from workbench.records.provenance import project_root, provenance
from workbench.rollouts.batch import RolloutBatch
from workbench.sharding.mesh import Axis, single_process_mesh
from workbench.specs.losses import LossSpec
from workbench.specs.run import RunSpec
from workbench.train import step as flow

TOKENS, TOKENS_WITHOUT_GPU, DOCUMENTS = 16384, 1024, 32
LEVELS = ("none", "basic", "full")
BAR = 0.01
"""Largest share of a step for the basic metrics."""

LOSS = {"name": "grpo", "correction": {"kind": "tis"}, "kl": {"coefficient": 0.01}}


def measure(
    *, pairs: int = 15, later: int = 0, report_progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure everything and return a record.

    Args:
        pairs: steps at each level, interleaved; two more of each come first and are not counted.
        later: not used; every benchmark takes it.
        report_progress: called with progress messages.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    large = device.type == "cuda"
    tokens = TOKENS if large else TOKENS_WITHOUT_GPU
    mesh = single_process_mesh(device)
    samples: dict[str, list[float]] = {level: [] for level in LEVELS}
    report_progress(f"a policy on {device.type}, {tokens} tokens a step")
    with _checkpoint(large) as source:
        policy = load_policy(
            str(source), mesh=mesh, precision="bfloat16" if large else "float32", implementation="vocabulary_parallel"
        )
    spec = RunSpec(loss=LOSS, precision="bfloat16" if large else "float32")
    rows, totals = flow.prepare_rows(_rollouts(tokens, policy.vocabulary_size), spec, mesh)
    loss = build_loss(spec.loss)
    for number in range(pairs + 2):
        report_progress(f"steps at each level, turn {number} of {pairs + 1}")
        for level in LEVELS:
            with StepClock(device) as clock:
                flow.run_step(policy, loss, rows, totals, level=level, loss_spec=spec.loss)
            if number >= 2:
                samples[level].append(clock.step_ms)
    medians = {level: statistics.median(values) for level, values in samples.items()}
    shares = {
        level: statistics.median(
            measured - bare for measured, bare in zip(samples[level], samples["none"], strict=True)
        )
        / medians["none"]
        for level in LEVELS[1:]
    }
    alone = metrics_alone(device, tokens=tokens, documents=DOCUMENTS, spec=spec.loss)
    bound = alone.share_of(medians["none"])
    bars = (
        {
            "basic_share": {
                "bar": BAR,
                "median": max(shares["basic"], bound),
                "holds": max(shares["basic"], bound) <= BAR,
            }
        }
        if large
        else {}
    )
    return {
        "benchmark": "metrics_cost",
        "device": torch.cuda.get_device_name() if large else "cpu",
        "model": "Qwen3-0.6B architecture, seeded" if large else "tiny",
        "parameters": _count(policy),
        "tokens": tokens,
        "documents": DOCUMENTS,
        "step_ms": samples,
        "median_ms": medians,
        "share": shares,
        "alone": {
            "total_ms": alone.total_ms,
            "issue_ms": alone.issue_ms,
            "launches": alone.launches,
            "metrics": alone.metrics,
            "share": bound,
        },
        "bars": bars,
        "provenance": provenance(project_root()),
    }


def format_record(record: dict[str, Any]) -> str:
    """Format a record as lines of text."""
    medians = ", ".join(f"{level} {value:.2f} ms" for level, value in record["median_ms"].items())
    shares = ", ".join(f"{level} {100 * value:+.2f} %" for level, value in record["share"].items())
    lines = [
        f"{record['model']} on {record['device']}, {record['tokens']} tokens a step",
        f"step by level of metrics: {medians} (medians of {len(record['step_ms']['none'])})",
        f"over none, turn by turn: {shares}",
        f"basic metrics alone on an idle device: {record['alone']['total_ms']:.2f} ms, "
        f"{100 * record['alone']['share']:.2f} % of a step",
    ]
    lines += [
        f"{name}: {bar['median']:.4f}, bar {bar['bar']}: {'holds' if bar['holds'] else 'MISSED'}"
        for name, bar in record["bars"].items()
    ]
    return "\n".join(lines)


@contextmanager
def _checkpoint(large: bool) -> Iterator[str | Path]:
    """Yield a folder with the published architecture and seeded weights, or the name of the tiny one."""
    if not large:
        yield "tiny-qwen3"
        return
    with tempfile.TemporaryDirectory() as folder:
        published_qwen3("qwen3-0.6b").save_pretrained(folder)
        yield Path(folder)


def _rollouts(tokens: int, vocabulary: int) -> RolloutBatch:
    """Draw documents of many lengths, half of each trained; log-probabilities near those of a uniform policy."""
    draw = torch.Generator().manual_seed(0)
    shares = 0.5 + torch.rand(DOCUMENTS, generator=draw)
    lengths = (shares / shares.sum() * tokens).long().clamp_min(2)
    lengths[-1] += tokens - int(lengths.sum())
    uniform = -torch.log(torch.tensor(float(vocabulary)))
    documents = []
    for number, length in enumerate(lengths.tolist()):
        near = [uniform + 0.1 * torch.randn(length, generator=draw) for _ in range(3)]
        documents.append(
            {
                "tokens": torch.randint(vocabulary, (length,), generator=draw),
                "loss_mask": torch.arange(length) >= length // 2,
                "advantages": float(torch.randn((), generator=draw)),
                "old_logprobs": near[0],
                "sampler_logprobs": near[1],
                "ref_logprobs": near[2],
                "reward": float(number % 2),
                "group_id": number // 8,
            }
        )
    return RolloutBatch.from_documents(documents)


def _count(policy: Policy) -> int:
    return sum(parameter.numel() for parameter in policy.model.parameters())


# ---- the metrics of one micro-batch alone


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


def metrics_alone(
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
    terms = build_loss(spec)(inputs)
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
