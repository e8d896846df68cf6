"""The spec of a run: every setting that decides its numbers. YAML in, canonical JSON out, whose hash names the run."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from workbench.atomic import standard
from workbench.specs.groups import (
    DataSpec,
    Group,
    KernelSpec,
    LayoutSpec,
    ModelSpec,
    OptimizerSpec,
    PolicySpec,
    RecordSpec,
    ReproducibleSpec,
)
from workbench.specs.lora import LoraSpec
from workbench.specs.losses import LossSpec
from workbench.specs.losses.own import OwnLoss
from workbench.specs.mixtures import PredictionSpec, RoutingSpec
from workbench.specs.online import OnlineSpec, online_conflicts
from workbench.specs.precision import ALIASES, Dtypes, MixedPrecisionSpec, PrecisionName, resolve
from workbench.specs.precision import conflicts as precision_conflicts
from workbench.specs.reading import merge, parse_spec, read_yaml
from workbench.specs.sync import SyncSpec, sync_conflicts


class RunSpec(Group):
    """One run: a loss on rollouts, in a layout, at a precision, for some optimizer steps.

    Example:
        >>> RunSpec(layout={"cp": 2, "order": "zigzag"}).layout.world_size
        2
    """

    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    online: OnlineSpec = OnlineSpec()
    sync: SyncSpec = SyncSpec()
    policy: PolicySpec = PolicySpec()
    kernels: KernelSpec = KernelSpec()
    loss: LossSpec = LossSpec()
    layout: LayoutSpec = LayoutSpec()
    routing: RoutingSpec = RoutingSpec()
    prediction: PredictionSpec = PredictionSpec()
    lora: LoraSpec = LoraSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    # Never None: the command line would turn an optional section into subcommands (DECISIONS.md, row 84).
    reproducible: ReproducibleSpec = ReproducibleSpec()
    record: RecordSpec = RecordSpec()
    precision: PrecisionName = "float32"
    """Of weights, activations and gradients: one dtype, or a preset of several; see `workbench.specs.precision`.
    float64 also lifts norms and rotary embeddings."""
    mixed_precision: MixedPrecisionSpec = MixedPrecisionSpec()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs if there are enough for all ranks, and CPU otherwise."""
    steps: int = Field(1, ge=1)
    """Optimizer steps."""
    seed: int = 0
    """Seed of torch, and in online runs of prompts and completions."""
    timeout_s: float = Field(120.0, gt=0, le=1e8)
    """A collective that waits longer than this fails. The time includes other work of the other ranks: completions and
    rewards of an online run, a checkpoint."""
    faults: tuple[str, ...] = ()
    """Known bugs to plant, by name; see `workbench.faults`."""
    frozen_clip: str | None = None
    """Another configuration of the same experiment, whose recorded clip decisions replace this run's own; None: its
    own. Comparisons of precisions need it: a decision that flips is an O(1) change of one token."""

    @model_validator(mode="after")
    def _check_settings(self) -> RunSpec:
        for problem in _conflicts(self):
            raise ValueError(problem)
        return self

    @field_validator("precision", mode="after")
    @classmethod
    def _first_name(cls, value: str) -> str:
        return ALIASES.get(value, value)

    @field_validator("faults", mode="before")
    @classmethod
    def _list_of_names(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def dtypes(self) -> Dtypes:
        """The dtype of each part of a step."""
        return resolve(self.precision, self.mixed_precision)

    @property
    def in_float64(self) -> bool:
        """True if a step's gradient is computed in float64 throughout, so that the run can be a ground truth."""
        return self.dtypes.in_float64

    @property
    def certified(self) -> bool:
        """True if each step gets a certificate."""
        return self.reproducible.on if self.record.certificate is None else self.record.certificate

    def canonical(self) -> str:
        """Return sorted JSON of every setting, including defaults except those of `ADDED_SETTINGS`."""
        settings, defaults = self.model_dump(mode="json"), RunSpec().model_dump(mode="json")
        for name in ADDED_SETTINGS:
            *path, last = name.split(".")
            group, default = (functools.reduce(dict.__getitem__, path, of) for of in (settings, defaults))
            if group[last] == default[last]:
                del group[last], default[last]
        surrogate = settings["loss"]["surrogate"]
        for name, default in ADDED_PARAMETERS.get(surrogate["kind"], {}).items():
            if surrogate[name] == default:
                del surrogate[name]
        return json.dumps(standard(settings), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def content_hash(self) -> str:
        """Return eight hex digits of the hash of the canonical JSON."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()[:8]

    def merged(self, changes: Mapping[str, Any]) -> RunSpec:
        """Return this spec with some settings changed; nested mappings merge key by key.

        Of the loss only the differences from its preset are merged, so that another name brings its own settings.
        """
        settings = self.model_dump(mode="json") | {"loss": self.loss.overrides()}
        return parse_spec(RunSpec, merge(settings, changes), where="settings")


ADDED_SETTINGS = (
    "reproducible",
    "online.top_k",  # settings of a group come before the group
    "online.top_p",
    "online.min_p",
    "online.truncation_order",
    "online.sampler_logprobs",
    "online",
    "sync",
    "loss.correction.staleness_high",
    "policy.support",
    "kernels",
    "mixed_precision",
    "routing",
    "prediction",
    "lora",
    "layout.ep",
    "layout.pp",
    "layout.pipeline_schedule",
    "layout.stages_per_rank",
    "layout.stage_layers",
    "layout.shard_ranks",
    "layout.reshard_after_forward",
    "layout.unit_layers",
    "data.balance",
    "record.certificate",
    "record.checkpoint_every",
    "record.trace_tokens",
    "loss.compat.kl_denominator",
)
"""Settings added after the first records: at their defaults they do not enter the identity of a run."""

ADDED_PARAMETERS: Mapping[str, Mapping[str, Any]] = {"sft": {"label_smoothing": 0.0}}
"""Kind of surrogate -> parameters that were added to it after the first records, with their defaults; alike."""


def _conflicts(spec: RunSpec) -> Iterator[str]:
    """Yield settings of several groups that conflict, each with its fix."""
    loss, kernel = spec.loss, spec.layout.kernel
    if loss.denominator == "constant" and loss.denominator_constant is None:
        yield (
            f"loss {loss.name!r} divides by documents * denominator_constant, which is not given; give "
            "loss.denominator_constant, for instance the length limit of a completion"
        )
    if loss.counts_live:
        yield (
            f"loss.correction.denominator = {loss.correction.denominator!r} with old_policy {loss.old_policy!r} counts "
            "the tokens that the live policy keeps, but the weights of a step are data from before its forward pass; "
            "use old_policy: recorded"
        )
    if loss.kl.coefficient and loss.kl.placement == "reward" and spec.data.advantages.name == "recorded":
        yield (
            "loss.kl.placement 'reward' with recorded advantages: a penalty in the reward acts before advantages are "
            "computed; name an estimator in data.advantages, or place the penalty in the loss"
        )
    if isinstance(loss.surrogate, OwnLoss) and loss.surrogate.engine is not None:
        unsupported = {
            "policy.fused_loss": spec.policy.fused_loss,
            "reproducible": spec.reproducible.on,
            "mixed_precision.loss": spec.dtypes.loss is not None,
        }
        for name in (name for name, on in unsupported.items() if on):
            yield (
                f"{name} is for a loss of per-token terms, and loss.engine {loss.surrogate.engine!r} for a function "
                "that returns one number; leave one of them out"
            )
    if spec.policy.support == "recorded" and loss.label_smoothing:
        yield (
            "loss.surrogate.label_smoothing with policy.support 'recorded': labels are smoothed over the whole "
            "vocabulary, and log-probabilities are those of the truncated support; leave one of them out"
        )
    if spec.policy.support == "recorded" and spec.online.on and not spec.online.truncates:
        yield (
            "policy.support 'recorded' with a sampler that draws from the whole vocabulary: it records no supports; "
            "give online.top_k, top_p or min_p, or take support: whole"
        )
    yield from sync_conflicts(spec)
    if spec.online.on and (problems := list(online_conflicts(spec))):
        yield f"online: {'; '.join(problems)}"
    if spec.layout.pp > 1:
        yield from _not_in_stages(spec)
    yield from _routes_not_known(spec)
    if spec.prediction.on:
        yield from _not_predicted(spec)
    if spec.routing.on and spec.reproducible.on:
        yield (
            f"routing.{spec.routing.changed[0]} with the reproducible mode, which computes no mixture of experts; "
            "leave one of them out"
        )
    yield from _adapters_not_known(spec)
    dtypes, half = spec.dtypes, ("bfloat16", "float16")
    for problem in precision_conflicts(dtypes, spec.mixed_precision.changed):
        yield f"precision {spec.precision}: {problem}"
    if dtypes.gradients != dtypes.weights and spec.layout.shard_parameters:
        yield (
            f"gradients in {dtypes.gradients} with layout.shard_parameters, which accumulates them in the dtype of the "
            f"weights ({dtypes.weights}); set mixed_precision.gradients: {dtypes.weights}, or replicate parameters"
        )
    if dtypes.reduction_order != "collective" and spec.layout.shard_parameters:
        yield (
            "mixed_precision.reduction_order with layout.shard_parameters, whose backward reduce-scatters gradients in "
            "the backend's order; leave one of them out"
        )
    if spec.policy.fp32_head and dtypes.compute not in half:
        yield (
            f"policy.fp32_head casts the head to float32, and the run computes in {dtypes.compute} already; leave it "
            "out, or take precision bf16_mixed"
        )
    known = {"flash": half, "cudnn": half, "fa4": half, "flex": (*half, "float32")}.get(kernel)
    if known and dtypes.compute not in known:
        yield (
            f"layout.kernel {kernel!r} computes in {' or '.join(known)}, and the run in {dtypes.compute}; take kernel "
            "auto or plain, or another precision"
        )
    kernels = dict(spec.kernels)
    if dtypes.compute == "float64" and "liger" in kernels.values():
        yield "kernels: liger computes in float32, and precision is float64; take compiled or torch"
    if spec.reproducible.on and not dtypes.single:
        yield (
            f"precision {spec.precision} with the reproducible mode, which has one dtype for everything; take float32 "
            "or bfloat16, without mixed_precision"
        )
    if spec.reproducible.on and spec.layout.shard_ranks:
        yield (
            f"layout.shard_ranks = {spec.layout.shard_ranks} with the reproducible mode, which adds the gradients of "
            "all ranks in one order; leave shard_ranks out"
        )
    if spec.reproducible.on and spec.kernels.changed:
        yield (
            f"kernels.{spec.kernels.changed[0]} = {kernels[spec.kernels.changed[0]]!r} with the reproducible mode, "
            "which has kernels of its own; leave it out"
        )
    if spec.reproducible.on and (problems := list(_inexact(spec))):
        yield f"reproducible: {'; '.join(problems)}"


def _not_in_stages(spec: RunSpec) -> Iterator[str]:
    """Yield settings that pipeline stages do not support, each with its fix."""
    if spec.online.on:
        yield (
            "layout.pp with online.task: the sampler and old log-probabilities need the whole policy on each rank; "
            "take pp: 1, or rollouts from data.path"
        )
    if spec.reproducible.on:
        yield (
            "layout.pp with the reproducible mode, which sums the gradients of all layers on each rank; take pp: 1, or "
            "the ordinary mode"
        )
    if spec.record.trace_tokens:
        yield (
            "layout.pp with record.trace_tokens: a trace has every module's values, and a stage only its own; leave "
            "one of them out"
        )


def _not_predicted(spec: RunSpec) -> Iterator[str]:
    """Yield settings that layers for multi-token prediction do not support, each with its fix."""
    if spec.reproducible.on:
        yield (
            "prediction.depths with the reproducible mode, which computes the decoder's own layers alone; leave one of "
            "them out"
        )
    if spec.lora.on and spec.prediction.detach == "policy" and "prediction" not in spec.lora.modules_to_save:
        yield (
            "prediction.detach 'policy' with lora, which freezes the layers that this leaves to train; train them "
            "whole (lora.modules_to_save: [prediction]), or detach nothing"
        )
    if spec.record.trace_tokens:
        yield (
            "prediction.depths with record.trace_tokens, which traces one pass through the decoder; leave one of "
            "them out"
        )


def _routes_not_known(spec: RunSpec) -> Iterator[str]:
    """Yield settings of routers that need routes or biases which the run does not have, each with its fix."""
    routing, online = spec.routing, spec.online
    if routing.replay == "old" and not (online.on and online.old_logprobs == "trainer"):
        yield (
            "routing.replay 'old' without a pass that computes old log-probabilities; take online.old_logprobs: "
            "trainer, or replay: recorded with the routes of a rollout dataset"
        )


def _adapters_not_known(spec: RunSpec) -> Iterator[str]:
    """Yield settings that conflict with adapters, each with its fix."""
    if spec.lora.on and spec.reproducible.on:
        yield (
            "lora with the reproducible mode, whose GEMMs are those of whole weights; leave one of them out, or merge "
            "the adapter into its base"
        )
    if "sampler" in spec.lora.changed and not spec.online.on:
        yield f"lora.sampler = {spec.lora.sampler!r} without online.task: nothing is sampled; leave it out"


def _inexact(spec: RunSpec) -> Iterator[str]:
    """Yield settings that the reproducible mode cannot make exact, or would ignore, each with its fix."""
    layout, policy, block = spec.layout, spec.policy, spec.reproducible.block_tokens
    assert block is not None, "_inexact is about runs in the reproducible mode"
    if spec.precision == "float64":
        yield "precision float64 has more bits than the exact sums keep; take float32 or bfloat16"
    if layout.cp > 1 and layout.order in ("striped", "document_zigzag", "whole_documents"):
        yield (
            f"order {layout.order!r} moves tokens and not whole blocks of {block}; take contiguous, zigzag or balanced"
        )
    if layout.cp > 1 and layout.order == "balanced" and layout.block_tokens % block:
        yield (
            f"order 'balanced' moves blocks of layout.block_tokens = {layout.block_tokens}, which "
            f"reproducible.block_tokens = {block} does not divide"
        )
    if layout.cp > 1 and layout.attention != "gathered":
        yield f"attention {layout.attention!r} sums in the order of its ranks; take gathered"
    if layout.kernel != "auto":
        yield f"kernel {layout.kernel!r} is not the attention kernel of this mode; leave layout.kernel out"
    if layout.ep > 1:
        yield "layout.ep is of a mixture of experts, which this mode does not compute; leave it out"
    if layout.sequence_parallel:
        yield "sequence_parallel sums activations over tp in an order of its own; leave it out"
    if spec.loss.label_smoothing:
        yield "loss.surrogate.label_smoothing: this mode has no mean of the logits over the vocabulary; leave it out"
    if spec.reproducible.weight_chunks % layout.tp:
        yield (
            f"weight_chunks = {spec.reproducible.weight_chunks} cannot be split over tp = {layout.tp} ranks; give a "
            "power of two that is at least tp, the same in every run that is to agree"
        )
    if ignored := [f"policy.{name}" for name in policy.changed if name != "temperature"]:
        yield f"{' and '.join(ignored)}: the head is fixed in this mode; leave it out"
    yield from (
        f"fault {name!r}: known bugs are planted in functions that this mode mostly replaces, so that they have no "
        "effect; plant it in the ordinary mode"
        for name in spec.faults
    )
    if spec.optimizer.name == "sgd" and spec.precision == "bfloat16":
        yield (
            "sgd in bfloat16: torch rounds the last elements of a shard differently from the others; take "
            "adamw, or float32"
        )


def load_run_spec(path: Path) -> RunSpec:
    """Read one run's spec from YAML."""
    return parse_spec(RunSpec, read_yaml(path) or {}, where=str(path))
