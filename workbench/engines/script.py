"""An engine that runs in a driver script, in an environment of its own, on as many ranks as a case has."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from workbench.engines.case import EngineCase, EngineStep, read_step, write_cases


class Engine(Protocol):
    """Runs cases; returns a step for each, in order."""

    def __call__(self, cases: Sequence[EngineCase]) -> Sequence[EngineStep]:
        """Run cases."""
        ...


@dataclass(frozen=True)
class Script:
    """A driver script (`workbench.engines.driver.serve`) and how to start it.

    Attributes:
        python: interpreter of the engine's environment.
        script: path of the driver.
        options: further arguments, written NAME=VALUE.
        path: folder that has the `workbench` package, for PYTHONPATH.
        timeout_s: of one start of the script.
        environment: further environment variables.
    """

    python: Path
    script: Path
    options: Mapping[str, str] = field(default_factory=dict)
    path: Path = Path(__file__).parents[2]
    timeout_s: float = 900.0
    environment: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, cases: Sequence[EngineCase]) -> list[EngineStep]:
        """Run cases, those of one number of ranks in one start of the script."""
        steps: dict[int, EngineStep] = {}
        for ranks in sorted({case.ranks for case in cases}):
            numbers = [number for number, case in enumerate(cases) if case.ranks == ranks]
            chosen = [cases[number] for number in numbers]
            steps |= dict(zip(numbers, self._start(chosen, ranks), strict=True))
        return [steps[number] for number in range(len(cases))]

    def _start(self, cases: Sequence[EngineCase], ranks: int) -> list[EngineStep]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
        environment = (
            os.environ | {"PYTHONPATH": str(self.path), "OMP_NUM_THREADS": "1"} | offline | dict(self.environment)
        )
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_cases(folder, cases)
            options = [f"{key}={value}" for key, value in self.options.items()]
            command = [str(self.python), *launcher, str(self.script), name, *options]
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=False, timeout=self.timeout_s
                )
                output, ended = done.stdout + done.stderr, f"the driver ended with {done.returncode}"
            except subprocess.TimeoutExpired as late:
                output, ended = str(late.stderr or ""), f"no answer after {self.timeout_s:g} s"
            return [
                read_step(folder, number)
                if (folder / f"{number}.json").exists()
                else EngineStep(error=f"{ended}: {last_error(output)}")
                for number in range(len(cases))
            ]


def last_error(output: str) -> str:
    """Return the last line of an output that names an exception other than the launcher's own, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and "ChildFailedError" not in line]
    named = [line for line in lines if "Error" in line.split(":")[0] and " " not in line.split(":")[0].split("]: ")[-1]]
    return (named or lines or ["no output"])[-1][-300:]
