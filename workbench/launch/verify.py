"""Check that multi-GPU training matches one GPU, with flat memory and no hang.

A decoder takes steps of plain SGD on GRPO losses: on one rank with whole rows, in float64 (the truth) and in float32
with the rows in several orders; and on several ranks that share every row, under torch's own context parallelism (on
GPUs) and under the workbench's, each with an engine that sums gradients (a plain all-reduce) and one that averages
them (DDP with its defaults), aligned by `workbench.align_loss`; and in pipeline stages, and a mixture with its experts
on several ranks, by the workbench's own step. In one batch of four a single rank has all loss tokens.

Bars, of the float32 weights after the last step. The effect of rounding alone is measured: the distance of one rank's
weights from the truth, its median over orders of the rows.

    distance    of all weights from the truth, over one rank's             at most 2
    parameter   the same of each parameter, the largest                    at most 4
    sight       the distance of a run whose gradients are off by the number of ranks, over that allowed by the first
                bar: the margin by which a missing factor would exceed it  at least 100
    moved       distance that training moved the weights, over one rank's distance: a missing factor cannot be seen at
                the bar of sight in a training that did not move by twice as much   at least 200
    trained     share of one rank's steps with a gradient that is finite and not zero    all
    same        every weight has the same bits on all ranks                holds or not
    growth      bytes allocated and reserved by torch after each step, over those after step 5: 0 (GPUs)

A record has a verdict. `equal`: every bar holds. `unsound baseline`: the truth, or one rank's float32, is not finite,
or so far from the truth that a missing factor would not be seen (sight, moved). `vacuous`: weights that did not move,
or steps without a gradient. `different`: anything else that is missed.

Units: milliseconds a step, bytes.

Letters: B rows | T tokens of a row.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from workbench.atomic import from_json
from workbench.errors import LaunchError, SpecError
from workbench.launch.devices import visible_gpus
from workbench.records.provenance import project_root, provenance, without_machine_paths

MIXTURE = "tiny-qwen3-moe"
"""The model with experts, which are trained on several ranks too."""

MODELS = {"tiny-qwen3": {}, MIXTURE: {}, "qwen3-0.6b": {"rows": 2, "learning_rate": 0.002, "orders": 1}}
"""Model -> settings of its task that differ from the default."""

TOKENS_A_RANK = {"tiny-qwen3": 128, MIXTURE: 64, "qwen3-0.6b": 256}
"""Of each row."""

LORA_LEARNING_RATE = 0.1
"""Of plain SGD on adapters: at 0.3, of 60 steps, one rank in float32 was too far from the truth to be a baseline."""

BARS = {"distance": 2.0, "parameter": 4.0, "sight": 100.0, "moved": 200.0, "trained": 1.0}
_AT_LEAST = ("sight", "moved", "trained")
SETTLED = 5
"""Steps after which memory may not grow."""

GRACE_S = 60.0
"""Time that ranks have to end; `torch.distributed.run` itself gives them 30."""

ONE_RANK = "one_rank"
RANK = "workbench.launch.verify_rank"


@dataclasses.dataclass(frozen=True)
class Task:
    """The training that one rank and several do.

    Attributes:
        model: `tiny-qwen3`, `tiny-qwen3-moe`, or a published architecture (`workbench.policy.decoder.QWEN3`), with
            seeded weights.
        learning_rate: of plain SGD, under which a scaled gradient changes the weights, unlike under Adam.
        orders: float32 runs of one rank, each with the rows in another order.
        lora_r: rank of adapters on every linear layer, which alone are trained; 0: all weights are.
    """

    model: str = "tiny-qwen3"
    steps: int = 200
    rows: int = 4
    tokens: int = 256  # T
    learning_rate: float = 0.3
    ranks: int = 2  # that share each row
    orders: int = 3
    lora_r: int = 0
    device: str = "cpu"
    timeout_s: float = 120.0  # of a collective

    def attentions(self) -> tuple[str, ...]:
        """Implementations of context parallelism: torch's, where it can train, and ours."""
        return ("torch", "ours") if self.device == "cuda" else ("ours",)

    def layouts(self) -> dict[str, dict[str, Any]]:
        """Layouts of the workbench's own step: pipeline stages, and experts on the ranks of dp; none with adapters."""
        if self.lora_r:
            return {}
        experts = {"ours_ep": {"dp": self.ranks, "ep": self.ranks}} if self.model == MIXTURE else {}
        return {"ours_pp": {"pp": self.ranks}} | experts


def measure(
    *,
    gpus: int = 2,
    model: str = "tiny-qwen3",
    steps: int = 200,
    ranks: int | None = None,
    give_up_s: float = 900.0,
    report_progress: Callable[[str], None] = lambda line: None,
    **task: Any,
) -> dict[str, Any]:
    """Train on one rank and on several, and return the comparison as a record.

    As many GPUs as `gpus` share the rows; with 0, as many processes as `ranks` (two) on CPU, through gloo. A job is
    ended after `give_up_s`. `task` has other settings of `Task`.

    Raises:
        SpecError: another model, no steps, or no second rank.
        LaunchError: too few GPUs; ranks that failed, or hung.
    """
    ranks = gpus or ranks or 2
    if model not in MODELS or steps < 1 or ranks < 2:
        raise SpecError(
            f"verify: {ranks} rank(s), model {model!r}, {steps} steps",
            rule=f"at least two ranks, one of {', '.join(MODELS)}, and at least one step",
            fix="give --gpus 2, or --gpus 0 for two processes on CPU",
        )
    if gpus > len(visible_gpus()):
        raise LaunchError(
            f"verify on {gpus} GPUs",
            found=f"{len(visible_gpus())} here",
            rule="one GPU for each rank",
            fix="give --gpus 0 to verify on CPU, through gloo",
        )
    device = "cuda" if gpus else "cpu"
    defaults = {"tokens": TOKENS_A_RANK[model] * ranks} | MODELS[model]
    if task.get("lora_r"):
        defaults["learning_rate"] = LORA_LEARNING_RATE
    settings = dataclasses.asdict(Task(model=model, steps=steps, ranks=ranks, device=device, **defaults | task))
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="verify-") as scratch:
        folder = Path(scratch)
        (folder / "task.json").write_text(json.dumps(settings))
        for count in (1, ranks):
            unit, plural = ("GPU", "s") if gpus else ("process", "es")
            report_progress(f"{steps} steps on {count} {unit}{plural if count > 1 else ''}")
            _job(count, folder, give_up_s)
        record = compared(folder, ranks)
    return {
        "benchmark": "verify",
        "device": _device(device),
        "task": settings,
        **record,
        "seconds": time.perf_counter() - started_s,
        "provenance": provenance(project_root()),
    }


def compared(folder: Path, ranks: int) -> dict[str, Any]:
    """Compare the weights of every run with the truth's, and return distances, bars and verdict."""
    runs = {path.stem: from_json(path.read_bytes()) for path in sorted(folder.glob("*.json")) if path.stem != "task"}
    distances = {name: _distances(folder, name) for name in runs if name != "truth"}
    alone = [by_parameter for name, by_parameter in distances.items() if name.startswith(ONE_RANK)]
    own = _median(_whole(by_parameter) for by_parameter in alone)
    own_parameters = {name: _median(by_parameter[name] for by_parameter in alone) for name in alone[0]}
    moved = _whole(_distances(folder, "start"))
    entries = {}
    for name, run in runs.items():
        entry = {
            "step_ms": run["step_ms"],
            "first_loss": run["losses"][0],
            "last_loss": run["losses"][-1],
            "steps": len(run["losses"]),
        }
        if run["allocated_bytes"]:
            entry["bytes"] = {kind: _memory(run[f"{kind}_bytes"]) for kind in ("allocated", "reserved")}
        if name != "truth":
            each = {key: _over(distance, own_parameters[key]) for key, distance in distances[name].items()}
            worst = max(each, key=lambda parameter: _size(each[parameter]))
            entry |= {
                "distance": _whole(distances[name]),
                "over_one_rank": _over(_whole(distances[name]), own),
                "worst_parameter": worst,
                "worst_over_one_rank": each[worst],
            }
        if "same_on_all_ranks" in run:
            entry["same_on_all_ranks"] = run["same_on_all_ranks"]
        entries[name] = entry
    baselines = {name: run for name, run in runs.items() if name == "truth" or name.startswith(ONE_RANK)}
    shared = [entry for entry in entries.values() if "same_on_all_ranks" in entry]
    measured = {
        "distance": _largest(entry["over_one_rank"] for entry in shared),
        "parameter": _largest(entry["worst_over_one_rank"] for entry in shared),
        "sight": _over(_whole(distances["off_by_ranks"]), BARS["distance"] * own),
        "moved": _over(moved, own),
        "trained": _trained(baselines.values()),
    }
    bars = {
        name: {"bar": bar, "found": value, "holds": value >= bar if name in _AT_LEAST else value <= bar}
        for name, bar in BARS.items()
        if (value := measured[name]) is not None
    }
    same = all(entry["same_on_all_ranks"] for entry in shared)
    bars["same"] = {"bar": True, "found": same, "holds": same}
    if growths := [entry["bytes"][kind]["growth"] for entry in shared if "bytes" in entry for kind in entry["bytes"]]:
        bars["growth"] = {"bar": 0, "found": max(growths), "holds": max(growths) <= 0}
    broken = [name for name, run in baselines.items() if not all(map(math.isfinite, run["losses"]))]
    broken += [name for name, number in (("truth", moved), (ONE_RANK, own)) if not math.isfinite(number)]
    verdict, why = _judged(bars, moved, list(dict.fromkeys(broken)))
    return {
        "ranks": ranks,
        "moved": moved,
        "one_rank_distance": own,
        "runs": entries,
        "bars": bars,
        "verdict": verdict,
        "why": why,
    }


def _judged(bars: dict[str, Any], moved: float, broken: Sequence[str]) -> tuple[str, str]:
    """The verdict, and the reason for any but "equal"."""
    missed = [name for name, bar in bars.items() if not bar["holds"]]
    if broken:
        return "unsound baseline", f"not finite: {', '.join(broken)}"
    if not moved or "trained" in missed:
        if not moved:
            return "vacuous", "training did not move the weights"
        share = bars["trained"]["found"]
        return "vacuous", f"only {share:.1%} of one rank's steps have a gradient that is finite and not zero"
    if too_far := [name for name in ("sight", "moved") if name in missed]:
        return "unsound baseline", f"one rank is too far from the truth to show a missing factor: {', '.join(too_far)}"
    return ("different", f"missed: {', '.join(missed)}") if missed else ("equal", "")


def verdict_of(record: dict[str, Any]) -> str:
    """The verdict of a record; derived from its bars for older records without one."""
    holds = all(bar["holds"] for bar in record["bars"].values())
    return str(record.get("verdict") or ("equal" if holds else "different"))


def format_record(record: dict[str, Any]) -> str:
    """Format a record as lines of text, the verdict last."""
    task = record["task"]
    lines = [
        f"{task['model']}, {task['steps']} steps of {task['rows']} rows of {task['tokens']} tokens, on "
        f"{record['ranks']} x {record['device']}, {record['seconds']:.0f} s",
        f"one rank in float32 is {record['one_rank_distance']:.2e} from the float64 truth; training moved the "
        f"weights by {record['moved']:.2e}",
    ]
    for name, entry in record["runs"].items():
        if "same_on_all_ranks" in entry:
            memory = "".join(
                f", {kind} {size['after'] / 2**20:.1f} MiB, growth {size['growth']} bytes"
                for kind, size in entry.get("bytes", {}).items()
            )
            lines.append(
                f"{name}: {entry['over_one_rank']:.2f} times that (a parameter at most "
                f"{entry['worst_over_one_rank']:.2f} times its own), {entry['step_ms']:.1f} ms a step{memory}"
            )
    lines += [
        f"{name}: {_number(bar['found'])}, bar {_number(bar['bar'])}: {'holds' if bar['holds'] else 'MISSED'}"
        for name, bar in record["bars"].items()
    ]
    ranks = f"{record['ranks']} ranks"
    verdict, why = verdict_of(record), record.get("why", "")
    lines.append(
        {
            "equal": f"{ranks} and one rank train the same weights",
            "different": f"{ranks} and one rank do NOT agree: see what is missed",
        }.get(verdict, f"{verdict}: {why}; {ranks} and one rank cannot be compared by this")
    )
    return "\n".join(lines)


def _median(values: Iterable[float]) -> float:
    """The median; NaN, which cannot be sorted, if any value is NaN."""
    numbers = list(values)
    return math.nan if any(map(math.isnan, numbers)) else statistics.median(numbers)


def _over(distance: float, own: float) -> float:
    """A distance in units of one rank's own; 1 if both are zero, infinite if only the unit is."""
    if own:
        return distance / own
    return 1.0 if distance == 0 else math.inf if distance > 0 else math.nan


def _trained(runs: Collection[dict[str, Any]]) -> float | None:
    """Share of the steps whose gradient is finite and not zero; None if the runs did not record norms."""
    if any(run.get("gradient_norms") is None for run in runs):
        return None
    every = [norm for run in runs for norm in run["gradient_norms"]]
    return sum(norm != 0 and math.isfinite(norm) for norm in every) / len(every) if every else 0.0


def _largest(values: Iterable[float]) -> float:
    """The largest; NaN, which `max` may drop, counts as larger than all."""
    return max(values, key=_size)


def _size(value: float) -> tuple[bool, float]:
    return math.isnan(value), value


def _number(value: Any) -> str:
    return str(value) if isinstance(value, bool) else f"{value:.4g}"


def _memory(after_each: Sequence[int]) -> dict[str, int]:
    settled = after_each[min(SETTLED, len(after_each)) - 1]
    return {"after": settled, "growth": max(after_each[SETTLED:], default=settled) - settled}


def _distances(folder: Path, name: str) -> dict[str, float]:
    """Distance of each parameter from the truth's."""
    from safetensors import safe_open

    files = (safe_open(folder / f"{which}.safetensors", "pt") for which in (name, "truth"))
    with next(files) as run, next(files) as truth:
        keys = truth.keys()
        return {key: float((run.get_tensor(key).double() - truth.get_tensor(key)).norm()) for key in keys}


def _whole(distances: dict[str, float]) -> float:
    return sum(distance**2 for distance in distances.values()) ** 0.5


def _job(ranks: int, folder: Path, give_up_s: float) -> None:
    """Run one process, or several ranks; return when all have succeeded."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    title = f"verify: {ranks} rank{'s' if ranks > 1 else ''}"
    with (folder / f"said{ranks}").open("w+") as log:
        process = subprocess.Popen(
            _command(ranks, folder),
            env={"OMP_NUM_THREADS": "1"} | env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(give_up_s)
        except subprocess.TimeoutExpired:
            raise LaunchError(
                title,
                found=f"no end after {give_up_s:.0f} s; {_last_output(log)}",
                rule="every rank comes to the same collectives",
                fix="read its last output",
            ) from None
        finally:
            _end(process)
        if process.returncode:
            raise LaunchError(title, found=_last_output(log), rule="every rank ends with 0", fix="read its last output")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that has not ended; torch.distributed.run ends its ranks."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _command(ranks: int, folder: Path) -> list[str]:
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *several, "-m", RANK, str(folder)]


def _last_output(log: Any) -> str:
    """The errors that the ranks printed, or else the last lines."""
    log.seek(0)
    lines = without_machine_paths(log.read()).strip().splitlines()
    causes = [line for line in lines if re.match(r"(\[rank\d+\]: *)?[\w.]*(Error|Exception)\b", line)]
    return " | ".join(dict.fromkeys(causes[:4])) or " | ".join(lines[-5:]) or "no output"


def _device(kind: str) -> str:
    if kind == "cpu":
        return "CPU process"
    import torch

    return torch.cuda.get_device_name()
