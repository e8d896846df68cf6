"""The gap of a sampler on a GPU at 0.6 billion parameters, by cause, and its floor: bfloat16, FP8, float32 masters.

The trainer has float32 weights of the published Qwen3-0.6B architecture, drawn from a seed, with embeddings that are
scaled so that a token has some nats of entropy. The sampler draws with a cache in a batch, or scores its completions in
one pass, in bfloat16; its FP8 trunk multiplies in FP8 (`torch._scaled_mm`), which `workbench.mismatch` never calls.

    python -m workbench bench attribution_gpu

Without a GPU a tiny decoder stands for it, whose FP8 operands are multiplied in float32: it shows that this works.

Letters: N rows of tokens | D model dimension | O output channels.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import workbench as wb
from experiments.attribution.cases import E4M3, Engine, in_dtype, moved, prompts, with_head
from experiments.attribution.measure import DRAWS, NEAR
from experiments.attribution_gpu.page import write_gpu_report
from workbench.mismatch.computing import Computation
from workbench.mismatch.configuration import Configuration
from workbench.mismatch.documents import read_documents
from workbench.mismatch.floor import noise_of, truth
from workbench.mismatch.settings import sides
from workbench.policy.decoder import published_qwen3, tiny_qwen3
from workbench.records.provenance import project_root, provenance

COUNT, TOKENS, PROMPT_TOKENS = 16, 64, (24, 96)
TEMPERATURE = 0.8
MINUTES = 5.5
"""No further case is begun after this time; the record names those that are left out."""
SPREAD = 3.6
"""Standard deviation of the logits: with 151,936 normal logits at temperature 0.8 some nats of entropy are left."""


class Fp8Linear(nn.Module):
    """A linear layer that multiplies in e4m3: one scale a token of the input, one an output channel of the weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight_OD = layer.weight.detach()
        self.dtype = weight_OD.dtype
        self.weight_OD, self.scale_O1 = quantized(weight_OD)

    def forward(self, input_ND: Tensor) -> Tensor:
        """The product, in the input's dtype."""
        rows_ND = input_ND.flatten(0, -2)
        low_ND, scale_N1 = quantized(rows_ND)
        if input_ND.is_cuda:
            product_NO = torch._scaled_mm(
                low_ND, self.weight_OD.T, scale_a=scale_N1, scale_b=self.scale_O1.T, out_dtype=self.dtype
            )
        else:
            product_NO = ((low_ND.float() * scale_N1) @ (self.weight_OD.float() * self.scale_O1).T).to(self.dtype)
        return product_NO.unflatten(0, input_ND.shape[:-1])


def quantized(values_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Values in e4m3, and the scale of each row in float32."""
    scale_N1 = values_ND.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    return (values_ND.float() / scale_N1).to(E4M3), scale_N1


def with_fp8_trunk(model: Any) -> Any:
    """Return a copy whose linear layers but the head multiply in FP8."""
    other = copy.deepcopy(model)
    for name, module in list(other.named_modules()):
        for child, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear) and child != "lm_head":
                setattr(other.get_submodule(name), child, Fp8Linear(layer))
    return other


class Sides:
    """The trainer's decoder on the device, its prompts, and samplers of it."""

    def __init__(self) -> None:
        self.large = torch.cuda.is_available()
        self.device = "cuda" if self.large else "cpu"
        model: Any = published_qwen3("qwen3-0.6b") if self.large else tiny_qwen3(61)
        embeddings = model.get_input_embeddings().weight
        with torch.no_grad():  # tied: logits are hidden states of unit root mean square times embeddings
            embeddings.mul_(SPREAD / (float(embeddings.std()) * model.config.hidden_size**0.5))
        self.model = model.to(self.device)
        self.half = in_dtype(self.model, torch.bfloat16)
        self.name = "Qwen3-0.6B architecture, seeded" if self.large else "tiny"
        count, self.tokens = (COUNT, TOKENS) if self.large else (8, 12)
        lengths = PROMPT_TOKENS if self.large else (4, 12)
        self.rows = prompts(count, 2, vocabulary=model.config.vocab_size, tokens=lengths)

    def engine(self, model: Any = None, **settings: Any) -> Engine:
        """A sampler of bfloat16 weights, or of others."""
        return Engine(self.half if model is None else model, **{"temperature": TEMPERATURE, **settings})

    def records(self, engine: Engine) -> list[dict[str, Any]]:
        """Records of a sampler."""
        drawn = engine.draw(self.rows, self.tokens, 3)
        return [
            {"prompt_ids": row, "completion_ids": ids, "sampler_logprobs": nats}
            for row, (ids, nats) in zip(self.rows, drawn, strict=True)
        ]

    def cases(self) -> Mapping[str, tuple[Sequence[str], Callable[[], tuple[Engine, Mapping[str, Any]]], Any]]:
        """Name -> factors that no setting states, a sampler with its stated settings, and the trainer's settings."""
        low, fp8 = {"precision": "bfloat16"}, {"precision": "bfloat16", "gemms": "fp8_rowwise"}
        engine, older = self.engine, moved(self.model.cpu(), 5).to(self.device)
        self.model.to(self.device)
        trunk = with_fp8_trunk(self.half)
        rounded = with_head(self.model, torch.bfloat16)
        return {
            "bfloat16, cache, stated": ((), lambda: (engine(), low), {}),
            "bfloat16, one pass, stated": ((), lambda: (engine(again=True), low), {}),
            "FP8 trunk, cache, stated": ((), lambda: (engine(trunk), fp8), {}),
            "FP8 trunk, one pass, stated": ((), lambda: (engine(trunk, again=True), fp8), {}),
            "bfloat16, not stated": (["trunk precision"], lambda: (engine(), {}), {}),
            "FP8 trunk, not stated": (["FP8"], lambda: (engine(trunk), low), {}),
            "bfloat16 head, not stated": (["head precision"], lambda: (engine(rounded, again=True), {}), {}),
            "raw values, not stated": (["log-probability mode"], lambda: (engine(values="raw"), low), {}),
            "top_p 0.95, not stated": (["truncation"], lambda: (engine(top_p=0.95), low), {}),
            "temperature 0.85, not stated": (["temperature"], lambda: (engine(temperature=0.85), low), {}),
            "weights of another step": (
                ["stale weights"],
                lambda: (engine(in_dtype(older, torch.bfloat16)), low),
                {"older": {"step_1": older}},
            ),
            "FP8 trunk and raw values, not stated": (
                ["FP8", "log-probability mode"],
                lambda: (engine(trunk, values="raw"), low),
                {},
            ),
        }


def measure(
    *, pairs: int = 0, only: tuple[str, ...] = (), report_progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measure everything, and return a record.

    Args:
        pairs: not used; every benchmark takes it.
        only: names of cases; all if none is named.
        report_progress: called with progress messages.
    """
    start, own = time.monotonic(), Sides()
    floors, rows, left_out = [] if only else floors_of(own, report_progress), [], []
    for name, (factors, build, more) in own.cases().items():
        if only and name not in only:
            continue
        if time.monotonic() - start > 60 * MINUTES:
            left_out.append(name)
            continue
        began = time.monotonic()
        engine, stated = build()
        records = own.records(engine)
        trainer = {"model": own.model, "temperature": TEMPERATURE, **more}
        result = wb.attribute(trainer, {"rollouts": records, **stated}, draws=DRAWS, device=own.device)
        rows.append(
            {
                "case": name,
                "planted": list(factors),
                "causes": [part.factor for part in result.causes],
                "descriptions": [part.description for part in result.causes],
                "undecided": list(result.undecided),
                "verdict": result.verdict,
                "alarms": dict(result.alarms),
                "gap": result.gap["mean_distance"],
                "rest": result.rest["mean_distance"],
                "floor": result.floor["mean"],
                "safe": result.safe,
                "tokens": sum(len(one["completion_ids"]) for one in records),
                "nats": -sum(sum(one["sampler_logprobs"]) for one in records)
                / sum(len(one["completion_ids"]) for one in records),
                "seconds": round(time.monotonic() - began, 2),
            }
        )
        report_progress(f"{name}: {rows[-1]['descriptions']} {rows[-1]['verdict']}, {rows[-1]['seconds']} s")
    return {
        "benchmark": "attribution_gpu",
        "command": "python -m workbench bench attribution_gpu",
        "device": torch.cuda.get_device_name() if own.large else "cpu",
        "model": own.name,
        "parameters": sum(value.numel() for value in own.model.parameters()),
        "cases": rows,
        "left_out": left_out,
        "floors": floors,
        "seconds": time.monotonic() - start,
        "bars": bars(rows, floors),
        "provenance": provenance(project_root()),
    }


def bars(rows: Sequence[Mapping[str, Any]], floors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every planted cause is named, first where it is alone; nothing stated is accused; the floor is right."""
    planted, clean = [row for row in rows if row["planted"]], [row for row in rows if not row["planted"]]
    return {
        "named": {
            "bar": len(planted),
            "holds": all(set(row["causes"]) == set(row["planted"]) and not row["alarms"] for row in planted),
        },
        "accused": {"bar": 0, "holds": not any(row["causes"] or row["alarms"] for row in clean)},
        "floor": {"bar": NEAR, "holds": all(abs(row["ratio"] - 1) <= NEAR for row in floors)},
    }


def floors_of(own: Sides, report_progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """The floor of each precision, drawn, and by the distance of the computation itself from its truth."""
    trainer, sampler = sides({"model": own.model}, own.records(own.engine()))
    computation = Computation(trainer, read_documents(sampler.rollouts), device=own.device)
    rows = []
    for precision in ("float32", "bfloat16", "float16"):
        real = [
            computation.column(one) - truth(computation, one)
            for one in (Configuration(precision=precision, attention=kernel) for kernel in ("sdpa", "eager"))
        ]
        drawn = noise_of(computation, Configuration(precision=precision), draws=DRAWS, seed=0)
        figures = [float(torch.as_tensor(values).abs().mean()) for values in (drawn, torch.stack(real))]
        rows.append(
            {
                "precision": precision,
                "drawn": figures[0],
                "real": figures[1],
                "ratio": figures[0] / figures[1],
                "tokens": drawn.shape[1],
            }
        )
        report_progress(f"floor {precision}: {rows[-1]['ratio']:.3f}")
    return rows


def format_record(record: Mapping[str, Any]) -> str:
    """Format a record as lines of text."""
    lines = [f"{record['model']} on {record['device']}, {record['seconds']:.0f} s"]
    lines += [
        f"{row['case']}: {', '.join(row['descriptions']) or 'nothing found'}; gap {row['gap']:.3g}, rest "
        f"{row['rest']:.3g}, floor {row['floor']:.3g} nats"
        for row in record["cases"]
    ]
    lines += [f"floor in {row['precision']}: drawn over computed {row['ratio']:.3f}" for row in record["floors"]]
    return "\n".join(lines)


def write_page(record: Mapping[str, Any], folder: Path) -> Path:
    """Write the record as a page."""
    return write_gpu_report(record, folder)
