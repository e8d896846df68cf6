"""Time, memory and parity of one rank's training step under every choice of kernels.

``python -m experiments.step.measure [RECORD.json]`` on a machine with one GPU. One optimizer step of the same packed
documents with each choice: loss and every gradient are compared with a float32 truth, the steps of all choices are
timed in turn, and one step of each is profiled: GPU time by class of kernel, and the share of the step in which the
GPU is idle. A choice that cannot run is left out with its error.

Units: milliseconds; GiB at the peak of the timed steps.
"""

from __future__ import annotations

import gc
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from experiments.gpu_layouts.measure import Rank, Workload, _judge, _tensor
from workbench.atomic import to_json, write_whole
from workbench.errors import WorkbenchError
from workbench.metrics.step import StepClock, forget_peak, peak_bytes
from workbench.policy.model import load_policy
from workbench.records.provenance import project_root, provenance
from workbench.rollouts.files import load
from workbench.sharding.mesh import single_process_mesh
from workbench.specs.groups import LayoutSpec
from workbench.train import step as flow
from workbench.train.optimizer import build_optimizer

SAMPLES = 5
RECORD = Path(__file__).with_name("step.json")
LIGER = {"norm": "liger", "rope": "liger", "mlp": "liger"}
COMPILED = {"norm": "compiled", "rope": "compiled", "mlp": "compiled"}
CHOICES: dict[str, dict[str, Any]] = {
    "one_rank": {"kernel": "flash"},
    "liger, flash": {"kernel": "flash", "kernels": LIGER},
    "liger, cudnn": {"kernel": "cudnn", "kernels": LIGER},
    "compiled, cudnn": {"kernel": "cudnn", "kernels": COMPILED},
    "liger, fa4": {"kernel": "fa4", "kernels": LIGER},
    "compiled, fa4": {"kernel": "fa4", "kernels": COMPILED},
}
"""Name -> attention kernel and kernels of the trunk."""

CLASSES = (
    ("attention", r"flash|fmha|cudnn|FlashAttention|flash_attn|sdpa"),
    ("gemm", r"nvjet|gemm|cutlass|cublas|splitK|xmma"),
    ("optimizer", r"multi_tensor|adam|FusedOptimizer"),
    ("copy", r"Memcpy|Memset|copy_kernel|direct_copy"),
    ("compiled or Triton", r"triton|^_|rms_norm|rope|swiglu|silu"),
)
"""Class -> names of its kernels; the first that matches. The rest are element-wise and reductions of torch."""


class Choice:
    """A policy with its kernels, and its steps."""

    def __init__(self, rank: Rank, workload: str, choice: Mapping[str, Any]) -> None:
        self.rank, self.name, self.choice = rank, workload, choice
        self.spec = rank.spec(
            rank.plan.workloads[workload], LayoutSpec().model_copy(update={"kernel": choice["kernel"]})
        )
        mesh = single_process_mesh(rank.device)
        self.batch = load(rank.folder / workload)
        self.policy = load_policy(
            self.spec.model.source,
            mesh=mesh,
            precision=self.spec.precision,
            implementation="auto",
            fused_loss=True,
            kernels=choice.get("kernels"),
        )
        self.optimizer = build_optimizer(self.policy, self.spec)
        self.loss = flow.build_loss(self.spec.loss)
        self.rows, self.totals = flow.prepare_rows(self.batch, self.spec, mesh)

    def parity(self) -> dict[str, Any]:
        """Distance from the truth."""
        clipped_S = _tensor(self.rank.folder / f"{self.name}.tokens.safetensors", "clipped")
        result = flow.run_step(
            self.policy,
            self.loss,
            self.rows,
            self.totals,
            num_source=self.batch.num_tokens,
            frozen_clip_S=clipped_S,
            keep_gradients=True,
            loss_spec=self.spec.loss,
            fused=True,
        )
        return self.rank._parity(self.name, result, self.batch)

    def step(self) -> float:
        """Milliseconds of a step."""
        with StepClock(self.rank.device) as clock:
            result = flow.run_step(
                self.policy, self.loss, self.rows, self.totals, loss_spec=self.spec.loss, level="none", fused=True
            )
            flow.clip_gradients(self.policy, result.norms, None)
            self.optimizer.step()
        return clock.step_ms

    def profile(self) -> dict[str, Any]:
        """GPU milliseconds by class of kernel, their number, and the longest kernels."""
        on_gpu = [ProfilerActivity.CUDA] if self.rank.device.type == "cuda" else []
        with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as recorded:
            wall_ms = self.step()
        by_class: dict[str, float] = {}
        by_name: dict[str, float] = {}
        count = 0
        events = [event for event in recorded.events() if event.device_type == DeviceType.CUDA]
        for event in events:
            spent = event.device_time_total / 1e3
            kind = next((kind for kind, names in CLASSES if re.search(names, event.name)), "element-wise")
            by_class[kind] = by_class.get(kind, 0.0) + spent
            by_name[event.name[:90]] = by_name.get(event.name[:90], 0.0) + spent
            count += 1
        busy = sum(by_class.values())
        longest = sorted(by_name.items(), key=lambda each: -each[1])[:14]
        return {
            "profiled_ms": wall_ms,
            "busy_ms": busy,
            "kernels": count,
            "by_class_ms": by_class,
            "longest_ms": longest,
        }


def measure(workload: Workload, *, samples: int = SAMPLES, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """Measure every choice of kernels, or those named, and return a record."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = (
        Path(__file__).parent.parent / "gpu_layouts" / ("layouts.yaml" if device.type == "cuda" else "dry_run.yaml")
    )
    plan = yaml.safe_load(source.read_text()) | {"layouts": {"one_rank": {}}}
    plan["workloads"] = {"step": workload.model_dump(mode="json") | {"layouts": []}}
    entries: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary:
        folder = Path(temporary)
        (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
        rank = Rank(folder, device, samples)
        began = time.time()
        rank.prepare()
        print(f"prepared in {time.time() - began:.0f} s", flush=True)
        for name, choice in CHOICES.items():
            if names and name not in names:
                continue
            gc.collect()
            torch.cuda.empty_cache()
            try:
                began = time.time()
                one = Choice(rank, "step", choice)
                entry = {"ranks": 1, "parity": one.parity(), "first_s": time.time() - began}
                one.step()
                forget_peak(device)
                entry["samples_ms"] = [one.step() for _ in range(samples)]
                entry["step_ms"] = statistics.median(entry["samples_ms"])
                entry["peak_gib"] = peak_bytes(device) / 2**30
                entry |= one.profile()
                del one
            except (WorkbenchError, RuntimeError, ImportError) as error:
                entry = {"left_out": f"{type(error).__name__}: {error}"[:600]}
            entries[name] = entry
            print(
                name,
                {key: value for key, value in entry.items() if key not in ("parity", "longest_ms")},
                flush=True,
            )
            print("\n".join(f"    {ms:8.1f} {kernel}" for kernel, ms in entry.get("longest_ms", ())), flush=True)
    _judge(entries)
    return {
        "benchmark": "step",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "plan": plan,
        "choices": entries,
        "provenance": provenance(project_root(), seed=plan["seed"]),
    }


def main(arguments: list[str]) -> None:
    """Measure, print and write the record."""
    plan = yaml.safe_load((Path(__file__).parent.parent / "gpu_layouts/layouts.yaml").read_text())
    record = measure(Workload(**plan["workloads"]["bfloat16_32k"]))
    for name, entry in record["choices"].items():
        if "left_out" not in entry:
            print(name, round(entry["step_ms"]), round(entry["peak_gib"], 1), entry["parity"])
    write_whole(Path(arguments[0]) if arguments else RECORD, to_json(record))


if __name__ == "__main__":
    main(sys.argv[1:])
