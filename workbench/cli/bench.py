"""`workbench bench`: measure what is claimed of speed on this machine, and write it down."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from workbench.bench import BENCHMARKS
from workbench.errors import SpecError
from workbench.records.directory import project_root, to_json, without_machine_paths, write_whole


@dataclasses.dataclass
class BenchOptions:
    """Options of the verb."""

    names: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(
            help="Which benchmarks; all if none is named: " + "; ".join(f"{n}, {q}" for n, q in BENCHMARKS.items())
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
        benchmark = importlib.import_module(f"workbench.bench.{name}")
        folder = options.folder or project_root() / "experiments" / getattr(benchmark, "FOLDER", "benchmarks")
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
