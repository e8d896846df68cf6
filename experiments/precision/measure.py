"""The cost of each choice of precision: errors against float64, updates that are lost, time and memory.

``python -m experiments.precision.measure [LAB[=MINUTES] ...]``: for every choice and several batches one gradient from
the same weights, with the clip decisions of the float64 run; its own clip decisions; and training for some steps.
Labs:

    precision     the arithmetic policy on its rollouts, on a CPU: two data-parallel ranks simulated in this process
                  with two micro-batches each, so that accumulation and reduction are exercised
    qwen3_0.6b    the published architecture with random weights, on one GPU: four micro-batches of 4,096 tokens
    qwen3_8b      the widths of that architecture with four layers, the same

A format of GEMMs that the device does not have is emulated; the record names it. A choice that cannot run is left out
with its error.

Units: errors are relative (distance over norm), milliseconds of a step, GiB at the peak of a step, bytes of one rank
per parameter.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.gpu_layouts.measure import OldPolicy, draw_documents, perturb, predicted_logprobs
from workbench.atomic import to_json, write_whole
from workbench.errors import WorkbenchError
from workbench.metrics.step import StepClock, forget_peak, peak_bytes
from workbench.policy.decoder import published_qwen3
from workbench.policy.gemm_formats import emulated_formats
from workbench.policy.model import DTYPES
from workbench.records.provenance import project_root, provenance
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.files import load
from workbench.sharding.gradients import full_weights
from workbench.sharding.mesh import Mesh, single_process_mesh
from workbench.sharding.simulated import simulate
from workbench.specs.reading import merge
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.checkpoint import build_policy
from workbench.train.optimizer import LossScale, build_optimizer

FOLDER = Path(__file__).parent
TRUTH, UNIT = "float64", "bf16_mixed"
OPTIMIZER = {"learning_rate": 1e-6, "max_grad_norm": 1.0}
"""Rate and clipping of verl's PPO trainer: ``actor.optim.lr`` 1e-6, ``actor.grad_clip`` 1.0."""
CHOICES: dict[str, dict[str, Any]] = {
    TRUTH: {"precision": "float64"},
    "float32": {"precision": "float32"},
    "tf32": {"precision": "tf32"},
    "fp16_amp": {"precision": "fp16_amp"},
    "fp16, scale 1": {"precision": "fp16_amp", "mixed_precision": {"loss_scale": 1.0}},
    UNIT: {"precision": UNIT},
    "bf16_mixed, fp32 head": {"precision": UNIT, "policy": {"fp32_head": True}},
    "bf16_mixed, fp32 norms": {"precision": UNIT, "mixed_precision": {"norms": "float32"}},
    "bf16_mixed, chunked head": {"precision": UNIT, "policy": {"logprobs": "chunked"}},
    "bf16_mixed, bf16 loss": {"precision": UNIT, "mixed_precision": {"loss": "bfloat16"}},
    "bf16_mixed, bf16 moments": {"precision": UNIT, "mixed_precision": {"moments": "bfloat16"}},
    "bf16_mixed, 8-bit moments": {"precision": UNIT, "mixed_precision": {"moments": "8bit"}},
    "fsdp2_bf16": {"precision": "fsdp2_bf16"},
    "deepspeed_bf16": {"precision": "deepspeed_bf16"},
    "bf16_pure": {"precision": "bfloat16"},
    "bf16 weights at random": {
        "precision": "bfloat16",
        "mixed_precision": {"moments": "float32", "stochastic_rounding": True},
    },
    "fp8_tensorwise": {"precision": "fp8_tensorwise"},
    "fp8_rowwise": {"precision": "fp8_rowwise"},
    "fp8_rowwise, MLPs": {"precision": UNIT, "mixed_precision": {"mlp_gemms": "fp8_rowwise"}},
    "fp8_blockwise": {"precision": "fp8_blockwise"},
    "mxfp8": {"precision": "mxfp8"},
}
"""Choice -> settings."""
COMPILED = {"norm": "compiled", "rope": "compiled", "mlp": "compiled"}
LIGER = {"norm": "liger", "rope": "liger", "mlp": "liger"}
ON_GPU: dict[str, dict[str, Any]] = {
    "bf16_mixed, plain attention": {"precision": UNIT, "layout": {"kernel": "plain"}},
    "bf16_mixed, cudnn attention": {"precision": UNIT, "layout": {"kernel": "cudnn"}},
    "bf16_mixed, compiled": {"precision": UNIT, "kernels": COMPILED},
    "bf16_mixed, liger": {"precision": UNIT, "kernels": LIGER},
    "fp8_rowwise, compiled": {"precision": "fp8_rowwise", "kernels": COMPILED},
}
"""Kernels that a CPU does not have."""
WIDE = (
    TRUTH,
    "bf16_mixed",
    "bf16_mixed, liger",
    "fp8_rowwise",
    "fp8_tensorwise",
    "fp8_blockwise",
    "bf16_pure",
    "bf16_mixed, fp32 head",
    "bf16_mixed, 8-bit moments",
    "fp16_amp",
    "bf16_mixed, compiled",
    "fp8_rowwise, compiled",
    "deepspeed_bf16",
    "bf16 weights at random",
    "mxfp8",
    "float32",
)
"""Choices at 8B shapes; the last ones are left out first where time ends."""
_OF_SEVERAL = ("bf16_mixed, chunked head", "fsdp2_bf16")
"""Choices of the tiny lab alone: one rank reduces nothing, and the fused head has chunks."""


@dataclass(frozen=True)
class Lab:
    """A model, its batches, and what of a run is the same for all choices."""

    base: Mapping[str, Any]
    batches: Callable[[RunSpec, Path], list[RolloutBatch]]
    choices: Mapping[str, Mapping[str, Any]]
    steps: int
    ranks: int = 1
    keep: torch.dtype = torch.float64
    model: Callable[[Path], str] | None = None
    text: str = ""

    def spec(self, choice: str, source: str | None = None) -> RunSpec:
        """The settings of a choice."""
        model = {} if source is None else {"model": {"source": source}}
        return RunSpec.model_validate(merge(merge(dict(self.base), model), dict(self.choices[choice])))

    def on_ranks(self, rank: Callable[[Mesh], Any]) -> list[Any]:
        """Run a function on every rank: simulated ones, or the GPU of this process."""
        if self.ranks > 1:
            return simulate(rank, dp=self.ranks)
        return [rank(single_process_mesh(torch.device(self.base["device"])))]


def parts_of_rollouts(documents: int, batches: int) -> Callable[[RunSpec, Path], list[RolloutBatch]]:
    """Batches of so many documents of the arithmetic rollouts."""

    def draw(spec: RunSpec, folder: Path) -> list[RolloutBatch]:
        whole = load(project_root() / spec.data.path)
        return [whole.select(range(at * documents, (at + 1) * documents)) for at in range(batches)]

    return draw


def random_documents(rows: int, tokens: int, vocabulary: int = 151936) -> Callable[[RunSpec, Path], list[RolloutBatch]]:
    """One batch of packed random documents, whose old policy has weights that lie a tenth of their deviation away."""

    def draw(spec: RunSpec, folder: Path) -> list[RolloutBatch]:
        batch = draw_documents(rows, tokens, (tokens // 16, tokens // 2), vocabulary, seed=0)
        policy = build_policy(
            spec, single_process_mesh(torch.device(spec.device)), project_root(), temperature=batch.temperature
        )
        perturb(policy.model, OldPolicy(relative=0.1, seed=1))
        return [replace(batch, old_logprobs_T=predicted_logprobs(policy, batch, spec))]

    return draw


def _published(name: str, layers: int | None) -> Callable[[Path], str]:
    def save(folder: Path) -> str:
        published_qwen3(name, layers=layers, seed=0).save_pretrained(folder)
        return str(folder)

    return save


def _on_gpu(name: str, layers: int | None, text: str, names: Sequence[str] = ()) -> Lab:
    base = {
        "device": "cuda",
        "optimizer": OPTIMIZER,
        "record": {"metrics": "none"},
        "data": {"micro_batch_tokens": 4096},
        "policy": {"fused_loss": True, "chunk_tokens": 1024},
    }
    choices = {key: value for key, value in (CHOICES | ON_GPU).items() if key not in _OF_SEVERAL}
    choices |= {key: choices[key] | {"layout": {"kernel": "plain"}} for key in ("float32", "tf32")}
    batches = random_documents(rows=4, tokens=4096)
    return Lab(
        base,
        batches,
        {key: choices[key] for key in names or choices},
        steps=3,
        keep=torch.float32,
        model=_published(name, layers),
        text=text,
    )


LABS = {
    "precision": Lab(
        base={
            "layout": {"dp": 2},
            "data": {"micro_batches": 2},
            "device": "cpu",
            "optimizer": OPTIMIZER,
            "record": {"metrics": "none"},
        },
        batches=parts_of_rollouts(documents=24, batches=3),
        choices=CHOICES,
        steps=6,
        ranks=2,
        text="The arithmetic policy on its rollouts, two simulated ranks on a CPU with two micro-batches each",
    ),
    "qwen3_0.6b": _on_gpu(
        "qwen3-0.6b", None, "Qwen3-0.6B with random weights, four micro-batches of 4,096 random tokens on one GPU"
    ),
    "qwen3_8b": _on_gpu(
        "qwen3-8b",
        4,
        "Four layers of the widths of Qwen3-8B, random weights, four micro-batches of 4,096 random tokens on one GPU",
        WIDE,
    ),
}
"""Name of a record -> its lab."""


def spec_of(choice: str) -> RunSpec:
    """The settings of a choice in the lab on a CPU."""
    return LABS["precision"].spec(choice)


def measure(
    lab: Lab = LABS["precision"], *, names: Sequence[str] = (), name: str = "precision", minutes: float = math.inf
) -> dict[str, Any]:
    """Measure the choices of a lab, or those named, and return a record. The truth is always first.

    After so many minutes no other choice is started; the record says so.
    """
    began, names = time.perf_counter(), names or tuple(lab.choices)
    entries: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as temporary:
        source = lab.model(Path(temporary)) if lab.model else None
        parts = lab.batches(lab.spec(TRUTH, source), Path(temporary))
        truths = [_trained(lab, lab.spec(TRUTH, source), part) for part in parts]
        cancels = _cancellation(lab, lab.spec(TRUTH, source), parts[0])
        for choice in [TRUTH, *(choice for choice in names if choice != TRUTH)]:
            started, spec = time.perf_counter(), lab.spec(choice, source)
            results = truths if choice == TRUTH else []
            if started - began > 60 * minutes:
                entries[choice] = {"left_out": f"no time: {minutes:g} minutes had passed"}
                continue
            try:
                for part, truth in zip(parts[len(results) :], truths[len(results) :], strict=True):
                    _free()
                    results = [*results, _trained(lab, spec, part, truth["clipped"])]
                entries[choice] = _entry(lab, choice, spec, results, truths, cancels)
            except (WorkbenchError, RuntimeError, ImportError) as error:
                entries[choice] = {"left_out": f"{type(error).__name__}: {error}"[:600]}
            print(_line(choice, entries[choice], time.perf_counter() - started), flush=True)
    device = torch.device(lab.base["device"])
    return {
        "benchmark": "precision",
        "command": f"python -m experiments.precision.measure {name}",
        "what": lab.text,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "base": dict(lab.base),
        "documents": [part.num_documents for part in parts],
        "tokens": [part.num_tokens for part in parts],
        "steps": lab.steps,
        "choices": entries,
        "minutes": (time.perf_counter() - began) / 60,
        "provenance": provenance(project_root(), seed=0),
    }


def bytes_per_parameter(spec: RunSpec) -> float:
    """Bytes that a rank holds per parameter: weights, their copies, gradients and two moments."""
    dtypes = spec.dtypes
    moment = 1 + 4 / 256 if dtypes.moments == "8bit" else DTYPES[dtypes.moments].itemsize
    held = DTYPES[dtypes.weights].itemsize + DTYPES[dtypes.gradients].itemsize + 2 * moment
    return held + DTYPES[dtypes.compute].itemsize * dtypes.copies


def _entry(
    lab: Lab,
    choice: str,
    spec: RunSpec,
    results: Sequence[Mapping[str, Any]],
    truths: Sequence[Mapping[str, Any]],
    cancels: Mapping[str, float],
) -> dict[str, Any]:
    dtypes = spec.dtypes
    parts = ("weights", "compute", "gradients", "reduction", "moments", "loss", "router", "norms")
    return {
        "settings": dict(lab.choices[choice]),
        "dtypes": {key: getattr(dtypes, key) for key in parts if getattr(dtypes, key)} | dtypes.gemms,
        "coarsest": dtypes.coarsest,
        "emulated": results[0]["emulated"],
        "bytes_per_parameter": bytes_per_parameter(spec),
        "batches": [_compared(one, truth) for one, truth in zip(results, truths, strict=True)],
        "step_ms": statistics.median(ms for one in results for ms in one["ms"]),
        "peak_gib": max(one["peak"] for one in results) / 2**30 or None,
        "skipped": sum(one["skipped"] for one in results),
        "worst_parameters": [] if choice == TRUTH else _worst(results[0], truths[0], cancels),
    }


def _trained(lab: Lab, spec: RunSpec, batch: RolloutBatch, clipped_S: Tensor | None = None) -> dict[str, Any]:
    def rank(mesh: Mesh) -> dict[str, Any]:
        policy = build_policy(spec, mesh, project_root(), temperature=batch.temperature)
        loss, optimizer, scale = flow.build_loss(spec.loss), build_optimizer(policy, spec), LossScale.of(spec.dtypes)
        rows, totals = flow.prepare_rows(batch, spec, mesh)
        settings: dict[str, Any] = {"loss_spec": spec.loss, "level": "none", "fused": spec.policy.fused_loss}
        of_tokens = settings | {"num_source": int(batch.source_T.max()) + 1}
        own = flow.run_step(policy, loss, rows, totals, **of_tokens)
        frozen = own.tokens["clipped"] if clipped_S is None else clipped_S
        first = flow.run_step(policy, loss, rows, totals, frozen_clip_S=frozen, keep_gradients=True, **of_tokens)
        gradients = {name: gradient.to(lab.keep) for name, gradient in first.gradients.items()}
        numbers = {"loss": float(first.loss["total"]), "logprobs": own.tokens["policy_logprobs"].double()}
        clipped = own.tokens["clipped"]
        del own, first
        start = {key: value.clone() for key, value in full_weights(policy.model, policy.shards, mesh).items()}
        ms, skipped = [], 0
        forget_peak(mesh.device)
        for _ in range(lab.steps):
            with StepClock(mesh.device) as clock:
                policy.loss_scale = scale.value
                result = flow.run_step(policy, loss, rows, totals, **settings)
                norm = flow.clip_gradients(policy, result.norms, spec.optimizer.max_grad_norm)
                if scale.accepts(norm):
                    optimizer.step()
                else:
                    skipped += 1
            ms.append(clock.step_ms)
        end = full_weights(policy.model, policy.shards, mesh)
        unseen = sum(int((start[name].bfloat16() == end[name].bfloat16()).sum()) for name in start)
        return numbers | {
            "gradients": gradients,
            "clipped": clipped,
            "trained": int(batch.loss_mask_T.sum()),
            "updates": {name: (end[name].double() - start[name].double()).to(lab.keep) for name in start},
            "unseen": unseen / sum(value.numel() for value in start.values()),
            "ms": ms,
            "skipped": skipped,
            "peak": peak_bytes(mesh.device) if mesh.device.type == "cuda" else 0,
            "emulated": emulated_formats(policy.model, DTYPES[spec.dtypes.compute]),
        }

    result: dict[str, Any] = lab.on_ranks(rank)[0]
    return result


def _cancellation(lab: Lab, spec: RunSpec, batch: RolloutBatch) -> dict[str, float]:
    """Parameter -> norms of the gradients of single rows, summed, over the norm of their sum: how much they cancel."""

    def rank(mesh: Mesh) -> tuple[dict[str, float], dict[str, Tensor]]:
        policy = build_policy(spec, mesh, project_root(), temperature=batch.temperature)
        loss = flow.build_loss(spec.loss)
        rows, totals = flow.prepare_rows(batch, spec, mesh)
        strategy = flow.choose_strategy(reproducible=False, fused=spec.policy.fused_loss)
        norms: dict[str, float] = {}
        sums: dict[str, Tensor] = {}
        for row in rows:
            policy.model.zero_grad(set_to_none=True)
            step_loss = flow.StepLoss(loss, totals, spec.loss)
            _, (_, _, scalars), _ = strategy.row_loss(policy, row.hidden_states(policy), row, step_loss)
            scalars["total"].value.backward()
            for name, parameter in policy.model.named_parameters():
                if parameter.grad is not None:
                    norms[name] = norms.get(name, 0.0) + float(parameter.grad.norm())
                    sums[name] = parameter.grad.clone() if name not in sums else sums[name].add_(parameter.grad)
        return norms, sums

    of_ranks = lab.on_ranks(rank)
    return {
        name: sum(norms[name] for norms, _ in of_ranks) / float(sum(sums[name] for _, sums in of_ranks).norm())
        for name in of_ranks[0][0]
    }


def _compared(one: Mapping[str, Any], truth: Mapping[str, Any]) -> dict[str, float]:
    """Errors of a choice on one batch."""
    shift = (one["logprobs"] - truth["logprobs"]).abs()
    moved = [(one["updates"][name] == 0, right != 0) for name, right in truth["updates"].items()]
    return {
        "loss_error": abs(one["loss"] - truth["loss"]) / abs(truth["loss"]),
        "logprob_mean_nats": float(shift.sum()) / one["trained"],
        "logprob_max_nats": float(shift.max()),
        "clip_flips": int((one["clipped"] != truth["clipped"]).sum()),
        "gradient_error": _distance(one["gradients"], truth["gradients"]),
        "update_error": _distance(one["updates"], truth["updates"]),
        "unmoved": sum(int((still & moves).sum()) for still, moves in moved) / sum(int(m.sum()) for _, m in moved),
        "unseen_by_bf16_sampler": one["unseen"],
    }


def _worst(one: Mapping[str, Any], truth: Mapping[str, Any], cancels: Mapping[str, float]) -> list[dict[str, Any]]:
    """The three parameters with the largest relative error of the gradient, and what explains it."""
    entries = []
    for name, right in truth["gradients"].items():
        wrong, there = one["gradients"][name], right != 0
        underflow = float(((wrong == 0) & there).sum() / there.sum())
        length = float(wrong.double().norm() / right.double().norm())
        cause = (
            f"underflow: {100 * underflow:.0f} % of its elements are zero"
            if underflow > 0.01
            else f"underflow on the way to it: its norm is {length:.2f} of the right one"
            if length < 0.9
            else f"cancellation: the gradients of rows are {cancels[name]:.1f} times their sum"
            if cancels[name] > 2
            else "rounding"
        )
        entries.append({"parameter": name, "error": _distance({name: wrong}, {name: right}), "cause": cause})
    return sorted(entries, key=lambda entry: -entry["error"])[:3]


def _distance(actual: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Norm of the difference over the norm of the second, over all parameters."""
    apart = math.hypot(*(float((actual[name].double() - value.double()).norm()) for name, value in right.items()))
    return apart / math.hypot(*(float(value.double().norm()) for value in right.values()))


def _free() -> None:
    """Collect what only cycles hold, such as the hooks of sharded parameters."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _line(choice: str, entry: Mapping[str, Any], seconds: float) -> str:
    if "left_out" in entry:
        return f"{choice:28} left out: {entry['left_out']}"
    errors = " ".join(f"{key} {value:.2g}" for key, value in entry["batches"][0].items())
    return f"{choice:28} {entry['step_ms']:.0f} ms, {entry['peak_gib'] or 0:.1f} GiB, {errors} ({seconds:.0f} s)"


def main(arguments: list[str]) -> None:
    """Measure labs, ``NAME`` or ``NAME=MINUTES``, and write their records."""
    for argument in arguments or ["precision"]:
        name, _, minutes = argument.partition("=")
        write_whole(
            FOLDER / f"{name}.json", to_json(measure(LABS[name], name=name, minutes=float(minutes or math.inf)))
        )


if __name__ == "__main__":
    main(sys.argv[1:])
