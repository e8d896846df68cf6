"""Cost of a bridge between two layouts: bytes and time of each direction, for every way across.

The same activation crosses on the fast path, its gradients all-reduced over cp, or the tokens that each cp rank used
all-gathered; on the general path, whole sequences; and straight into shards. Without GPUs tiny ones cross between
processes, which shows that it runs but little about speed. Before it is timed each way is compared with global
tensors, bit for bit. `python -m experiments.encoder_bridge.measure_bridge` is one rank.

Units: milliseconds of the slowest rank; received bytes of the rank that receives most.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.encoder_bridge.page_bridge import write_bridge_report
from experiments.entries import JOB_S, OUT, job_output
from workbench.metrics.step import StepClock
from workbench.records.provenance import project_root, provenance
from workbench.sharding.bridge import Grid, GridGroups, GridPair, connect
from workbench.sharding.bridge.delivery import Delivery, crossing_of, sides_of
from workbench.sharding.bridge.grid import least_samples
from workbench.sharding.bridge.sides import Side
from workbench.sharding.bridge.traffic import Traffic
from workbench.sharding.collectives import all_max, all_sum
from workbench.sharding.mesh import join, leave, world_axis

SAMPLES = 9
WAYS: dict[str, tuple[Delivery, bool]] = {
    "fast path, all-reduce over cp": (Delivery(), False),
    "fast path, all-gather over cp": (Delivery(order="zigzag"), False),
    "general path, whole sequences": (Delivery(order="zigzag"), True),
    "general path, into shards": (Delivery("sharded", "zigzag"), True),
}
"""Way -> its delivery, and True for the general path."""


def pairs_of(ranks: int) -> dict[str, GridPair]:
    """A fan-in, a fan-out and an equal pair, into a destination that shards its sequence over two ranks.

    Example:
        >>> pairs_of(4)["fan-out"]
        GridPair(tp4 -> cp2 x dp2: fan-out)
    """
    to, rest = Grid.of(cp=2, dp=ranks // 2), ranks // 2
    pairs = {"fan-in": GridPair(Grid.of(dp=ranks), to), "equal": GridPair(Grid.of(tp=2, dp=rest), to)}
    return pairs | ({"fan-out": GridPair(Grid.of(tp=ranks), to)} if rest > 1 else {})


def measure(
    *, pairs: int = SAMPLES, later: int = 0, report_progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure on all GPUs of this machine, or on four processes, and return a record.

    Args:
        pairs: samples of each way and direction, after two that are not counted.
        later: not used; every benchmark takes it.
        report_progress: called with progress messages.

    Raises:
        LaunchError: ranks that failed.
    """
    gpus = torch.cuda.device_count()
    ranks = gpus if gpus > 1 else 4
    report_progress(f"bridges over {ranks} {'GPUs' if gpus > 1 else 'processes'}")
    results = _on(ranks, pairs)
    for bridge in results["bridges"].values():
        for entry in bridge["ways"].values():
            entry |= {f"{way}_ms": statistics.median(entry[f"{way}_samples_ms"]) for way in ("forward", "backward")}
    return {
        "benchmark": "bridge",
        "device": torch.cuda.get_device_name() if gpus > 1 else "cpu",
        "ranks": ranks,
        **results,
        "bars": {"exact": {"holds": _exact(results)}},
        "provenance": provenance(project_root()),
    }


def _exact(results: dict[str, Any]) -> bool:
    return all(way["wrong_numbers"] == 0 for bridge in results["bridges"].values() for way in bridge["ways"].values())


def format_record(record: dict[str, Any]) -> str:
    """Format a record as lines of text."""
    lines = [f"bridges over {record['ranks']} ranks on {record['device']}, {record['activation']}"]
    for name, bridge in record["bridges"].items():
        lines += [
            f"{name}, {way}: forward {entry['forward_ms']:.2f} ms ({entry['forward_bytes'] / 2**20:.1f} MiB), "
            f"backward {entry['backward_ms']:.2f} ms ({entry['backward_bytes'] / 2**20:.1f} MiB)"
            for way, entry in bridge["ways"].items()
        ]
    return "\n".join(lines)


def write_page(record: dict[str, Any], folder: Path) -> Path:
    """Write the record as a page with drawings."""
    return write_bridge_report(record, folder)


def _on(ranks: int, samples: int) -> dict[str, Any]:
    return job_output("experiments.encoder_bridge.measure_bridge", ranks, samples, what=f"bridges over {ranks} ranks")


def _size(on_gpu: bool) -> tuple[int, int, torch.dtype]:
    """Tokens of a sample, features of a token, precision."""
    return (8192, 4096, torch.bfloat16) if on_gpu else (2048, 256, torch.float32)


def _crossing(
    pair: GridPair, how: Delivery, general: bool, groups: GridGroups, tokens: int
) -> Callable[[Tensor], Tensor]:
    """Build the function that takes an activation [b, s, h] across."""
    samples = (least_samples(pair) // pair.source["dp"],) * pair.source["dp"]
    bridge = connect(pair.source, pair.destination, groups, delivery=how.kind, order=how.order)
    if general:
        crossing = crossing_of(pair, how, samples, tokens)
        return lambda values: crossing.cross(values.flatten(0, 1), bridge.all_ranks)
    return lambda values: bridge.cross(values, samples)


def _sample(pair: GridPair, groups: GridGroups, device: torch.device, count: int) -> dict[str, Any]:
    """Measure each way, its samples interleaved with the others', so that a disturbance affects all."""
    tokens, features, dtype = _size(device.type == "cuda")
    values = torch.randn(
        least_samples(pair) // pair.source["dp"], tokens, features, dtype=dtype, device=device, requires_grad=True
    )
    ways = {name: _crossing(pair, how, general, groups, tokens) for name, (how, general) in WAYS.items()}
    results: dict[str, Any] = {}
    for name, (how, general) in WAYS.items():
        traffic = Traffic.of(pair, how, tokens=tokens, general=general)
        sides = sides_of(pair, Delivery(how.kind, "zigzag"), traffic.route.samples, tokens)
        results[name] = {
            f"{way}_bytes": traffic.received_bytes(way, features * values.element_size())
            for way in ("forward", "backward")
        }
        results[name] |= {
            "forward_samples_ms": [],
            "backward_samples_ms": [],
            "wrong_numbers": _wrong(ways[name], sides, values.detach(), groups),
        }
    for number in range(count + 2):
        for name, cross in ways.items():
            values.grad = None
            _meet(groups, device)
            with StepClock(device) as forward:
                out = cross(values)
            gradient = torch.ones_like(out)
            _meet(groups, device)
            with StepClock(device) as backward:
                out.backward(gradient)
            slowest = all_max(torch.tensor([forward.step_ms, backward.step_ms], device=device), groups.world).tolist()
            if number >= 2:
                results[name]["forward_samples_ms"].append(slowest[0])
                results[name]["backward_samples_ms"].append(slowest[1])
    return results


def _wrong(cross: Callable[[Tensor], Tensor], sides: tuple[Side, Side], like: Tensor, groups: GridGroups) -> int:
    """Count the numbers of all ranks that differ from the value of their token, forward and backward."""
    before, after = (side.share_of[groups.rank] for side in sides)
    answered_t = after.gradient_rows_t.to(like.device)

    def rows(numbers_t: Tensor) -> Tensor:
        small = (numbers_t.to(like.device) * 37 % 101 - 50).to(like.dtype)  # exact in every precision
        return small[:, None].expand(-1, like.shape[-1])

    values = rows(before.tokens_t).reshape(like.shape).clone().requires_grad_()
    out = cross(values)
    out.backward((rows(after.tokens_t) * answered_t[:, None]).reshape(out.shape))
    assert values.grad is not None, "backward brings every source rank its gradient"
    wrong_out = out.detach() != rows(after.tokens_t).view_as(out)
    wrong_gradient = values.grad != rows(before.tokens_t).view_as(values)
    return int(all_sum(wrong_out.sum() + wrong_gradient.sum(), groups.world))


def _sizes_of(grid: Grid) -> dict[str, int]:
    return dict(zip(grid.names, grid.sizes, strict=True))


def _meet(groups: GridGroups, device: torch.device) -> None:
    """Wait for all ranks."""
    float(all_max(torch.zeros((), device=device), groups.world))


def main(arguments: Sequence[str]) -> None:
    """One rank."""
    device = join("cuda" if torch.cuda.device_count() > 1 else "cpu", timeout_s=JOB_S)
    groups = GridGroups(world_axis())
    tokens, features, dtype = _size(device.type == "cuda")
    bridges = {
        name: {
            "source": _sizes_of(pair.source),
            "destination": _sizes_of(pair.destination),
            "ways": _sample(pair, groups, device, int(arguments[0])),
        }
        for name, pair in pairs_of(groups.world.size).items()
    }
    if groups.rank == 0:
        activation = f"samples of {tokens} x {features} {str(dtype).removeprefix('torch.')}"
        Path(os.environ[OUT]).write_text(json.dumps({"activation": activation, "bridges": bridges}))
    groups.destroy()
    leave()


if __name__ == "__main__":
    main(sys.argv[1:])
