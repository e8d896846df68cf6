"""What each choice of precision costs: errors against float64, updates that are lost, time and bytes.

``python -m experiments.precision.measure [RECORD.json]``: the arithmetic policy on its rollouts, two data-parallel
ranks simulated in this process with two micro-batches each, so that accumulation and reduction are exercised. For every
choice and several batches: one gradient from the same weights with the clip decisions of the float64 run, its own clip
decisions, and training for some steps. FP8, MXFP8 and TF32 are emulated, here and on GPUs.

Units: errors are relative (distance over norm), milliseconds of this machine, bytes of one rank per parameter.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.atomic import to_json, write_whole
from workbench.policy.model import DTYPES
from workbench.records.provenance import project_root, provenance
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.files import load
from workbench.sharding.gradients import full_weights
from workbench.sharding.mesh import Mesh
from workbench.sharding.simulated import simulate
from workbench.specs.reading import merge
from workbench.specs.run import RunSpec
from workbench.train import step as flow
from workbench.train.checkpoint import build_policy
from workbench.train.optimizer import LossScale, build_optimizer

RECORD = Path(__file__).with_name("precision.json")
TRUTH, UNIT = "float64", "bf16_mixed"
BASE: dict[str, Any] = {
    "layout": {"dp": 2},
    "data": {"micro_batches": 2},
    "device": "cpu",
    "optimizer": {"learning_rate": 1e-6, "max_grad_norm": 1.0},
    "record": {"metrics": "none"},
}
"""Rate and clipping of verl's PPO trainer: ``actor.optim.lr`` 1e-6, ``actor.grad_clip`` 1.0."""
CHOICES: dict[str, dict[str, Any]] = {
    TRUTH: {"precision": "float64"},
    "float32": {"precision": "float32"},
    "tf32": {"precision": "tf32"},
    "fp16_amp": {"precision": "fp16_amp"},
    "fp16, scale 1": {"precision": "fp16_amp", "mixed_precision": {"loss_scale": 1.0}},
    UNIT: {"precision": UNIT},
    "bf16_mixed, fp32 head": {"precision": UNIT, "policy": {"fp32_head": True}},
    "bf16_mixed, chunked head": {"precision": UNIT, "policy": {"logprobs": "chunked"}},
    "bf16_mixed, bf16 moments": {"precision": UNIT, "mixed_precision": {"moments": "bfloat16"}},
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


def spec_of(choice: str) -> RunSpec:
    """The settings of a choice."""
    return RunSpec.model_validate(merge(BASE, CHOICES[choice]))


def measure(
    *, batches: int = 3, documents: int = 24, steps: int = 6, names: Sequence[str] = tuple(CHOICES)
) -> dict[str, Any]:
    """Measure choices on batches of documents, each with so many steps; return a record. The truth is always first."""
    whole, began = load(project_root() / RunSpec().data.path), time.perf_counter()
    parts = [whole.select(range(at * documents, (at + 1) * documents)) for at in range(batches)]
    truths = [_trained(spec_of(TRUTH), part, steps) for part in parts]
    rows = [_rows_of_truth(part) for part in parts[:1]]
    entries = {}
    for name in [TRUTH, *(name for name in names if name != TRUTH)]:
        spec = spec_of(name)
        results = [
            truth if name == TRUTH else _trained(spec, part, steps, truth["clipped"])
            for part, truth in zip(parts, truths, strict=True)
        ]
        compared = [_compared(one, truth) for one, truth in zip(results, truths, strict=True)]
        entries[name] = {
            "settings": CHOICES[name],
            "dtypes": {key: getattr(spec.dtypes, key) for key in ("weights", "compute", "gradients", "reduction")}
            | {"moments": spec.dtypes.moments, **spec.dtypes.gemms},
            "coarsest": spec.dtypes.coarsest,
            "bytes_per_parameter": bytes_per_parameter(spec),
            "batches": compared,
            "step_ms": statistics.median(ms for one in results for ms in one["ms"]),
            "worst_parameters": [] if name == TRUTH else _worst(results[0], truths[0], rows[0]),
        }
    return {
        "benchmark": "precision",
        "command": "python -m experiments.precision.measure",
        "device": "cpu",
        "model": RunSpec().model.source,
        "base": BASE,
        "documents": documents,
        "steps": steps,
        "choices": entries,
        "minutes": (time.perf_counter() - began) / 60,
        "provenance": provenance(project_root(), seed=0),
    }


def bytes_per_parameter(spec: RunSpec) -> float:
    """Bytes that a rank holds per parameter: weights, their copies, gradients and two moments."""
    dtypes = spec.dtypes
    held = [dtypes.weights, dtypes.gradients, dtypes.moments, dtypes.moments]
    return sum(DTYPES[each].itemsize for each in held) + DTYPES[dtypes.compute].itemsize * dtypes.copies


def _trained(spec: RunSpec, batch: RolloutBatch, steps: int, clipped_S: Tensor | None = None) -> dict[str, Any]:
    def rank(mesh: Mesh) -> dict[str, Any]:
        policy = build_policy(spec, mesh, project_root(), temperature=batch.temperature)
        loss, optimizer, scale = flow.build_loss(spec.loss), build_optimizer(policy, spec), LossScale.of(spec.dtypes)
        rows, totals = flow.prepare_rows(batch, spec, mesh)
        settings: dict[str, Any] = {
            "num_source": int(batch.source_T.max()) + 1,
            "level": "none",
            "loss_spec": spec.loss,
        }
        own = flow.run_step(policy, loss, rows, totals, **settings)
        frozen = own.tokens["clipped"] if clipped_S is None else clipped_S
        first = flow.run_step(policy, loss, rows, totals, frozen_clip_S=frozen, keep_gradients=True, **settings)
        start = full_weights(policy.model, policy.shards, mesh)
        ms = []
        for _ in range(steps):
            began = time.perf_counter()
            policy.loss_scale = scale.value
            result = flow.run_step(policy, loss, rows, totals, level="none", loss_spec=spec.loss)
            norm = flow.clip_gradients(policy, result.norms, spec.optimizer.max_grad_norm)
            if scale.accepts(norm):
                optimizer.step()
            ms.append(1e3 * (time.perf_counter() - began))
        return {
            "loss": float(first.loss["total"]),
            "gradients": {name: gradient.double() for name, gradient in first.gradients.items()},
            "logprobs": own.tokens["policy_logprobs"].double(),
            "clipped": own.tokens["clipped"],
            "trained": int(batch.loss_mask_T.sum()),
            "start": start,
            "end": full_weights(policy.model, policy.shards, mesh),
            "ms": ms,
        }

    result: dict[str, Any] = simulate(rank, dp=2)[0]
    return result


def _rows_of_truth(batch: RolloutBatch) -> dict[str, float]:
    """Parameter -> norms of the gradients of single rows, summed, over the norm of their sum: how much they cancel."""
    spec = spec_of(TRUTH)

    def rank(mesh: Mesh) -> list[dict[str, Tensor]]:
        policy = build_policy(spec, mesh, project_root(), temperature=batch.temperature)
        loss = flow.build_loss(spec.loss)
        rows, totals = flow.prepare_rows(batch, spec, mesh)
        gradients = []
        for row in rows:
            policy.model.zero_grad(set_to_none=True)
            hidden_TD = row.hidden_states(policy)
            _, (_, _, scalars), _ = flow.PLAIN.row_loss(policy, hidden_TD, row, flow.StepLoss(loss, totals, spec.loss))
            scalars["total"].value.backward()
            gradients.append({n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None})
        return gradients

    parts = [gradient for of_rank in simulate(rank, dp=2) for gradient in of_rank]
    return {
        name: float(sum(part[name].norm() for part in parts) / sum(part[name] for part in parts).norm())
        for name in parts[0]
    }


def _compared(one: Mapping[str, Any], truth: Mapping[str, Any]) -> dict[str, float]:
    """Errors of a choice on one batch."""
    moved, rightly = (_flat(each["end"]) - _flat(each["start"]) for each in (one, truth))
    shift = (one["logprobs"] - truth["logprobs"]).abs()
    start, end = (_flat(one[key]).bfloat16() for key in ("start", "end"))
    return {
        "loss_error": abs(one["loss"] - truth["loss"]) / abs(truth["loss"]),
        "logprob_mean_nats": float(shift.sum()) / one["trained"],
        "logprob_max_nats": float(shift.max()),
        "clip_flips": int((one["clipped"] != truth["clipped"]).sum()),
        "gradient_error": _distance(_flat(one["gradients"]), _flat(truth["gradients"])),
        "update_error": _distance(moved, rightly),
        "unmoved": float(((moved == 0) & (rightly != 0)).sum() / (rightly != 0).sum()),
        "unseen_by_bf16_sampler": float((start == end).double().mean()),
    }


def _worst(one: Mapping[str, Any], truth: Mapping[str, Any], cancels: Mapping[str, float]) -> list[dict[str, Any]]:
    """The three parameters with the largest relative error of the gradient, and what explains it."""
    entries = []
    for name, right in truth["gradients"].items():
        wrong, zeros = one["gradients"][name], right != 0
        underflow = float(((wrong == 0) & zeros).sum() / zeros.sum())
        cause = (
            f"underflow: {100 * underflow:.0f} % of its elements are zero"
            if underflow > 0.01
            else f"cancellation: the gradients of rows are {cancels[name]:.1f} times their sum"
            if cancels[name] > 2
            else "rounding"
        )
        entries.append({"parameter": name, "error": _distance(wrong, right), "cause": cause})
    return sorted(entries, key=lambda entry: -entry["error"])[:3]


def _flat(named: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1).double() for value in named.values()])


def _distance(actual: Tensor, right: Tensor) -> float:
    return float((actual.double() - right.double()).norm() / right.double().norm())


def main(arguments: list[str]) -> None:
    """Measure, print and write the record."""
    record = measure()
    for name, entry in record["choices"].items():
        first = entry["batches"][0]
        print(f"{name:26}", {key: float(f"{value:.2g}") for key, value in first.items()}, f"{entry['step_ms']:.0f} ms")
    write_whole(Path(arguments[0]) if arguments else RECORD, to_json(record))


if __name__ == "__main__":
    main(sys.argv[1:])
