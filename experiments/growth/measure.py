"""How cost grows: verbs over run directories, and a step's preparation over documents; CPU time, one process each.

python experiments/growth/measure.py            writes growth.json next to it
python experiments/growth/measure.py report     measures that part alone: verbs, preparation or report

The run directories are synthetic (four steps, one parameter, no tensors) and in a temporary folder. A growth exponent
is the slope of log(CPU time above that of the smallest size, the start-up) between the two largest sizes: 1 is linear.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.atomic import to_json, write_whole
from workbench.compare.comparison import Comparison
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root, provenance
from workbench.specs.run import RunSpec

RUNS = (0, 500, 1000)
CONFIGURATIONS = (35, 100, 200)
DOCUMENTS = (0, 50_000, 100_000)
TIMES = 4  # the least counts: what else this machine does only adds
VERBS = {
    "ls": ("ls",),
    "status of an experiment": ("status", "many"),
    "status of a run": ("status", "c0"),
    "attach": ("attach", "many"),
    "cancel": ("cancel", "many"),
}
"""Of runs that have ended: `attach` lists them and returns, `cancel` finds nothing to end."""
STEPS = 4

PREPARE = """
import sys, torch
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.packing import pack
from workbench.rollouts.targets import shift_targets
ones = torch.ones(max(int(sys.argv[1]), 1), 3, dtype=torch.int64)
batch = RolloutBatch.from_padded(
    prompt_ids=ones[:, :1], prompt_mask=ones[:, :1], completion_ids=ones, completion_mask=ones,
    advantages=0.5 * ones[:, 0], old_logprobs=-1.0 * ones,
)
for row in pack(batch, rows=8, multiple_of=4):
    shift_targets(row)
"""


def make_runs(experiment: Path, number: int) -> None:
    """Write run directories like those of small runs that succeeded, without waiting for the disk."""
    sync, os.fsync = os.fsync, lambda file: None
    try:
        for index in range(number):
            run = RunDirectory.create(experiment / "runs", f"c{index}", RunSpec(steps=STEPS, seed=index))
            run.set_state("running")
            for step in range(STEPS):
                numbers = {"loss/total/sum": 0.5, "gradient/norm/global": 1.0, "time/step_ms": 40.0}
                run.append_step({"step": step, **numbers, "gradient_norms": {"w": 1.0}})
            run.write_exit(0, {}, None)
            run.set_state("succeeded")
    finally:
        os.fsync = sync


def cpu_s(command: list[str], folder: Path) -> float:
    """CPU time of a command, user and system: the least of several runs."""
    return min(_cpu_s(command, folder) for _ in range(TIMES))


def _cpu_s(command: list[str], folder: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(project_root()), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def grown(sizes: tuple[int, ...], measured: Callable[[int], float]) -> dict[str, Any]:
    """CPU seconds by size, and the growth exponent between the two largest; the first size is the start-up."""
    seconds = {size: measured(size) for size in sizes}
    return {"cpu_s": {str(size): round(value, 3) for size, value in seconds.items()}, "exponent": exponent(seconds)}


def exponent(seconds: dict[int, float]) -> float | None:
    """Slope of the time above start-up; None if the largest adds less than a tenth of it, which is noise.

    Example:
        >>> exponent({0: 1.0, 500: 2.0, 1000: 3.0}), exponent({0: 1.0, 500: 2.0, 1000: 5.0})
        (1.0, 2.0)
    """
    first, *_, half, most = sorted(seconds)
    start, small, large = seconds[first], seconds[half] - seconds[first], seconds[most] - seconds[first]
    if large < 0.1 * start or small <= 0:
        return None
    return round(math.log(large / small) / math.log(most / half), 2)


def disk(experiment: Path) -> dict[str, float]:
    """Files, folders and kilobytes of a run directory."""
    inside = list((experiment / "runs").rglob("*"))
    runs = sum(path.name == "config.json" for path in inside)
    size = sum(path.stat().st_blocks * 512 for path in inside)
    return {
        "files": round(sum(path.is_file() for path in inside) / runs, 1),
        "folders": round(sum(path.is_dir() for path in inside) / runs, 1),
        "kilobytes": round(size / runs / 1024, 1),
    }


def measure_verbs(runs: tuple[int, ...] = RUNS) -> dict[str, Any]:
    """Measure the verbs over run directories, and the disk that one takes."""
    python = sys.executable
    with tempfile.TemporaryDirectory() as name:
        folders = {number: Path(name) / str(number) for number in runs}
        for number, folder in folders.items():
            (folder / "data/rollouts").mkdir(parents=True)
            (folder / "data/rollouts/manifest.json").write_text("{}")
            make_runs(folder / "experiments/many", max(number, 1))
        verbs = {
            verb: grown(runs, lambda n, words=words: cpu_s([python, "-m", "workbench", *words], folders[n]))
            for verb, words in VERBS.items()
        }
        one = disk(folders[max(runs)] / "experiments/many")
    return {
        "provenance": provenance(project_root()),
        "runs": list(runs),
        "verbs": verbs,
        "of a run directory": one,
    }


def measure_preparation(documents: tuple[int, ...] = DOCUMENTS) -> dict[str, Any]:
    """Measure the preparation of a step."""
    return grown(documents, lambda number: cpu_s([sys.executable, "-c", PREPARE, str(number)], Path.cwd()))


def many_configurations(number: int) -> Comparison:
    """Return the saved comparison of layout_parity with its configurations repeated, under names of their own."""
    saved = Comparison.load(project_root() / "experiments/layout_parity")
    repeated = enumerate(itertools.islice(itertools.cycle(saved.configurations), number))
    first = len(saved.configurations)
    named = [c if at < first else replace(c, name=f"{c.name}-{at // first}") for at, c in repeated]
    return replace(saved, configurations=named)


def measure_report(configurations: tuple[int, ...] = CONFIGURATIONS) -> dict[str, Any]:
    """CPU seconds of the page, without start-up, and its megabytes, by number of configurations."""
    from workbench.report.page import page

    seconds, megabytes = {}, {}
    for number in configurations:
        comparison, before = many_configurations(number), time.process_time()
        text = page(comparison)
        seconds[str(number)] = round(time.process_time() - before, 2)
        megabytes[str(number)] = round(len(text.encode()) / 1e6, 2)
    return {"provenance": provenance(project_root()), "cpu_s": seconds, "megabytes": megabytes}


if __name__ == "__main__":
    file = Path(__file__).with_name("growth.json")
    parts = sys.argv[1:] or ["verbs", "preparation", "report"]
    record = json.loads(file.read_text()) if file.exists() else {}
    if "verbs" in parts:
        record |= measure_verbs()
    if "preparation" in parts:
        record["preparation of a step"] = measure_preparation()
    if "report" in parts:
        record["report"] = measure_report()
    write_whole(file, to_json(record))
