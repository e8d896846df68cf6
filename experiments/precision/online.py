"""Every preset of precision trains online: what it samples, earns and loses on the way.

``python -m experiments.precision.online [MINUTES [PRESET ...]]``: with a GPU Qwen3-0.6B with random weights, else the
tiny policy; presets that are named replace theirs in the saved record. Completions are rewarded with the share of their
tokens whose ids are even. Sampled, trained and recorded by the same code as any other run.

Units: nats; milliseconds of an optimizer step without its sampling.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench.atomic import from_json, to_json, write_whole
from workbench.errors import WorkbenchError
from workbench.policy.decoder import published_qwen3, tiny_qwen3
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root, provenance
from workbench.specs.precision import PRESETS
from workbench.specs.run import RunSpec
from workbench.train.worker import run_here

FOLDER = Path(__file__).parent
METRICS = {
    "reward": "reward/all/mean",
    "gradient_norm": "gradient/norm/global",
    "sampler_kl_nats": "kl/policy_sampler/k3_mean",
    "sampler_moved": "sampler/moved/fraction",
    "loss_scale": "precision/loss_scale",
    "skipped": "precision/skipped",
    "step_ms": "time/step_ms",
    "peak_bytes": "memory/peak_bytes",
}
"""Column -> metric of the run."""


class EvenTokens:
    """Prompts of four ids; the reward is the share of even ids in a completion."""

    end_ids: Sequence[int] = (0,)
    right_reward = 1.0

    def prompts(self, seed: int, count: int) -> Iterable[str]:
        """The first prompts of a seed."""
        return [f"{1 + at % 7} {1 + at % 5} {1 + at % 3} {2 + (seed + at) % 16}" for at in range(count)]

    def encode(self, text: str) -> Iterable[int]:
        """The ids of a prompt."""
        return [int(part) for part in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        """Ids as text."""
        return " ".join(str(int(token)) for token in tokens)

    def reward(self, prompt: str, completion: str) -> float:
        """The share of even ids."""
        tokens = self.encode(completion)
        return statistics.mean(float(token % 2 == 0) for token in tokens)


def settings(source: str, precision: str, device: str) -> dict[str, Any]:
    """The run of a preset."""
    gpu = device == "cuda"
    return {
        "model": {"source": source},
        "precision": precision,
        "device": device,
        "steps": 4 if gpu else 8,
        "record": {"gradients": "norms"},
        "online": {
            "task": "experiments/precision/online.py:EvenTokens",
            "prompts": 16,
            "answers": 8,
            "max_new_tokens": 24 if gpu else 16,
            "temperature": 0.15 if gpu else 1.0,
            "prompts_at_once": 16,
        },
        "data": {"advantages": {"name": "grpo"}, "micro_batch_tokens": 4096},
        "policy": {"fused_loss": gpu},
        "optimizer": {"learning_rate": 1e-5 if gpu else 1e-3, "max_grad_norm": 1.0},
    }


def measure(names: Sequence[str] = tuple(PRESETS), minutes: float = math.inf) -> dict[str, Any]:
    """Train with every preset, or those named, and return a record. After so many minutes none is started."""
    device, began = "cuda" if torch.cuda.is_available() else "cpu", time.perf_counter()
    runs = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as temporary:
        source = str(Path(temporary) / "model")
        model = published_qwen3("qwen3-0.6b", seed=0) if device == "cuda" else tiny_qwen3(19, seed=0)
        model.save_pretrained(source)
        for name in names:
            started = time.perf_counter()
            if started - began > 60 * minutes:
                runs[name] = {"left_out": f"no time: {minutes:g} minutes had passed"}
                continue
            try:
                runs[name] = _run(Path(temporary), RunSpec.model_validate(settings(source, name, device)))
            except (WorkbenchError, RuntimeError) as error:
                runs[name] = {"left_out": f"{type(error).__name__}: {error}"[:600]}
            print(name, runs[name], f"{time.perf_counter() - started:.0f} s", flush=True)
    return {
        "benchmark": "precision_online",
        "command": "python -m experiments.precision.online",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "settings": settings("MODEL", "PRESET", device),
        "runs": runs,
        "minutes": (time.perf_counter() - began) / 60,
        "provenance": provenance(project_root(), seed=0),
    }


def _run(folder: Path, spec: RunSpec) -> dict[str, Any]:
    run = RunDirectory.create(folder / "runs", spec.precision, spec)
    run_here(run, project_root())
    steps = run.steps()
    columns = {name: [_metric(step, key) for step in steps] for name, key in METRICS.items()}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)} | {
        "emulated": from_json((run.path / "provenance.json").read_text()).get("emulated_gemms", [])
    }


def _metric(step: Mapping[str, Any], key: str) -> float | None:
    value = step.get(key)
    return None if value is None else float(value)


def main(arguments: list[str]) -> None:
    """Measure for ``MINUTES`` and write the record; the runs of presets that are named replace theirs in it."""
    path = FOLDER / ("online_gpu.json" if torch.cuda.is_available() else "online.json")
    minutes, names = float(arguments[0]) if arguments else math.inf, arguments[1:]
    record = measure(names or tuple(PRESETS), minutes)
    if names:
        record["runs"] = from_json(path.read_text())["runs"] | record["runs"]
    write_whole(path, to_json(record))


if __name__ == "__main__":
    main(sys.argv[1:])
