"""The policy: a Hugging Face decoder, sharded for this rank, from a packed row to token log-probabilities.

`transformers` is used through two public APIs: the Auto classes, and the attention registry, where the
workbench's context-parallel attention has its own name. Under that name no mask is built from positions
(which would take a zigzag shard for two documents); the mask comes from the shard plan.

Letters: T packed tokens | V vocabulary | D model dimension.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workbench.errors import ShardingError, SpecError
from workbench.policy.logprobs import IMPLEMENTATIONS, TokenLogprobs, fastest, token_logprobs, triton_unsupported_reason
from workbench.policy.logprobs.head import make_head
from workbench.policy.logprobs.truncated_support import TruncatedSupport
from workbench.policy.precision import cast, lift_to_float64
from workbench.policy.tensor_plan import shard_decoder
from workbench.policy.tiny import TINY
from workbench.sharding import data_parallel
from workbench.sharding.attention import AttentionShard, sharded_attention
from workbench.sharding.mesh import Mesh, single_process_mesh
from workbench.sharding.tensor_parallel import ParameterShard, shard_range

ATTENTION = "workbench_sharded"
CHUNKED = ("chunked", "triton")
"""Implementations of the log-probabilities that process a row in chunks, as `fused_loss` requires."""
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Exact(Protocol):
    """Bitwise-reproducible substitute for a policy's own computation; `workbench.reproducible` implements it."""

    def hidden_states(self, tokens_T: Tensor, positions_T: Tensor, shard: AttentionShard) -> Tensor:
        """See `Policy.hidden_states`."""
        ...

    def token_logprobs(
        self, hidden_TD: Tensor, targets_T: Tensor, temperature_T: Tensor | None = None, *, outputs: Iterable[str] = ...
    ) -> TokenLogprobs:
        """See `Policy.token_logprobs`."""
        ...


@dataclass
class Policy:
    """One rank's part of a decoder.

    Attributes:
        model: the `transformers` causal language model, sharded for this rank.
        mesh: the axes.
        shards: how every parameter is sharded, by name.
        vocabulary_size: V of the whole model.
        temperature: divides logits, unless a call passes one per token.
        implementation: of the log-probabilities, by name.
        fp32_head: True if hidden states and head are cast to float32 before their GEMM.
        chunk_tokens: rows whose logits exist at a time.
        keep_bytes: how much the head may save for backward.
        trunk: module that computes hidden states and gathers parameters on the way, if they are sharded over dp x cp.
            Each call is followed by its backward before the next. None: parameters are replicated.
        exact: computes instead if every layout must give the same bits.
    """

    model: Any
    mesh: Mesh
    shards: dict[str, ParameterShard]
    vocabulary_size: int
    temperature: float
    implementation: str
    fp32_head: bool = False
    chunk_tokens: int = 4096
    keep_bytes: int = 0
    trunk: nn.Module | None = None
    exact: Exact | None = None

    def hidden_states(
        self, tokens_T: Tensor, positions_T: Tensor, shard: AttentionShard, *, embeddings_TD: Tensor | None = None
    ) -> Tensor:
        """Last hidden states of this rank's tokens.

        Args:
            tokens_T: [t] vocabulary ids.
            positions_T: [t] positions in their documents.
            shard: which tokens attend to which.
            embeddings_TD: input of the first layer, if not the tokens' own embeddings; see `embeddings`.

        Shapes:   tokens_T and positions_T [t] -> [t, D].
        Layout:   cp: sharded(T); tp: replicated.
        Raises:   SpecError: embeddings in reproducible mode.
        """
        if self.exact is None:
            return self.module_hidden_states(tokens_T, positions_T, shard, embeddings_TD)
        if embeddings_TD is not None:
            raise SpecError(
                "embeddings in the reproducible mode",
                found="hidden_states(..., embeddings_TD=...)",
                rule="the mode covers no module that produces embeddings, and does not sum its gradients",
                fix="turn the mode off if an encoder feeds the policy",
            )
        return self.exact.hidden_states(tokens_T, positions_T, shard)

    def module_hidden_states(
        self, tokens_T: Tensor, positions_T: Tensor, shard: AttentionShard, embeddings_TD: Tensor | None = None
    ) -> Tensor:
        """`hidden_states` of the current modules, with the attention that the shard names."""
        forward = self.model.base_model if self.trunk is None else self.trunk
        inputs = {"input_ids": tokens_T[None]} if embeddings_TD is None else {"inputs_embeds": embeddings_TD[None]}
        out = forward(**inputs, position_ids=positions_T[None], use_cache=False, shard=shard)
        return out.last_hidden_state[0]

    def reshard(self) -> None:
        """Reshard the weights that `hidden_states` without a backward left gathered."""
        if self.trunk is not None:
            data_parallel.reshard_parameters(self.trunk)

    def embeddings(self, tokens_T: Tensor) -> Tensor:
        """Token embeddings of this rank, which the caller may modify before `hidden_states` reads them.

        Shapes:   [t] -> [t, D]; [t / tp, D] with sequence parallelism.
        Layout:   cp: sharded(T); tp: replicated, or with sequence parallelism sharded(t).
        Backward: expects the complete gradient on each tp rank, as at the input of decoder layers.
        Raises:   ShardingError: parameters are sharded over dp x cp, and gathered only inside the model.
        """
        if self.trunk is not None:
            raise ShardingError(
                "embeddings of a policy with sharded parameters",
                found="layout.shard_parameters",
                rule="the embedding is whole only inside the model",
                fix="leave shard_parameters out",
            )
        return self.model.get_input_embeddings()(tokens_T[None])[0]

    def token_logprobs(
        self,
        hidden_TD: Tensor,
        targets_T: Tensor,
        temperature_T: Tensor | None = None,
        *,
        active_T: Tensor | None = None,
        support: TruncatedSupport | None = None,
        outputs: Iterable[str] = ("entropy", "logsumexp"),
    ) -> TokenLogprobs:
        """Log-probability of each target, entropy and log-normaliser of each distribution, in nats.

        Args:
            hidden_TD: [t, D].
            targets_T: [t] vocabulary ids.
            temperature_T: [t] divides each token's logits (1 under the mask), for rollouts sampled at several
                temperatures; None: the policy's temperature for all.
            active_T: [t] the tokens that are computed; None: all.
            support: each token's truncated support in the sampler; None: not truncated.
            outputs: see `logprobs.token_logprobs`.

        Shapes: [t] each.
        Raises: SpecError: truncated supports, or a subset of tokens, in reproducible mode.
        """
        if self.exact is not None:
            if support is not None or active_T is not None:
                raise SpecError(
                    "exact log-probabilities of a subset of tokens, or of truncated supports",
                    rule="all tokens are computed, each against the whole vocabulary",
                    fix="leave active_T and kept out, or compute without workbench.reproducible",
                )
            return self.exact.token_logprobs(hidden_TD, targets_T, temperature_T, outputs=outputs)
        return token_logprobs(
            hidden_TD,
            targets_T=targets_T,
            implementation=self.implementation,
            temperature=self.temperature if temperature_T is None else temperature_T,
            active_T=active_T,
            support=support,
            outputs=outputs,
            **self.head_arguments(),
        )

    def head_arguments(self) -> dict[str, Any]:
        """Output head of this rank and its settings, as arguments of `logprobs.token_logprobs`."""
        axis, head = self.mesh["tp"], _head_of(self.model)
        if data_parallel.is_shard(head["weight_VD"]):
            raise ShardingError(
                "the output head of sharded parameters",
                found="this rank's shard of its weight",
                rule="it is gathered from hidden_states to the end of the backward that follows",
                fix="call hidden_states before, and backward after",
            )
        first, _ = shard_range(self.vocabulary_size, axis, what="output head: vocabulary")
        return {
            **head,
            "axis": axis,
            "first_token": first,
            "fp32_head": self.fp32_head,
            "chunk_tokens": self.chunk_tokens,
            "keep_bytes": self.keep_bytes,
        }


def load_policy(
    source: str,
    *,
    mesh: Mesh | None = None,
    precision: str = "float32",
    temperature: float = 1.0,
    implementation: str = "auto",
    project: Path | None = None,
    tied: bool | None = None,
    seed: int = 0,
    fp32_head: bool = False,
    chunk_tokens: int = 4096,
    keep_bytes: int = 0,
    shard_parameters: bool = False,
    sequence_parallel: bool = False,
    checkpointing: bool = False,
    fused_loss: bool = False,
) -> Policy:
    """Load a decoder, register the workbench's attention, and shard it for this rank.

    Args:
        source: a checkpoint folder (absolute, or relative to ``project``), a hub id, or a name of `tiny.TINY`.
        mesh: the axes; one rank if None.
        precision: float64, float32 or bfloat16. float64 includes norms and rotary embeddings.
        temperature: divides logits.
        implementation: of the log-probabilities: auto, or one of `logprobs.IMPLEMENTATIONS`; see
            `choose_implementation`.
        project: base of relative folders.
        tied: tiny models only: the head is the embedding.
        seed: tiny models only: of their weights.
        fp32_head: cast hidden states and head to float32 before their GEMM.
        chunk_tokens: rows whose logits exist at a time, for chunked and triton.
        keep_bytes: how much these may save for backward.
        shard_parameters: shard parameters over dp x cp; see `workbench.sharding.data_parallel`.
        sequence_parallel: each tp rank holds 1 / tp of the tokens between sharded layers.
        checkpointing: save no activations inside a decoder layer; recompute them in backward.
        fused_loss: loss and gradient are computed in one pass over the head, which needs chunks.

    Raises:
        SpecError: no such checkpoint, an unknown implementation, or one that does not support this layout.
        ShardingError: heads or features that tp does not divide.
    """
    mesh = mesh or single_process_mesh()
    dtype = torch.promote_types(DTYPES[precision], torch.float32) if fp32_head else DTYPES[precision]
    implementation = choose_implementation(implementation, mesh, dtype, fused_loss=fused_loss)
    model = load_decoder(source, project=project, tied=tied, seed=seed).eval()  # no dropout; gradients as in training
    _refuse_unknown(model)
    model = with_our_attention(model)
    model.get_input_embeddings().padding_idx = None  # a packed row has no padding id: every embedding is trained
    if precision == "float64":
        expected = _probe(model, "float32")
        model = lift_to_float64(model)
        _check_logits(model, _probe(model, precision), expected, what="float64 run")
    else:
        model = cast(model, DTYPES[precision])
    config = model.config.get_text_config()
    shards = shard_decoder(model, mesh, sequence_parallel=sequence_parallel)
    if checkpointing:
        _checkpoint_layers(model)
    trunk = None
    if shard_parameters:
        trunk = _Trunk(model)
        shards = data_parallel.shard_parameters(trunk, decoder_layers(model), shards, mesh)
    else:
        model = model.to(mesh.device)
    return Policy(
        model, mesh, shards, config.vocab_size, temperature, implementation, fp32_head, chunk_tokens, keep_bytes, trunk
    )


def decoder_layers(model: Any) -> list[nn.Module]:
    """Layers of a decoder, in order, as `transformers` marks them for checkpointing."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.base_model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _checkpoint_layers(model: Any) -> None:
    """Recompute each decoder layer in backward, collectives included, at the same point on every rank.

    The switch of `transformers` does nothing in eval mode, and a policy is in eval mode to have no dropout. The layer's
    own forward is wrapped, so that names and hooks of the module do not change.

    Raises:
        SpecError: a model that does not mark its layers.
    """
    layers = decoder_layers(model)
    if not layers:
        raise SpecError(
            f"layout.checkpointing with model type {model.config.get_text_config().model_type!r}",
            found="no decoder layers",
            rule="layers that transformers marks for checkpointing",
            fix="leave layout.checkpointing out for this model",
        )
    for layer in layers:
        # A policy has no randomness, so generator states are not saved.
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


class _Trunk(nn.Module):
    """A model whose forward ends at the hidden states; its head stays a submodule."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model.base_model(**inputs)


def choose_implementation(requested: str, mesh: Mesh, dtype: torch.dtype, *, fused_loss: bool = False) -> str:
    """Choose the implementation of a policy's log-probabilities, once for every pass of a run.

    Old, reference and training passes use the same one: two implementations differ in their last bits, and with them
    the ratio of a policy to itself differs from 1. "auto" takes the fastest on a GPU; on a CPU the slow and simple
    ones, which match the numbers of earlier runs, or chunked for a fused loss.

    Args:
        requested: auto, or one of `logprobs.IMPLEMENTATIONS`.
        mesh: the axes.
        dtype: of the operands of the head's GEMM.
        fused_loss: the head has to work in chunks.

    Raises:
        SpecError: an unknown implementation, or one that does not support this layout, this device or a fused loss.
    """
    if requested == "auto":
        if fused_loss or mesh.device.type == "cuda":
            return fastest(dtype, mesh.device)
        return "vocabulary_parallel" if mesh["tp"].size > 1 else "reference"
    if requested not in IMPLEMENTATIONS or (requested == "reference" and mesh["tp"].size > 1):
        raise SpecError(
            f"policy.logprobs = {requested!r} with tp={mesh['tp'].size}",
            rule=f"one of auto, {', '.join(IMPLEMENTATIONS)}; reference needs the whole vocabulary, tp=1",
            fix="use auto, or vocabulary_parallel",
        )
    if fused_loss and requested not in CHUNKED:
        raise SpecError(
            f"policy.logprobs = {requested!r} with fused_loss",
            found="an implementation that holds all logits of a row at once",
            rule=f"one of auto, {', '.join(CHUNKED)}: a fused loss processes a row in chunks",
            fix="use auto",
        )
    if requested == "triton" and (why := triton_unsupported_reason(dtype, mesh.device)):
        raise SpecError(
            "policy.logprobs = 'triton'",
            found=why,
            rule="a GPU that Triton compiles for, and a dtype of at most 32 bits",
            fix="use auto, or chunked, which needs only torch",
        )
    return requested


def _head_of(model: Any) -> dict[str, Any]:
    """Weight, bias, scale and cap of a decoder's output head, by the names of `transformers` configurations."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return {
        "weight_VD": head.weight,
        "bias_V": getattr(head, "bias", None),
        "logit_scale": scale,
        "soft_cap": getattr(config, "final_logit_softcapping", None) or None,
    }


def load_decoder(source: str, *, project: Path | None = None, tied: bool | None = None, seed: int = 0) -> Any:
    """Return the stock `transformers` decoder of a source, unsharded, in float32, on CPU.

    Args:
        source: a checkpoint folder (absolute, or relative to ``project``), a hub id, or a name of `tiny.TINY`.
        project: base of relative folders.
        tied: tiny models only: the head is the embedding.
        seed: tiny models only: of their weights.

    Raises:
        SpecError: no such checkpoint, or one whose tensors are not exactly the model's.
    """
    if source in TINY:
        return TINY[source](19, tied=tied is not False, seed=seed)
    if tied is not None:
        raise SpecError(
            f"model.tied = {tied} with model.source = {source!r}",
            rule="a checkpoint defines whether its head is tied",
            fix="leave model.tied out",
        )
    import transformers
    from safetensors import SafetensorError

    transformers.utils.logging.disable_progress_bar()
    folder = (project or Path()) / source
    # safetensors only, so that no pickle is loaded (DECISIONS.md, 18)
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder if folder.is_dir() else source, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise SpecError(
            f"load model.source = {source!r}",
            found=str(error).splitlines()[0],
            rule="a checkpoint folder (config.json, *.safetensors), a hub id that can be reached, or "
            f"{' or '.join(TINY)}",
            fix=f"check the path (the folder {source!r} is looked up under the project root)",
        ) from None
    mismatches = [
        f"{kind.replace('_keys', '')}: {', '.join(sorted(map(str, info[kind])))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info.get(kind)
    ]
    if mismatches:
        raise SpecError(
            f"load model.source = {source!r}",
            found="; ".join(mismatches),
            rule="the checkpoint holds exactly the tensors of the model: none initialized at random, none ignored",
            fix="save the whole model again, or fix config.json",
        )
    return model


def _refuse_unknown(model: Any) -> None:
    """Reject features that are known to be unsupported; `with_our_attention` measures the rest."""
    config = model.config.get_text_config()
    cap = getattr(config, "attn_logit_softcapping", None)
    refused = [f"attn_logit_softcapping = {cap}"] if cap else []
    known = ("full_attention", "sliding_attention")
    refused += [f"layers of type {kind!r}" for kind in getattr(config, "layer_types", None) or () if kind not in known]
    # These derive their frequencies from the longest position, which differs by rank and by packing.
    refused += [
        f"rotary embedding {module.rope_type!r}"
        for module in model.modules()
        if getattr(module, "rope_type", "default") in ("dynamic", "longrope")
    ]
    if refused:
        raise SpecError(
            f"policy of model type {config.model_type!r}",
            found=", ".join(dict.fromkeys(refused)),
            rule="causal attention, full or with a sliding window; rotary angles from a token's own position",
            fix="use a model without these",
        )


def with_our_attention(model: Any) -> Any:
    """Set a decoder's attention to the workbench's, and reject the model if its logits change.

    Two short documents in one packed row, its tokens in a shuffled order, must get the logits that the stock model
    gives each alone, from our hidden states and the head that its configuration describes. This detects what a list of
    names cannot: another scale on the logits, positions that the model counts itself, attention that bypasses the
    registry. Sliding windows are made shorter than the documents for the check: a window of thousands of tokens
    that is not passed to attention would go unnoticed.

    Raises:
        SpecError: it does not run with our attention, or gives other logits.
    """
    with _short_windows(model), torch.no_grad():
        stock = torch.cat(
            [
                model(
                    input_ids=_PROBE[None, start:stop] % model.config.get_text_config().vocab_size, use_cache=False
                ).logits[0]
                for start, stop in ((0, 5), (5, 8))
            ]
        )
        model.set_attn_implementation(_register_attention())
        _check_logits(model, _probe(model, "packed"), stock, what="packed run")
    return model


@contextlib.contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """Limit sliding windows to three tokens, wherever the model and its configuration have one."""
    owners = {id(one): one for module in model.modules() for one in (module, getattr(module, "config", None))}
    windows = [
        (owner, owner.sliding_window)
        for owner in owners.values()
        if isinstance(getattr(owner, "sliding_window", None), int)
    ]
    try:
        for owner, window in windows:
            owner.sliding_window = min(window, 3)
        yield
    finally:
        for owner, window in windows:
            owner.sliding_window = window


_PROBE = torch.tensor([1, 3, 2, 5, 4, 2, 6, 1])
_PROBE_ORDER = torch.tensor([4, 0, 6, 2, 7, 1, 5, 3])


def _probe(model: Any, what: str) -> Tensor:
    """Logits of two packed documents in document order, computed as a policy does, from a shuffled row."""
    shard = AttentionShard(_PROBE_ORDER[None, None], documents_T=torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]))
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])[_PROBE_ORDER]
    config = model.config.get_text_config()
    try:
        with torch.no_grad():
            tokens = _PROBE[_PROBE_ORDER] % config.vocab_size
            hidden_TD = model.base_model(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, shard=shard
            ).last_hidden_state[0]
            head = make_head(**_head_of(model))
            logits_TV = head.logits_(hidden_TD @ head.weight_VD.T, head.bias_V, 1.0)
            return logits_TV[torch.argsort(_PROBE_ORDER)]
    except (TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        raise SpecError(
            f"policy of model type {config.model_type!r}: {what}",
            found=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            rule="a decoder whose attention goes through the attention registry of transformers",
            fix="use a dense decoder such as Llama, Qwen2, Qwen3 or Mistral",
        ) from None


def _check_logits(model: Any, actual_TV: Tensor, expected_TV: Tensor, *, what: str) -> None:
    """Reject a model whose logits have changed."""
    relative_error = float((actual_TV.double() - expected_TV.double()).abs().max() / expected_TV.double().abs().max())
    if not relative_error <= 1e-3:  # far above the rounding of float32; the negation also catches NaN
        raise SpecError(
            f"policy of model type {model.config.get_text_config().model_type!r}: {what}",
            found=f"logits off by {relative_error:.2g} of the largest, relative to the stock model's",
            rule="logits are hidden states times the head's weight, scaled and capped as the configuration says; "
            "documents in a packed row do not attend to each other; norms and rotary "
            "embeddings are of a known kind",
            fix="use a dense decoder such as Llama, Qwen2, Qwen3 or Mistral",
        )


def _register_attention() -> str:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, sharded_attention)
    return ATTENTION
