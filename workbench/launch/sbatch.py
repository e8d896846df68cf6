"""Jobs of Slurm without torchx: a plain batch script, and `sbatch`.

The script starts one agent on each node with `srun`. Its job has the states, reasons and ends that
`workbench.launch.slurm` reads of every job.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.errors import LaunchError
from workbench.launch.component import MEMORY_MB, WORKER, agent_arguments, environment_of, job_name
from workbench.launch.devices import Placement
from workbench.launch.options import SBATCH, SLURM
from workbench.launch.slurm import COMMAND_S

OWN = {
    "python": "The interpreter on the cluster (this one, by its path)",
    "memory_mb": "Memory of the host for each rank; 0 asks for none",
}
"""Options of ours; every other one is a long option of sbatch, such as partition=gpu or exclusive=."""

SET_HERE = (
    *("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-task", "mem", "array", "wrap", "export"),
    *("job-name", "output", "error", "open-mode", "chdir", "requeue", "no-requeue", "parsable", "test-only"),
)
"""Options of sbatch that follow from the runs."""

_OPTION = re.compile(r"[a-z][a-z-]*")


def script(
    names: Sequence[str],
    run_paths: Sequence[Path],
    world_size: int,
    placement: Placement,
    *,
    project: Path,
    worker: str = WORKER,
    options: Mapping[str, str] | None = None,
    resumable: bool = False,
) -> str:
    """Write the batch script of a job; nothing is created or contacted. Arguments as of `jobs.describe`.

    Raises:
        LaunchError: an option that sbatch cannot have, or that follows from the runs.
    """
    options = dict(options or {})
    _check(options)
    nodes, ranks = placement.nodes, world_size // placement.nodes
    memory_mb = _number("memory_mb", options.pop("memory_mb", str(MEMORY_MB[placement.device])))
    python = options.pop("python", "") or sys.executable
    folder = run_paths[0].resolve() / "torchx"  # of the job's files, whatever started it
    requests = {
        "job-name": job_name(names),
        "chdir": str(folder),
        "output": "slurm-%j.out",
        "error": "slurm-%j.err",
        "nodes": str(nodes),
        "ntasks": str(nodes),
        "cpus-per-task": str(ranks),
        **({"mem": f"{memory_mb * ranks}M"} if memory_mb else {}),
        **({"gpus-per-task": str(len(placement.gpus) // nodes)} if placement.gpus else {}),
        # without a checkpoint a requeued job would run a half-done run directory again
        **({"requeue": "", "open-mode": "append"} if resumable else {"no-requeue": ""}),
        **options,
    }
    # the cluster assigns GPUs
    given = {key: value for key, value in environment_of(placement).items() if not key.startswith("CUDA_")}
    agent = shlex.join([python, *agent_arguments(world_size, nodes, run_paths, project, worker)])
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}{f'={shlex.quote(value)}' if value else ''}" for name, value in requests.items()),
        "set -e",
        *(f"export {name}={shlex.quote(value)}" for name, value in {"PYTHONUNBUFFERED": "1", **given}.items()),
        # a step does not inherit the cores of its task since Slurm 22.05
        f"srun --kill-on-bad-exit=1 --wait=60 --cpus-per-task={ranks} {agent}",
    ]
    return "\n".join(lines) + "\n"


def submit(text: str) -> str:
    """Submit a script, and return the handle of its job.

    Raises:
        LaunchError: sbatch is missing, or refused, in its own words.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SBATCH_EXPORT")}
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=text, env=environment, capture_output=True, text=True, timeout=COMMAND_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        found = "no sbatch on this machine" if isinstance(error, FileNotFoundError) else str(error)
        raise _refused(found) from error
    number = done.stdout.strip().partition(";")[0]
    if done.returncode or not number.isdecimal():
        raise _refused(" ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}")
    return f"{SLURM}://{SBATCH}/{number}"


def _refused(found: str) -> LaunchError:
    return LaunchError(
        "submit a job with sbatch",
        found=found,
        rule="sbatch accepts the script; run directory and project are on a file system that the nodes see",
        fix="launch where Slurm's own commands work, and check the options; --dry-run shows the script",
    )


def _check(options: Mapping[str, str]) -> None:
    wrong = [name for name, value in options.items() if not _is_option(name, value)]
    if wrong:
        raise LaunchError(
            f"options of {SBATCH}: {', '.join(map(repr, wrong))}",
            found="set by the launcher" if set(wrong) <= set(SET_HERE) else "not a long option of sbatch in a line",
            rule=f"{', '.join(OWN)}, or a long option of sbatch, none of {', '.join(SET_HERE)}",
            fix="correct the name, or leave it out; --nodes of the verb chooses the nodes",
        )


def _is_option(name: str, value: str) -> bool:
    ours = name in OWN
    return ours or bool(_OPTION.fullmatch(name) and name not in SET_HERE and value.isprintable())


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise LaunchError(f"option {name} = {text!r}", found=repr(text), rule="a number", fix="correct the value")
    return int(text)
