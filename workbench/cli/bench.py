"""`workbench bench`: measure what is claimed of speed on this machine, and write it down.

The measurements lie in ``experiments/`` of a checkout, beside the records that they make, and not in the package.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import tyro

from workbench.errors import SpecError
from workbench.records.directory import project_root, to_json, without_machine_paths, write_whole

BENCHMARKS = {
    "launch_overhead": (
        "benchmarks.launch_overhead",
        "what a torchx job costs over bare torch.distributed.run, and when ranks are ready",
    ),
    "head": (
        "head.measure",
        "what log-probabilities and their gradients cost, ours and others', against three matrix products",
    ),
    "head_parallel": (
        "head.measure_parallel",
        "what the head costs with its vocabulary cut over GPUs, against one that has it all",
    ),
    "layouts": (
        "gpu_layouts.measure",
        "what layouts and attention algorithms cost on several GPUs, and whether they all train the same model",
    ),
    "reproducible": (
        "reproducible.measure",
        "what the same bits in every layout cost, whether every layout has them, and how far off they are",
    ),
    "bridge": (
        "encoder_bridge.measure_bridge",
        "what a bridge between two layouts costs, bytes and time of each direction, for every way across",
    ),
    "encoder_bridge": (
        "encoder_bridge.measure",
        "whether two modules in two layouts train as one process does, and which check sees which bug",
    ),
    "metrics_cost": (
        "benchmarks.metrics_cost",
        "what share of a step the metrics take, on a GPU with the Qwen3-0.6B architecture",
    ),
}
"""Name -> module below experiments/, and the question that it answers.

A module has `measure() -> record` and `in_words(record)`, and a record's ``bars`` say what must hold. One with a page
has `write_page(record, folder)`. Records are written into the module's folder.
"""


@dataclasses.dataclass
class BenchOptions:
    """Options of the verb."""

    names: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(
            help="Which benchmarks; all if none is named: "
            + "; ".join(f"{name}, {question}" for name, (_, question) in BENCHMARKS.items())
        ),
    ] = ()
    folder: Annotated[
        Path | None,
        tyro.conf.arg(help="Where records are written; if left out a folder of experiments/ of the project."),
    ] = None
    pairs: Annotated[int | None, tyro.conf.arg(help="Samples of each kind, where a benchmark takes pairs.")] = None
    only: Annotated[
        tuple[str, ...],
        tyro.conf.arg(help="Workloads, of a benchmark that can measure some and keep its record of the others."),
    ] = ()


def main(arguments: Sequence[str]) -> int:
    """Do `workbench bench`; 1 if a bar is missed."""
    options = tyro.cli(
        BenchOptions,
        args=list(arguments),
        prog="workbench bench",
        description="Measure what is claimed of speed on this machine, and write it down.",
    )
    if strangers := [name for name in options.names if name not in BENCHMARKS]:
        raise SpecError(
            f"benchmark {', '.join(strangers)}",
            found="no benchmark of that name",
            rule=f"one of {', '.join(BENCHMARKS)}",
            fix="choose one of them, or name none for all",
        )
    held = True
    for name in options.names or BENCHMARKS:
        benchmark = _load(name)
        folder = options.folder or Path(benchmark.__file__).parent
        wanted: dict[str, Any] = {} if options.pairs is None else {"pairs": options.pairs}
        wanted |= {"only": options.only} if options.only else {}
        record = benchmark.measure(told=lambda line: print(f"  {line}", flush=True), **wanted)
        record["command"] = " ".join(["workbench bench", *map(without_machine_paths, arguments)])
        folder.mkdir(parents=True, exist_ok=True)
        written = write_whole(folder / f"{name}.json", to_json(record))
        print(f"{benchmark.in_words(record)}\nrecord: {written}")
        if hasattr(benchmark, "write_page") and (page := benchmark.write_page(record, folder)):
            print(f"page: {page}")
        held = held and all(bar["holds"] for bar in record["bars"].values())
    return 0 if held else 1


def _load(name: str) -> ModuleType:
    """The module of a benchmark, from the checkout that the current folder is in."""
    place, root = BENCHMARKS[name][0], project_root()
    file = root / "experiments" / f"{place.replace('.', '/')}.py"
    if not file.is_file():
        raise SpecError(
            f"benchmark {name}",
            found=f"no {file}",
            rule="benchmarks lie in a checkout of the project and are no part of the installed package",
            fix="change into a checkout",
        )
    sys.path[:0] = [] if str(root) in sys.path else [str(root)]
    return importlib.import_module(f"experiments.{place}")
