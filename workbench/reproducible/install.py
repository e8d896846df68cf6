"""Swap the modules of a decoder for exact ones, restore them, and reject modules that would not be exact."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SpecError
from workbench.policy.model import Policy
from workbench.policy.tensor_plan import tensor_plan
from workbench.reproducible import modules
from workbench.reproducible.exact import Exact
from workbench.reproducible.exact_sums import Accumulator, Leaves, Resolution
from workbench.reproducible.kernels import choose
from workbench.reproducible.logprobs import ExactHead
from workbench.reproducible.modules import Pieces
from workbench.reproducible.parts import share_integers
from workbench.reproducible.shards import flush_layers
from workbench.sharding.divisibility import check_weight_chunks
from workbench.sharding.tensor_parallel import defer_input_sums, shard_range

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Decoders of `transformers` that are known to do only elementwise sums and products, and moves, between the swapped
modules."""

FRAMES = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP")
NORM, ROTARY = "RMSNorm", "RotaryEmbedding"
ACTIVATIONS = ("SiLU", "SiLUActivation", "GELU", "GELUActivation", "GELUTanh", "PytorchGELUTanh")
KNOWN = {
    *(family + frame for family in FAMILIES for frame in (*FRAMES, NORM, ROTARY)),
    *ACTIVATIONS,
    "Linear",
    "Embedding",
    "ModuleList",
}
STYLES = {"colwise": True, "rowwise": False}
"""Style of a linear layer -> True if pieces of the weight are pieces of its outputs."""


def install(policy: Policy, resolution: Resolution) -> Exact:
    """Switch a policy to reproducible mode, in place, until `Exact.remove`.

    `Policy.hidden_states` and `Policy.token_logprobs` are exact from then on. Backward adds gradients of weights to
    exact sums; `Exact.reduce` finishes them. The policy is as `load_policy` returns it: sharded over tp, parameters
    sharded or not, checkpointing or not.

    Raises:
        SpecError: a precision, a setting of the head or a module that is not known to be exact, by name; pieces that
            do not divide heads, features or vocabulary.
        ShardingError: sequence parallelism.
    """
    if policy.exact is not None:
        raise SpecError(
            "install",
            found="a policy that computes exactly already",
            rule="modules are swapped once",
            fix="call remove() of the previous one",
        )
    _refuse(policy, resolution)
    model, tp = policy.model, policy.mesh["tp"]
    dtype = next(model.parameters()).dtype
    kernels = choose(policy.mesh.device, dtype, resolution.block_tokens)
    pieces = Pieces(kernels, resolution.block_tokens, resolution.weight_chunks // tp.size, tp)
    swap = _Swap(policy, pieces)
    before = torch.get_num_threads()
    defer_input_sums(model, deferred=True)
    for name, module in model.named_modules():
        swap.module(name, module)
    swap.share_integers()
    end_flushes = flush_layers(policy, swap.accumulators)
    torch.set_num_threads(1)  # threads split a tensor by its size, and the tail of a split may round differently

    def remove() -> None:
        torch.set_num_threads(before)
        end_flushes()
        defer_input_sums(model, deferred=False)
        swap.back()
        policy.exact = None

    exact = Exact(policy, resolution, pieces, swap.accumulators, swap.head, remove)
    exact.start()
    policy.exact = exact
    return exact


@contextmanager
def reproducibly(policy: Policy, *, block_tokens: int, weight_chunks: int = 1, bits: int = 32) -> Iterator[Exact]:
    """Compute a user-defined step with the same bits in every layout.

    The policy is exact within the context, and restored afterwards. Settings are those of `Resolution`.

    Raises:
        SpecError, ShardingError: see `install`.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> from workbench.policy.model import load_policy
        >>> from workbench.sharding.attention import AttentionShard
        >>> from workbench.sharding.mesh import Axis
        >>> from workbench.sharding.plan import ShardPlan
        >>> policy = load_policy("tiny-qwen3")
        >>> tokens, places = torch.arange(16), torch.arange(16)
        >>> plan = ShardPlan.make("contiguous", num_tokens=16, cp=1)
        >>> shard = AttentionShard.make(plan, torch.zeros(16, dtype=torch.long), Axis("cp"))
        >>> with wb.reproducibly(policy, block_tokens=8) as exact:
        ...     hidden = policy.hidden_states(tokens, places, shard)
        ...     policy.token_logprobs(hidden, tokens.roll(-1)).logprobs_T.sum().neg().backward()
        ...     exact.reduce()
        >>> policy.model.lm_head.weight.grad.shape
        torch.Size([19, 64])
    """
    exact = install(policy, Resolution(block_tokens, weight_chunks, bits))
    try:
        yield exact
    finally:
        exact.remove()


class _Swap:
    """Replaces forwards of a policy's modules, and records the originals."""

    def __init__(self, policy: Policy, pieces: Pieces) -> None:
        self.policy, self.pieces = policy, pieces
        self.accumulators: dict[str, Accumulator] = {}
        self._weights: list[str] = []
        self._before: list[tuple[Any, Any]] = []
        self._names = {id(parameter): name for name, parameter in policy.model.named_parameters()}
        self._by_outputs = _styles(policy.model)
        self._heads = policy.model.config.get_text_config().num_attention_heads

    def module(self, name: str, module: Any) -> None:
        """Swap one module, if it does computation."""
        pieces, kind = self.pieces, type(module).__name__
        if module is self.policy.model.get_output_embeddings():
            self._head = self._sums(module.weight, blocks=1)
        elif isinstance(module, nn.Linear):
            by_outputs, bias = self._by_outputs[name], module.bias
            sums = self._sums(module.weight, blocks=1), None if bias is None else self._sums(bias, tokens=1)
            self._weights.append(self._names[id(module.weight)])
            self._set(module, lambda x: modules.linear(x, module.weight, module.bias, by_outputs, sums, pieces))
        elif isinstance(module, nn.Embedding):
            into, (first, _) = self._sums(module.weight, tokens=1), self._vocabulary()
            self._set(module, lambda tokens: modules.embedding(tokens, module.weight, first, into, pieces))
        elif kind.endswith(NORM):
            into = self._sums(module.weight, tokens=self._heads)
            self._set(module, lambda x: modules.rms_norm(x, module.weight, module.variance_epsilon, into, pieces))
        elif kind.endswith(ROTARY):
            look_up = module.forward
            self._set(module, lambda x, position_ids: modules.rotary(look_up, x, position_ids, pieces))
        elif kind in ACTIVATIONS:
            activation = module.forward
            self._set(module, lambda x: modules.elementwise(x, activation, pieces))

    def head(self) -> ExactHead:
        """Output head with its current weights: sharded parameters are gathered and freed."""
        first, vocabulary = self._vocabulary()
        width = -(-vocabulary // (self.pieces.here * self.pieces.tp.size))
        return ExactHead(self.policy.head_arguments()["weight_VD"], first, vocabulary, width, self._head, self.pieces)

    def share_integers(self) -> None:
        """Let each rank of cp keep a part of the integers of linear layers; see `parts`."""
        shards = self.policy.shards
        whole = [name for name in self._weights if not (shards[name].over_dp_cp or shards[name].gradient_is_partial)]
        dtypes = {name: parameter.dtype for name, parameter in self.policy.model.named_parameters()}
        share_integers({name: self.accumulators[name] for name in whole}, dtypes, self.policy.mesh)

    def back(self) -> None:
        """Restore every module's own forward."""
        for module, before in self._before:
            del module.forward
            if before is not None:
                module.forward = before

    def _set(self, module: Any, forward: Callable[..., Any]) -> None:
        self._before.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def _sums(self, parameter: Tensor, tokens: int = 0, blocks: int = 0) -> Accumulator:
        """Accumulator of a parameter's gradient; shared by tied parameters."""
        name = self._names[id(parameter)]
        if name not in self.accumulators:
            self.accumulators[name] = Accumulator(parameter.shape, self.policy.mesh.device, Leaves())
        sums = self.accumulators[name]
        sums.per = Leaves(sums.per.tokens + tokens, sums.per.blocks + blocks)
        return sums

    def _vocabulary(self) -> tuple[int, int]:
        size = self.policy.vocabulary_size
        return shard_range(size, self.pieces.tp, what="vocabulary")[0], size


def _styles(model: Any) -> dict[str, bool]:
    """Linear layer -> True if its pieces are of the outputs."""
    plan = tensor_plan(model)
    return {
        name: STYLES[style]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        for pattern, style in plan.items()
        if style in STYLES and fnmatch.fnmatchcase(name, pattern)
    }


def _refuse(policy: Policy, resolution: Resolution) -> None:
    """Reject everything that would not be exact, in one message."""
    model, config = policy.model, policy.model.config.get_text_config()
    named = [(name, module, type(module).__name__.removeprefix("FSDP")) for name, module in model.named_modules()]
    wrong = [f"{kind} at {name}" if name else kind for name, _, kind in named if kind not in KNOWN]
    wrong += [
        f"{name} in training mode, with dropout"
        for name, module, _ in named
        if module.training and getattr(module, "attention_dropout", 0)
    ]
    for name, parameter in model.named_parameters():
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            wrong.append(f"{name} in {str(parameter.dtype).removeprefix('torch.')}")
        if not parameter.requires_grad:
            wrong.append(f"{name}, which is not trained")
    head, styles = model.get_output_embeddings(), _styles(model)
    linear = [name for name, module, _ in named if isinstance(module, nn.Linear) and module is not head]
    wrong += [f"{name}, which no plan shards" for name in linear if name not in styles]
    rules = {
        "a bias of the output head": getattr(head, "bias", None) is not None,
        "a scale of the logits": {getattr(config, name, None) for name in ("logit_scale", "logits_scaling")}
        - {None, 1.0},
        "a cap of the logits": bool(getattr(config, "final_logit_softcapping", None)),
        "fp32_head": policy.fp32_head,
    }
    wrong += [rule for rule, is_used in rules.items() if is_used]
    if wrong:
        raise SpecError(
            f"exact computation of model type {config.model_type!r}",
            found=", ".join(wrong[:6]),
            rule=f"dense decoders of the families {', '.join(FAMILIES)}, in float32 or bfloat16, every "
            "parameter trained",
            fix="use such a model, or compute without the reproducible mode",
        )
    _refuse_pieces(policy, resolution.weight_chunks)


def _refuse_pieces(policy: Policy, chunks: int) -> None:
    config, tp, size = policy.model.config.get_text_config(), policy.mesh["tp"].size, policy.vocabulary_size
    counts = {
        "query heads": config.num_attention_heads,
        "features between two layers": config.intermediate_size,
        "key/value heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    }
    check_weight_chunks(chunks, counts, size, tp)
