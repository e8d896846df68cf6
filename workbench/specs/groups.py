"""The groups of settings of a run, beside those of its loss (`workbench.specs.losses`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from workbench.specs.losses.base import Settings


class Group(Settings):
    """Finite settings, whose repr shows only what differs from the defaults."""

    model_config = ConfigDict(allow_inf_nan=False)

    @property
    def changed(self) -> list[str]:
        """Names of the settings that differ from their defaults."""
        return [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        shown = self.changed
        return ((name, value) for name, value in super().__repr_args__() if name in shown)


SPLIT_BACKWARD = frozenset(
    {"zero_bubble", "interleaved_zero_bubble", "zbv", "zbv_zero_bubble", "dualpipe", "dualpipev"}
)
"""Names of pipeline schedules that are refused by name."""


class LayoutSpec(Group):
    """The parallel layout: the number of ranks and the split of the work."""

    dp: int = Field(1, ge=1)
    """Data-parallel ranks: each trains on rows of its own."""
    cp: int = Field(1, ge=1)
    """Context-parallel ranks: they share the tokens of each row."""
    tp: int = Field(1, ge=1)
    """Tensor-parallel ranks: they share heads, feed-forward columns and the vocabulary."""
    ep: int = Field(1, ge=1)
    """Ranks that share the experts of a mixture, neighbours among dp x cp, whose number it divides."""
    pp: int = Field(1, ge=1)
    """Pipeline-parallel ranks: each has some layers, its stages, through which the micro-batches of a step pass."""
    # Megatron-LM's and torchtitan's default, which holds the activations of at most pp micro-batches
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = "1f1b"
    """Order of micro-batches in the stages: all forward first (gpipe), or one forward, one backward; interleaved_1f1b
    has several stages per rank. Micro-batches are rows: data.micro_batches, or data.micro_batch_tokens."""
    stages_per_rank: int = Field(1, ge=1)
    """For interleaved_1f1b: stages of each pipeline rank; stage s is on rank s % pp."""
    stage_layers: tuple[int, ...] = ()
    """Decoder layers of each pipeline stage, in order; (): equal runs. The last stage has the head as well, whose cost
    is that of several layers where the vocabulary is large."""
    order: Literal["contiguous", "zigzag", "striped", "document_zigzag", "whole_documents", "balanced"] = "contiguous"
    """Assignment of a row's tokens to context-parallel ranks; see `workbench.sharding.orders`."""
    # a block of torch's flex attention (_DEFAULT_SPARSE_BLOCK_SIZE of torch 2.11)
    block_tokens: int = Field(128, ge=1)
    """Tokens of a block that the balanced order moves as a whole."""
    attention: Literal["gathered", "ring", "ulysses", "hybrid"] = "gathered"
    """Exchange of keys and values between context-parallel ranks; see `workbench.sharding.attention`."""
    ulysses: int = Field(1, ge=1)
    """For hybrid attention: neighbouring cp ranks that exchange heads; the rings go over cp / ulysses ranks."""
    kernel: Literal["auto", "plain", "flash", "flex", "cudnn", "fa4"] = "auto"
    """The attention kernel of a rank. auto takes the fastest supported one."""
    sequence_parallel: bool = False
    """Between tensor-parallel layers, each tp rank holds 1 / tp of the tokens of its cp rank."""
    shard_parameters: bool = False
    """Shard parameters, gradients and optimizer state over dp x cp (FSDP2) instead of replicating them."""
    shard_ranks: int = Field(0, ge=0)
    """With shard_parameters: ranks over which one copy of the parameters is sharded, neighbours among dp x cp, whose
    number it divides; there are dp * cp / shard_ranks copies, whose gradients are summed (HSDP). 0: one copy."""
    reshard_after_forward: bool = True
    """With shard_parameters: free the gathered weights of a decoder layer after its forward and gather them again for
    its backward. False keeps them in between: one gather less, for memory of all layers' gathered weights."""
    unit_layers: int = Field(1, ge=1)
    """With shard_parameters: neighbouring decoder layers that are one unit of FSDP2, gathered and freed together. More
    of them cost the memory of as many layers, and fewer calls of the host, which small layers wait for."""
    checkpointing: bool = False
    """Activation checkpointing of decoder layers: recompute their activations in backward."""

    @model_validator(mode="before")
    @classmethod
    def _check_axes(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and str(value.get("pipeline_schedule")).lower() in SPLIT_BACKWARD:
            raise ValueError(
                f"pipeline_schedule {value['pipeline_schedule']!r} is not supported: it splits the gradients of inputs "
                "and of weights into two passes, which is not proven to give the same gradients here; take "
                "interleaved_1f1b, 1f1b or gpipe"
            )
        return value

    @model_validator(mode="after")
    def _check_stages(self) -> LayoutSpec:
        interleaved = self.pp > 1 and self.pipeline_schedule == "interleaved_1f1b"
        if self.stages_per_rank > 1 and not interleaved:
            raise ValueError(
                f"stages_per_rank = {self.stages_per_rank} with pp = {self.pp} and pipeline_schedule "
                f"{self.pipeline_schedule!r}; several stages per rank are those of interleaved_1f1b, over pp > 1 ranks"
            )
        if interleaved and self.stages_per_rank == 1:
            raise ValueError(
                "pipeline_schedule 'interleaved_1f1b' with stages_per_rank = 1 is 1f1b; give stages_per_rank, or take "
                "1f1b"
            )
        stages = self.pp * self.stages_per_rank
        if self.stage_layers and (self.pp == 1 or len(self.stage_layers) != stages or min(self.stage_layers) < 0):
            raise ValueError(
                f"stage_layers = {list(self.stage_layers)} with pp = {self.pp}: {stages if self.pp > 1 else 'no'} "
                "pipeline stages; it has the number of layers of each stage"
            )
        return self

    @model_validator(mode="after")
    def _check_ep(self) -> LayoutSpec:
        if self.dp * self.cp % self.ep:
            raise ValueError(
                f"ep = {self.ep} does not divide dp * cp = {self.dp * self.cp}: experts are shared by ranks that have "
                "different tokens"
            )
        return self

    @model_validator(mode="after")
    def _check_sharding(self) -> LayoutSpec:
        if self.shard_ranks and not self.shard_parameters:
            raise ValueError(
                f"shard_ranks = {self.shard_ranks} without shard_parameters: it is the number of ranks over which one "
                "copy of the parameters is sharded"
            )
        if self.shard_ranks == 1:
            raise ValueError(
                "shard_ranks = 1 gives each rank a whole copy, and shards nothing; leave out shard_parameters and "
                "shard_ranks: parameters are replicated then"
            )
        if self.shard_ranks and self.dp * self.cp % self.shard_ranks:
            raise ValueError(f"shard_ranks = {self.shard_ranks} does not divide dp * cp = {self.dp * self.cp}")
        if not self.reshard_after_forward and not self.shard_parameters:
            raise ValueError(
                "reshard_after_forward = False without shard_parameters: whole parameters are never gathered; leave it "
                "out, or shard parameters"
            )
        if self.unit_layers > 1 and not self.shard_parameters:
            raise ValueError(
                f"unit_layers = {self.unit_layers} without shard_parameters: whole parameters are never gathered; "
                "leave it out, or shard parameters"
            )
        if self.unit_layers > 1 and self.pp > 1:
            raise ValueError(
                f"unit_layers = {self.unit_layers} with pp = {self.pp}: pipeline stages gather each layer once a step; "
                "leave it out"
            )
        if not self.reshard_after_forward and self.pp > 1:
            raise ValueError(
                f"reshard_after_forward = False with pp = {self.pp}: pipeline stages keep gathered parameters from a "
                "step's first forward to its last backward in any case; leave it out"
            )
        if self.shard_ranks and self.ep > 1:
            raise ValueError(
                f"shard_ranks = {self.shard_ranks} with ep = {self.ep}: experts are sharded over all ranks that have "
                "the same ones, and copies of the others over fewer ranks are not supported; leave one of them out"
            )
        return self

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Sizes of the axes, as arguments of `workbench.sharding.mesh.make_mesh`."""
        sizes = {axis: getattr(self, axis) for axis in ("dp", "cp", "tp", "ulysses", "ep", "pp")}
        return sizes | ({"shard": self.shard_ranks} if self.shard_ranks else {})

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
        parts = [f"{axis}={getattr(self, axis)}" for axis in ("pp", "dp", "cp", "tp") if getattr(self, axis) > 1]
        labels = {
            self.order: self.cp > 1,
            f"blocks={self.block_tokens}": self.cp > 1 and self.order == "balanced" and self.block_tokens != 128,
            self.attention: self.cp > 1 and self.attention != "gathered",
            f"ulysses={self.ulysses}": self.ulysses > 1,
            self.kernel: self.kernel != "auto",
            f"ep={self.ep}": self.ep > 1,
            self.pipeline_schedule: self.pp > 1 and self.pipeline_schedule != "1f1b",
            f"stages={self.stages_per_rank}": self.stages_per_rank > 1,
            f"layers={'+'.join(map(str, self.stage_layers))}": bool(self.stage_layers),
            "sp": self.sequence_parallel,
            "fsdp": self.shard_parameters and not self.shard_ranks,
            f"hsdp={self.shard_ranks}": bool(self.shard_ranks),
            "no_reshard": not self.reshard_after_forward,
            f"unit_layers={self.unit_layers}": self.unit_layers > 1,
            "checkpointing": self.checkpointing,
        }
        parts += [label for label, shown in labels.items() if shown]
        return " ".join(parts if self.world_size > 1 else ["one rank", *parts])


class ModelSpec(Group):
    """The decoder and its source."""

    source: str = "data/arithmetic/policy"
    """A checkpoint folder (relative to the project root, or absolute), a hub id, `tiny-qwen3`, `tiny-qwen3-moe`
    or `tiny-gpt-oss`."""
    tied: bool | None = None
    """Tie the output head to the embedding; None keeps the setting of the source. Only tiny models can change it."""
    seed: int = 0
    """Seed of the weights of tiny models."""


class PolicySpec(Group):
    """The computation of token log-probabilities from hidden states."""

    logprobs: Literal["auto", "reference", "vocabulary_parallel", "chunked", "triton"] = "auto"
    """Implementation by name. On a GPU auto takes triton, or chunked if triton cannot run; on a CPU reference, or
    vocabulary_parallel when tp > 1, and chunked with fused_loss."""
    temperature: float | None = Field(None, gt=0)
    """Divides logits; None takes the temperature of the rollouts."""
    fused_loss: bool = False
    """Compute the gradient in the forward pass over the head, a chunk at a time: three GEMMs with the head, and the
    logits of one chunk. A loss whose coupling of tokens forbids it takes four; the record has the reason."""
    support: Literal["whole", "recorded"] = "whole"
    """Tokens over which log-probabilities are normalized. whole: the vocabulary. recorded: the truncated support of the
    sampler (top-k, top-p, min-p), replayed token by token from the rollouts; entropies stay those of the vocabulary."""
    fp32_head: bool = False
    """Cast hidden states and head to float32 before their GEMM, in a run that computes in bfloat16 or float16."""
    chunk_tokens: int = Field(4096, ge=1)
    """Rows whose logits exist at a time, for chunked and triton. The default stands for the logits of 4096 rows with
    Qwen3's vocabulary: more rows where a rank has a smaller one."""
    keep_bytes: int = Field(0, ge=0)
    """Memory for head outputs saved for backward, for chunked and triton: saved chunks cost three GEMMs with the
    head, others four."""

    @property
    def chunk_rows(self) -> int | None:
        """``chunk_tokens`` as `logprobs.token_logprobs` takes it: None for the default."""
        return self.chunk_tokens if "chunk_tokens" in self.changed else None

    @model_validator(mode="after")
    def _check_chunked_settings(self) -> PolicySpec:
        chunked = [name for name in self.changed if name in ("fused_loss", "chunk_tokens", "keep_bytes")]
        if chunked and self.logprobs in ("reference", "vocabulary_parallel"):
            raise ValueError(
                f"{' and '.join(chunked)} with logprobs {self.logprobs!r}, which holds all logits of a row at once; "
                "take chunked, triton or auto"
            )
        return self


class KernelSpec(Group):
    """Kernels of the decoder's layers, besides attention (`layout.kernel`) and log-probabilities (`policy.logprobs`).

    torch: as `transformers` computes them. compiled: the same formula through torch.compile. liger: the Triton kernels
    of liger-kernel, an optional extra, on a GPU.
    """

    norm: Literal["torch", "compiled", "liger"] = "torch"
    """RMS norms."""
    rope: Literal["torch", "compiled", "liger"] = "torch"
    """Rotary position embeddings."""
    mlp: Literal["torch", "compiled", "liger"] = "torch"
    """SiLU of the gate times the other branch of an MLP."""


class AdvantageSpec(Group):
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


class DataSpec(Group):
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
    balance: Literal["tokens", "work"] = "tokens"
    """What `micro_batches` have nearly equally much of: tokens; or work, which is tokens and attention (the squares of
    the lengths), so that no data-parallel rank waits for the one with the longest documents."""
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
        if self.micro_batch_tokens is not None and self.balance != "tokens":
            raise ValueError(
                "balance is that of micro_batches; micro_batch_tokens fills rows in the order of the documents: leave "
                "one of them out"
            )
        return self


class OptimizerSpec(Group):
    """The optimizer and gradient clipping."""

    name: Literal["adamw", "sgd"] = "adamw"
    """The optimizer, as torch.optim has it; sgd is without momentum."""
    # for the shipped policy; RL of billions of parameters takes some 1e-6, as TRL 1.16's GRPOConfig does
    learning_rate: float = Field(1e-4, ge=0)
    """The same in every step: there is no schedule."""
    # as TRL 1.16's GRPOConfig; torch's own AdamW has 0.01
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled from the gradient in adamw, added to it in sgd."""
    max_grad_norm: float | None = Field(None, gt=0)
    """Clip the global gradient norm to this; None: no clipping."""


class ReproducibleSpec(Group):
    """The same bits in every layout: settings that must be equal in compared runs; see `workbench.reproducible`."""

    block_tokens: int | None = Field(None, ge=1)
    """Tokens of a block: everything is computed block by block, in blocks that no layout splits. None: the ordinary
    mode, whose last bits depend on the layout."""
    weight_chunks: int = Field(1, ge=1)
    """Chunks in which weights are multiplied: a power of two that divides heads and features, and at least the tp ranks
    of every run to be compared."""
    # 2^-32 is half an ulp of float32 at 2^-8 = 0.004 and less above, and sums have room up to 2^62 / 2^32 = 2^30. At
    # most 60, because sums stay below 2^62 (workbench/reproducible/README.md)
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


class RecordSpec(Group):
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
