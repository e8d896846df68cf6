"""Cost of our output head at drawn sizes, next to the four known ones.

`python -m experiments.head.drawn --seed NUMBER` on a machine with a GPU writes `drawn.json`: our passes alone, against
cuBLAS's GEMMs of the same run. Sizes are drawn from the seed: tokens in multiples of 1024, dimensions and vocabularies
of 64, both log-uniform between the smallest and the largest of published decoders. A proof takes a seed that is chosen
before anything is measured, and once; kernels have been compared at the sizes of those in `SEEN`.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.head.contenders import BOTH, FORWARD
from experiments.head.measure import ROUNDS, interleaved
from experiments.head.workloads import SIZES, SIZES_WITHOUT_GPU, Size, Workload
from workbench.atomic import to_json, write_whole
from workbench.records.provenance import project_root, provenance

DRAWN = 3
SEEN = {23: "before", 1128: "after", 1129: "after"}
"""Seeds at whose sizes kernels were compared, before or after their record: they prove nothing more."""
TOKENS, DIMENSIONS, VOCABULARIES = (8192, 65536), (1024, 8192), (32000, 262144)
"""Smallest and largest: micro-batches of A to D; Qwen3-0.6B and Llama-3-70B; Llama 2 and Gemma 3."""
BARS = {
    "fused_loss": {"A": 1.03, "B": 1.03, "C": 1.03, "": 1.05},
    "token_logprobs": {"": 1.02},
    "token_logprobs, entropy": {"": 1.05},
}
"""Contender -> size -> largest time in the GEMMs of its floor; "": every other size. Callers know how many tokens are
computed, as a trainer does."""
COUNTED = ("fused_loss, counted", "token_logprobs, counted")
"""The same where the host waits for a copy of the targets to count them, recorded beside them."""


def drawn_sizes(seed: int, count: int = DRAWN) -> list[Size]:
    """Draw sizes; E, F, ... are their names."""
    rng = random.Random(seed)

    def drawn(low: int, high: int, multiple: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))) / multiple) * multiple

    return [
        Size(chr(ord("E") + number), drawn(*TOKENS, 1024), drawn(*DIMENSIONS, 64), drawn(*VOCABULARIES, 64))
        for number in range(count)
    ]


def measure(
    *, seed: int, rounds: int = ROUNDS, report_progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure our passes and the floor at every size, and return a record."""
    large = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if large else "cpu"), torch.bfloat16 if large else torch.float32
    sizes = [*SIZES, *drawn_sizes(seed)] if large else SIZES_WITHOUT_GPU
    workloads = {}
    for size in sizes:
        report_progress(str(size))
        work = Workload.make(size, device, dtype)
        ours = {
            part: [one for one in contenders if one.kind == "floor" or one.name in (*BARS, *COUNTED)]
            for part, contenders in (("forward_backward", BOTH), ("forward", FORWARD))
        }
        timed = {part: interleaved(work, some, rounds, report_progress) for part, some in ours.items()}
        workloads[size.name] = {
            "tokens": size.tokens,
            "dimension": size.dimension,
            "vocabulary": size.vocabulary,
            **{part: {name: entry["ratio"] for name, entry in of["contenders"].items()} for part, of in timed.items()},
            "floor_ms": {part: of["floor_ms"] for part, of in timed.items()},
        }
    return {
        "device": torch.cuda.get_device_name() if large else "cpu",
        "seed": seed,
        "rounds": rounds,
        "workloads": workloads,
        "bars": bars(workloads),
        "provenance": provenance(project_root(), seed=seed),
    }


def bars(workloads: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Check every bar: of a step the three GEMMs, of a pass without a gradient one."""
    results = {}
    for size, work in workloads.items():
        for name, by_size in BARS.items():
            bar = by_size.get(size, by_size[""])
            ratio = work["forward_backward" if name == "fused_loss" else "forward"][name]
            results[f"{size}: {name}"] = {"bar": bar, "median": ratio, "holds": ratio <= bar}
    return results


def main() -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(description="Cost of the output head at drawn sizes.")
    parser.add_argument("--seed", type=int, required=True, help="of the sizes; one that was not measured before")
    record = measure(seed=parser.parse_args().seed, report_progress=lambda line: print(line, flush=True))
    write_whole(Path(__file__).with_name("drawn.json"), to_json(record))
    for name, bar in record["bars"].items():
        print(f"{name}: {bar['median']:.3f}, at most {bar['bar']}{'' if bar['holds'] else ': MISSED'}")


if __name__ == "__main__":
    main()
