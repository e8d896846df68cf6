"""Stated settings of the two sides: which weights, in which arithmetic, and which quantity was recorded.

What the sampler's settings leave out is as in the trainer's: the two are meant to be the same policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from workbench.errors import RecordError, SpecError, check_kind
from workbench.rollouts.sampling import Order
from workbench.specs.reading import parse_spec, read_yaml

CASE = "attribute.yaml"
Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Head = Literal["float64", "float32", "float32_masters", "bfloat16", "float16", "bfloat16_softmax", "float16_softmax"]
Gemms = Literal[
    "dense",
    "fp8_tensorwise",
    "fp8_rowwise",
    "fp8_blockwise",
    "mxfp8",
    "fp8_weights_tensorwise",
    "fp8_weights_rowwise",
    "fp8_weights_blockwise",
]
Lora = Literal["unmerged", "merged", "merged_rounded", "dropped", "doubled", "times_alpha", "rslora", "unscaled"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True)


class Side(_Model):
    """Settings by which one side computes a log-probability."""

    precision: Dtype = "float32"
    """Of the trunk: weights and activations; parts that the model computes in float32 stay so."""
    head: Head | None = None
    """Of the output head: its GEMM and its logits. None: that of the trunk."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Kernel, by the name of `transformers`."""
    gemms: Gemms = "dense"
    """Format of the GEMMs of the trunk's linear layers."""
    routes: Literal["own", "recorded"] = "own"
    """Of a mixture of experts: chosen by its own router, or those of `sampler_routes`."""
    lora: Lora = "unmerged"
    """Application of the adapter, if there is one."""
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Divisor of the logits."""
    top_k: int = Field(default=0, ge=0)
    """Most likely tokens that are kept; 0: all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest probability mass that is kept."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Tokens with at least this share of the largest probability are kept."""
    order: Order = "vllm"
    """Order of truncation, by engine; what top_p keeps depends on it where there is another."""
    logprobs: Literal["raw", "scaled", "processed"] = "processed"
    """Quantity: of the logits as they are; after the temperature; after temperature and truncation."""


class Trainer(Side):
    """The side whose weights are given."""

    model: Any
    """Checkpoint folder, name of a tiny model, or a model of `transformers`."""
    older: dict[str, Any] = Field(default_factory=dict)
    """Earlier checkpoints by name, the newest first."""
    adapter: Path | None = None
    """Folder of a LoRA adapter in peft's format, of the current weights."""


class Sampler(Side):
    """The side that drew the tokens."""

    rollouts: Any
    """Records of `docs/guides/trainer-and-sampler.md`, a rollout dataset or a `RolloutBatch`."""
    vocabulary: Path | None = None
    """JSON list of the text of each vocabulary id; needed to find other tokens of the same text."""


def sides(trainer: Any, sampler: Any = None) -> tuple[Trainer, Sampler]:
    """Return validated settings of both sides.

    Args:
        trainer: mapping with the keys of `Trainer`; or a checkpoint alone; or, without ``sampler``, a folder with
            `CASE`.
        sampler: mapping with the keys of `Sampler`, or rollouts alone.

    Raises:
        SpecError: an unknown or impossible setting.
        RecordError: a folder without `CASE`.
    """
    base = Path()
    if sampler is None:
        check_kind("attribute a case", trainer, (str, Path), f"pass the folder of {CASE}, or trainer and sampler")
        base = Path(trainer)
        trainer, sampler = _read_case(base)
    first = trainer if isinstance(trainer, Mapping) else {"model": trainer}
    second = sampler if isinstance(sampler, Mapping) and "rollouts" in sampler else {"rollouts": sampler}
    own: Trainer = parse_spec(Trainer, dict(first), where="the trainer's settings")
    shared = {name: getattr(own, name) for name in Side.model_fields if name not in second}
    other: Sampler = parse_spec(Sampler, {**shared, **second}, where="the sampler's settings")
    return (
        own.model_copy(
            update={
                "model": _path(base, own.model),
                "older": {name: _path(base, one) for name, one in own.older.items()},
                "adapter": own.adapter and base / own.adapter,
            }
        ),
        other.model_copy(
            update={"rollouts": _path(base, other.rollouts), "vocabulary": other.vocabulary and base / other.vocabulary}
        ),
    )


def _path(base: Path, value: Any) -> Any:
    """Return a path below the case's folder if there is one, otherwise the value as it is."""
    if isinstance(value, str | Path) and (base / value).exists():
        return base / value
    return value


def _read_case(folder: Path) -> tuple[Any, Any]:
    path = folder / CASE
    if not path.is_file():
        raise RecordError(
            f"attribute the gap of {folder}",
            found=f"no {CASE}",
            rule=f"a folder with {CASE}, which has the keys trainer and sampler",
            fix="see docs/guides/trainer-and-sampler.md, or pass trainer and sampler to wb.attribute",
        )
    content = read_yaml(path)
    if not isinstance(content, Mapping) or set(content) != {"trainer", "sampler"}:
        found = ", ".join(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise SpecError(
            f"attribute the gap of {path}",
            found=found,
            rule="the keys trainer and sampler, and no others",
            fix="see docs/guides/trainer-and-sampler.md",
        )
    return content["trainer"], content["sampler"]
