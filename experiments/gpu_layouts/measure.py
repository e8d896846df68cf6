"""Cost and parity of layouts and attention algorithms on several GPUs.

One optimizer step of the same packed documents in every layout: the loss and every gradient are compared with a truth
of higher precision, then the step is timed. Layouts, sizes and precisions are in
`experiments/gpu_layouts/layouts.yaml`; without GPUs its tiny twin runs, which shows that it works but nothing about
speed. A layout whose ranks fail is left out with their error message, and the others continue.
`python -m experiments.gpu_layouts.measure FOLDER WORKLOAD/LAYOUT ...` is one rank.

Units: milliseconds of forward, backward, reduction and optimizer; GiB at the peak of the rank that needs most.

Letters: T packed tokens | S tokens of the source batch.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import shutil
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
from torch import Tensor

from experiments.entries import GIVE_UP_S, entry_file, recording_failure, result_of, run_entries
from experiments.gpu_layouts.page import write_layout_report
from workbench.atomic import from_json, to_json, write_whole
from workbench.errors import WorkbenchError
from workbench.metrics.step import StepClock, peak_bytes
from workbench.policy.model import Policy, load_policy
from workbench.records.provenance import project_root, provenance
from workbench.reduction.weights import StepTotals
from workbench.rollouts.batch import PADDING, RolloutBatch
from workbench.rollouts.files import load, save
from workbench.sharding.collectives import all_max
from workbench.sharding.mesh import Mesh, join, leave, make_mesh, single_process_mesh
from workbench.specs.groups import LayoutSpec
from workbench.specs.reading import parse_spec, read_yaml
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.optimizer import build_optimizer
from workbench.train.rows import LocalRow

SAMPLES = 3
MINUTES = 8.0
"""For all layouts; the record names those that are not reached in time."""
TINY_VOCABULARY = 19
_PADDED = 16
"""Multiple to which documents are padded here: that of the document zigzag on up to 8 ranks."""
WHOLE_FACTOR, PARAMETER_FACTOR = 1.5, 2.0
"""Largest distance of a layout from the truth, in distances of one rank: the whole gradient, and each parameter (of
which one rank's distance counts as at least its relative one of the whole gradient)."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Truth(_Model):
    """Baseline of a workload: one rank, at a higher precision and in rows that fit there."""

    precision: Literal["float32", "float64"]
    row_tokens: int
    checkpointing: bool = False


class Workload(_Model):
    """The documents of one optimizer step, and the precision in which layouts train on them."""

    precision: Literal["bfloat16", "float32", "float64"]
    rows: int
    row_tokens: int
    document_tokens: tuple[int, int]
    truth: Truth
    layouts: tuple[str, ...] = ()
    """Names; empty: all."""


class OldPolicy(_Model):
    """The old policy: w + relative * std(w) * normal numbers from a seed, tensor by tensor."""

    relative: float
    seed: int


class Plan(_Model):
    """Plan of the measurement."""

    question: str
    model: str
    seed: int
    old_policy: OldPolicy
    workloads: dict[str, Workload]
    layouts: dict[str, LayoutSpec]
    kernels: dict[str, str] = {}
    """Kernels of norms, rotary embeddings and MLPs, of every layout."""
    decoder_layers: int | None = None
    """Of the model; None: as many as its published architecture has."""
    micro_batches: dict[str, int] = {}
    """Layout -> rows of each dp rank, among which documents are dealt (`balance`). The others fill rows of
    `Workload.row_tokens` in the order of the documents. Ranks of cp have a part of each row each: with one row for cp
    rows of the others, a rank has as many tokens at a time as one rank of dp, and launches as few kernels."""
    balance: Literal["tokens", "work"] = "tokens"
    """What dealt rows have nearly equally much of."""

    def entries(self, ranks: int) -> list[str]:
        """Workload and layout of every measurement on ``ranks`` ranks, those of one policy next to each other."""
        return [
            f"{name}/{layout}"
            for name in self.workloads
            for layout in self.of(name)
            if self.layouts[layout].world_size == ranks
        ]

    def of(self, workload: str) -> tuple[str, ...]:
        """The layouts of a workload."""
        return self.workloads[workload].layouts or tuple(self.layouts)


def measure(
    *,
    pairs: int = SAMPLES,
    minutes: float = MINUTES,
    plan_file: str = "",
    report_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure every layout that this machine has GPUs for and return a record.

    Args:
        pairs: timed steps of each layout, after two that are not timed.
        minutes: no further layout is started after this time.
        plan_file: of this folder; empty: `layouts.yaml`, without a GPU `dry_run.yaml`.
        report_progress: called with progress messages.

    Raises:
        LaunchError: the layout of one rank failed, which is the baseline of the others.
    """
    gpus = torch.cuda.device_count()
    source = Path(__file__).parent / (plan_file or ("layouts.yaml" if gpus else "dry_run.yaml"))
    plan = parse_spec(Plan, read_yaml(source), where=source.name)
    start, deadline = time.time(), time.time() + 60 * minutes
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # gigabytes of weights, read by every rank
    with tempfile.TemporaryDirectory(dir=in_memory) as temporary:
        folder = Path(temporary)
        shutil.copy(source, folder / "plan.yaml")
        for ranks in sorted({layout.world_size for layout in plan.layouts.values()}):
            if ranks <= max(gpus, 0 if gpus else 2):
                run_entries(
                    "experiments.gpu_layouts.measure",
                    ranks,
                    plan.entries(ranks),
                    folder,
                    pairs,
                    deadline=deadline,
                    report_progress=report_progress,
                    needed=lambda ranks=ranks: "one rank ends with 0" if ranks == 1 else "",
                )
        results = {
            name: {layout: result_of(folder, f"{name}/{layout}") for layout in plan.of(name)} for name in plan.workloads
        }
        old = {name: from_json((folder / f"{name}.json").read_text()) for name in plan.workloads}
    for layouts in results.values():
        _judge(layouts)
    return {
        "benchmark": "layouts",
        "device": torch.cuda.get_device_name() if gpus else "cpu",
        "gpus": gpus,
        "plan": plan.model_dump(mode="json"),
        "rollouts": old,
        "workloads": results,
        "bars": _bars(results),
        "minutes": (time.time() - start) / 60,
        "provenance": provenance(project_root(), seed=plan.seed),
    }


def format_record(record: Mapping[str, Any]) -> str:
    """Format a record as lines of text."""
    lines = [f"layouts on {record['device']}"]
    for workload, layouts in record["workloads"].items():
        for name, entry in layouts.items():
            summary = entry.get("left_out")
            if summary is None:
                parity = entry["parity"]
                summary = (
                    f"{entry['step_ms']:.1f} ms, {entry['tokens_per_second']:.0f} tokens/s, efficiency "
                    f"{entry['efficiency']:.2f}, {entry['peak_gib']:.2f} GiB, "
                    f"{parity['distance_in_one_ranks']:.2f} of one rank's distance to the truth"
                )
            lines.append(f"{workload}, {name}: {summary}")
    return "\n".join(lines)


def write_page(record: Mapping[str, Any], folder: Path) -> Path:
    """Write the record as a page with figures."""
    return write_layout_report(record, folder)


# ---- the launching process -----------------------------------------------------------------------------


def _judge(layouts: dict[str, dict[str, Any]]) -> None:
    """Add efficiency and distance to the truth of each layout, relative to one rank."""
    baseline = layouts["one_rank"]
    if "left_out" in baseline:
        why = f"no baseline; one_rank: {baseline['left_out']}"
        layouts.update({name: {"left_out": why} for name in layouts})
        return
    relative = baseline["parity"]["distance"] / baseline["parity"]["norm"]
    for entry in layouts.values():
        if "left_out" in entry:
            continue
        parity = entry["parity"]
        parts = {
            name: distance / max(baseline["parity"]["of_parameters"][name], relative * parity["norms"][name])
            for name, distance in parity["of_parameters"].items()
        }
        worst = max(parts, key=lambda name: parts[name])
        parity |= {
            "distance_in_one_ranks": parity["distance"] / baseline["parity"]["distance"],
            "worst_parameter": worst,
            "worst_in_one_ranks": parts[worst],
        }
        parity["within"] = parity["distance_in_one_ranks"] <= WHOLE_FACTOR and parts[worst] <= PARAMETER_FACTOR
        entry["efficiency"] = baseline["step_ms"] / (entry["ranks"] * entry["step_ms"])
    for entry in layouts.values():
        for key in ("of_parameters", "norms"):
            entry.get("parity", {}).pop(key, None)


def _bars(workloads: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Bars of parity; speed has none."""
    shares = [
        max(
            entry["parity"]["distance_in_one_ranks"] / WHOLE_FACTOR,
            entry["parity"]["worst_in_one_ranks"] / PARAMETER_FACTOR,
        )
        for layouts in workloads.values()
        for entry in layouts.values()
        if "left_out" not in entry
    ]
    left_out = sum("left_out" in entry for layouts in workloads.values() for entry in layouts.values())
    return {
        "parity: worst layout in its budget": {
            "bar": 1.0,
            "median": max(shares, default=0.0),
            "holds": all(share <= 1.0 for share in shares),
        },
        "layouts left out": {"bar": 0.0, "median": float(left_out), "holds": not left_out},
    }


# ---- one rank ------------------------------------------------------------------------------------------


class Rank:
    """State of a rank between layouts: meshes, and the last policy.

    Args:
        folder: of weights, rollouts, truths and results.
        device: of this rank.
        samples: timed steps.
    """

    def __init__(self, folder: Path, device: torch.device, samples: int) -> None:
        self.folder, self.device, self.samples = folder, device, samples
        self.plan: Plan = parse_spec(Plan, read_yaml(folder / "plan.yaml"), where="plan.yaml")
        self._meshes: dict[tuple[tuple[str, int], ...], Mesh] = {}
        self._policy: tuple[Any, Policy, torch.optim.Optimizer] | None = None

    def mesh(self, layout: LayoutSpec) -> Mesh:
        """The mesh of a layout."""
        sizes = tuple(layout.mesh_sizes.items())
        if sizes not in self._meshes:
            self._meshes[sizes] = make_mesh(**layout.mesh_sizes, device=self.device)
        return self._meshes[sizes]

    def policy(self, spec: RunSpec, mesh: Mesh) -> tuple[Policy, torch.optim.Optimizer]:
        """Load the policy of a spec, or reuse the last one; its optimizer does not change the weights."""
        layout = spec.layout
        key = (
            spec.precision,
            *layout.mesh_sizes.values(),
            layout.sequence_parallel,
            layout.shard_parameters,
            layout.reshard_after_forward,
            layout.unit_layers,
            layout.checkpointing,
            layout.pipeline_schedule,
            layout.stage_layers,
        )
        if self._policy is None or self._policy[0] != key:
            self._policy = None
            gc.collect()  # sharded parameters are in reference cycles
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            policy = load_policy(
                spec.model.source,
                mesh=mesh,
                precision=spec.precision,
                implementation="auto",
                fused_loss=True,
                shard_parameters=layout.shard_parameters,
                reshard_after_forward=layout.reshard_after_forward,
                unit_layers=layout.unit_layers,
                checkpointing=layout.checkpointing,
                sequence_parallel=layout.sequence_parallel,
                kernels=self.plan.kernels,
                pipeline_schedule=layout.pipeline_schedule,
                stages_per_rank=layout.stages_per_rank,
                stage_layers=layout.stage_layers,
            )
            self._policy = key, policy, build_optimizer(policy, spec)
        return self._policy[1:]

    def spec(self, workload: Workload, layout: LayoutSpec, *, micro_batches: int = 0, truth: bool = False) -> RunSpec:
        """The run of a workload in a layout, with so many dealt rows (0: filled ones), or of its truth."""
        row_tokens = workload.truth.row_tokens if truth else workload.row_tokens
        return parse_spec(
            RunSpec,
            {
                "model": {"source": str(self.folder / "model")},
                "policy": {"fused_loss": True},
                "layout": layout.model_dump(),
                "data": {"micro_batches": micro_batches, "balance": self.plan.balance}
                if micro_batches
                else {"micro_batch_tokens": row_tokens},
                "loss": {"name": "grpo", "surrogate": {"clip_low": 0.2, "clip_high": 0.28}},
                "precision": workload.truth.precision if truth else workload.precision,
                "optimizer": {"learning_rate": 0.0, "weight_decay": 0.0},
            },
            where=str(layout),
        )

    def prepare(self) -> None:
        """Write weights, rollouts with the old policy's log-probabilities, and the truth of each workload."""
        save_model(self.plan, self.folder / "model")
        mesh = single_process_mesh(self.device)
        for name, workload in self.plan.workloads.items():
            layout = LayoutSpec(kernel="plain", checkpointing=workload.truth.checkpointing)
            spec = self.spec(workload, layout, truth=True)
            policy, _ = self.policy(spec, mesh)
            drawn = draw_rollouts(workload, self.plan)
            with perturbed(policy.model, self.plan.old_policy):
                batch = replace(drawn, old_logprobs_T=predicted_logprobs(policy, drawn, spec))
            save(batch, self.folder / name)
            rows, totals = flow.prepare_rows(batch, spec, mesh)
            result = flow.run_step(
                policy,
                flow.build_loss(spec.loss),
                rows,
                totals,
                num_source=batch.num_tokens,
                keep_gradients=True,
                loss_spec=spec.loss,
                fused=True,
            )
            save_file(
                {key: value.contiguous().cpu() for key, value in result.gradients.items()},
                self.folder / f"{name}.gradients.safetensors",
            )
            policy.model.zero_grad(set_to_none=True)
            tokens = {key: result.tokens[key].cpu() for key in ("clipped", "policy_logprobs")}
            save_file(tokens, self.folder / f"{name}.tokens.safetensors")
            apart_S = (tokens["policy_logprobs"].double() - batch.old_logprobs_T.double())[batch.loss_mask_T]
            write_whole(
                self.folder / f"{name}.json",
                to_json(
                    {
                        "documents": batch.num_documents,
                        "tokens": batch.num_tokens,
                        "trained_tokens": batch.num_trained_tokens,
                        "loss": float(result.loss["total"]),
                        "clipped": float(tokens["clipped"].sum() / batch.num_trained_tokens),
                        "old_policy_apart_nats": float(apart_S.abs().mean()),
                        "old_policy_apart_most_nats": float(apart_S.abs().max()),
                    }
                ),
            )
        self._policy = None

    def measure(self, workload_name: str, layout_name: str) -> None:
        """Compare a layout with the truth, time it, and write the result."""
        workload, layout = self.plan.workloads[workload_name], self.plan.layouts[layout_name]
        file = entry_file(self.folder, f"{workload_name}/{layout_name}")
        mesh = self.mesh(layout)
        try:
            spec = self.spec(workload, layout, micro_batches=self.plan.micro_batches.get(layout_name, 0))
            result = self._measured(workload_name, spec, mesh)
        except WorkbenchError as error:  # the same on every rank, before any collective
            result = {"left_out": str(error).replace("\n", ";")}
        if mesh.is_first:
            write_whole(file, to_json(result))

    def _measured(self, name: str, spec: RunSpec, mesh: Mesh) -> dict[str, Any]:
        layout = spec.layout
        policy, optimizer = self.policy(spec, mesh)
        batch, loss = load(self.folder / name), flow.build_loss(spec.loss)
        with StepClock(self.device) as preparing:
            rows, totals = flow.prepare_rows(batch, spec, mesh)
        clipped_S = _tensor(self.folder / f"{name}.tokens.safetensors", "clipped")
        result = flow.run_step(
            policy,
            loss,
            rows,
            totals,
            num_source=batch.num_tokens,
            frozen_clip_S=clipped_S,
            keep_gradients=True,
            loss_spec=spec.loss,
            fused=True,
        )
        parity = self._parity(name, result, batch) if mesh.is_first else None
        del result
        timed = self.timed(policy, optimizer, rows, totals, spec)
        packed = flow.pack_step(batch, spec)
        balance = flow.plan_row(packed[0].document_ids_T, layout).balance()
        return {
            "layout": str(layout),
            "ranks": layout.world_size,
            "micro_batches": len(rows),
            "prepare_ms": preparing.step_ms,
            "tokens_per_second": batch.num_tokens / timed["step_ms"] * 1e3,
            **timed,
            "padding": sum(row.num_tokens for row in packed) / batch.num_tokens - 1,
            "attention_max_over_mean": balance.max_over_mean,
            "attention_in_lock_step": balance.in_lock_step,
            "parity": parity,
        }

    def timed(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        rows: Sequence[LocalRow],
        totals: StepTotals,
        spec: RunSpec,
        *,
        warm: int = 1,
    ) -> dict[str, Any]:
        """Time steps with their optimizer after some that are not timed, and the peak of the rank that needs most."""
        loss, step_ms = flow.build_loss(spec.loss), []
        for number in range(warm + self.samples):
            if self.device.type == "cuda" and number == warm:
                torch.cuda.reset_peak_memory_stats()
            with StepClock(self.device) as clock:
                result = flow.run_step(policy, loss, rows, totals, loss_spec=spec.loss, level="none", fused=True)
                flow.clip_gradients(policy, result.norms, None)
                optimizer.step()
            if number >= warm:
                step_ms.append(clock.step_ms)
        return {
            "samples_ms": step_ms,
            "step_ms": statistics.median(step_ms),
            "peak_gib": self.most(float(peak_bytes(self.device)), policy.mesh) / 2**30,
        }

    def most(self, value: float, mesh: Mesh) -> float:
        """The largest value of all ranks."""
        most = torch.tensor(value, dtype=torch.float64, device=self.device)
        for axis in ("dp_cp", "tp", "pp"):
            most = all_max(most, mesh[axis])
        return float(most)

    def _parity(self, name: str, result: flow.StepResult, batch: RolloutBatch) -> dict[str, Any]:
        distances, norms = {}, {}
        with safe_open(self.folder / f"{name}.gradients.safetensors", framework="pt", device=str(self.device)) as truth:
            for key, gradient in result.gradients.items():
                true = truth.get_tensor(key).double()
                distances[key] = float((gradient.to(self.device).double() - true).norm())
                norms[key] = float(true.norm())
        tokens = self.folder / f"{name}.tokens.safetensors"
        trained_S = batch.loss_mask_T
        apart_S = (result.tokens["policy_logprobs"].double() - _tensor(tokens, "policy_logprobs").double())[trained_S]
        flipped_S = result.tokens["would_clip"] != _tensor(tokens, "clipped")
        return {
            "loss": float(result.loss["total"]),
            "distance": math.hypot(*distances.values()),
            "norm": math.hypot(*norms.values()),
            "of_parameters": distances,
            "norms": norms,
            "logprobs_apart_nats": float(apart_S.abs().mean()),
            "flipped_clips": int(flipped_S.sum()),
        }


def draw_rollouts(workload: Workload, plan: Plan) -> RolloutBatch:
    """Draw the documents of a workload; see `draw_documents`."""
    return draw_documents(
        workload.rows,
        workload.row_tokens,
        workload.document_tokens,
        TINY_VOCABULARY if plan.model.startswith("tiny") else 151936,
        plan.seed,
    )


def draw_documents(
    rows: int, row_tokens: int, document_tokens: tuple[int, int], vocabulary: int, seed: int
) -> RolloutBatch:
    """Draw documents of random tokens that fill rows: the first quarter is a prompt, advantages are of either sign.

    A row is full once every document is padded to 16 tokens, and begins with a document of the maximum length, which
    does not fit into the space of that padding, so that every layout cuts the step into the same rows.
    """
    rng = random.Random(seed)
    low, high = document_tokens
    lengths: list[int] = []
    for _ in range(rows):
        left = row_tokens
        while left >= low + _PADDED:
            drawn = round(math.exp(rng.uniform(math.log(low), math.log(high))))
            length = high if left == row_tokens else min(drawn, left)
            if left - length < low + 2 * _PADDED and left <= high:
                length = left
            lengths.append(length)
            left -= -(-length // _PADDED) * _PADDED
    documents = []
    for length in lengths:
        advantage = rng.choice((-1, 1)) * rng.uniform(0.2, 2.0)
        documents.append(
            {
                "tokens": [rng.randrange(vocabulary) for _ in range(length)],
                "loss_mask": [int(t > length // 4) for t in range(length)],
                "advantages": advantage,
                "old_logprobs": [0.0] * length,
            }
        )
    return RolloutBatch.from_documents(documents)


@contextlib.contextmanager
def perturbed(model: torch.nn.Module, how: OldPolicy) -> Iterator[None]:
    """Move every weight, in place, while this is open: see `perturb`."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    perturb(model, how)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)


def perturb(model: torch.nn.Module, how: OldPolicy) -> None:
    """Move every weight, in place: w + relative * std(its tensor) * n, n normal, drawn from the seed where w lies."""
    draw = torch.Generator(next(model.parameters()).device).manual_seed(how.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, device=parameter.device, generator=draw).to(parameter.dtype)
            parameter.add_(noise, alpha=how.relative * float(parameter.std()))


def predicted_logprobs(policy: Policy, batch: RolloutBatch, spec: RunSpec) -> Tensor:
    """[S] float32 log-probabilities of every predicted token, 0 elsewhere."""
    logprobs_S = torch.zeros(batch.num_tokens)
    rows, _ = flow.prepare_rows(batch, spec, policy.mesh)
    with torch.no_grad():
        for local in rows:
            row = local.row
            hidden_TD = policy.hidden_states(row.tokens_T, row.positions_T, local.attention)
            logprobs_T = policy.token_logprobs(hidden_TD, row.targets_T, None, outputs=()).logprobs_T
            real_T = row.source_T != PADDING
            logprobs_S[row.source_T[real_T].cpu()] = logprobs_T[real_T].float().cpu()
    return logprobs_S


def save_model(plan: Plan, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the weights of a plan's model, in a dtype."""
    from workbench.policy.decoder import TINY, published_qwen3

    if plan.model in TINY:
        model = TINY[plan.model](TINY_VOCABULARY, seed=plan.seed)
    else:
        model = published_qwen3(plan.model, layers=plan.decoder_layers, seed=plan.seed)
    model.to(dtype).save_pretrained(folder)


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)


def main(arguments: Sequence[str]) -> None:
    """Run one rank; if it fails, write the traceback into the folder."""
    folder, samples, deadline, entries = Path(arguments[0]), int(arguments[1]), float(arguments[2]), arguments[3:]
    with recording_failure(folder):
        device = join("cuda" if torch.cuda.is_available() else "cpu", timeout_s=GIVE_UP_S)
        rank = Rank(folder, device, samples)
        if not (folder / "model").exists():
            rank.prepare()
        for entry in entries:
            workload, layout = entry.split("/")
            mesh = rank.mesh(rank.plan.layouts[layout])
            if rank.most(float(time.time() > deadline), mesh):
                break
            rank.measure(workload, layout)
        leave()


if __name__ == "__main__":
    main(sys.argv[1:])
