"""Time, memory and parity of one rank's training step under every choice of kernels, and of peers.

``python -m experiments.step.measure [RECORD.json] [NAME ...] [MODEL]`` on a machine with one GPU. One optimizer step of
the same packed documents with each choice: loss and every gradient are compared with a float32 truth, the step is
timed, and one is profiled: GPU time by class of kernel, and idle time between kernels. Then the steps of
`experiments.step.peers` are timed in the same process. A choice that cannot run is left out with its error.

Units: milliseconds; GiB at the peak of the timed steps.
"""

from __future__ import annotations

import copy
import gc
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from experiments.gpu_layouts.measure import Rank, Workload, _judge, _tensor
from experiments.step.peers import PEERS, Peer
from workbench.atomic import to_json, write_whole
from workbench.errors import WorkbenchError
from workbench.metrics.step import StepClock, forget_peak, peak_bytes
from workbench.policy.decoder import QWEN3
from workbench.policy.model import load_policy
from workbench.records.provenance import project_root, provenance
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.files import load
from workbench.sharding.mesh import single_process_mesh
from workbench.specs.groups import LayoutSpec
from workbench.train import step as flow
from workbench.train.optimizer import build_optimizer

SAMPLES = 5
RECORD = Path(__file__).with_name("step.json")
LIGER = {"norm": "liger", "rope": "liger", "mlp": "liger"}
COMPILED = {"norm": "compiled", "rope": "compiled", "mlp": "compiled"}
MIXED = LIGER | {"norm": "compiled"}
"""Liger's backward of norms takes longer than the compiled one (`longest_ms` of the record)."""
CHOICES: dict[str, dict[str, Any]] = {
    "one_rank": {"kernel": "flash"},
    "mixed, flash": {"kernel": "flash", "kernels": MIXED},
    "mixed, cudnn": {"kernel": "cudnn", "kernels": MIXED},
    "mixed, fa4": {"kernel": "fa4", "kernels": MIXED},
    "liger, flash": {"kernel": "flash", "kernels": LIGER},
    "liger, cudnn": {"kernel": "cudnn", "kernels": LIGER},
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


def profiled(step: Callable[[], float], device: torch.device) -> dict[str, Any]:
    """GPU milliseconds of one step by class of kernel, their number, the longest kernels, and the time between them."""
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as recorded:
        wall_ms = step()
    events = [event for event in recorded.events() if event.device_type == DeviceType.CUDA]
    by_class: dict[str, float] = {}
    by_name: dict[str, float] = {}
    for event in events:
        spent = event.device_time_total / 1e3
        kind = next((kind for kind, names in CLASSES if re.search(names, event.name)), "element-wise")
        by_class[kind] = by_class.get(kind, 0.0) + spent
        by_name[event.name[:90]] = by_name.get(event.name[:90], 0.0) + spent
    return {
        "profiled_ms": wall_ms,
        "busy_ms": sum(by_class.values()),
        "kernels": len(events),
        "by_class_ms": by_class,
        "longest_ms": sorted(by_name.items(), key=lambda each: -each[1])[:14],
        "gaps": gaps([(event.time_range.start, event.time_range.end, event.name) for event in events]),
    }


def gaps(kernels: Sequence[tuple[float, float, str]], most: int = 12) -> dict[str, Any]:
    """Milliseconds between two kernels, in which a GPU computes nothing, and the pairs of kernels with most of them.

    Args:
        kernels: start and end in microseconds, and name; in any order.
        most: so many pairs.
    """
    pairs: dict[tuple[str, str], list[float]] = {}
    ordered = sorted(kernels)
    end, last = (ordered[0][0], "") if ordered else (0.0, "")
    for start, stop, name in ordered:
        if start > end:
            pairs.setdefault((last[:60], name[:60]), []).append((start - end) / 1e3)
        if stop > end:
            end, last = stop, name
    longest = sorted(pairs.items(), key=lambda each: -sum(each[1]))[:most]
    return {
        "total_ms": sum(map(sum, pairs.values())),
        "number": sum(map(len, pairs.values())),
        "longest": [
            {"after": after, "before": before, "number": len(each), "total_ms": sum(each), "most_ms": max(each)}
            for (after, before), each in longest
        ],
    }


def model_flop(batch: RolloutBatch, config: Path) -> float:
    """Floating-point operations of a step without recomputation: three times those of the forward pass.

    Two per weight of a product and token (the head only on trained tokens), and in each layer four per visible pair of
    tokens, feature and head.

    Source: the count of PaLM, arXiv 2204.02311, appendix B, with causal attention inside documents.
    """
    sizes = json.loads(config.read_text())
    features, layers, heads = sizes["hidden_size"], sizes["num_hidden_layers"], sizes["num_attention_heads"]
    width, key_heads = sizes["head_dim"], sizes["num_key_value_heads"]
    weights = 2 * features * width * (heads + key_heads) + 3 * features * sizes["intermediate_size"]
    lengths = torch.unique_consecutive(batch.document_ids_T, return_counts=True)[1].double()
    pairs = float((lengths * (lengths + 1) / 2).sum())
    forward = 2 * weights * layers * batch.num_tokens + 4 * pairs * width * heads * layers
    return 3 * (forward + 2 * features * sizes["vocab_size"] * batch.num_trained_tokens)


def longest_gaps(on_gpu: Sequence[Any], on_host: Sequence[Any], most: int = 8) -> dict[str, Any]:
    """When the GPU computes nothing: milliseconds between kernels, and what the host does in the longest gaps."""
    ordered = sorted(on_gpu, key=lambda event: event.time_range.start)
    gaps, end, last = [], ordered[0].time_range.start if ordered else 0.0, ""
    for event in ordered:
        if event.time_range.start > end:
            gaps.append((event.time_range.start - end, end, last, event.name))
        if event.time_range.end > end:
            end, last = event.time_range.end, event.name
    longest = []
    for length, start, before, after in sorted(gaps, reverse=True)[:most]:
        shared = [
            (min(each.time_range.end, start + length) - max(each.time_range.start, start), each.name)
            for each in on_host
            if each.time_range.start < start + length and each.time_range.end > start
        ]
        host = [f"{name[:60]} {us / 1e3:.2f}" for us, name in sorted(shared, reverse=True)[:6]]
        longest.append({"ms": length / 1e3, "after": before[:60], "before": after[:60], "host_ms": host})
    return {"total_ms": sum(gap[0] for gap in gaps) / 1e3, "number": len(gaps), "longest": longest}


def measure(
    workload: Workload,
    *,
    samples: int = SAMPLES,
    names: Sequence[str] = (),
    model: str | None = None,
    record: Path | None = None,
) -> dict[str, Any]:
    """Measure every choice of kernels and peer, or those named, and return a record.

    Args:
        workload: the documents.
        samples: timed steps of each.
        names: of choices and peers; empty: all.
        model: a published Qwen3; None: that of the plan of the layouts.
        record: a file to which everything that was measured is written after each choice.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = (
        Path(__file__).parent.parent / "gpu_layouts" / ("layouts.yaml" if device.type == "cuda" else "dry_run.yaml")
    )
    plan = yaml.safe_load(source.read_text()) | {"layouts": {"one_rank": {}}}
    plan |= {} if model is None else {"model": model}
    plan["workloads"] = {"step": workload.model_dump(mode="json") | {"layouts": []}}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary:
        folder = Path(temporary)
        (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
        rank = Rank(folder, device, samples)
        began = time.time()
        rank.prepare()
        print(f"prepared in {time.time() - began:.0f} s", flush=True)
        batch = load(folder / "step")
        spec = rank.spec(rank.plan.workloads["step"], LayoutSpec())
        result: dict[str, Any] = {
            "benchmark": "step",
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "plan": plan,
            "model_tflop": model_flop(batch, folder / "model" / "config.json") / 1e12,
            "choices": {},
            "peers": {},
            "provenance": provenance(project_root(), seed=plan["seed"]),
        }
        # The peers last: Liger replaces functions of the model's file for the rest of the process.
        build: dict[str, Callable[[str], Any]] = {
            "choices": lambda name: Choice(rank, "step", CHOICES[name]),
            "peers": lambda name: Peer(spec, batch, PEERS[name], device),
        }
        for kind, name in [*(("choices", name) for name in CHOICES), *(("peers", name) for name in PEERS)]:
            if names and name not in names:
                continue
            entry = result[kind][name] = _measured(lambda kind=kind, name=name: build[kind](name), device, samples)
            shown = {key: value for key, value in entry.items() if key not in ("parity", "longest_ms", "gaps")}
            print(name, shown, flush=True)
            if record is not None:
                judged = copy.deepcopy(result)
                _judge(judged["choices"])
                write_whole(record, to_json(judged))
    _judge(result["choices"])
    return result


def _measured(build: Callable[[], Any], device: torch.device, samples: int) -> dict[str, Any]:
    """Build, compare where the step has a truth, time and profile; an error is the entry."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        began = time.time()
        one = build()
        entry = {"ranks": 1} | ({"parity": one.parity()} if isinstance(one, Choice) else {})
        one.step()
        entry["first_s"] = time.time() - began
        one.step()
        forget_peak(device)
        entry["samples_ms"] = [one.step() for _ in range(samples)]
        entry["step_ms"] = statistics.median(entry["samples_ms"])
        entry["peak_gib"] = peak_bytes(device) / 2**30
        return entry | profiled(one.step, device)
    except (WorkbenchError, RuntimeError, ImportError, AttributeError, TypeError) as error:
        return {"left_out": f"{type(error).__name__}: {error}"[:600]}


def main(arguments: list[str]) -> None:
    """Measure, print and write the record."""
    plan = yaml.safe_load((Path(__file__).parent.parent / "gpu_layouts/layouts.yaml").read_text())
    models, names = [name for name in arguments[1:] if name in QWEN3], [n for n in arguments[1:] if n not in QWEN3]
    if unknown := sorted({*names} - {*CHOICES} - {*PEERS}):
        raise SystemExit(f"{', '.join(unknown)}: none of {', '.join([*CHOICES, *PEERS, *QWEN3])}")
    measure(
        Workload(**plan["workloads"]["bfloat16_32k"]),
        names=names,
        model=models[0] if models else None,
        record=Path(arguments[0]) if arguments else RECORD,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
