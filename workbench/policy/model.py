"""The policy: a Hugging Face decoder, sharded for this rank, from a packed row to token log-probabilities.

Letters: T packed tokens | V vocabulary | D model dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from workbench.errors import ShardingError, SpecError
from workbench.policy.adapters import load_adapters
from workbench.policy.compute_copies import compute_copies, use_module_dtypes
from workbench.policy.decoder import head_of
from workbench.policy.gemm_formats import use_gemm_formats
from workbench.policy.kernels import use_kernels
from workbench.policy.logprobs import IMPLEMENTATIONS, TokenLogprobs, fastest, token_logprobs, triton_unsupported_reason
from workbench.policy.logprobs.head import upcast
from workbench.policy.logprobs.truncated_support import TruncatedSupport
from workbench.policy.lora import Lora, head_operands, head_weight
from workbench.policy.prediction import Prediction, prediction_layers
from workbench.policy.preparation import prepare_decoder
from workbench.policy.routers import Routers, Routes, install_routers
from workbench.policy.sizes import check_whole_vocabulary
from workbench.policy.stages import Stages, split_stages
from workbench.policy.tensor_plan import shard_decoder, shard_experts
from workbench.policy.trunk import Head, Trunk, checkpoint_layers, decoder_layers
from workbench.sharding import data_parallel
from workbench.sharding.attention import AttentionShard
from workbench.sharding.mesh import Mesh, single_process_mesh
from workbench.sharding.sequence_parallel import Stream
from workbench.sharding.tensor_parallel import ParameterShard, shard_range
from workbench.specs.lora import LoraSpec
from workbench.specs.precision import PRESETS, Dtypes

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
CHUNKED = ("chunked", "triton")
"""Implementations of the log-probabilities that process a row in chunks, as `fused_loss` requires."""


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
        temperature, implementation, fp32_head, chunk_tokens, keep_bytes: see `load_policy`.
        trunk: module that computes hidden states and gathers parameters on the way, if they are sharded over dp x cp.
            Each call is followed by its backward before the next. None: parameters are replicated.
        exact: computes instead if every layout must give the same bits.
        dtypes: of weights, computation, and gradients.
        loss_scale: factor of the loss before backward; gradients are divided by it once they are complete.
        shapes: of every parameter, whole; with pipeline stages, those of all stages.
        stages: the pipeline stages, and which of them this rank has; None: the rank has the whole decoder.
        routers: of a mixture of experts whose routes are noted or replayed; None: they are not.
        prediction: layers that predict further tokens; None: there are none.
        lora: its adapters, the only parameters that are trained; None: all are.
    """

    model: Any
    mesh: Mesh
    shards: dict[str, ParameterShard]
    vocabulary_size: int
    temperature: float
    implementation: str
    fp32_head: bool = False
    chunk_tokens: int | None = None
    keep_bytes: int = 0
    trunk: nn.Module | None = None
    exact: Exact | None = None
    dtypes: Dtypes = PRESETS["float32"]
    loss_scale: float = 1.0
    shapes: Mapping[str, torch.Size] = field(default_factory=dict)
    stages: Stages | None = None
    routers: Routers | None = None
    prediction: Prediction | None = None
    lora: Lora | None = None
    _computes: bool = field(default=False, init=False)

    @property
    def _needs_copies(self) -> bool:
        return self.dtypes.copies and (self.trunk is None or self.mesh["dp_cp"].group is None)

    @property
    def accumulates_in_copies(self) -> bool:
        """True if gradients reach the parameters when `in_compute_dtype` ends, not in backward."""
        return self._needs_copies and self.dtypes.gradients != self.dtypes.weights

    @contextlib.contextmanager
    def in_compute_dtype(self) -> Iterator[None]:
        """Compute in ``dtypes.compute`` while this is open: everything from hidden states to the end of backward.

        Where parameters are sharded over dp x cp, they are cast as they are gathered, and this does nothing.
        """
        if not self._needs_copies:
            yield
            return
        with compute_copies(self.model, DTYPES[self.dtypes.compute], accumulate=self.accumulates_in_copies):
            self._computes = True
            try:
                yield
            finally:
                self._computes = False

    def hidden_states(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        shard: AttentionShard,
        *,
        embeddings_TD: Tensor | None = None,
        routes: Routes | None = None,
    ) -> Tensor:
        """Last hidden states of this rank's tokens, whose positions are those in their documents.

        ``embeddings_TD`` is the input of the first layer, if not the tokens' own embeddings; see `embeddings`.
        ``routes`` are replayed and noted by the routers of a policy that has them.

        Shapes:   tokens_T and positions_T [t] -> [t, D].
        Layout:   cp: sharded(T); tp: replicated.
        Raises:   SpecError: embeddings in reproducible mode.
        """
        if self.exact is None:
            return self.module_hidden_states(tokens_T, positions_T, shard, embeddings_TD, routes)
        if embeddings_TD is not None:
            raise SpecError(
                "embeddings in the reproducible mode",
                found="hidden_states(..., embeddings_TD=...)",
                rule="the mode covers no module that produces embeddings, and does not sum its gradients",
                fix="turn the mode off if an encoder feeds the policy",
            )
        return self.exact.hidden_states(tokens_T, positions_T, shard)

    def module_hidden_states(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        shard: AttentionShard,
        embeddings_TD: Tensor | None = None,
        routes: Routes | None = None,
    ) -> Tensor:
        """`hidden_states` of the current modules, with the attention that the shard names."""
        if self.stages is not None:
            raise ShardingError(
                "hidden states of a policy in pipeline stages",
                found=f"stages {', '.join(map(str, self.stages.own))} of {self.stages.last + 1}",
                rule="micro-batches pass through the stages of all ranks, by a schedule (`workbench.train.pipeline`)",
                fix="use pp=1, or train.step.run_step",
            )
        inputs = {"input_ids": tokens_T[None]} if embeddings_TD is None else {"inputs_embeds": embeddings_TD[None]}
        return self._forward(inputs, positions_T, shard, routes).last_hidden_state.squeeze(0)

    def predicted_hidden_states(
        self,
        hidden_TD: Tensor,
        tokens_TK: Tensor,
        positions_T: Tensor,
        shard: AttentionShard,
        *,
        detach: str = "nothing",
    ) -> Iterator[Tensor]:
        """Hidden states [t, D] of each depth of `prediction`, in order, from the last ones of this rank's tokens.

        ``tokens_TK`` and ``detach``: see `policy.prediction.Prediction.hidden_states`.
        """
        assert self.prediction is not None, "of a policy that was loaded for it"
        inputs = {"position_ids": positions_T[None], "shard": shard}
        return self.prediction.hidden_states(hidden_TD, tokens_TK, detach=detach, **inputs)

    def stage_output(
        self,
        stage: int,
        tokens_T: Tensor,
        positions_T: Tensor,
        shard: AttentionShard,
        input_TD: Tensor | None,
        routes: Routes | None = None,
    ) -> Tensor:
        """Output of one of this rank's pipeline stages; of the last one, the hidden states.

        ``input_TD`` is the output of the stage before; None: the stage is the first, and reads the tokens.

        Shapes: tokens_T and positions_T [t], input_TD and output as `stage_input`; of the last stage [t, D].
        """
        inputs = {"input_ids": tokens_T[None]} if input_TD is None else {"inputs_embeds": input_TD[None]}
        return self._forward(inputs, positions_T, shard, routes, stage)[0]

    def stage_input(self, tokens_T: Tensor) -> Tensor:
        """Empty tensor of the shape and dtype that pass from stage to stage, and back as gradients.

        Shapes: [t] -> [t, D]; with sequence parallelism [t / tp, D].
        """
        assert self.stages is not None, "of a policy in stages"
        dtype, tokens = DTYPES[self.dtypes.compute], len(tokens_T) // self.stages.sharing
        return torch.empty(tokens, self.stages.width, dtype=dtype, device=self.mesh.device)

    def _forward(
        self, inputs: dict[str, Any], positions_T: Tensor, shard: AttentionShard, routes: Routes | None, *stage: int
    ) -> Any:
        if self._needs_copies and not self._computes:
            raise SpecError(
                f"hidden states of a policy with weights in {self.dtypes.weights}",
                found=f"a forward outside of Policy.in_compute_dtype(), and compute in {self.dtypes.compute}",
                rule="forward and backward run on copies of the weights, cast once for all micro-batches",
                fix="with policy.in_compute_dtype(): ..., around forward and backward",
            )
        if routes is not None:
            inputs = inputs | {"routes": routes}
        forward: Any = self.trunk or (self.model.base_model if self.stages is None else self.stages.forward)
        return forward(*stage, **inputs, position_ids=positions_T[None], use_cache=False, shard=shard)

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
        return self.model.get_input_embeddings()(tokens_T[None]).squeeze(0)

    def token_logprobs(
        self,
        hidden_TD: Tensor,
        targets_T: Tensor,
        temperature_T: Tensor | None = None,
        *,
        active_T: Tensor | None = None,
        support: TruncatedSupport | None = None,
        outputs: Iterable[str] = ("entropy", "logsumexp"),
        head: Mapping[str, Any] | None = None,
    ) -> TokenLogprobs:
        """Log-probability of each target, entropy and log-normaliser of each distribution, in nats.

        ``head`` is in place of `head_arguments`. Other arguments as in `logprobs.token_logprobs`. ``temperature_T``
        divides each token's logits (1 under the mask), for rollouts sampled at several temperatures; None: the policy's
        temperature for all. A negative target, which is ignored, costs a second pass on chunked and triton unless
        ``active_T`` leaves it out.

        Shapes: hidden_TD [t, D], the others [t] -> [t] each.
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
        trained = head is None or head["weight_VD"].requires_grad
        return token_logprobs(
            self.head_input(hidden_TD, trained=trained),
            targets_T=targets_T,
            implementation=self.implementation,
            temperature=self.temperature if temperature_T is None else temperature_T,
            active_T=active_T,
            support=support,
            outputs=outputs,
            expected_rows=len(targets_T) if active_T is None else None,
            **(self.head_arguments() if head is None else head),
        )

    def head_input(self, hidden_TD: Tensor, *, trained: bool = True) -> Tensor:
        """Hidden states as `head_arguments` takes them: with columns for the adapter of the head, if it has one.

        Shapes:   [t, D] -> [t, D], or [t, D + r].
        Backward: to the adapter too, if ``trained``.
        """
        if self.lora is None or self.lora.head is None:
            return hidden_TD
        wide_TD = upcast(hidden_TD) if self.fp32_head else hidden_TD
        return head_operands(self.model.get_output_embeddings(), self.lora.spec.scale, wide_TD, trained=trained)

    def head_arguments(self) -> dict[str, Any]:
        """Output head of this rank and its settings, as arguments of `logprobs.token_logprobs`.

        With an adapter its weight has columns for it, and takes `head_input`.
        """
        axis, head = self.mesh["tp"], head_of(self.model)
        if data_parallel.is_shard(head["weight_VD"]):
            raise ShardingError(
                "the output head of sharded parameters",
                found="this rank's shard of its weight",
                rule="it is gathered from hidden_states to the end of the backward that follows",
                fix="call hidden_states before, and backward after",
            )
        first, _ = shard_range(self.vocabulary_size, axis, what="output head: vocabulary")
        if self.lora is not None and self.lora.head is not None:
            head["weight_VD"] = head_weight(self.model.get_output_embeddings())
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
    precision: str | Dtypes = "float32",
    temperature: float = 1.0,
    implementation: str = "auto",
    project: Path | None = None,
    tied: bool | None = None,
    seed: int = 0,
    fp32_head: bool = False,
    chunk_tokens: int | None = None,
    keep_bytes: int = 0,
    shard_parameters: bool = False,
    reshard_after_forward: bool = True,
    unit_layers: int = 1,
    sequence_parallel: bool = False,
    checkpointing: bool = False,
    fused_loss: bool = False,
    kernels: Mapping[str, str] | None = None,
    pipeline_schedule: str = "1f1b",
    stages_per_rank: int = 1,
    stage_layers: Sequence[int] = (),
    routing: bool = False,
    depths: int = 0,
    lora: LoraSpec | None = None,
) -> Policy:
    """Load a decoder, register the workbench's attention, and shard it for this rank.

    Args:
        source: a checkpoint folder (absolute, or relative to ``project``), a hub id, or a name of `decoder.TINY`.
        mesh: the axes; one rank if None.
        precision: float64, float32, bfloat16 or another preset of `workbench.specs.precision`, or dtypes. float64
            includes norms and rotary embeddings. Where the computation has another dtype than the weights, passes
            through the model happen within `Policy.in_compute_dtype`.
        temperature: divides logits.
        implementation: of the log-probabilities, see `choose_implementation`.
        project: base of relative folders.
        tied: tiny models only: the head is the embedding.
        seed: tiny models only: of their weights.
        fp32_head: cast hidden states and head to float32 before their GEMM.
        chunk_tokens: rows whose logits exist at a time, for chunked and triton.
        keep_bytes: how much these may save for backward.
        shard_parameters: shard parameters over dp x cp; see `workbench.sharding.data_parallel`.
        reshard_after_forward: gather sharded weights again for backward; pipeline stages keep them in any case.
        unit_layers: neighbouring layers that are gathered together.
        sequence_parallel: each tp rank holds 1 / tp of the tokens between sharded layers.
        checkpointing: save no activations inside a decoder layer; recompute them in backward.
        fused_loss: loss and gradient are computed in one pass over the head, which needs chunks.
        kernels: of norms, rotary embeddings and MLPs, see `workbench.policy.kernels.use_kernels`.
        pipeline_schedule: order of the micro-batches in pipeline stages; see `workbench.sharding.pipeline`.
        stages_per_rank: pipeline stages of each rank of the axis pp.
        stage_layers: layers of each stage; (): equal runs.
        routing: prepare the routers of a mixture of experts to note and to replay routes; see `policy.routers`.
        depths: layers to add that predict further tokens; see `policy.prediction`.
        lora: adapters, which alone are trained; None, or settings without a rank and a source: none.

    Raises:
        SpecError: no such checkpoint, an unknown implementation, or one that does not support this layout.
        ShardingError: heads or features that tp does not divide, more pipeline stages than layers.
    """
    mesh = mesh or single_process_mesh()
    dtypes = PRESETS[precision] if isinstance(precision, str) else precision
    compute = DTYPES[dtypes.compute]
    dtype = torch.promote_types(compute, torch.float32) if fp32_head else compute
    implementation = choose_implementation(implementation, mesh, dtype, fused_loss=fused_loss)
    model, places = prepare_decoder(
        source,
        project=project,
        tied=tied,
        seed=seed,
        depths=depths,
        dtype=DTYPES[dtypes.weights],
        lifted=dtypes.compute == "float64",
    )
    config = model.config.get_text_config()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    shards = shard_decoder(model, mesh, sequence_parallel=sequence_parallel)
    shards = shard_experts(model, mesh, shards)
    adapters = None
    if lora is not None and lora.on:
        adapters, shards, shapes = load_adapters(model, mesh, shards, lora, shapes=shapes, project=project)
    model = use_kernels(model, kernels or {})  # after the check of the shards on the host, where Triton does not run
    # Inside of other dtypes for routers, whose logits are noted before they are cast back.
    share = (mesh["tp"].rank, mesh["tp"].size) if sequence_parallel else (0, 1)
    routers = install_routers(model, share=share) if routing else None
    model = use_module_dtypes(model, {kind: dtype and DTYPES[dtype] for kind, dtype in dtypes.modules.items()})
    model = use_gemm_formats(model, dtypes.gemms)  # after the check of the shards, which would see its rounding
    if checkpointing:
        checkpoint_layers(model)  # of all stages: one may have the head alone
    stages, shards = split_stages(
        model,
        mesh,
        shards,
        schedule_name=pipeline_schedule,
        stages_per_rank=stages_per_rank,
        stage_layers=stage_layers,
        sequence_parallel=sequence_parallel,
    )
    trunk = None
    if shard_parameters:
        # Layers for multi-token prediction may add to the head's gradient after that of the hidden states is complete.
        trunk = Trunk(model, stages, Head.apart(model) if stages is None and not places else None)
        casts = data_parallel.Casts(compute, DTYPES[dtypes.reduction]) if not dtypes.single else None
        layers, further = decoder_layers(model), prediction_layers(model)
        shards = data_parallel.shard_parameters(
            trunk,
            [layer for layer in layers if layer not in further],
            shards,
            mesh,
            casts,
            reshard_after_forward=reshard_after_forward and stages is None,
            reshard_after_backward=stages is None,
            last=trunk.head,
            apart=further,
            unit_layers=unit_layers,
        )
    else:
        model = model.to(mesh.device)
    return Policy(
        model,
        mesh,
        shards,
        config.vocab_size,
        temperature,
        implementation,
        fp32_head,
        chunk_tokens,
        keep_bytes,
        trunk,
        dtypes=dtypes,
        loss_scale=dtypes.loss_scale or 1.0,
        shapes=shapes,
        stages=stages,
        routers=routers,
        prediction=places and Prediction(model, *places, Stream(mesh["tp"], sharded=sequence_parallel)),
        lora=adapters,
    )


def choose_implementation(requested: str, mesh: Mesh, dtype: torch.dtype, *, fused_loss: bool = False) -> str:
    """Choose the implementation of a policy's log-probabilities, once for every pass of a run.

    Old, reference and training passes use the same one: two implementations differ in their last bits, and with them
    the ratio of a policy to itself differs from 1. "auto" takes the fastest on a GPU for operands of this dtype; on a
    CPU the slow and simple ones, which match the numbers of earlier runs, or chunked for a fused loss.

    Raises:
        SpecError: an unknown implementation, or one that does not support this layout, this device or a fused loss.
    """
    if requested == "auto":
        if fused_loss or mesh.device.type == "cuda":
            return fastest(dtype, mesh.device)
        return "vocabulary_parallel" if mesh["tp"].size > 1 else "reference"
    check_whole_vocabulary(requested, mesh["tp"].size, IMPLEMENTATIONS)
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
