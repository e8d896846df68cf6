"""Growth of cost: verbs over run directories, and a step's preparation over documents; CPU time, one process each.

python -m experiments.growth.measure            writes growth.json next to it
python -m experiments.growth.measure report     measures that part alone: verbs, reading, long, preparation, estimators,
                                                report or computing, of which it also takes entries ("run, steps")

The run directories are synthetic (four steps, one parameter) and in a temporary folder. A growth exponent is the slope
of log(CPU time above that of the smallest size, the start-up) between the two largest sizes: 1 is linear.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.growth.engine import engine
from experiments.growth.inputs import COMMANDS, COMPARE, make_runs
from workbench.atomic import to_json, write_whole
from workbench.compare import comparison
from workbench.compare.comparison import Comparison, Configuration
from workbench.records.provenance import project_root, provenance

RUNS = (0, 500, 1000)
CONFIGURATIONS = (35, 100, 200, 1000)
DOCUMENTS = (0, 50_000, 100_000)
TIMES = 4  # the least counts: what else this machine does only adds
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
ENOUGH_S = 4.0  # a command is not repeated once it has taken as much in all: the scatter is then some per cent of it
VERBS = {
    "ls": ("ls",),
    "status of an experiment": ("status", "many"),
    "status of a run": ("status", "c0"),
    "attach": ("attach", "many"),
    "cancel": ("cancel", "many"),
}
"""Of runs that have ended: `attach` lists them and returns, `cancel` finds nothing to end."""
SIZES = (1, 10, 100, 1000)
"""Of what a verb reads that is not an experiment's run directories alone."""

LONG = (200, 100)
"""Configurations, and steps of each, of the comparison that is saved and read as columns and as one JSON."""

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


def cpu_s(command: list[str], folder: Path) -> float:
    """CPU time of a command and of all that it starts, user and system: the least of several runs.

    FRESH in it is another folder each time, ENGINE the address of an inference engine.
    """
    seconds: list[float] = []
    with engine() if "ENGINE" in command else contextlib.nullcontext("") as address:
        while len(seconds) < TIMES and sum(seconds) < ENOUGH_S:
            found = {"FRESH": str(folder / f"fresh-{len(seconds)}"), "ENGINE": address}
            seconds.append(_cpu_s([found.get(word, word) for word in command], folder))
    return min(seconds)


def _cpu_s(command: list[str], folder: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(project_root()), "OMP_NUM_THREADS": "1"}
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # a rank that outlives its parent is counted too
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=False)
    assert done.returncode in (0, 1), command  # 1: a verdict other than equal
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def grown(sizes: tuple[int, ...], measured: Callable[[int], float]) -> dict[str, Any]:
    """CPU seconds by size, and the growth exponent between the two largest; the first size is the start-up."""
    seconds = {size: round(measured(size), 3) for size in sizes}
    return {"cpu_s": {str(size): value for size, value in seconds.items()}, "exponent": exponent(seconds)}


def exponent(seconds: dict[int, float]) -> float | None:
    """Slope of the time above that of the smallest size, over the size above it.

    None if the largest size adds less than a tenth of the time of the smallest, which is noise.

    Example:
        >>> exponent({0: 1.0, 500: 2.0, 1000: 3.0}), exponent({0: 1.0, 500: 2.0, 1000: 5.0})
        (1.0, 2.0)
    """
    first, *_, half, most = sorted(seconds)
    start, small, large = seconds[first], seconds[half] - seconds[first], seconds[most] - seconds[first]
    if large < 0.1 * start or min(small, large) <= 0:
        return None
    return round(math.log(large / small) / math.log((most - first) / (half - first)), 2)


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


def measure_estimators(documents: tuple[int, ...] = DOCUMENTS) -> dict[str, Any]:
    """Measure each estimator of advantages in groups of four, and the signs of preference pairs, in this process."""
    import torch

    from workbench.losses.document_sums import pair_signs
    from workbench.rollouts.advantages.inputs import AdvantageInputs
    from workbench.rollouts.advantages.registry import ESTIMATORS, estimate_advantages

    def inputs(number: int, tokens: int = 3) -> AdvantageInputs:
        draw = torch.Generator().manual_seed(0)
        values_N, values_T = (torch.rand(many, generator=draw).double() for many in (number, number * tokens))
        ids_T = torch.arange(number).repeat_interleave(tokens)
        return AdvantageInputs(
            document_ids_T=ids_T,
            loss_mask_T=torch.ones_like(ids_T, dtype=torch.bool),
            rewards_N=values_N,
            group_ids_N=torch.arange(number) // 4,
            values_T=values_T,
            components_NK=values_N[:, None].repeat(1, 2),
            baselines_N=values_N,
            old_logprobs_T=-values_T,
            squared_probabilities_T=values_T,
        )

    def pairs(given: AdvantageInputs) -> None:
        pair_signs(
            given.document_ids_T, given.document_ids_T // 2, given.rewards_N[given.document_ids_T], given.loss_mask_T
        )

    def seconds(call: Callable[[AdvantageInputs], object], number: int) -> float:
        if number == 0:
            return 0.0
        given, before = inputs(number), time.process_time()
        call(given)
        return time.process_time() - before

    calls: dict[str, Callable[[AdvantageInputs], object]] = {
        name: functools.partial(estimate_advantages, name) for name in ESTIMATORS
    }
    return {
        "provenance": provenance(project_root()),
        "estimators": {
            name: grown(documents, functools.partial(seconds, call))
            for name, call in (calls | {"preference pairs": pairs}).items()
        },
    }


def many_configurations(number: int) -> Comparison:
    """Return the saved comparison of layout_parity with its configurations repeated, under names of their own."""
    saved = Comparison.load(project_root() / "experiments/layout_parity")
    repeated = enumerate(itertools.islice(itertools.cycle(saved.configurations), number))
    first = len(saved.configurations)
    named = [c if at < first else replace(c, name=f"{c.name}-{at // first}") for at, c in repeated]
    return replace(saved, configurations=named)


def measure_reading(sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    """Measure what reads runs, saved comparisons, steps or dumps, by their number."""
    python, results = sys.executable, {}
    with tempfile.TemporaryDirectory() as name:
        for size in sizes:
            place = Path(name) / str(size)
            make_runs(place / "experiments/many", size, tensors=True)
            make_runs(place / "experiments/two", 2, steps=size, tensors=True)
            (place / "experiments/saved").mkdir()
            many_configurations(size).save(place / "experiments/saved/comparison.json")
            write_dump(place / "dump", size)

        def measured(*words: str) -> dict[str, Any]:
            def seconds(size: int) -> float:
                place = Path(name) / str(size)
                found = {"TRUSTED": "c0", "SUSPECT": "c1"}
                runs = {key: str(next((place / "experiments/two/runs").glob(f"{run}-*"))) for key, run in found.items()}
                return cpu_s([python, *(runs.get(word, word) for word in words)], place)

            return grown(sizes, seconds)

        results = {
            "compare, runs": measured("-c", COMPARE, "experiments/many"),
            "export, runs": measured(
                "-m", "workbench", "export", "experiments/many", "--to", "tensorboard", "--folder", "FRESH"
            ),
            "compare, saved configurations": measured("-m", "workbench", "compare", "experiments/saved"),
            "report, saved configurations": measured("-m", "workbench", "report", "experiments/saved", "--no-notebook"),
            "diagnose, steps of two runs": measured("-m", "workbench", "diagnose", "TRUSTED", "SUSPECT"),
            "check, documents of a dump": measured("-m", "workbench", "check", "dump"),
        }
    return {"provenance": provenance(project_root()), "sizes": list(sizes), "verbs": results}


def measure_computing(record: dict[str, Any], entries: Sequence[str], save: Callable[[], None]) -> None:
    """Measure the verbs that compute or read rollouts and logs, one entry after the other, each saved at once."""
    began = provenance(project_root())  # before the record changes the tree
    for entry in entries:
        sizes, command = COMMANDS[entry]
        with tempfile.TemporaryDirectory() as name:
            folders = {size: Path(name) / str(size) for size in sizes}
            for folder in folders.values():
                folder.mkdir()

            def seconds(size: int, folders: dict[int, Path] = folders, command: Any = command) -> float:
                arguments = command(folders[size], size)
                words = arguments if arguments[0] == "-c" else ["-m", "workbench", *arguments]
                return cpu_s([sys.executable, *words], folders[size])

            record[entry] = grown(sizes, seconds) | {"provenance": began}
        save()


def write_dump(folder: Path, documents: int, tokens: int = 32) -> None:
    """Write a step of a trainer in the interchange format: what a plain policy gradient computes, correctly."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(documents, tokens, generator=draw, dtype=torch.float64)
    advantages = torch.randn(documents, generator=draw, dtype=torch.float64)
    coefficients = -advantages[:, None].expand_as(logprobs) / logprobs.numel()
    folder.mkdir(parents=True)
    step = {
        "loss_mask": torch.ones(documents, tokens, dtype=torch.int64),
        "policy_logprobs": logprobs,
        "old_logprobs": logprobs.clone(),
        "advantages": advantages,
        "coefficients": coefficients.clone(),
    }
    save_file(step, folder / "step.safetensors")
    about = {"format": "rl step", "version": 1, "files": ["step.safetensors"], "dtype": "float64"}
    about |= {"settings": {"name": "reinforce", "denominator": "token"}}
    (folder / "step.json").write_text(json.dumps(about))


def measure_long(configurations: int = LONG[0], steps: int = LONG[1]) -> dict[str, Any]:
    """Measure a long comparison as columns next to a JSON, and as one JSON: megabytes, and CPU seconds of both ways."""
    few = many_configurations(configurations)
    repeated = [_repeated(each, steps, place * steps) for place, each in enumerate(few.configurations)]
    saved, results = replace(few, configurations=repeated), {}
    rows = sum(len(c.steps) + len(c.parameters) for c in repeated)
    for kind, limit in (("columns", comparison.LONG), ("one JSON", sys.maxsize)):
        with tempfile.TemporaryDirectory() as name:
            path, before, comparison.LONG = Path(name) / "comparison.json", comparison.LONG, limit
            try:
                began = time.process_time()
                saved.save(path)
                written = time.process_time()
                read = Comparison.load(path)
                ended = time.process_time()
            finally:
                comparison.LONG = before
            assert read == saved, kind
            del read
            results[kind] = {
                "json_mb": round(path.stat().st_size / 1e6, 2),
                "columns_mb": round(sum(file.stat().st_size for file in Path(name).glob("*.parquet")) / 1e6, 2),
                "save_s": round(written - began, 1),
                "load_s": round(ended - written, 1),
            }
    return {"provenance": provenance(project_root()), "configurations": configurations, "rows": rows, **results}


def _repeated(configuration: Configuration, steps: int, first: int) -> Configuration:
    """A configuration with its steps again and again, and numbers that no other has: equal ones would be stored once.

    `first`: number of its first step among those of all configurations.
    """
    count, ratios = len(configuration.steps) or 1, configuration.ratios

    def changed(record: dict[str, Any], step: int) -> dict[str, Any]:
        factor = 1 + (first + step) * 1e-7

        def other(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: other(each) for name, each in value.items()}
            return value * factor if type(value) is float else value

        return {key: step if key == "step" else other(value) for key, value in record.items()}

    tiles = range(0, steps, count)
    return replace(
        configuration,
        steps=[changed(r, at + r["step"]) for at in tiles for r in configuration.steps],
        whole_gradient=[changed(r, at + r["step"]) for at in tiles for r in configuration.whole_gradient],
        parameters=[replace(p, **changed(vars(p), at + p.step)) for at in tiles for p in configuration.parameters],
        ratios={str(at + int(step)): ratio for at in tiles for step, ratio in ratios.items()},
    )


def measure_report(configurations: tuple[int, ...] = CONFIGURATIONS) -> dict[str, Any]:
    """CPU seconds of the page, without start-up, and its megabytes, by number of configurations."""
    from workbench.report.page import page

    seconds, megabytes = {}, {}
    for number in configurations:
        repeated, before = many_configurations(number), time.process_time()
        text = page(repeated)
        seconds[str(number)] = round(time.process_time() - before, 2)
        megabytes[str(number)] = round(len(text.encode()) / 1e6, 2)
    return {"provenance": provenance(project_root()), "cpu_s": seconds, "megabytes": megabytes}


if __name__ == "__main__":
    file = Path(__file__).with_name("growth.json")
    parts = sys.argv[1:] or ["verbs", "reading", "long", "preparation", "estimators", "report", "computing"]
    record = json.loads(file.read_text()) if file.exists() else {}
    if "verbs" in parts:
        record |= measure_verbs()
    if "reading" in parts:
        record["reading"] = measure_reading()
    if "long" in parts:
        record["long comparison"] = measure_long()
    if "preparation" in parts:
        record["preparation of a step"] = measure_preparation()
    if "estimators" in parts:
        record["advantages of a step"] = measure_estimators()
    if "report" in parts:
        record["report"] = measure_report()
    computing = record.setdefault("computing", {})
    chosen = list(COMMANDS) if "computing" in parts else [entry for entry in parts if entry in COMMANDS]
    measure_computing(computing, chosen, lambda: write_whole(file, to_json(record)))
    write_whole(file, to_json(record))
