"""`workbench bench` and `workbench verify`: measure on this machine, and record the results.

The benchmarks are in ``experiments/`` of a checkout, next to the records that they write, and not in the package.
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

from workbench.atomic import to_json, write_whole
from workbench.cli.terminal import answered
from workbench.errors import SpecError
from workbench.launch import verify as verification
from workbench.records.provenance import project_root, without_machine_paths

BENCHMARKS = {
    "launch_overhead": (
        "benchmarks.launch_overhead",
        "cost of a torchx job over bare torch.distributed.run, and the time until ranks are ready",
    ),
    "head": (
        "head.measure",
        "cost of log-probabilities and their gradients, ours and others', against three GEMMs",
    ),
    "head_parallel": (
        "head.measure_parallel",
        "cost of the vocabulary-parallel head against an unsharded one",
    ),
    "layouts": (
        "gpu_layouts.measure",
        "cost of layouts and attention algorithms on several GPUs, and whether they all train the same model",
    ),
    "reproducible": (
        "reproducible.measure",
        "cost of the same bits in every layout, whether every layout has them, and how far off they are",
    ),
    "bridge": (
        "encoder_bridge.measure_bridge",
        "cost of a bridge between two layouts: bytes and time of each direction, for every route",
    ),
    "encoder_bridge": (
        "encoder_bridge.measure",
        "whether two modules in two layouts train as one process does, and which check catches which bug",
    ),
    "sensitivity": (
        "sensitivity.measure",
        "which known bugs a comparison of layouts rejects, next to the gates of other projects",
    ),
    "attribution": (
        "attribution.measure",
        "whether causes planted between trainer and sampler are named, and whether the floor is right",
    ),
    "mismatch_lab": (
        "mismatch_lab.measure",
        "what corrections for the gap between trainer and sampler discard, and their effect against the seeds' spread",
    ),
    "attribution_gpu": (
        "attribution_gpu.measure",
        "which causes a gap has whose sampler runs in bfloat16 and FP8 on a GPU, with the Qwen3-0.6B architecture",
    ),
    "metrics_cost": (
        "benchmarks.metrics_cost",
        "share of a step that the metrics take, on a GPU with the Qwen3-0.6B architecture",
    ),
    "cpu_step": (
        "benchmarks.cpu_step",
        "what a step of the default ablation takes on a CPU, next to a bare loop over the same documents",
    ),
    "recorder_cost": (
        "benchmarks.recorder_cost",
        "share of a step that a recorder takes in a plain training loop, on a GPU with the Qwen3-0.6B architecture",
    ),
}
"""Name -> module below experiments/, and the question that it answers.

A module has `measure() -> record` and `format_record(record)`, and a record's ``bars`` state what must hold. One with a
page has `write_page(record, folder)`. Records are written into the module's folder.
"""


@dataclasses.dataclass
class BenchOptions:
    """Options of `workbench bench`."""

    names: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(
            help="Benchmarks to run; all if none is named: "
            + "; ".join(f"{name}, {question}" for name, (_, question) in BENCHMARKS.items())
        ),
    ] = ()
    folder: Path | None = None
    """Folder of the records; by default that of the benchmark, in experiments/."""
    pairs: int | None = None
    """Samples of each kind, where a benchmark takes pairs."""
    only: tuple[str, ...] = ()
    """Workloads to measure, where a benchmark can keep its record of the others."""


def bench(arguments: Sequence[str]) -> int:
    """Run `workbench bench`; exit code 1 if a bar is missed."""
    options = tyro.cli(
        BenchOptions,
        args=list(arguments),
        prog="workbench bench",
        description="Run the performance benchmarks on this machine and record the results.",
    )
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        raise SpecError(
            f"benchmark {', '.join(unknown)}",
            found="no benchmark of that name",
            rule=f"one of {', '.join(BENCHMARKS)}",
            fix="choose one of them, or name none for all",
        )
    passed, written_records = True, []
    for name in options.names or BENCHMARKS:
        benchmark = _load(name)
        assert benchmark.__file__ is not None, "a benchmark is loaded from its file"
        folder = options.folder or Path(benchmark.__file__).parent
        settings: dict[str, Any] = {} if options.pairs is None else {"pairs": options.pairs}
        settings |= {"only": options.only} if options.only else {}
        record = benchmark.measure(report_progress=lambda line: print(f"  {line}", flush=True), **settings)
        written = _write(record, folder / f"{name}.json", ["workbench bench", *arguments])
        written_records.append({"name": name, "record": str(written), "bars": record["bars"]})
        print(f"{benchmark.format_record(record)}\nrecord: {written}")
        if hasattr(benchmark, "write_page") and (page := benchmark.write_page(record, folder)):
            print(f"page: {page}")
        passed = passed and all(bar["holds"] for bar in record["bars"].values())
    answered(lambda: written_records)
    return 0 if passed else 1


def _load(name: str) -> ModuleType:
    """Import the module of a benchmark from the checkout that the current folder is in."""
    place, root = BENCHMARKS[name][0], project_root()
    file = root / "experiments" / f"{place.replace('.', '/')}.py"
    if not file.is_file():
        raise SpecError(
            f"benchmark {name}",
            found=f"no {file}",
            rule="benchmarks are part of a checkout of the project, not of the installed package",
            fix="change into a checkout",
        )
    sys.path[:0] = [] if str(root) in sys.path else [str(root)]
    return importlib.import_module(f"experiments.{place}")


_VERIFY = """Train on several ranks and on one, and compare their weights and memory.

Exit code 0 for equal, 1 for different, vacuous (weights that did not move, steps without a gradient) or an unsound
baseline (one rank or the float64 truth not finite, or too far apart), 2 for invalid input."""


@dataclasses.dataclass
class VerifyOptions:
    """Options of `workbench verify`."""

    gpus: int = 2
    """GPUs that share each row; 0: two processes on CPU, through gloo."""
    model: Annotated[str, tyro.conf.arg(help=f"One of {', '.join(verification.MODELS)}; seeded weights.")] = (
        "tiny-qwen3"
    )
    steps: int = 200
    """Optimizer steps of every run."""
    lora_r: int = 0
    """Rank of adapters on every linear layer, which alone are trained; 0: all weights are."""
    record: Annotated[
        Path | None,
        tyro.conf.arg(
            help="Path of the record; by default experiments/benchmarks/verify.json of the project, and "
            "verify_cpu.json there for --gpus 0."
        ),
    ] = None


def verify(arguments: Sequence[str]) -> int:
    """Run `workbench verify`; 0 if the verdict is "equal", 1 for any other."""
    options = tyro.cli(VerifyOptions, args=list(arguments), prog="workbench verify", description=_VERIFY)
    record = verification.measure(
        gpus=options.gpus,
        model=options.model,
        steps=options.steps,
        lora_r=options.lora_r,
        report_progress=lambda line: print(f"  {line}", flush=True),
    )
    name = "verify.json" if options.gpus else "verify_cpu.json"
    path = options.record or project_root() / "experiments" / "benchmarks" / name
    written = _write(record, path, ["workbench verify", *arguments])
    print(f"{verification.format_record(record)}\nrecord: {written}")
    answered(lambda: {"verdict": verification.verdict_of(record), "path": str(written), "record": record})
    return 0 if verification.verdict_of(record) == "equal" else 1


def _write(record: dict[str, Any], path: Path, command: Sequence[str]) -> Path:
    """Write a record with the command that made it."""
    record["command"] = " ".join(map(without_machine_paths, command))
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, to_json(record))
