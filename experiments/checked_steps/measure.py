"""Time of `wb.check_step` on a step of a million tokens: ``python -m experiments.checked_steps.measure``.

A step of GRPO with a k3 penalty and truncated weights for the sampler, in documents of drawn lengths, dumped by plain
arithmetic; once right, and once divided by documents instead of tokens. Writes ``million.json``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

import workbench as wb
from workbench.atomic import to_json, write_whole
from workbench.dumps.step import StepDump

RECORD = Path(__file__).parent / "million.json"
TOKENS = 1_000_000
LONGEST = 4000
GROUP = 8
BAR_S = 60.0
"""Seconds that a check may take on a CPU."""
SETTINGS = {
    "name": "grpo",
    "kl": {"coefficient": 0.05},
    "correction": {"ratio": "token", "ratio_high": 2.0},
}


def dump(tokens: int, *, by_documents: bool = False) -> StepDump:
    """Return a step of about as many tokens, in float32, whose trainer divides by tokens or, wrongly, by documents."""
    g = torch.Generator().manual_seed(0)
    number = GROUP * max(1, round(2 * tokens / LONGEST / GROUP))
    lengths_N = torch.randint(1, LONGEST, (number,), generator=g)
    lengths_N = (lengths_N * tokens / lengths_N.sum()).long().clamp_min(1)
    ids_T = torch.arange(number).repeat_interleave(lengths_N)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(len(ids_T), generator=g)

    rewards_N, groups_N = torch.rand(number, generator=g).round(), torch.arange(number) // GROUP
    rewards_GC = rewards_N.reshape(-1, GROUP).double()
    spread_G1 = rewards_GC.std(1, keepdim=True) + 1e-4
    advantages_N = ((rewards_GC - rewards_GC.mean(1, keepdim=True)) / spread_G1).reshape(-1).float()
    old_T = -1.5 - normal(0.7).abs()
    values = {"policy_logprobs": old_T + normal(0.1), "sampler_logprobs": old_T + normal(0.05)}
    values |= {"old_logprobs": old_T, "ref_logprobs": old_T + normal(0.1)}
    x_T = values["policy_logprobs"].clone().requires_grad_()
    ratio_T, A_T = (x_T - old_T).exp(), advantages_N[ids_T]
    surrogate_T = -torch.minimum(ratio_T * A_T, ratio_T.clamp(0.8, 1.2) * A_T)
    weight_T = (old_T - values["sampler_logprobs"]).exp().clamp(max=2.0)
    gap_T = values["ref_logprobs"] - x_T
    each_T = weight_T * surrogate_T + 0.05 * (gap_T.exp() - 1 - gap_T)
    total = (each_T / (lengths_N[ids_T] * number)).sum() if by_documents else each_T.mean()
    total.backward()
    assert x_T.grad is not None, "it was back-propagated"
    tokens_T = {name: value_T.double() for name, value_T in {**values, "coefficients": x_T.grad}.items()}
    tokens_T["loss_mask"] = torch.ones_like(ids_T, dtype=torch.bool)
    documents = {"rewards": rewards_N.double(), "group_ids": groups_N, "advantages": advantages_N.double()}
    more = {"settings": SETTINGS, "advantages": {"name": "grpo"}, "losses": {"total": total.item()}}
    return StepDump(ids_T, tokens_T, documents, **more)


def measure(tokens: int = TOKENS) -> dict[str, Any]:
    """Check a right step and a wrong one; seconds, verdicts and first causes."""
    torch.set_num_threads(1)
    rows = {}
    for name in ("right", "divided by documents"):
        step = dump(tokens, by_documents=name != "right")
        begin, own = time.perf_counter(), time.process_time()
        check = wb.check_step(step)
        seconds, used = time.perf_counter() - begin, time.process_time() - own
        first = f"{check.causes[0].kind}: {check.causes[0].description}" if check.causes else ""
        rows[name] = {"seconds": seconds, "processor_s": used, "verdict": check.verdict, "cause": first}
        rows[name] |= {"tokens": len(step.document_ids_T), "documents": step.num_documents}
    versions = {"torch": torch.__version__, "threads": 1, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    return {**versions, "bar_s": BAR_S, "steps": rows}


if __name__ == "__main__":
    record = measure()
    write_whole(RECORD, to_json(record))
    for name, row in record["steps"].items():
        seconds = f"{row['seconds']:.1f} s ({row['processor_s']:.1f} s of a processor)"
        print(f"{name}: {seconds}, {row['verdict']} {row['cause']}")
