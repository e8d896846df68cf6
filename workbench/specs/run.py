"""The spec of a run: every setting that decides its numbers, as data.

Frozen pydantic models; an unknown key is an error that names the nearest known one. YAML in, canonical JSON
out, whose hash is part of the run directory's name.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from workbench.atomic import standard
from workbench.errors import SpecError
from workbench.specs.losses import SURROGATES, check_inherited
from workbench.specs.losses import LossSpec as LossSpec


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Show only fields that differ from their defaults in a repr."""
        known = type(self).model_fields
        return (
            (name, value)
            for name, value in super().__repr_args__()
            if name not in known or value != known[name].default
        )


class LayoutSpec(_Model):
    """The parallel layout: the number of ranks and the split of the work."""

    dp: int = Field(1, ge=1)
    """Data-parallel ranks: each trains on rows of its own."""
    cp: int = Field(1, ge=1)
    """Context-parallel ranks: they share the tokens of each row."""
    tp: int = Field(1, ge=1)
    """Tensor-parallel ranks: they share heads, feed-forward columns and the vocabulary."""
    order: Literal["contiguous", "zigzag", "striped", "document_zigzag", "balanced"] = "contiguous"
    """Assignment of a row's tokens to context-parallel ranks; see `workbench.sharding.orders`."""
    block_tokens: int = Field(128, ge=1)
    """Tokens of a block that the balanced order moves as a whole."""
    attention: Literal["gathered", "ring", "ulysses", "hybrid"] = "gathered"
    """Exchange of keys and values between context-parallel ranks; see `workbench.sharding.attention`."""
    ulysses: int = Field(1, ge=1)
    """For hybrid attention: neighbouring cp ranks that exchange heads; the rings go over cp / ulysses ranks."""
    kernel: Literal["auto", "plain", "flash", "flex"] = "auto"
    """The attention kernel of a rank. auto takes the fastest supported one."""
    sequence_parallel: bool = False
    """Between tensor-parallel layers, each tp rank holds 1 / tp of the tokens of its cp rank."""
    shard_parameters: bool = False
    """Shard parameters, gradients and optimizer state over dp x cp (FSDP2) instead of replicating them."""
    checkpointing: bool = False
    """Activation checkpointing of decoder layers: recompute their activations in backward."""

    @model_validator(mode="before")
    @classmethod
    def _check_axes(cls, value: Any) -> Any:
        for axis, meaning in (("pp", "pipeline"), ("ep", "expert")):
            if isinstance(value, Mapping) and axis in value:
                raise ValueError(f"{axis} ({meaning} parallelism) is not supported; the axes are dp, cp and tp")
        return value

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.dp * self.cp * self.tp

    @model_validator(mode="after")
    def _check_ulysses(self) -> LayoutSpec:
        if self.ulysses > 1 and self.attention != "hybrid":
            raise ValueError(
                f"ulysses = {self.ulysses} with attention {self.attention!r}; it is the number of neighbours that "
                "exchange heads in hybrid attention (attention ulysses takes all of cp)"
            )
        if self.cp % self.ulysses:
            raise ValueError(f"ulysses = {self.ulysses} does not divide cp = {self.cp}")
        if self.attention == "hybrid" and self.ulysses == 1 < self.cp:
            raise ValueError(
                "attention 'hybrid' with ulysses = 1 is attention 'ring'; give ulysses, a divisor of cp, or take ring"
            )
        return self

    def __str__(self) -> str:
        parts = [f"{axis}={getattr(self, axis)}" for axis in ("dp", "cp", "tp") if getattr(self, axis) > 1]
        if self.cp > 1:
            parts.append(self.order)
            parts += [f"blocks={self.block_tokens}"] if self.order == "balanced" and self.block_tokens != 128 else []
            parts += [self.attention] if self.attention != "gathered" else []
            parts += [f"ulysses={self.ulysses}"] if self.ulysses > 1 else []
        parts += [self.kernel] if self.kernel != "auto" else []
        parts += [
            label
            for label, on in (
                ("sp", self.sequence_parallel),
                ("fsdp", self.shard_parameters),
                ("checkpointing", self.checkpointing),
            )
            if on
        ]
        return " ".join(parts if self.world_size > 1 else ["one rank", *parts])


class ModelSpec(_Model):
    """The decoder and its source."""

    source: str = "data/arithmetic/policy"
    """A checkpoint folder (relative to the project root, or absolute), a hub id, `tiny-qwen3` or `tiny-qwen3-moe`."""
    tied: bool | None = None
    """Tie the output head to the embedding; None keeps the setting of the source. Only tiny models can change it."""
    seed: int = 0
    """Seed of the weights of tiny models."""


class PolicySpec(_Model):
    """The computation of token log-probabilities from hidden states."""

    logprobs: Literal["auto", "reference", "vocabulary_parallel", "chunked", "triton"] = "auto"
    """Implementation by name. On a GPU auto takes triton, or chunked if triton cannot run; on a CPU reference, or
    vocabulary_parallel when tp > 1, and chunked with fused_loss."""
    temperature: float | None = Field(None, gt=0)
    """Divides logits; None takes the temperature of the rollouts."""
    fused_loss: bool = False
    """Compute the gradient in the forward pass over the head, a chunk at a time: three GEMMs with the head, and the
    logits of one chunk. A loss whose coupling of tokens forbids it takes four; the record has the reason."""
    fp32_head: bool = False
    """Cast hidden states and head to float32 before their GEMM, in a bfloat16 run."""
    chunk_tokens: int = Field(4096, ge=1)
    """Rows whose logits exist at a time, for chunked and triton."""
    keep_bytes: int = Field(0, ge=0)
    """Memory for head outputs saved for backward, for chunked and triton: saved chunks cost three GEMMs with the
    head, others four."""

    @model_validator(mode="after")
    def _check_chunked_settings(self) -> PolicySpec:
        if self.logprobs in ("reference", "vocabulary_parallel"):
            chunked = [
                name
                for name in ("fused_loss", "chunk_tokens", "keep_bytes")
                if getattr(self, name) != type(self).model_fields[name].default
            ]
            if chunked:
                raise ValueError(
                    f"{' and '.join(chunked)} with logprobs {self.logprobs!r}, which holds all logits of a "
                    "row at once; take chunked, triton or auto"
                )
        return self


class AdvantageSpec(_Model):
    """The source of advantages."""

    name: Literal[
        "recorded",
        "grpo",
        "dr_grpo",
        "rloo",
        "leave_one_out",
        "opo",
        "gpg",
        "pass_at_k",
        "gdpo",
        "grpo_whitened",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "optimal_token_baseline",
        "gae",
        "vapo",
    ] = "recorded"
    """recorded: those of the rollout dataset. Otherwise an estimator of `workbench.rollouts.advantages`, from the
    rewards of all documents of the step, less a KL penalty that `loss.kl` places in the reward."""
    settings: dict[str, bool | float | str] = Field(default_factory=dict)
    """Of the estimator, such as {ddof: 0, epsilon: 1e-6}."""


class DataSpec(_Model):
    """The rollout dataset and its split into steps and rows."""

    path: str = "data/arithmetic/rollouts"
    """Folder of a rollout dataset (relative to the project root, or absolute)."""
    documents_per_step: int | None = Field(None, ge=1)
    """Documents of one optimizer step, taken in order and cyclically; None takes all of them every step."""
    micro_batches: int = Field(1, ge=1)
    """Rows of each data-parallel rank per optimizer step, one after another."""
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of a row. Micro-batches of this size are filled, on all data-parallel ranks in turn, until the
    step has its documents, in as many micro-batches as needed; `micro_batches` must stay 1."""
    advantages: AdvantageSpec = AdvantageSpec()
    """The source of advantages."""
    keep_groups: bool = False
    """Put all documents of a group into one row. A loss on preference pairs implies it."""
    multiple_of: int | None = Field(None, ge=1)
    """Rows are padded to a multiple of this; None takes the multiple of the layout."""

    @model_validator(mode="after")
    def _check_micro_batches(self) -> DataSpec:
        if self.micro_batch_tokens is not None and self.micro_batches != 1:
            raise ValueError(
                "micro_batches is the number of rows of a rank, micro_batch_tokens the size of a row; give one of them"
            )
        return self


class OnlineSpec(_Model):
    """Rollouts sampled from the policy during the run, for a task with a checkable reward."""

    task: str | None = None
    """arithmetic, or FILE.py:NAME, a custom class (see `workbench.rollouts.task.Task`). None: rollouts come from
    data.path."""
    prompts: int = Field(16, ge=1)
    """Prompts of a sampling."""
    answers: int = Field(8, ge=1)
    """Completions of each prompt; they are a group."""
    temperature: float = Field(1.0, gt=0)
    """Divides the sampler's logits. The trainer's are divided by policy.temperature, which defaults to this."""
    max_new_tokens: int = Field(64, ge=1)
    """Length limit of a completion."""
    updates: int = Field(1, ge=1)
    """Optimizer steps on the completions of one sampling. Each takes data.documents_per_step of them, in order and
    cyclically; all of them if that is left out."""
    sampler_precision: Literal["float64", "float32", "bfloat16"] | None = None
    """Of the sampler's weights and activations; None takes the run's."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Source of the old policy's log-probabilities: the trainer, in a forward pass before the first update, or the
    sampler."""
    prompts_at_once: int = Field(8, ge=1)
    """Prompts whose completions are sampled in one batch. Batches, and not prompts, are assigned to ranks, so that they
    are the same in every layout. A rank without a batch waits for the others, no longer than timeout_s."""

    @property
    def on(self) -> bool:
        """True if the run samples its own rollouts."""
        return self.task is not None

    @property
    def documents(self) -> int:
        """Completions of a sampling."""
        return self.prompts * self.answers

    @model_validator(mode="after")
    def _check_task(self) -> OnlineSpec:
        given = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if not self.on and given:
            raise ValueError(
                f"{', '.join(given)} without a task, which turns online rollouts on; give online.task, "
                "such as arithmetic"
            )
        return self


class OptimizerSpec(_Model):
    """The optimizer and gradient clipping."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(1e-4, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float | None = Field(None, gt=0)
    """Clip the global gradient norm to this; None: no clipping."""


class ReproducibleSpec(_Model):
    """The same bits in every layout: settings that must be equal in compared runs; see `workbench.reproducible`."""

    block_tokens: int | None = Field(None, ge=1)
    """Tokens of a block: everything is computed block by block, in blocks that no layout splits. None: the ordinary
    mode, whose last bits depend on the layout."""
    weight_chunks: int = Field(1, ge=1)
    """Chunks in which weights are multiplied: a power of two that divides heads and features, and at least the tp ranks
    of every run to be compared."""
    bits: int = Field(32, ge=1, le=60)
    """Gradients are summed as multiples of 2^-bits, for a loss in which the mean token weight is 1."""

    @property
    def on(self) -> bool:
        """True if the run is in this mode."""
        return self.block_tokens is not None

    @model_validator(mode="after")
    def _check_blocks(self) -> ReproducibleSpec:
        if not self.on and (self.weight_chunks, self.bits) != (1, 32):
            raise ValueError(
                "weight_chunks and bits belong to the reproducible mode, which block_tokens turns on; give "
                "reproducible.block_tokens, such as 128"
            )
        if self.weight_chunks & (self.weight_chunks - 1):
            raise ValueError(
                f"weight_chunks = {self.weight_chunks} is no power of two, and sums over chunks are a binary tree"
            )
        return self


class RecordSpec(_Model):
    """The files of a run in addition to its step records."""

    gradients: Literal["none", "norms", "full"] = "full"
    """Per-parameter gradients after reduction: nothing, their norms, or every element."""
    tokens: bool = True
    """Per-token log-probabilities, ratios and clip decisions, in the order of the rollout dataset."""
    metrics: Literal["none", "basic", "full"] = "basic"
    """Metrics of each step: none, the cheap ones, or all."""
    certificate: bool | None = None
    """A hash of each step's loss, log-probabilities, gradients and weights, bit for bit; see
    `workbench.records.certificate`. None: in the reproducible mode."""
    checkpoint_every: int | None = Field(None, ge=1)
    """Interval, in steps, of checkpoints of weights and optimizer state, of which the newest is kept, and one at the
    end: an interrupted run resumes from it when it is launched again. None: no checkpoints."""
    trace_tokens: int | None = Field(None, ge=1)
    """Tokens of a block in traces: fingerprints of every module's input and output, and of its gradient, per block; see
    `workbench.train.trace`. None: no trace."""


class RunSpec(_Model):
    """One run: a loss on rollouts, in a layout, at a precision, for some optimizer steps.

    Example:
        >>> RunSpec(layout={"cp": 2, "order": "zigzag"}).layout.world_size
        2
    """

    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    online: OnlineSpec = OnlineSpec()
    policy: PolicySpec = PolicySpec()
    loss: LossSpec = LossSpec()
    layout: LayoutSpec = LayoutSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    # Never None: the command line would turn an optional section into subcommands (DECISIONS.md, row 84).
    reproducible: ReproducibleSpec = ReproducibleSpec()
    record: RecordSpec = RecordSpec()
    precision: Literal["float64", "float32", "bfloat16"] = "float32"
    """Of weights, activations and gradients. float64 also lifts norms and rotary embeddings."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs if there are enough for all ranks, and CPU otherwise."""
    steps: int = Field(1, ge=1)
    seed: int = 0
    timeout_s: float = Field(120.0, gt=0)
    """A collective that waits longer than this fails. The time includes other work of the other ranks: completions and
    rewards of an online run, a checkpoint."""
    faults: tuple[str, ...] = ()
    """Known bugs to plant, by name; see `workbench.faults`."""
    frozen_clip: str | None = None
    """Another configuration of the same experiment, whose recorded clip decisions replace this run's own; None: its
    own. Comparisons of precisions need it: a decision that flips is an O(1) change of one token."""

    @model_validator(mode="after")
    def _check_loss(self) -> RunSpec:
        if self.loss.denominator == "constant" and self.loss.denominator_constant is None:
            raise ValueError(
                f"loss {self.loss.name!r} divides by documents * denominator_constant, which is not "
                "given; give loss.denominator_constant, for instance the length limit of a completion"
            )
        if self.loss.counts_live:
            raise ValueError(
                f"loss.correction.denominator = {self.loss.correction.denominator!r} with old_policy "
                "'current' counts the tokens that the live policy keeps, but the weights of a step are data from "
                "before its forward pass; use old_policy: recorded"
            )
        return self

    @model_validator(mode="after")
    def _check_penalty_in_the_reward(self) -> RunSpec:
        kl = self.loss.kl
        if kl.coefficient and kl.placement == "reward" and self.data.advantages.name == "recorded":
            raise ValueError(
                "loss.kl.placement 'reward' with recorded advantages: a penalty in the reward acts before "
                "advantages are computed; name an estimator in data.advantages, or place the penalty in the loss"
            )
        return self

    @model_validator(mode="after")
    def _check_online(self) -> RunSpec:
        if self.online.on and (problems := list(_online_problems(self))):
            raise ValueError(f"online: {'; '.join(problems)}")
        return self

    @model_validator(mode="after")
    def _check_fp32_head(self) -> RunSpec:
        if self.policy.fp32_head and self.precision != "bfloat16":
            raise ValueError(
                f"policy.fp32_head casts the head to float32, and precision is {self.precision} already; "
                "leave it out, or take precision bfloat16"
            )
        return self

    @model_validator(mode="after")
    def _check_kernel(self) -> RunSpec:
        known = {"flash": ("bfloat16",), "flex": ("bfloat16", "float32")}.get(self.layout.kernel)
        if known and self.precision not in known:
            raise ValueError(
                f"layout.kernel {self.layout.kernel!r} computes in {' or '.join(known)}, and precision is "
                f"{self.precision}; take kernel auto or plain, or another precision"
            )
        return self

    @model_validator(mode="after")
    def _check_reproducible(self) -> RunSpec:
        if self.reproducible.on and (problems := list(_inexact(self))):
            raise ValueError(f"reproducible: {'; '.join(problems)}")
        return self

    @field_validator("faults", mode="before")
    @classmethod
    def _list_of_names(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def certified(self) -> bool:
        """True if each step gets a certificate."""
        return self.reproducible.on if self.record.certificate is None else self.record.certificate

    def canonical(self) -> str:
        """Return sorted JSON of every setting, including defaults except those of `LATER`."""
        settings, defaults = self.model_dump(mode="json"), RunSpec().model_dump(mode="json")
        for name in ADDED_SETTINGS:
            *path, last = name.split(".")
            group, default = (functools.reduce(dict.__getitem__, path, of) for of in (settings, defaults))
            if group[last] == default[last]:
                del group[last]
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


ADDED_SETTINGS = ("reproducible", "online", "record.certificate", "record.checkpoint_every", "record.trace_tokens")
"""Settings added after the first records: at their defaults they do not enter the identity of a run."""


_NOT_SAMPLED = {
    "gae": "critic values",
    "vapo": "critic values",
    "gdpo": "reward components",
    "remax": "rewards of greedy completions",
    "optimal_token_baseline": "squared probabilities",
}
"""Advantage estimators that need more than rewards -> the inputs that they need."""


def _online_problems(spec: RunSpec) -> Iterator[str]:
    """Yield settings that conflict with online rollouts, each with its fix."""
    data, online, every = spec.data, spec.online, spec.record.checkpoint_every
    if data.path != DataSpec().path:
        yield f"data.path = {data.path!r} would not be read: online.task samples the rollouts; leave one of them out"
    if data.advantages.name == "recorded":
        yield "a task gives rewards and no advantages; name an estimator in data.advantages, such as {name: grpo}"
    if data.documents_per_step is not None and data.documents_per_step > online.documents:
        yield (
            f"data.documents_per_step = {data.documents_per_step} is more than a sampling has ({online.prompts} "
            f"prompts with {online.answers} completions); a step takes each document at most once"
        )
    if spec.loss.needs_pairs and online.answers != 2:
        yield f"loss {spec.loss.name!r} compares pairs, and online.answers = {online.answers}; take answers: 2"
    elif data.documents_per_step is not None and data.documents_per_step * online.updates < online.documents:
        yield (
            f"online.updates = {online.updates} of data.documents_per_step = {data.documents_per_step} train on "
            f"{online.updates * data.documents_per_step} of the {online.documents} completions of a sampling, and "
            "never on the others; take more updates or documents, or sample less"
        )
    together = data.keep_groups or spec.loss.needs_pairs
    if together and data.documents_per_step is not None and data.documents_per_step % online.answers:
        yield (
            f"data.documents_per_step = {data.documents_per_step} splits groups of {online.answers} completions, "
            "which must share a row; take a multiple of online.answers"
        )
    if missing := _NOT_SAMPLED.get(data.advantages.name):
        yield (
            f"data.advantages {data.advantages.name!r} needs {missing}, which online runs do not produce; take an "
            "estimator of rewards, such as grpo or rloo"
        )
    elif online.answers == 1 and data.advantages.name not in ("recorded", "reinforce_plus_plus"):
        yield (
            f"one completion per prompt is no group, and data.advantages {data.advantages.name!r} would be 0 "
            "everywhere; take more online.answers, or reinforce_plus_plus"
        )
    if spec.frozen_clip is not None:
        yield "frozen_clip takes decisions of another run, which has other tokens; leave it out"
    yield from (
        f"fault {name!r} does nothing where advantages are computed before a step's rows; plant it in a run "
        "on a rollout dataset"
        for name in spec.faults
        if name in ("baseline_per_micro_batch", "whitening_per_rank")
    )
    if every is not None and every % online.updates:
        yield (
            f"record.checkpoint_every = {every} lies between samplings, which come every {online.updates} steps; "
            "take a multiple of online.updates"
        )


def _inexact(spec: RunSpec) -> Iterator[str]:
    """Yield settings that the reproducible mode cannot make exact, or would ignore, each with its fix."""
    layout, policy, block = spec.layout, spec.policy, spec.reproducible.block_tokens
    if spec.precision == "float64":
        yield "precision float64 has more bits than the exact sums keep; take float32 or bfloat16"
    if layout.cp > 1 and layout.order in ("striped", "document_zigzag"):
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
    if layout.sequence_parallel:
        yield "sequence_parallel sums activations over tp in an order of its own; leave it out"
    if spec.reproducible.weight_chunks % layout.tp:
        yield (
            f"weight_chunks = {spec.reproducible.weight_chunks} cannot be split over tp = {layout.tp} ranks; give a "
            "power of two that is at least tp, the same in every run that is to agree"
        )
    ignored = [
        name
        for name in ("logprobs", "fused_loss", "fp32_head", "chunk_tokens", "keep_bytes")
        if getattr(policy, name) != type(policy).model_fields[name].default
    ]
    if ignored:
        yield f"{' and '.join(f'policy.{name}' for name in ignored)}: the head is fixed in this mode; leave it out"
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


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested ``changes`` into a copy of ``base``.

    Raises:
        SpecError: a loss of another kind over one whose surrogate was given parameters; see
            `workbench.specs.losses.check_carried`.
    """
    merged = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        if nested and key == "loss":
            check_inherited(merged[key], value)
        merged[key] = merge(merged[key], value) if nested else value
    return merged


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to one level with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def parse_spec(model: type[BaseModel], settings: Any, *, where: str) -> Any:
    """Validate settings, and report every mistake in one error.

    Args:
        model: the pydantic model.
        settings: a mapping, as parsed from YAML.
        where: the source of the settings, such as a file.

    Raises:
        SpecError: an unknown key (with the nearest known one), a wrong type, a value out of range.
    """
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        raise SpecError(
            f"{where}: {error.error_count()} setting(s) cannot be used",
            found="; ".join(_message(model, e) for e in error.errors()),
            rule=f"settings of {model.__name__}; unknown keys are errors",
            fix="correct the file; `workbench run --help` lists every setting",
        ) from None


def _message(model: type[BaseModel], error: Any) -> str:
    loc = [
        part
        for at, part in enumerate(error["loc"])
        if not (at and error["loc"][at - 1] == "surrogate" and part in SURROGATES)
    ]
    path = ".".join(map(str, loc))
    if isinstance(error["input"], Mapping) and error["type"] == "value_error":
        text = error["msg"].removeprefix("Value error, ")  # from a validator of several settings
        return f"{path}: {text}" if path else text
    if error["type"] != "extra_forbidden":
        return f"{path} = {error['input']!r}: {error['msg']}"
    known = _known_keys(model, error["loc"][:-1])
    near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
    return f"unknown key {path!r} ({hint})"


def _known_keys(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    for at, part in enumerate(path):
        if at and path[at - 1] == "surrogate" and part in SURROGATES:
            model = SURROGATES[part]
            continue
        field = model.model_fields.get(str(part))
        if field is None:
            return []
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = [a for a in candidates if isinstance(a, type) and issubclass(a, BaseModel)]
        if not inner:
            return list(RunSpec.model_fields)
        model = inner[0]
    return list(model.model_fields)


def read_yaml(path: Path) -> Any:
    """Read the settings in a YAML file, without duplicate keys.

    Raises:
        SpecError: no such file, not YAML, or a duplicate key (in plain YAML the last one silently wins).
    """
    try:
        with path.open(encoding="utf8") as file:
            return yaml.load(file, Loader=_UniqueKeyLoader)
    except FileNotFoundError:
        raise SpecError(
            f"read {path}",
            found="no such file",
            rule="a YAML file with an ablation or a spec",
            fix="check the path; experiments/ holds examples",
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(
            f"read {path}", found=str(error), rule="valid YAML", fix="correct the place named above"
        ) from None


def load_run_spec(path: Path) -> RunSpec:
    """Read one run's spec from YAML."""
    return parse_spec(RunSpec, read_yaml(path) or {}, where=str(path))


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen and key != "<<":
                line = key_node.start_mark.line + 1
                raise SpecError(
                    f"read {self.name}",
                    found=f"{key!r} on line {seen[key]} and again on line {line}",
                    rule="every key is unique",
                    fix="rename or remove one of them",
                )
            seen[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)
