"""Cost of a recorder: optimizer steps of a plain training loop without one, with one, and with per-token notes.

The loop is a user's: a transformers model, float32 weights under autocast in bfloat16, torch's clipping and AdamW.
On a GPU it is the published Qwen3-0.6B architecture with seeded weights and four micro-batches of 4,096 tokens; the bar
of 5 % is stated for this setting. Without a GPU it is the tiny policy, without a bar. Steps of a loop that the host
bounds scatter by a tenth, so the bar is on the recorder's own work: its step on an idle device, which hides nothing.

Units: milliseconds of the wall clock, device work finished; samples are in the order of measurement.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.metrics.step import StepClock
from workbench.policy.decoder import published_qwen3, tiny_qwen3
from workbench.records.provenance import project_root, provenance
from workbench.records.recorder import Recorder

MICRO_BATCHES, TOKENS, TOKENS_WITHOUT_GPU = 4, 4096, 64
WAYS = ("without", "recorder", "recorder and tokens")
BAR = 0.05
"""Largest share of a step for a recorder in its default setting."""


class Loop:
    """A plain training loop on random tokens."""

    def __init__(self) -> None:
        self.large = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.large else "cpu")
        model: Any = published_qwen3("qwen3-0.6b") if self.large else tiny_qwen3(512)
        self.model = model.to(self.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        tokens = TOKENS if self.large else TOKENS_WITHOUT_GPU
        ids = torch.randint(self.model.config.vocab_size, (MICRO_BATCHES, 1, tokens + 1))
        self.micro_batches = ids.to(self.device)

    def step(self, recorder: Recorder | None, with_tokens: bool) -> float:
        """One optimizer step, in milliseconds."""
        with StepClock(self.device) as clock:
            for ids in self.micro_batches:
                with torch.autocast(self.device.type, torch.bfloat16):
                    logits = self.model(ids[:, :-1]).logits
                logprobs = -F.cross_entropy(logits.float().flatten(0, 1), ids[0, 1:], reduction="none")
                loss = -logprobs.mean() / MICRO_BATCHES
                loss.backward()
                if recorder is not None:
                    noted: dict[str, Tensor] = {"policy_logprobs": logprobs} if with_tokens else {}
                    recorder.note(loss, counts={"trained_tokens": len(logprobs)}, tokens=noted)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return clock.step_ms

    def alone(self, folder: Path, repeats: int = 10) -> float:
        """The work of a recorder at a step, in milliseconds: the median on an idle device."""
        for ids in self.micro_batches:
            self.model(ids[:, :64]).logits.float().sum().backward()
        samples = []
        with Recorder(folder, self.model) as recorder:
            for _ in range(repeats):
                with StepClock(self.device) as clock:
                    recorder.step(1.0, counts={"trained_tokens": 1})
                samples.append(clock.step_ms)
        self.optimizer.zero_grad()
        return statistics.median(samples)


def measure(
    *, pairs: int = 12, later: int = 0, report_progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure everything and return a record.

    Args:
        pairs: turns; in a turn every way makes three steps, of which the first is not counted.
        later: not used; every benchmark takes it.
        report_progress: called with progress messages.
    """
    loop = Loop()
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(pairs + 1):
            report_progress(f"turn {turn} of {pairs}")
            for way in WAYS:
                place = Path(folder) / f"{turn} {way}"
                recorded = way != "without"
                with Recorder(place, loop.model, loop.optimizer) if recorded else nullcontext() as recorder:
                    of_turn = [loop.step(recorder, "tokens" in way) for _ in range(3)]
                samples[way] += of_turn[1:] if turn else []
        alone = loop.alone(Path(folder) / "alone")
        written = sum(file.stat().st_size for file in place.rglob("*") if file.is_file()) / 3
    medians = {way: statistics.median(values) for way, values in samples.items()}
    shares = {way: medians[way] / medians["without"] - 1 for way in WAYS[1:]}
    own = alone / medians["without"]
    bar = {"recorder_share": {"bar": BAR, "median": own, "holds": own <= BAR}}
    return {
        "benchmark": "recorder_cost",
        "device": torch.cuda.get_device_name() if loop.large else "cpu",
        "model": "Qwen3-0.6B architecture, seeded" if loop.large else "tiny",
        "parameters": sum(value.numel() for value in loop.model.parameters()),
        "tokens": MICRO_BATCHES * (TOKENS if loop.large else TOKENS_WITHOUT_GPU),
        "step_ms": samples,
        "median_ms": medians,
        "share": shares,
        "alone_ms": alone,
        "alone_share": own,
        "bytes_of_a_step": written,
        "bars": bar if loop.large else {},
        "provenance": provenance(project_root()),
    }


def format_record(record: dict[str, Any]) -> str:
    """Format a record as lines of text."""
    medians = ", ".join(f"{way} {value:.1f} ms" for way, value in record["median_ms"].items())
    shares = ", ".join(f"{way} {100 * value:+.2f} %" for way, value in record["share"].items())
    lines = [
        f"{record['model']} on {record['device']}, {record['tokens']} tokens a step",
        f"step: {medians} (medians of {len(record['step_ms']['without'])}); over none: {shares}",
        f"its own work at a step, alone on an idle device: {record['alone_ms']:.1f} ms, "
        f"{100 * record['alone_share']:.1f} % of a step",
    ]
    lines += [
        f"{name}: {bar['median']:.4f}, bar {bar['bar']}: {'holds' if bar['holds'] else 'MISSED'}"
        for name, bar in record["bars"].items()
    ]
    return "\n".join(lines)
