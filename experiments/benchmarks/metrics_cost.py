"""Cost of metrics: whole optimizer steps with metrics switched off, basic and full, one after another.

On a GPU the model is the published Qwen3-0.6B architecture with seeded weights in bfloat16, and a step trains on 16 384
tokens; the budget of 1 % is stated for this setting. Without a GPU it is the tiny policy, without a bar.

Units: milliseconds of the wall clock, device work finished; samples are in the order of measurement.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from workbench.losses.build import make_loss
from workbench.metrics.cost import StepClock, metrics_cost
from workbench.policy.model import Policy, load_policy
from workbench.policy.published import published_qwen3
from workbench.records.directory import project_root, provenance
from workbench.rollouts.batch import RolloutBatch
from workbench.sharding.mesh import single_process_mesh
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
    loss = make_loss(spec.loss)
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
    alone = metrics_cost(device, tokens=tokens, documents=DOCUMENTS, spec=spec.loss)
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
