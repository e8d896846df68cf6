"""`workbench verify`: check that multi-GPU training matches one GPU, with flat memory; writes a record."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from workbench.launch import verify
from workbench.records.directory import project_root, to_json, without_machine_paths, write_whole

_DESCRIPTION = """Train on several ranks and on one, and compare their weights and memory.

Exit code 0 for equal, 1 for different, vacuous (weights that did not move, steps without a gradient) or an unsound
baseline (one rank or the float64 truth not finite, or too far apart), 2 for invalid input."""


@dataclasses.dataclass
class VerifyOptions:
    """Options of the verb."""

    gpus: Annotated[int, tyro.conf.arg(help="GPUs that share each row; 0: two processes on CPU, through gloo.")] = 2
    model: Annotated[str, tyro.conf.arg(help=f"One of {', '.join(verify.MODELS)}; seeded weights.")] = "tiny-qwen3"
    steps: Annotated[int, tyro.conf.arg(help="Optimizer steps of every run.")] = 200
    record: Annotated[
        Path | None,
        tyro.conf.arg(
            help="Path of the record; by default experiments/benchmarks/verify.json of the project, and "
            "verify_cpu.json there for --gpus 0."
        ),
    ] = None


def main(arguments: Sequence[str]) -> int:
    """Run `workbench verify`; 0 if the verdict is "equal", 1 for any other."""
    options = tyro.cli(VerifyOptions, args=list(arguments), prog="workbench verify", description=_DESCRIPTION)
    record = verify.measure(
        gpus=options.gpus,
        model=options.model,
        steps=options.steps,
        report_progress=lambda line: print(f"  {line}", flush=True),
    )
    record["command"] = " ".join(["workbench verify", *map(without_machine_paths, arguments)])
    name = "verify.json" if options.gpus else "verify_cpu.json"
    path = options.record or project_root() / "experiments" / "benchmarks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    written = write_whole(path, to_json(record))
    print(f"{verify.format_record(record)}\nrecord: {written}")
    return 0 if verify.verdict_of(record) == "equal" else 1
