"""Cost of the reproducible mode, the error of its gradients, and equality of bits in every layout.

One job for each number of GPUs takes its entries, a workload in a layout, one after the other; each computes in both
modes, on the same weights and documents. On a machine with one GPU, ranks of some layouts take turns on it. The plan
is `experiments/reproducible/reproducible.yaml`; without GPUs its tiny twin runs. An entry that fails is left out with
its error message, and the others continue. A machine with another number of GPUs adds to the record in the folder of
the experiment.
`python -m experiments.reproducible.measure FOLDER SAMPLES DEADLINE WORKLOAD/LAYOUT ...` is one rank.

Units: milliseconds of forward, backward, reduction, clipping and optimizer; GiB at the peak of the rank that needs
       most.

Letters: S tokens of the source batch.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import safe_open
from safetensors.torch import save_file

from experiments.entries import GIVE_UP_S, entry_file, recording_failure, result_of, run_entries
from experiments.gpu_layouts.measure import draw_documents
from experiments.reproducible.page import write_reproducible_report
from workbench.atomic import from_json, to_json, write_whole
from workbench.errors import RecordError, SpecError, WorkbenchError
from workbench.metrics.step import StepClock, peak_bytes
from workbench.policy.model import Policy, load_policy
from workbench.records.provenance import project_root, provenance
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.files import load, save
from workbench.sharding.collectives import all_max
from workbench.sharding.mesh import Mesh, join, leave, make_mesh, single_process_mesh
from workbench.sharding.simulated import simulate
from workbench.specs.groups import LayoutSpec, ReproducibleSpec
from workbench.specs.reading import parse_spec, read_yaml
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.exact import reproducible_mode
from workbench.train.optimizer import build_optimizer
from workbench.train.trace import certify, fingerprint_gradients

PREPARED = "prepared"
"""Marker file, written once weights, rollouts and truths are complete."""

SAMPLES = 3
WARM = 2
"""Steps that are not timed, in which kernels are compiled."""
MINUTES = 4.75
"""No further entry is started after this time; the record names those that are not reached."""
ACCURACY_FACTOR = 1.1
"""Largest distance of the whole gradient from the truth, in distances of the fast mode."""
MODES = ("fast", "reproducible")
GROUPS = {
    "attention": ("flash", "fmha"),
    "gradients of keys and values": ("add_by_head", "find_head_peaks"),
    "matrix products": ("multiply", "gemm", "nvjet", "cutlass", "xmma", "exp_product"),
    "weight gradients": ("add_outer_products",),
    "norms": ("normalise",),
    "sums over rows": ("add_columns", "add_at", "write_gradient", "add_squares", "find_peak"),
    "rows of logits": ("read_rows", "write_rows", "fold_target", "scale_rows", "say", "add_tiles", "target_logits"),
    "optimizer": ("multi_tensor", "adam"),
    "between ranks": ("nccl",),
}
"""Group of a kernel -> parts of kernel names; the first match counts. All others: elementwise and copies."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Architecture(_Model):
    """A published architecture, with a number of layers."""

    name: str
    layers: int


class Bars(_Model):
    """Largest cost of the reproducible mode, in multiples of the fast mode in the same layout."""

    time: float
    memory: float


class Workload(_Model):
    """The documents of one optimizer step, and the measurements on them."""

    model: str
    precision: Literal["bfloat16", "float32"]
    rows: int
    row_tokens: int
    document_tokens: tuple[int, int]
    reproducible: ReproducibleSpec
    timed: bool = False
    bars: Bars | None = None
    """Of every layout in which it is timed."""
    steps: int = 0
    """That are certified, in each mode."""
    truth: Literal["float32", "float64"] | None = None
    """Precision of the gradient that both modes are compared with, on one rank; None: no comparison."""
    layouts: tuple[str, ...] = ()
    """Names; empty: all."""
    simulated: tuple[str, ...] = ()
    """Those of them whose ranks take turns on one GPU, on a machine that has no more."""


class Plan(_Model):
    """Plan of the measurement."""

    question: str
    seed: int
    models: dict[str, Architecture]
    workloads: dict[str, Workload]
    layouts: dict[str, LayoutSpec]

    def chosen(self, workloads: Sequence[str]) -> Plan:
        """Restrict the plan to some workloads and their models; none named: all.

        Raises:
            SpecError: there is no such workload.
        """
        if unknown := sorted(set(workloads) - set(self.workloads)):
            raise SpecError(
                f"workload {', '.join(unknown)}",
                found="no workload of that name",
                rule=f"among {', '.join(self.workloads)}",
                fix="choose from these, or name none for all",
            )
        selected = {name: workload for name, workload in self.workloads.items() if not workloads or name in workloads}
        used = {workload.model for workload in selected.values()}
        models = {name: model for name, model in self.models.items() if name in used}
        return self.model_copy(update={"workloads": selected, "models": models})

    def of(self, workload: str) -> tuple[str, ...]:
        """The layouts of a workload."""
        return self.workloads[workload].layouts or tuple(self.layouts)

    def entries(self, gpus: int) -> dict[int, list[str]]:
        """Workload and layout of every measurement on a machine with ``gpus`` GPUs, by number of processes.

        A machine without any runs the entries of one with two, and also those of one with one.
        """
        by_ranks: dict[int, list[str]] = {}
        for name, workload in self.workloads.items():
            for layout in self.of(name):
                ranks = self.layouts[layout].world_size
                if ranks <= (gpus or 2):
                    by_ranks.setdefault(ranks, []).append(f"{name}/{layout}")
                elif gpus < 2 and layout in workload.simulated:
                    by_ranks.setdefault(1, []).append(f"{name}/{layout}")
        return dict(sorted(by_ranks.items()))


def measure(
    *,
    pairs: int = SAMPLES,
    minutes: float = MINUTES,
    only: Sequence[str] = (),
    report_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure everything that this machine has GPUs for and return a record.

    Args:
        pairs: timed steps of each mode.
        minutes: no further entry is started after this time.
        only: workloads, by name; none named: all. The others stay in the record as they were measured before.
        report_progress: called with progress messages.

    Raises:
        LaunchError: weights, rollouts and truths cannot be created.
        SpecError: there is no such workload.
    """
    gpus = torch.cuda.device_count()
    plan_file = Path(__file__).parent / ("reproducible.yaml" if gpus else "dry_run.yaml")
    plan = parse_spec(Plan, read_yaml(plan_file), where=plan_file.name)
    chosen = plan.chosen(only)
    start, deadline = time.time(), time.time() + 60 * minutes
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # gigabytes of weights, read by every rank
    with tempfile.TemporaryDirectory(dir=in_memory) as temporary:
        folder = Path(temporary)
        write_whole(folder / "plan.yaml", to_json(chosen.model_dump(mode="json")))
        entries = chosen.entries(gpus)
        for ranks, some in entries.items():
            run_entries(
                "experiments.reproducible.measure",
                ranks,
                some,
                folder,
                pairs,
                deadline=deadline,
                report_progress=report_progress,
                needed=lambda: "" if (folder / PREPARED).exists() else "one rank creates weights and truths",
            )
        results = {
            name: {
                layout: result_of(folder, f"{name}/{layout}")
                for layout in plan.of(name)
                if f"{name}/{layout}" in itertools.chain(*entries.values())
            }
            for name in chosen.workloads
        }
    for layouts in results.values():
        compare_certificates(layouts)
    machine = {
        "device": torch.cuda.get_device_name() if gpus else "cpu",
        "gpus": gpus,
        "workloads": results,
        "minutes": (time.time() - start) / 60,
        "provenance": provenance(project_root(), seed=plan.seed),
    }
    machines = [*_earlier(plan, gpus, tuple(results)), machine]
    return {
        "benchmark": "reproducible",
        "plan": plan.model_dump(mode="json"),
        "machines": sorted(machines, key=lambda one: one["gpus"]),
        "bars": bars(plan, machines),
    }


def format_record(record: Mapping[str, Any]) -> str:
    """Format a record as lines of text."""
    lines = []
    for machine in record["machines"]:
        lines.append(f"reproducible on {machine['gpus']} x {machine['device']}")
        for workload, layouts in machine["workloads"].items():
            for name, entry in layouts.items():
                lines.append(f"{workload}, {name}: {'; '.join(_summary(entry))}")
    lines += [
        f"{name}: {bar['median']:.3g}, bar {bar['bar']:.3g}, {'holds' if bar['holds'] else 'MISSED'}"
        for name, bar in record["bars"].items()
    ]
    return "\n".join(lines)


def _summary(entry: Mapping[str, Any]) -> Iterator[str]:
    if "left_out" in entry:
        yield f"left out: {entry['left_out']}"
    if "timed" in entry:
        fast, exact = (entry["timed"][mode] for mode in MODES)
        yield (
            f"{fast['step_ms']:.1f} -> {exact['step_ms']:.1f} ms ({exact['step_ms'] / fast['step_ms']:.3f}x), "
            f"{fast['peak_gib']:.2f} -> {exact['peak_gib']:.2f} GiB"
        )
    if "same" in entry:
        yield ", ".join(
            f"{mode}: {same['equal']} of {same['tensors']} tensors the same" for mode, same in entry["same"].items()
        )
    if "accuracy" in entry:
        yield f"gradient off by {entry['accuracy']['factor']:.3f} of the fast mode's"


def write_page(record: Mapping[str, Any], folder: Path) -> Path:
    """Write the record as a page with figures."""
    return write_reproducible_report(record, folder)


# ---- the launching process -----------------------------------------------------------------------------


RECORD = Path(__file__).with_name("reproducible.json")


def _earlier(plan: Plan, gpus: int, measured: Sequence[str]) -> list[dict[str, Any]]:
    """Read earlier measurements from the saved record, if it has the same plan.

    Of machines with other numbers of GPUs everything, of a machine with this number the other workloads.
    """
    if not gpus or not RECORD.exists():
        return []
    record = from_json(RECORD.read_text())
    if record["plan"] != from_json(to_json(plan.model_dump(mode="json"))):
        return []
    machines = [
        machine
        if machine["gpus"] != gpus
        else machine
        | {"workloads": {name: layouts for name, layouts in machine["workloads"].items() if name not in measured}}
        for machine in record["machines"]
    ]
    return [machine for machine in machines if machine["workloads"]]


def compare_certificates(layouts: Mapping[str, dict[str, Any]]) -> None:
    """Add to each layout the number of tensors with the bits of the first layout, and the first tensor that differs.

    The fingerprints are removed.
    """
    reference: dict[str, Any] | None = None
    for entry in layouts.values():
        if "steps" not in entry:
            continue
        reference = reference or entry["steps"]
        entry["same"] = {}
        for mode in MODES:
            pairs = [
                (f"step {number}: {name}", expected, run["fingerprints"].get(name))
                for number, (baseline, run) in enumerate(zip(reference[mode], entry["steps"][mode], strict=True))
                for name, expected in baseline["fingerprints"].items()
            ]
            differing = [name for name, expected, actual in pairs if expected != actual]
            entry["same"][mode] = {
                "tensors": len(pairs),
                "equal": len(pairs) - len(differing),
                "first": differing[0] if differing else None,
            }
    for entry in layouts.values():
        if "steps" in entry:
            entry["steps"] = {
                mode: [{key: value for key, value in step.items() if key != "fingerprints"} for step in steps]
                for mode, steps in entry["steps"].items()
            }


def bars(plan: Plan, machines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Check bits and accuracy on all machines; time and memory of each timed layout, if a workload has bars."""
    results: dict[str, Any] = {}

    def at_most(name: str, values: Sequence[float], bar: float) -> None:
        worst = max(values, default=math.inf)
        results[name] = {"bar": bar, "median": worst, "holds": worst <= bar}

    entries = [
        (name, layout, entry)
        for machine in machines
        for name, layouts in machine["workloads"].items()
        for layout, entry in layouts.items()
    ]
    unequal = [
        entry["same"]["reproducible"]["tensors"] - entry["same"]["reproducible"]["equal"]
        for _, _, entry in entries
        if "same" in entry
    ]
    at_most("tensors of other bits than one rank's", [float(sum(unequal))], 0.0)
    at_most(
        "error of the gradient, of the fast mode's",
        [entry["accuracy"]["factor"] for _, _, entry in entries if "accuracy" in entry],
        ACCURACY_FACTOR,
    )
    for name, workload in plan.workloads.items():
        if workload.bars is None:
            continue
        timed: dict[str, list[Any]] = {"one_rank": []}
        for workload_name, layout, entry in entries:
            if workload_name == name and "timed" in entry:
                timed.setdefault(layout, []).append(entry["timed"])
        for layout, measured in timed.items():
            for what, key, bar in (
                ("time", "step_ms", workload.bars.time),
                ("memory", "peak_gib", workload.bars.memory),
            ):
                at_most(
                    f"{name}, {layout}: {what}, of the fast mode's",
                    [modes["reproducible"][key] / modes["fast"][key] for modes in measured],
                    bar,
                )
    at_most("left out", [float(sum("left_out" in entry for _, _, entry in entries))], 0.0)
    return results


# ---- one rank ------------------------------------------------------------------------------------------


class Rank:
    """State of a rank between entries: meshes, and the last policy.

    Args:
        folder: of weights, rollouts, truths and results.
        device: of this rank.
        samples: timed steps.
    """

    def __init__(self, folder: Path, device: torch.device, samples: int) -> None:
        self.folder, self.device, self.samples = folder, device, samples
        self.plan: Plan = parse_spec(Plan, read_yaml(folder / "plan.yaml"), where="plan.yaml")
        self._meshes: dict[tuple[int, ...], Mesh] = {}
        self._policy: tuple[Any, Policy] | None = None

    def mesh(self, layout: LayoutSpec) -> Mesh:
        """The mesh of a layout."""
        sizes = (layout.dp, layout.cp, layout.tp)
        if sizes not in self._meshes:
            self._meshes[sizes] = make_mesh(dp=layout.dp, cp=layout.cp, tp=layout.tp, device=self.device)
        return self._meshes[sizes]

    def policy(self, spec: RunSpec, mesh: Mesh) -> Policy:
        """Load the policy of a spec, or reuse the last one."""
        layout = spec.layout
        key = (
            spec.model.source,
            spec.precision,
            layout.dp,
            layout.cp,
            layout.tp,
            layout.shard_parameters,
            layout.reshard_after_forward,
            layout.unit_layers,
            layout.checkpointing,
        )
        if self._policy is None or self._policy[0] != key:
            self._policy = None
            gc.collect()  # sharded parameters are in reference cycles
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._policy = (
                key,
                load_policy(
                    spec.model.source,
                    mesh=mesh,
                    precision=spec.precision,
                    implementation="auto",
                    shard_parameters=layout.shard_parameters,
                    reshard_after_forward=layout.reshard_after_forward,
                    unit_layers=layout.unit_layers,
                    checkpointing=layout.checkpointing,
                ),
            )
        return self._policy[1]

    def spec(self, workload: Workload, layout: LayoutSpec, mode: str, precision: str | None = None) -> RunSpec:
        """The run of a workload in a layout, in one of the modes, or of its truth."""
        return parse_spec(
            RunSpec,
            {
                "model": {"source": str(self.folder / workload.model)},
                "layout": layout.model_dump(),
                "data": {"micro_batch_tokens": workload.row_tokens},
                "loss": {"name": "grpo", "surrogate": {"clip_low": 0.2, "clip_high": 0.28}},
                "reproducible": workload.reproducible.model_dump() if mode == "reproducible" else {},
                "precision": precision or workload.precision,
                "optimizer": {
                    "learning_rate": 1e-4 if workload.steps else 0.0,
                    "weight_decay": 0.01,
                    "max_grad_norm": 1.0,
                },
            },
            where=str(layout),
        )

    def prepare(self) -> None:
        """Write the weights of each model, the rollouts of each workload, and its truth if it has one."""
        mesh = single_process_mesh(self.device)
        for name, model in self.plan.models.items():
            with self.device:
                built = _build(model, self.plan.seed)
            built.cpu().save_pretrained(self.folder / name)
            del built
        for name, workload in self.plan.workloads.items():
            spec = self.spec(workload, LayoutSpec(), "fast", workload.truth)
            batch = self._draw(workload)
            save(batch, self.folder / name)
            if workload.truth is None:
                continue
            policy = self.policy(spec, mesh)
            rows, totals = flow.prepare_rows(batch, spec, mesh)
            result = flow.run_step(
                policy,
                flow.build_loss(spec.loss),
                rows,
                totals,
                num_source=batch.num_tokens,
                keep_gradients=True,
                loss_spec=spec.loss,
            )
            save_file(
                {key: value.contiguous().cpu() for key, value in result.gradients.items()},
                self.folder / f"{name}.gradients.safetensors",
            )
            save_file({"clipped": result.tokens["clipped"].cpu()}, self.folder / f"{name}.tokens.safetensors")
        self._policy = None

    def _draw(self, workload: Workload) -> RolloutBatch:
        """Draw documents, with log-probabilities of the old policy near those of a uniform policy."""
        vocabulary = 19 if self.plan.models[workload.model].name == "tiny-qwen3" else 151936
        batch = draw_documents(workload.rows, workload.row_tokens, workload.document_tokens, vocabulary, self.plan.seed)
        noise_S = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(self.plan.seed))
        return replace(batch, old_logprobs_T=-math.log(vocabulary) + 0.3 * noise_S)

    def measure(self, workload_name: str, layout_name: str) -> None:
        """Measure a workload in a layout, and write the result."""
        workload, layout = self.plan.workloads[workload_name], self.plan.layouts[layout_name]
        simulated, first = layout.world_size > world_size(), True
        try:
            if simulated:
                self._policy = None
                result = simulate(
                    lambda mesh: Rank(self.folder, self.device, self.samples)._measured(
                        workload_name, workload, layout, mesh
                    ),
                    dp=layout.dp,
                    cp=layout.cp,
                    tp=layout.tp,
                    device=self.device,
                    timeout_s=GIVE_UP_S,
                )[0] | {"simulated": True}
            else:
                mesh = self.mesh(layout)
                first, result = mesh.is_first, self._measured(workload_name, workload, layout, mesh)
        except WorkbenchError as error:  # the same on every rank, before any collective
            result = {"left_out": str(error).replace("\n", ";")}
        if first:
            write_whole(entry_file(self.folder, f"{workload_name}/{layout_name}"), to_json(result))

    def _measured(self, name: str, workload: Workload, layout: LayoutSpec, mesh: Mesh) -> dict[str, Any]:
        batch = load(self.folder / name)
        result: dict[str, Any] = {"layout": str(layout), "ranks": layout.world_size, "tokens": batch.num_tokens}
        parts = {
            "accuracy": self._error if workload.truth and layout.world_size == 1 else None,
            "steps": self._certified if workload.steps else None,
            "timed": self.timed if workload.timed else None,
        }
        for part, of_mode in parts.items():
            if of_mode is not None:
                result[part] = {}
                for mode in MODES:
                    with self.in_mode(workload, layout, mesh, mode) as (policy, spec):
                        result[part][mode] = of_mode(name, policy, spec, batch, mesh)
        if "accuracy" in result:
            result["accuracy"]["factor"] = result["accuracy"]["reproducible"] / result["accuracy"]["fast"]
        return result

    @contextlib.contextmanager
    def in_mode(
        self, workload: Workload, layout: LayoutSpec, mesh: Mesh, mode: str
    ) -> Iterator[tuple[Policy, RunSpec]]:
        """Yield the policy in one of the modes, and restore its weights afterwards."""
        spec = self.spec(workload, layout, mode)
        policy = self.policy(spec, mesh)
        before = [parameter.detach().clone() for parameter in policy.model.parameters()] if workload.steps else []
        with reproducible_mode(policy, spec):
            yield policy, spec
        policy.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, value in zip(policy.model.parameters(), before, strict=bool(before)):
                parameter.copy_(value)

    def _error(self, name: str, policy: Policy, spec: RunSpec, batch: RolloutBatch, mesh: Mesh) -> float:
        """Distance of the whole gradient from the truth, over the truth's norm, with the truth's clip decisions."""
        rows, totals = flow.prepare_rows(batch, spec, mesh)
        with safe_open(self.folder / f"{name}.tokens.safetensors", framework="pt") as tokens:
            clipped_S = tokens.get_tensor("clipped")
        result = flow.run_step(
            policy,
            flow.build_loss(spec.loss),
            rows,
            totals,
            num_source=batch.num_tokens,
            frozen_clip_S=clipped_S,
            keep_gradients=True,
            loss_spec=spec.loss,
        )
        distances, norms = [], []
        with safe_open(self.folder / f"{name}.gradients.safetensors", framework="pt", device=str(self.device)) as truth:
            for key, gradient in result.gradients.items():
                true = truth.get_tensor(key).double()
                distances.append(float((gradient.to(self.device).double() - true).norm()))
                norms.append(float(true.norm()))
        return math.hypot(*distances) / math.hypot(*norms)

    def _certified(
        self, name: str, policy: Policy, spec: RunSpec, batch: RolloutBatch, mesh: Mesh
    ) -> list[dict[str, Any]]:
        """Run a few optimizer steps, and certify the bits of each."""
        rows, totals = flow.prepare_rows(batch, spec, mesh)
        optimizer, steps = build_optimizer(policy, spec), []
        for _ in range(self.plan.workloads[name].steps):
            result = flow.run_step(
                policy, flow.build_loss(spec.loss), rows, totals, num_source=batch.num_tokens, loss_spec=spec.loss
            )
            marks = fingerprint_gradients(policy)
            norm = flow.clip_gradients(policy, result.norms, spec.optimizer.max_grad_norm)
            optimizer.step()
            certificate = certify(policy, result, marks)
            steps.append(
                {
                    "certificate": certificate.hash,
                    "fingerprints": dict(certificate.fingerprints),
                    "unlike": certificate.differing_replicas,
                    "loss": float(result.loss["total"]),
                    "norm": norm,
                    **result.range,
                }
            )
        return steps

    def timed(self, name: str, policy: Policy, spec: RunSpec, batch: RolloutBatch, mesh: Mesh) -> dict[str, Any]:
        """Time and peak memory of a step, and on a GPU the breakdown of its time."""
        loss = flow.build_loss(spec.loss)
        optimizer = build_optimizer(policy, spec)
        with StepClock(self.device) as preparing:
            rows, totals = flow.prepare_rows(batch, spec, mesh)

        def step() -> dict[str, float]:
            result = flow.run_step(policy, loss, rows, totals, loss_spec=spec.loss, level="none")
            flow.clip_gradients(policy, result.norms, spec.optimizer.max_grad_norm)
            optimizer.step()
            return dict(result.range)

        samples = []
        for number in range(WARM + self.samples):
            if self.device.type == "cuda" and number == WARM:
                torch.cuda.reset_peak_memory_stats()
            with StepClock(self.device) as clock:
                value_range = step()
            samples.append(clock.step_ms)
        result = {
            "warm_ms": samples[:WARM],
            "samples_ms": samples[WARM:],
            "prepare_ms": preparing.step_ms,
            "step_ms": statistics.median(samples[WARM:]),
            "peak_gib": self.most(float(peak_bytes(self.device)), mesh) / 2**30,
            **value_range,
        }
        return result | (_time_by_kernel(step) if self.device.type == "cuda" else {})

    def most(self, value: float, mesh: Mesh) -> float:
        """The largest value of all ranks."""
        most = torch.tensor(value, dtype=torch.float64, device=self.device)
        return float(all_max(all_max(most, mesh["dp_cp"]), mesh["tp"]))


def _time_by_kernel(step: Callable[[], Any]) -> dict[str, Any]:
    """GPU milliseconds of one step by group of kernels, and of the longest kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    kernels = [
        (event.key, event.self_device_time_total / 1e3, event.count)
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA
    ]
    groups = dict.fromkeys((*GROUPS, "elementwise and copies"), 0.0)
    for name, milliseconds, _ in kernels:
        groups[group_of(name)] += milliseconds
    longest = sorted(kernels, key=lambda kernel: -kernel[1])[:20]
    return {
        "groups_ms": groups,
        "kernels": sum(count for _, _, count in kernels),
        "longest": [
            {"kernel": name[:120], "ms": milliseconds, "calls": count} for name, milliseconds, count in longest
        ],
    }


def group_of(kernel: str) -> str:
    """Group of a kernel, by its name."""
    return next(
        (group for group, parts in GROUPS.items() if any(part in kernel for part in parts)), "elementwise and copies"
    )


def _build(model: Architecture, seed: int) -> Any:
    from workbench.policy.decoder import QWEN3, published_qwen3, tiny_qwen3

    if model.name == "tiny-qwen3":
        return tiny_qwen3(19, seed=seed)
    if model.name not in QWEN3:
        raise RecordError(
            f"model {model.name!r}",
            found="no such architecture",
            rule=f"one of {', '.join(QWEN3)}",
            fix="choose one of these",
        )
    return published_qwen3(model.name, layers=model.layers, seed=seed)


def world_size() -> int:
    """Processes of this job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def main(arguments: Sequence[str]) -> None:
    """Run one rank; if it fails, write the traceback into the folder."""
    folder, samples, deadline, entries = Path(arguments[0]), int(arguments[1]), float(arguments[2]), arguments[3:]
    with recording_failure(folder):
        device = join("cuda" if torch.cuda.is_available() else "cpu", timeout_s=GIVE_UP_S)
        rank = Rank(folder, device, samples)
        if not (folder / PREPARED).exists():
            rank.prepare()
            write_whole(folder / PREPARED, b"")
        all_ranks = make_mesh(dp=world_size(), device=device)
        for entry in entries:
            if rank.most(float(time.time() > deadline), all_ranks):
                break
            rank.measure(*entry.split("/"))
        leave()


if __name__ == "__main__":
    main(sys.argv[1:])
