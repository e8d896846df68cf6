"""Drift of other systems: the newest release of each, called on drawn inputs and replayed: `make drift`.

Installs the newest release of every system from the package index into a folder of its own, with the packages that its
losses import in the environment `.engines/drift`, calls its loss functions (`calls.py`) on the calls of `draw.py`, and
compares results and names of options with the adapter's. ``python -m experiments.drift.measure [SYSTEM=VERSION ...]``
takes other releases, or some systems only; the record of others is kept.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.drift.draw import OPTIONS, draw
from workbench.atomic import from_json, to_json, write_whole
from workbench.errors import WorkbenchError
from workbench.systems import load_system, replay

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".engines/drift"
RECORD = Path(__file__).parent / "drift.json"
PACKAGES = {
    "trl": "trl",
    "verl": "verl",
    "openrlhf": "openrlhf",
    "areal": "areal",
    "liger": "liger-kernel",
    "skyrl": "skyrl",
}
"""System -> its package on the index."""
KNOWN: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], bool]]] = {
    "liger": (
        "luspo averages over all positions, so that padding enters its loss, and is not reproduced",
        lambda config: config["loss_type"] == "luspo",
    ),
}
"""System -> what it is known to compute otherwise than its adapter says, and the options under which it does."""
CASES = 120
BAR = 1e-9
"""Distance of two float64 evaluations, relative to the larger of 1 and the number: that of the recorded cases."""
Results = Mapping[str, Any]


def install(system: str, version: str = "") -> tuple[Path, str]:
    """Install a release without its dependencies; return its folder and version."""
    folder = ENVIRONMENT / "releases" / system
    wanted = PACKAGES[system] + (f"=={version}" if version else "")
    command = [str(ENVIRONMENT / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
    options = ["--upgrade", "--quiet", "--target", str(folder), wanted]
    subprocess.run([*command, *options], check=True, stderr=subprocess.DEVNULL)
    name = PACKAGES[system].replace("-", "_")
    infos = sorted(folder.glob(f"{name}-*.dist-info"), key=lambda info: info.stat().st_mtime)
    return folder, re.sub(rf"^{name}-|\.dist-info$", "", infos[-1].name)


def call(system: str, folder: Path, cases: Sequence[Mapping[str, Any]]) -> Results:
    """Call a release's functions in its environment."""
    with tempfile.TemporaryDirectory() as scratch:
        given, made = Path(scratch) / "cases.pt", Path(scratch) / "results.pt"
        torch.save(list(cases), given)
        script = Path(__file__).parent / "calls.py"
        command = [str(ENVIRONMENT / "bin/python"), str(script), system, str(folder), str(given), str(made)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment)
        return dict(torch.load(made, weights_only=True))


def compare(system: str, cases: Sequence[Mapping[str, Any]], results: Results) -> dict[str, Any]:
    """Replay every case; count those that agree, and name what differs."""
    counts: Counter[str] = Counter()
    differing, own, ours = [], 0.0, 0.0
    for number, (case, as_it_is, lifted) in enumerate(zip(cases, results["as_it_is"], results["lifted"], strict=True)):
        try:
            replayed: Results = replay(system, case["kind"], case["function"], case["config"], case["arrays"])
        except WorkbenchError as error:
            replayed = {"error": str(error.parts["found"] or error.parts["rule"])}
        problems, distances = _differences(replayed, lifted)
        counts["nan"] += "loss" in lifted and bool(lifted["loss"].isnan())
        own = max(own, *_differences(as_it_is, lifted)[1], 0.0)
        if system in KNOWN and KNOWN[system][1](case["config"]):
            counts["known"] += 1
            continue
        counts["agree"] += not problems
        counts["as_it_is"] += not _differences(replayed, as_it_is)[0]
        ours = max(ours, *distances, 0.0)
        if problems:
            differing.append({"case": number, "config": case["config"], "differs": problems[:4]})
    return {
        "cases": len(cases),
        "agree": counts["agree"],
        "agree_as_it_is": counts["as_it_is"],
        "known": counts["known"],
        "known_reason": KNOWN[system][0] if system in KNOWN else "",
        "nan_losses": counts["nan"],
        "own_precision": own,
        "distance": ours,
        "differing": differing[:6],
    }


def _differences(one: Results, other: Results) -> tuple[list[str], list[float]]:
    """Sentences on what differs, and the relative distances of all numbers that are in both and finite."""
    if "error" in one or "error" in other:
        return [f"{one.get('error', 'a result')} against {other.get('error', 'a result')}"], []
    problems, distances = [], []
    for name in ("loss", "grad_logprobs", "grad_hidden"):
        if name in one and name in other:
            far, distance = _apart(torch.as_tensor(one[name]), torch.as_tensor(other[name]))
            problems += [f"{name} by {distance:.2g}"] * far
            distances += [distance] if math.isfinite(distance) else []
    for name in one["metrics"].keys() & other["metrics"].keys():
        values = (torch.tensor(float(numbers["metrics"][name]), dtype=torch.float64) for numbers in (one, other))
        far, distance = _apart(*values)
        problems += [f"{name} by {distance:.2g}"] * far
        distances += [distance] if math.isfinite(distance) else []
    return problems, distances


def _apart(one: torch.Tensor, other: torch.Tensor) -> tuple[bool, float]:
    """Return (True if two results differ, their relative distance); NaN is equal to NaN and inf away from all else."""
    one, other = one.double(), other.double()
    if one.shape != other.shape or not torch.equal(one.isnan(), other.isnan()):
        return True, math.inf
    distance = ((one - other).abs() / other.abs().clamp_min(1)).nan_to_num(0.0)
    largest = float(distance.max()) if distance.numel() else 0.0
    return largest > BAR, largest


def options_of(system: str) -> set[str]:
    """Return the names of the options that an adapter knows."""
    model = load_system(system).settings
    names = {*model.model_fields}
    for field in model.model_fields.values():
        names |= {*getattr(field.annotation, "model_fields", ())}
    return names | {*getattr(model, "without_effect", ())}


def measure(releases: Mapping[str, str]) -> dict[str, Any]:
    """Measure systems at a version each, "" being the newest."""
    record = {}
    for system, version in releases.items():
        folder, installed = install(system, version)
        cases = [draw(system, number) for number in range(CASES)]
        results = call(system, folder, cases)
        unknown = sorted({*results["options"]} - options_of(system))
        record[system] = {
            "package": PACKAGES[system],
            "release": installed,
            "adapter": load_system(system).version,
            **compare(system, cases, results),
            "options_not_known": unknown,
        }
        print(format_row(system, record[system]))
    return record


def format_row(system: str, row: Mapping[str, Any]) -> str:
    """Return one line on a system."""
    text = f"{system} {row['release']}: {row['agree']} of {row['cases']} at {BAR:g} in float64"
    text += f" ({row['agree_as_it_is']} as it is; its own precision {row['own_precision']:.1g})"
    return f"{text}, {row['nan_losses']} NaN; {len(row['options_not_known'])} options unknown"


def main(arguments: Sequence[str]) -> None:
    """Measure and write the record."""
    chosen = dict(one.partition("=")[::2] for one in arguments) or dict.fromkeys(OPTIONS, "")
    before = from_json(RECORD.read_text())["systems"] if RECORD.exists() else {}
    systems = {**before, **measure(chosen)}
    ordered = {name: systems[name] for name in OPTIONS if name in systems}
    write_whole(RECORD, to_json({"torch": torch.__version__, "cases": CASES, "bar": BAR, "systems": ordered}))


if __name__ == "__main__":
    main(sys.argv[1:])
