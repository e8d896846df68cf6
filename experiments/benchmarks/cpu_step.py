"""A step of the default ablation on a CPU, its records included, next to a bare loop over the same documents.

The bare loop is a user's: the stock transformers model, one padded batch of all documents, clipped ratios, AdamW, and
nothing recorded. Ours is a run of the settings of `experiments/layout_parity/ablation.yaml` on one rank in float32,
which writes metrics and gradients as it does by default; a step is the time between the ends of two of its steps, files
included. Both take turns in one process each on the same cores.

Units: milliseconds of the wall clock.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.policy.decoder import load_decoder
from workbench.records.lookup import runs_of
from workbench.records.provenance import project_root, provenance
from workbench.rollouts.files import load
from workbench.specs.run import RunSpec

STEPS, TURNS = 12, 3
BAR = 1.15
"""Largest step of ours over that of the bare loop."""
ABLATION = """
question: How long is a step?
base:
  steps: {steps}
  precision: float32
  optimizer: {{name: adamw, learning_rate: 1.0e-4}}
  loss: {{name: grpo, surrogate: {{clip_low: 0.2, clip_high: 0.28}}, kl: {{coefficient: 0.05}}, denominator: token}}
reference: one_rank
configurations:
  one_rank: {{}}
"""


def measure(
    *, pairs: int = TURNS, later: int = 0, report_progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure both in turns, and return a record.

    Args:
        pairs: turns.
        later: not used; every benchmark takes it.
        report_progress: called with progress messages.
    """
    ours: list[float] = []
    bare: list[float] = []
    loop = BareLoop()
    for turn in range(pairs):
        ours += run_of_ours()
        bare += [loop.step() for _ in range(STEPS)][2:]
        report_progress(f"turn {turn + 1} of {pairs}")
    medians = {"ours": statistics.median(ours), "bare": statistics.median(bare)}
    ratio = medians["ours"] / medians["bare"]
    return {
        "benchmark": "cpu_step",
        "device": "cpu",
        "documents": loop.documents,
        "tokens": loop.tokens,
        "padded_tokens": loop.ids_NT.numel(),
        "ours_ms": ours,
        "bare_ms": bare,
        "median_ms": medians,
        "bars": {"ours over bare": {"bar": BAR, "median": ratio, "holds": ratio <= BAR}},
        "provenance": provenance(project_root()),
    }


class BareLoop:
    """A plain training loop over the rollouts of the default settings.

    Letters: N documents | T tokens of the longest, or of all.
    """

    def __init__(self) -> None:
        spec, project = RunSpec(), project_root()
        batch = load(project / str(spec.data.path))
        self.model = load_decoder(str(project / spec.model.source)).float().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        of_T = batch.document_ids_T
        self.documents, self.tokens = batch.num_documents, batch.num_tokens
        lengths = torch.bincount(of_T).tolist()

        def padded(values_T: Tensor) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(list(values_T.split(lengths)), batch_first=True)

        self.ids_NT = padded(batch.tokens_T)
        self.attended_NT = padded(torch.ones_like(batch.tokens_T))
        self.mask_NT = padded(batch.loss_mask_T.float())[:, 1:]
        self.old_NT = padded(batch.old_logprobs_T.float())[:, 1:]
        self.advantages_NT = padded(batch.advantages_T.float())[:, 1:]

    def step(self) -> float:
        """One optimizer step, in milliseconds."""
        start = time.perf_counter()
        logits = self.model(input_ids=self.ids_NT, attention_mask=self.attended_NT).logits[:, :-1]
        logprobs_NT = torch.log_softmax(logits, -1).gather(-1, self.ids_NT[:, 1:, None])[..., 0]
        ratio_NT = (logprobs_NT - self.old_NT).exp()
        gains_NT = torch.minimum(ratio_NT * self.advantages_NT, ratio_NT.clamp(0.8, 1.28) * self.advantages_NT)
        (-(gains_NT * self.mask_NT).sum() / self.mask_NT.sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (time.perf_counter() - start) * 1e3


def run_of_ours() -> list[float]:
    """Milliseconds of each step but the first two of a run, from the end of the step before."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "cpu_step.yaml"
        file.write_text(ABLATION.format(steps=STEPS))
        command = [sys.executable, "-m", "workbench", "run", str(file), "--where", "here"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        [entry] = runs_of(file.with_suffix(""))
        assert entry.run is not None, "the run has ended"
        ends = [step["time/ended_ns"] for step in entry.run.steps()]
    return [(later - earlier) / 1e6 for earlier, later in pairwise(ends)][1:]


def format_record(record: dict[str, Any]) -> str:
    """Format a record as lines of text."""
    [bar] = record["bars"].values()
    return (
        f"{record['documents']} documents, {record['tokens']} tokens: ours {record['median_ms']['ours']:.0f} ms with "
        f"records, a bare loop {record['median_ms']['bare']:.0f} ms: {bar['median']:.2f}, bar {bar['bar']}"
    )
