"""Precision of a run: presets by the names that users know, and the dtype of each part of a step.

A step computes with copies of the weights, cast to `compute`; the optimizer updates the weights themselves (the master
weights, where the two differ). Gradients leave a backward in `compute`, are accumulated over micro-batches in
`gradients`, summed over ranks in `reduction`, and reach an optimizer whose state has `moments`. The loss is computed in
float32, or in float64 where `compute` is, from log-probabilities in `loss`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from pydantic import Field

from workbench.specs.groups import Group

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Moments = Literal["float64", "float32", "bfloat16", "float16", "8bit"]
GemmFormat = Literal["dense", "tf32", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8"]
PrecisionName = Literal[
    "float64",
    "float32",
    "bfloat16",
    "bf16_mixed",
    "fp16_amp",
    "megatron_bf16",
    "fsdp2_bf16",
    "deepspeed_bf16",
    "tf32",
    "fp8_tensorwise",
    "fp8_rowwise",
    "fp8_blockwise",
    "mxfp8",
    "fp64",
    "fp32",
    "bf16_pure",
]

FINEST_FIRST = ("float64", "float32", "float16", "bfloat16", "float8")
"""By the spacing of their numbers: 52, 23, 10, 7 and 3 bits."""


@dataclass(frozen=True)
class Dtypes:
    """The dtype of each part of a training step; see `MixedPrecisionSpec`, which changes single ones of a preset."""

    weights: Dtype
    compute: Dtype
    gradients: Dtype
    reduction: Dtype
    moments: Moments
    loss: Dtype | None = None
    router: Dtype | None = None
    norms: Dtype | None = None
    attention_gemms: GemmFormat = "dense"
    mlp_gemms: GemmFormat = "dense"
    reduction_order: Literal["collective", "ranks"] = "collective"
    stochastic_rounding: bool = False
    loss_scale: float | None = None
    loss_scale_interval: int = 2000

    @property
    def gemms(self) -> dict[str, str]:
        """Part of a decoder -> the format of its GEMMs."""
        return {"attention": self.attention_gemms, "mlp": self.mlp_gemms}

    @property
    def modules(self) -> dict[str, Dtype | None]:
        """Kind of module -> the dtype in which it computes; None: `compute`."""
        return {"router": self.router, "norms": self.norms}

    @property
    def coarsest(self) -> str:
        """The dtype with the fewest bits of those that act on a step's gradient; the moments act on later ones only."""
        formats = [_FORMAT_BITS[each] for each in self.gemms.values() if each != "dense"]
        parts = filter(None, (self.loss, *self.modules.values()))
        always = (self.weights, self.compute, self.gradients, self.reduction)
        return max((*always, *formats, *parts), key=FINEST_FIRST.index)

    @property
    def in_float64(self) -> bool:
        """True if a step's gradient is computed in float64 throughout, so that it can be a ground truth."""
        return self.coarsest == "float64"

    @property
    def copies(self) -> bool:
        """True if a step computes with copies of the weights."""
        return self.compute != self.weights

    @property
    def single(self) -> bool:
        """True if one dtype serves all parts, as torch does without further settings."""
        return self == same(self.weights)


_FORMAT_BITS = {"tf32": "float16"} | dict.fromkeys(
    ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8"), "float8"
)
"""Format of a GEMM -> the dtype with as many bits of mantissa."""


def same(dtype: Dtype) -> Dtypes:
    """One dtype for everything."""
    return Dtypes(dtype, dtype, dtype, dtype, dtype)


_MIXED = Dtypes("float32", "bfloat16", "float32", "float32", "float32")

PRESETS: dict[str, Dtypes] = {
    "float64": same("float64"),
    "float32": same("float32"),
    "bfloat16": same("bfloat16"),
    "bf16_mixed": _MIXED,
    "fp16_amp": replace(_MIXED, compute="float16", loss_scale=65536.0),
    "megatron_bf16": _MIXED,
    "fsdp2_bf16": replace(_MIXED, reduction="bfloat16"),
    "deepspeed_bf16": replace(_MIXED, gradients="bfloat16", reduction="bfloat16"),
    "tf32": replace(same("float32"), attention_gemms="tf32", mlp_gemms="tf32"),
    "fp8_tensorwise": replace(_MIXED, attention_gemms="fp8_tensorwise", mlp_gemms="fp8_tensorwise"),
    "fp8_rowwise": replace(_MIXED, attention_gemms="fp8_rowwise", mlp_gemms="fp8_rowwise"),
    "fp8_blockwise": replace(_MIXED, attention_gemms="fp8_blockwise", mlp_gemms="fp8_blockwise"),
    "mxfp8": replace(_MIXED, attention_gemms="mxfp8", mlp_gemms="mxfp8"),
}
"""Preset -> its dtypes.

fp16_amp: initial scale, its factors (2 and 1/2) and the interval of 2000 steps are those of ``torch.amp.GradScaler``.
megatron_bf16: Megatron-LM's training script accumulates and reduces the gradients of bf16 runs in float32.
fsdp2_bf16: ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)``, whose ``reduce_dtype`` is then that of the parameters;
    torchtitan sets it to float32, which is bf16_mixed.
deepspeed_bf16: DeepSpeed 0.19.8, ``runtime/engine.py``, ``get_data_types`` and ``communication_data_type``: unless
    ``data_types.grad_accum_dtype`` and ``communication_data_type`` are set, both are the dtype of the model.
tf32, fp8_*, mxfp8: of the linear layers of attention and MLPs, emulated; see `workbench.policy.gemm_formats`.
"""

ALIASES = {"fp64": "float64", "fp32": "float32", "bf16_pure": "bfloat16"}
"""Further names of presets; records have the name on the right."""

assert PRESETS.keys() | ALIASES.keys() == set(get_args(PrecisionName))


class MixedPrecisionSpec(Group):
    """Dtypes of single parts of a training step, where they differ from those of the `precision` preset."""

    weights: Dtype | None = None
    """Of the weights that the optimizer updates (master weights). None, here and below: as the preset says."""
    compute: Dtype | None = None
    """Of the copies of the weights that a step computes with, and of activations."""
    gradients: Dtype | None = None
    """In which gradients of micro-batches are accumulated: that of `compute` or of `weights`."""
    reduction: Dtype | None = None
    """In which gradients are summed over ranks."""
    reduction_order: Literal["collective", "ranks"] | None = None
    """collective: that of the backend's all-reduce. ranks: gathered and summed one rank after another, each partial sum
    rounded to `reduction`."""
    moments: Moments | None = None
    """Of the state of adamw. 8bit: torchao's blocks of 256 numbers with one scale, for parameters of 4096 and more;
    extra eight_bit."""
    loss: Dtype | None = None
    """Of the log-probabilities, advantages and entropies that enter the loss, which itself computes in float32 or
    float64. None: as they come."""
    router: Dtype | None = None
    """In which routers of experts compute, with the copies of their weights. None: `compute`."""
    norms: Dtype | None = None
    """The same of norms."""
    attention_gemms: GemmFormat | None = None
    """Format of the operands of attention's linear layers; dense: `compute`. See `workbench.policy.gemm_formats`."""
    mlp_gemms: GemmFormat | None = None
    """The same of MLPs."""
    stochastic_rounding: bool | None = None
    """Round updated bfloat16 weights up or down at random, so that the mean is right, instead of to the nearest."""
    loss_scale: float | None = Field(None, gt=0)
    """Factor of the loss before backward, for the small gradients of float16; steps whose gradient is not finite are
    skipped and halve it. 1 keeps the checks without a factor."""
    loss_scale_interval: int | None = Field(None, ge=1)
    """Steps with a finite gradient after which the scale doubles."""


def resolve(name: str, changes: MixedPrecisionSpec) -> Dtypes:
    """Return the dtypes of a preset with single ones changed.

    Example:
        >>> resolve("bf16_mixed", MixedPrecisionSpec(reduction="bfloat16")).reduction
        'bfloat16'
    """
    given: dict[str, Any] = {key: value for key, value in changes if value is not None}
    return replace(PRESETS[name], **given)


def conflicts(dtypes: Dtypes, changed: Collection[str]) -> Iterator[str]:
    """Yield dtypes that do not go together, each with its fix."""
    if "float64" in (dtypes.compute, dtypes.weights) and dtypes.copies:
        yield (
            f"weights in {dtypes.weights} with compute in {dtypes.compute}: float64 replaces norms and rotary "
            "embeddings of the whole model; set both to float64, or neither"
        )
    if dtypes.gradients not in (dtypes.compute, dtypes.weights):
        yield (
            f"gradients in {dtypes.gradients}: torch accumulates them in the dtype of compute ({dtypes.compute}) or of "
            f"weights ({dtypes.weights}); take one of these"
        )
    if "float16" in (dtypes.weights, dtypes.moments):
        yield "weights or moments in float16 underflow in one step of adamw; take float32 or bfloat16"
    if dtypes.stochastic_rounding and dtypes.weights != "bfloat16":
        yield f"stochastic_rounding is of bfloat16 weights, and these are in {dtypes.weights}; set weights: bfloat16"
    if dtypes.loss_scale is None and "loss_scale_interval" in changed:
        yield "loss_scale_interval without loss_scale, which it would double; give loss_scale, such as 65536"


CHANGES = "mixed_precision."
"""Prefix of `MixedPrecisionSpec` in flat contexts."""


def dtypes_of(context: Mapping[str, Any]) -> Dtypes | None:
    """Return the dtypes of a record's context, ``precision`` and ``mixed_precision.NAME``; None: unknown ones."""
    name = str(context.get("precision"))
    if (name := ALIASES.get(name, name)) not in PRESETS:
        return None
    changes = {field.name: context.get(f"{CHANGES}{field.name}") for field in fields(Dtypes)}
    return replace(PRESETS[name], **{key: value for key, value in changes.items() if value is not None})
