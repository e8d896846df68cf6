"""The policy: a Hugging Face decoder, cut for this rank, from a row to token log-probabilities.

`transformers` is used through two public doors: the Auto classes, and the attention registry, where the
workbench's context-parallel attention has a name of its own. Under that name no mask is built from positions
(which would take a zigzag shard for two documents); ours comes from the shard plan.

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
from workbench.policy.logprobs import IMPLEMENTATIONS, TokenLogprobs, fastest, token_logprobs, triton_refusal
from workbench.policy.logprobs.head import make_head
from workbench.policy.logprobs.kept import KeptSets
from workbench.policy.precision import cast, lift_to_float64
from workbench.policy.tensor_plan import cut
from workbench.policy.tiny import TINY
from workbench.sharding import data_parallel
from workbench.sharding.attention import AttentionShard, sharded_attention
from workbench.sharding.mesh import Mesh, single_process_mesh
from workbench.sharding.tensor_parallel import ParameterShard, shard_range

ATTENTION = "workbench_sharded"
CHUNKED = ("chunked", "triton")
"""Implementations of the log-probabilities that go by chunks of a row, as `fused_loss` needs them."""
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Exact(Protocol):
    """What computes in place of a policy's own ways, with the same meaning; `workbench.reproducible` has one."""

    def hidden_states(self, tokens_T: Tensor, positions_T: Tensor, shard: AttentionShard) -> Tensor:
        """See `Policy.hidden_states`."""
        ...

    def token_logprobs(
        self, hidden_TD: Tensor, targets_T: Tensor, temperature_T: Tensor | None = None, *, wanted: Iterable[str] = ...
    ) -> TokenLogprobs:
        """See `Policy.token_logprobs`."""
        ...


@dataclass
class Policy:
    """A decoder as one rank holds it.

    Attributes:
        model: the `transformers` causal language model, cut for this rank.
        mesh: the axes.
        shards: how every parameter lies over tp, by name.
        vocabulary_size: V of the whole model.
        temperature: divides logits, unless a call gives one for each token.
        implementation: of the log-probabilities, by name.
        fp32_head: whether hidden states and head are lifted to float32 before they meet.
        chunk_tokens: rows whose logits exist at a time.
        keep_bytes: how much the head may keep for backward.
        trunk: what is called for hidden states where parameters are sharded over dp x cp, and gathers them on the way.
            Each call is followed by its backward before the next. None: every rank holds them.
        exact: what computes instead, where every layout must give the same bits.
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
            positions_T: [t] places in their documents.
            shard: who sees whom.
            embeddings_TD: what the first layer reads, where that is not (only) the tokens' own embeddings; as
                `embeddings` gives them.

        Shapes:   tokens_T and positions_T [t] -> [t, D].
        Layout:   cp: sharded(T); tp: replicated.
        Raises:   SpecError: embeddings in the reproducible mode.
        """
        if self.exact is None:
            return self.through_modules(tokens_T, positions_T, shard, embeddings_TD)
        if embeddings_TD is not None:
            raise SpecError(
                "embeddings in the reproducible mode",
                found="hidden_states(..., embeddings_TD=...)",
                rule="the mode knows no module that could have made them, and sums none of its gradients",
                fix="leave the mode out where an encoder feeds the policy",
            )
        return self.exact.hidden_states(tokens_T, positions_T, shard)

    def through_modules(
        self, tokens_T: Tensor, positions_T: Tensor, shard: AttentionShard, embeddings_TD: Tensor | None = None
    ) -> Tensor:
        """`hidden_states` of the modules as they stand, with the attention that the shard names."""
        forward = self.model.base_model if self.trunk is None else self.trunk
        read = {"input_ids": tokens_T[None]} if embeddings_TD is None else {"inputs_embeds": embeddings_TD[None]}
        out = forward(**read, position_ids=positions_T[None], use_cache=False, shard=shard)
        return out.last_hidden_state[0]

    def give_back(self) -> None:
        """Let go of the weights that `hidden_states` without a backward left whole, where parameters are sharded."""
        if self.trunk is not None:
            data_parallel.give_back(self.trunk)

    def embeddings(self, tokens_T: Tensor) -> Tensor:
        """What the first layer reads of this rank's tokens, to be changed here and there before it does.

        Shapes:   [t] -> [t, D]; [t / tp, D] with sequence parallelism.
        Layout:   cp: sharded(T); tp: replicated, or with sequence parallelism sharded(t).
        Backward: it wants the gradient of each tp rank to be whole, as it is at the input of decoder layers.
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
        kept: KeptSets | None = None,
        wanted: Iterable[str] = ("entropy", "logsumexp"),
    ) -> TokenLogprobs:
        """Log-probability of each target, entropy and log-normaliser of each distribution, in nats.

        Args:
            hidden_TD: [t, D].
            targets_T: [t] vocabulary ids.
            temperature_T: [t] what each token's logits are divided by (1 where nothing counts), for rollouts that
                were sampled at several temperatures; None takes the policy's one temperature for all.
            active_T: [t] the tokens that are computed; None: all.
            kept: what the sampler cut each distribution down to; None: nothing was cut.
            wanted: see `logprobs.token_logprobs`.

        Shapes: [t] each.
        Raises: SpecError: kept sets, or a choice of tokens, where `exact` computes.
        """
        if self.exact is not None:
            if kept is not None or active_T is not None:
                raise SpecError(
                    "exact log-probabilities of some tokens, or of kept sets",
                    rule="all tokens are computed, each against the whole vocabulary",
                    fix="leave active_T and kept out, or compute without workbench.reproducible",
                )
            return self.exact.token_logprobs(hidden_TD, targets_T, temperature_T, wanted=wanted)
        return token_logprobs(
            hidden_TD,
            targets_T=targets_T,
            implementation=self.implementation,
            temperature=self.temperature if temperature_T is None else temperature_T,
            active_T=active_T,
            kept=kept,
            wanted=wanted,
            **self.head_arguments(),
        )

    def head_arguments(self) -> dict[str, Any]:
        """The output head of this rank and its rules, as `logprobs.token_logprobs` takes them."""
        axis, head = self.mesh["tp"], _head_of(self.model)
        if data_parallel.is_shard(head["weight_VD"]):
            raise ShardingError(
                "the output head of sharded parameters",
                found="this rank's part of its weight",
                rule="it is whole from hidden_states to the end of the backward that follows",
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
    """Load a decoder, give it the workbench's attention, and cut it for this rank.

    Args:
        source: a checkpoint folder (absolute, or relative to ``project``), a hub id, or a name of `tiny.TINY`.
        mesh: the axes; one rank if None.
        precision: float64, float32 or bfloat16. float64 lifts norms and rotary embeddings too.
        temperature: divides logits.
        implementation: of the log-probabilities: auto, or one of `logprobs.IMPLEMENTATIONS`; see
            `choose_implementation`.
        project: what relative folders are relative to.
        tied: for tiny ones: whether the head is the embedding.
        seed: for tiny ones: of their weights.
        fp32_head: lift hidden states and head to float32 before they meet.
        chunk_tokens: rows whose logits exist at a time, for chunked and triton.
        keep_bytes: how much these may keep for backward.
        shard_parameters: shard parameters over dp x cp; see `workbench.sharding.data_parallel`.
        sequence_parallel: each tp rank holds 1 / tp of the tokens between cut layers.
        checkpointing: keep no activations inside a decoder layer; compute them again in backward.
        fused_loss: loss and gradient are computed in one pass over the head, so it goes by chunks.

    Raises:
        SpecError: no such checkpoint, an unknown implementation, or one that cannot serve this layout.
        ShardingError: heads or features that tp does not divide.
    """
    mesh = mesh or single_process_mesh()
    dtype = torch.promote_types(DTYPES[precision], torch.float32) if fp32_head else DTYPES[precision]
    implementation = choose_implementation(implementation, mesh, dtype, fused_loss=fused_loss)
    model = load_decoder(source, project=project, tied=tied, seed=seed).eval()  # no dropout; gradients as in training
    _refuse_unknown(model)
    model = with_our_attention(model)
    model.get_input_embeddings().padding_idx = None  # in a packed row every id is text, and trains
    if precision == "float64":
        expected = _probe(model, "float32")
        model = lift_to_float64(model)
        _hold(model, _probe(model, precision), expected, what="float64 run")
    else:
        model = cast(model, DTYPES[precision])
    config = model.config.get_text_config()
    shards = cut(model, mesh, sequence_parallel=sequence_parallel)
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
    """The layers of a decoder, in order, as `transformers` marks them for checkpointing."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.base_model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _checkpoint_layers(model: Any) -> None:
    """Compute each decoder layer again in backward, on every rank at the same place, its collectives included.

    The switch of `transformers` does nothing in eval mode, which is where a policy without dropout is. The layer's own
    forward is wrapped, so that names and hooks of the module stay where they are.

    Raises:
        SpecError: a model that does not say which its layers are.
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
        # Nothing is drawn at random in a policy, so no state of generators is kept.
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


class _Trunk(nn.Module):
    """A model that goes as far as hidden states when it is called; its head is part of it all the same."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model.base_model(**inputs)


def choose_implementation(requested: str, mesh: Mesh, dtype: torch.dtype, *, fused_loss: bool = False) -> str:
    """Choose the implementation of a policy's log-probabilities, once for every pass of a run.

    Old, reference and training passes use the same one: two implementations differ in their last bits, and with them
    the ratio of a policy to itself differs from 1. "auto" takes on a GPU what is fastest; on a CPU the slow and
    obvious, whose numbers earlier runs have, or chunked for a fused loss.

    Args:
        requested: auto, or one of `logprobs.IMPLEMENTATIONS`.
        mesh: the axes.
        dtype: of what is multiplied with the head.
        fused_loss: the head goes by chunks.

    Raises:
        SpecError: an unknown implementation, or one that cannot serve this layout, this device or a fused loss.
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
            rule=f"one of auto, {', '.join(CHUNKED)}: a fused loss goes by chunks of a row",
            fix="use auto",
        )
    if requested == "triton" and (why := triton_refusal(dtype, mesh.device)):
        raise SpecError(
            "policy.logprobs = 'triton'",
            found=why,
            rule="a GPU that Triton compiles for, and a dtype of at most 32 bits",
            fix="use auto, or chunked, which needs nothing but torch",
        )
    return requested


def _head_of(model: Any) -> dict[str, Any]:
    """Weight, bias, scale and cap of a decoder's output head; how its configuration names them is of `transformers`."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return {
        "weight_VD": head.weight,
        "bias_V": getattr(head, "bias", None),
        "logit_scale": scale,
        "soft_cap": getattr(config, "final_logit_softcapping", None) or None,
    }


def load_decoder(source: str, *, project: Path | None = None, tied: bool | None = None, seed: int = 0) -> Any:
    """The stock `transformers` decoder of a source, whole, in float32, on CPU.

    Args:
        source: a checkpoint folder (absolute, or relative to ``project``), a hub id, or a name of `tiny.TINY`.
        project: what relative folders are relative to.
        tied: for tiny ones: whether the head is the embedding.
        seed: for tiny ones: of their weights.

    Raises:
        SpecError: no such checkpoint, or one whose tensors are not exactly the model's.
    """
    if source in TINY:
        return TINY[source](19, tied=tied is not False, seed=seed)
    if tied is not None:
        raise SpecError(
            f"model.tied = {tied} with model.source = {source!r}",
            rule="a checkpoint says itself whether its head is tied",
            fix="leave model.tied out",
        )
    import transformers
    from safetensors import SafetensorError

    transformers.utils.logging.disable_progress_bar()
    folder = (project or Path()) / source
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
            fix=f"check the path (the folder {source!r} is looked for under the project root)",
        ) from None
    wrong = [
        f"{kind.replace('_keys', '')}: {', '.join(sorted(map(str, info[kind])))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info.get(kind)
    ]
    if wrong:
        raise SpecError(
            f"load model.source = {source!r}",
            found="; ".join(wrong),
            rule="the checkpoint holds exactly the tensors of the model: none is made up, none left out",
            fix="save the whole model again, or mend config.json",
        )
    return model


def _refuse_unknown(model: Any) -> None:
    """Refuse by name what is known to be left out here; `with_our_attention` measures the rest."""
    config = model.config.get_text_config()
    cap = getattr(config, "attn_logit_softcapping", None)
    asked = [f"attn_logit_softcapping = {cap}"] if cap else []
    known = ("full_attention", "sliding_attention")
    asked += [f"layers of type {kind!r}" for kind in getattr(config, "layer_types", None) or () if kind not in known]
    # These take their frequencies from the longest position, which differs by rank and by packing.
    asked += [
        f"rotary embedding {module.rope_type!r}"
        for module in model.modules()
        if getattr(module, "rope_type", "default") in ("dynamic", "longrope")
    ]
    if asked:
        raise SpecError(
            f"policy of model type {config.model_type!r}",
            found=", ".join(dict.fromkeys(asked)),
            rule="causal attention, in a sliding window or not, rotary angles from a token's own position",
            fix="use a model without these",
        )


def with_our_attention(model: Any) -> Any:
    """Give a decoder the workbench's attention, and refuse it if it then means anything else than before.

    Two short documents in one packed row, its tokens in a shuffled order, must get the logits that the stock model
    gives each alone, from our hidden states and what its configuration says of the head. That finds what no list of
    names can: another scale on the logits, positions that the model counts for itself, attention that does not go
    through the registry. Sliding windows are made shorter than the documents for it: a window of thousands of tokens
    that is not handed on to attention would go unnoticed.

    Raises:
        SpecError: it does not run with our attention, or not to the same logits.
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
        model.set_attn_implementation(_registered())
        _hold(model, _probe(model, "packed"), stock, what="packed run")
    return model


@contextlib.contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """Sliding windows of at most three tokens, wherever the model and its configuration have one."""
    holders = {id(one): one for module in model.modules() for one in (module, getattr(module, "config", None))}
    before = [
        (holder, holder.sliding_window)
        for holder in holders.values()
        if isinstance(getattr(holder, "sliding_window", None), int)
    ]
    try:
        for holder, window in before:
            holder.sliding_window = min(window, 3)
        yield
    finally:
        for holder, window in before:
            holder.sliding_window = window


_PROBE = torch.tensor([1, 3, 2, 5, 4, 2, 6, 1])
_PROBE_ORDER = torch.tensor([4, 0, 6, 2, 7, 1, 5, 3])


def _probe(model: Any, what: str) -> Tensor:
    """Logits of two packed documents in their own order, computed the way a policy does, in a shuffled one."""
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


def _hold(model: Any, actual_TV: Tensor, expected_TV: Tensor, *, what: str) -> None:
    """Refuse a model whose logits are not what they were; rounding of float32 is far below the bar."""
    far = float((actual_TV.double() - expected_TV.double()).abs().max() / expected_TV.double().abs().max())
    if not far <= 1e-3:
        raise SpecError(
            f"policy of model type {model.config.get_text_config().model_type!r}: {what}",
            found=f"logits off by {far:.2g} of the largest, against the stock model's",
            rule="hidden states times the head's weight, scaled and capped as the configuration says, are "
            "the logits, documents in a packed row do not see each other, and norms and rotary "
            "embeddings are of a known kind",
            fix="use a dense decoder such as Llama, Qwen2, Qwen3 or Mistral",
        )


def _registered() -> str:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, sharded_attention)
    return ATTENTION
