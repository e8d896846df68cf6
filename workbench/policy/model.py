"""The policy: a Hugging Face decoder, cut for this rank, from a row to token log-probabilities.

`transformers` is used through two public doors: the Auto classes, and the attention registry, where the
workbench's context-parallel attention has a name of its own. Under that name no mask is built from positions
(which would take a zigzag shard for two documents); ours comes from the shard plan.

Letters: T packed tokens | V vocabulary | D model dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SpecError
from workbench.policy.logprobs import IMPLEMENTATIONS
from workbench.policy.logprobs.reference import token_logprobs as reference_logprobs
from workbench.policy.logprobs.vocabulary_parallel import token_logprobs as vocabulary_parallel_logprobs
from workbench.policy.precision import lift_to_float64
from workbench.sharding.attention import AttentionShard, gathered_attention
from workbench.sharding.mesh import Mesh, single_process_mesh
from workbench.sharding.tensor_parallel import ParameterShard, apply_tensor_parallel, check_heads, shard_range

ATTENTION = "workbench_gathered"
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Policy:
    """A decoder as one rank holds it.

    Attributes:
        model: the `transformers` causal language model, cut for this rank.
        mesh: the axes.
        shards: how every parameter lies over tp, by name.
        vocabulary_size: V of the whole model.
        temperature: divides logits.
        implementation: of the log-probabilities, by name.
    """

    model: Any
    mesh: Mesh
    shards: dict[str, ParameterShard]
    vocabulary_size: int
    temperature: float
    implementation: str

    def hidden_states(self, tokens_T: Tensor, positions_T: Tensor, shard: AttentionShard) -> Tensor:
        """Last hidden states of this rank's tokens.

        Shapes:   tokens_T and positions_T [t] -> [t, D].
        Layout:   cp: sharded(T); tp: replicated.
        """
        out = self.model.base_model(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False,
                                    shard=shard)
        return out.last_hidden_state[0]

    def token_logprobs(self, hidden_TD: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each target and entropy of each distribution, in nats. [t, D] -> [t], [t]."""
        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        if self.implementation == "reference":
            return reference_logprobs(hidden_TD, head.weight, targets_T, temperature=self.temperature, bias_V=bias)
        axis = self.mesh["tp"]
        first, _ = shard_range(self.vocabulary_size, axis, what="output head: vocabulary")
        return vocabulary_parallel_logprobs(hidden_TD, head.weight, targets_T, axis=axis, first_token=first,
                                            temperature=self.temperature, local_bias_V=bias)


def load_policy(source: str, *, mesh: Mesh | None = None, precision: str = "float32", temperature: float = 1.0,
                implementation: str = "auto", project: Path | None = None, tied: bool | None = None,
                seed: int = 0) -> Policy:
    """Load a decoder, give it the workbench's attention, and cut it for this rank.

    Args:
        source: a checkpoint folder (absolute, or relative to ``project``), a hub id, or ``tiny-qwen3``.
        mesh: the axes; one rank if None.
        precision: float64, float32 or bfloat16. float64 lifts norms and rotary embeddings too.
        temperature: divides logits.
        implementation: of the log-probabilities: auto, reference or vocabulary_parallel.
        project: what relative folders are relative to.
        tied: for ``tiny-qwen3``: whether the head is the embedding.
        seed: for ``tiny-qwen3``: of its weights.

    Raises:
        SpecError: no such checkpoint, an unknown implementation, or one that cannot serve this layout.
        ShardingError: heads or features that tp does not divide.
    """
    mesh = mesh or single_process_mesh()
    if implementation == "auto":
        implementation = "vocabulary_parallel" if mesh["tp"].size > 1 else "reference"
    if implementation not in IMPLEMENTATIONS or (implementation == "reference" and mesh["tp"].size > 1):
        raise SpecError(f"policy.logprobs = {implementation!r} with tp={mesh['tp'].size}",
                        rule=f"one of auto, {', '.join(IMPLEMENTATIONS)}; reference needs the whole vocabulary, tp=1",
                        fix="use auto, or vocabulary_parallel")
    model = _load(source, project, tied, seed)
    _refuse_unknown(model)
    model = lift_to_float64(model) if precision == "float64" else model.to(DTYPES[precision])
    model.set_attn_implementation(_registered())
    model.eval()  # no dropout; gradients are as in training
    config = model.config.get_text_config()
    shards = _cut(model, config, mesh)
    return Policy(model.to(mesh.device), mesh, shards, config.vocab_size, temperature, implementation)


def _load(source: str, project: Path | None, tied: bool | None, seed: int) -> Any:
    if source == "tiny-qwen3":
        from workbench.policy.tiny import tiny_qwen3

        return tiny_qwen3(19, tied=tied is not False, seed=seed)
    if tied is not None:
        raise SpecError(f"model.tied = {tied} with model.source = {source!r}",
                        rule="a checkpoint says itself whether its head is tied", fix="leave model.tied out")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder = (project or Path()) / source
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(folder if folder.is_dir() else source,
                                                                 dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise SpecError(f"load model.source = {source!r}", found=str(error).splitlines()[0],
                        rule="a checkpoint folder, a hub id that can be reached, or tiny-qwen3",
                        fix=f"check the path (looked in {folder.name!r} under the project root first)") from None


def _refuse_unknown(model: Any) -> None:
    """Refuse by name what this policy would silently leave out."""
    config = model.config.get_text_config()
    left_out = {name: getattr(config, name, None) for name in
                ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale")}
    if getattr(config, "use_sliding_window", False):
        left_out["use_sliding_window"] = True
    asked = [f"{name} = {value}" for name, value in left_out.items() if value]
    if asked:
        raise SpecError(f"policy of model type {config.model_type!r}", found=", ".join(asked),
                        rule="plain causal attention and plain logits", fix="use a model without these")


def _cut(model: Any, config: Any, mesh: Mesh) -> dict[str, ParameterShard]:
    axis = mesh["tp"]
    if axis.size == 1:
        return {name: ParameterShard() for name, _ in model.named_parameters()}
    own_plan = getattr(config, "base_model_tp_plan", None)
    if not own_plan:
        raise SpecError(f"tensor parallelism of model type {config.model_type!r}", found="no tensor-parallel plan",
                        rule="the model's configuration names one (base_model_tp_plan)", fix="use tp=1 for this model")
    check_heads({"query": config.num_attention_heads, "key/value": config.num_key_value_heads}, axis)
    prefix = model.base_model_prefix
    plan = {f"{prefix}.{pattern}": style for pattern, style in own_plan.items()}
    plan[_name_of(model, model.get_input_embeddings())] = "embedding_rowwise"
    head, tied = model.get_output_embeddings(), config.tie_word_embeddings
    if not tied:
        plan[_name_of(model, head)] = "vocabulary_head"
    shards = apply_tensor_parallel(model, plan, axis)
    if tied:
        head.weight = model.get_input_embeddings().weight
    return shards


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _registered() -> str:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, gathered_attention)
    return ATTENTION


