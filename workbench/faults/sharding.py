"""Known bugs: sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from workbench.faults import fault
from workbench.policy.model import Policy
from workbench.sharding.collectives import all_sum_, gather_scatter, sum_identity
from workbench.sharding.mesh import Axis, Mesh
from workbench.sharding.tensor_parallel import ParameterShard

Shards = Mapping[str, ParameterShard]


@fault(
    seam="split_row",
    origin="OpenRLHF GPTLMLoss and THUDM/slime#1383 (all-reduce outside autograd), deepspeedai/DeepSpeed#6841",
    signature="loss right; the gradient of a loss on whole documents up to cp times too small, exactly 1 / cp where a "
    "document's trained tokens are spread evenly; no effect at all under a token-level loss",
    shows_in={"layout": {"cp": 2}, "loss": {"name": "gspo"}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/parity/test_faults.py::test_a_missing_adjoint_of_a_document_sum_affects_only_document_losses",
    changes_metrics=False,
)
def document_sum_without_adjoint(split_row: Callable, *args: object) -> object:
    """A sum over a document that straddles cp ranks is reduced in forward, and its adjoint is the identity."""
    local = split_row(*args)
    return replace(local, sums=replace(local.sums, complete=sum_identity))


@fault(
    seam="workbench.policy.logprobs.vocabulary_parallel:all_sum",
    origin="NVIDIA/Megatron-LM#7452, finding 2",
    signature="every log-probability too low by log tp, entropy and log-normaliser too high by as much; the gradient "
    "subtracts only 1 / tp of the softmax: no constant, and it does not sum to 0 over the vocabulary",
    needs="tp",
    detected_by="tests/faults/test_unseen.py::test_copies_of_the_vocabulary_cost_every_token_log_tp",
)
def gathered_logits_in_parallel_softmax(all_sum: Callable, sums_3T: Tensor, axis: Axis) -> Tensor:
    """The head gathers its logits, and the vocabulary-parallel loss sums the normalisers of tp full copies."""
    whole_3T = all_sum(sums_3T, axis).clone()
    whole_3T[:2] *= axis.size  # the sums of exp and of exp times logit; only one rank has the target
    return whole_3T


@fault(
    seam="workbench.sharding.sequence_parallel:gather_slice",
    origin="awslabs/slapo#20, NVIDIA/Megatron-LM#7452, appendix B (Wan); inside layers: THUDM/slime#1748",
    signature="the head right, everything below it exactly tp times too big; loss right; no effect without sequence "
    "parallelism",
    shows_in={"layout": {"tp": 2, "sequence_parallel": True}, "model": {"tied": False}},
    hidden_in={"layout": {"sequence_parallel": False}},
    detected_by="tests/faults/test_unseen.py::test_tokens_summed_again_are_tp_times_too_big_below_the_head",
    changes_metrics=False,
)
def gathered_tokens_summed_again(gather_slice: Callable, local: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """A head that every rank computes identically gets tokens from a gather whose adjoint sums the equal gradients."""
    return gather_scatter(local, axis, dim=dim)


@fault(
    seam="sum_gradients",
    origin="ByteDance-Seed/VeOmni#1115 and #1086",
    signature="each rank steps with the gradient of its own tokens: cosine below 1, weights of cp ranks drift apart; "
    "loss right, as it has a reduction of its own",
    needs="cp",
    changes_metrics=False,
)
def gradients_summed_over_dp_only(
    sum_gradients: Callable, model: object, shards: object, mesh: Mesh, *more: object
) -> None:
    """The group over which gradients are reduced contains the data-parallel ranks and not the context-parallel ones."""
    sum_gradients(model, shards, replace(mesh, axes={**mesh.axes, "dp_cp": mesh["dp"]}), *more)


@fault(
    seam="workbench.policy.logprobs.vocabulary_parallel:identity_sum",
    origin="no single report: Megatron-LM's f (arXiv 1909.08053, section 3) left out before a vocabulary-parallel head",
    signature="loss and the head's own gradient right; everything below it gets the gradient of one shard of the "
    "vocabulary, different on every tp rank",
    shows_in={"layout": {"tp": 2}, "model": {"tied": False}},
    hidden_in={"layout": {"tp": 1}},
    changes_metrics=False,
)
def head_input_gradient_not_summed(identity_sum: Callable, value: Tensor, axis: Axis) -> Tensor:
    """The sum over tp of the hidden states' gradient, before a vocabulary-parallel head, is missing."""
    return value


@fault(
    seam="gradient_norms",
    origin="pytorch/pytorch#180346, NVIDIA/Megatron-LM#6489, NovaSky-AI/SkyRL#211",
    signature="gradients exact; norms of replicated weights sqrt(tp) times too big, and the global norm by their "
    "share, so that a threshold clips too early",
    needs="tp",
    changes_gradient=False,
)
def norm_counts_replicas(gradient_norms: Callable, model: object, shards: Shards, mesh: Mesh) -> dict[str, float]:
    """Squares of replicated gradients are summed over tp like those of sharded ones."""
    copies = mesh["tp"].size
    return {
        name: norm * copies**0.5 if shards[name].dim is None else norm
        for name, norm in gradient_norms(model, shards, mesh).items()
    }


@fault(
    seam="gradient_norms",
    origin="NVIDIA/Megatron-LM#7452, finding 8 (#7530): softmax_offset without the mark of sharded parameters",
    signature="gradients exact; norms of attention sinks are those of the heads of the first tp rank, and the global "
    "norm is too small by the others, so that a clip passes more",
    shows_in={"model": {"source": "tiny-gpt-oss"}, "layout": {"tp": 2}},
    hidden_in={"layout": {"tp": 1}},
    detected_by="tests/faults/test_layout_and_policy_faults.py::test_norms_of_slices_are_those_of_the_first_rank",
    changes_gradient=False,
)
def norm_misses_sinks_of_other_ranks(
    gradient_norms: Callable, model: object, shards: Shards, mesh: Mesh
) -> dict[str, float]:
    """Sinks, one for each head of a rank, count in the norm as if every tp rank had all of them."""
    as_copies = {name: replace(shard, dim=None) if name.endswith(".sinks") else shard for name, shard in shards.items()}
    return gradient_norms(model, as_copies, mesh)


@fault(
    seam="sum_gradients",
    origin="NVIDIA/Megatron-LM#7452, finding 11 (the norm of a linear attention); transformers has a special style for "
    "these weights, replicated_with_grad_allreduce",
    signature="only norm weights wrong: q_norm and k_norm (all norms under sequence parallelism) have their rank's "
    "part, different on every tp rank, so that copies drift apart; loss and everything else right",
    needs="tp",
    changes_metrics=False,
)
def norm_gradient_not_summed_over_tp(
    sum_gradients: Callable, model: object, shards: Shards, mesh: object, *more: object
) -> None:
    """Weights replicated over tp that act on a rank's own heads (or tokens) keep the gradient of those."""
    whole = {name: replace(shard, gradient_is_partial=False) for name, shard in shards.items()}
    sum_gradients(model, whole, mesh, *more)


@fault(
    seam="workbench.policy.model:Policy.hidden_states",
    origin="no single report: the sum over tp of Megatron-LM's finalize_model_grads, called for every micro-batch",
    signature="only norm weights wrong: of q_norm and k_norm (all norms under sequence parallelism) micro-batch k of K "
    "counts tp^(K-1-k) times; loss and everything else right",
    shows_in={"layout": {"tp": 2}, "data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen_at_first.py::test_norms_summed_once_a_micro_batch_are_the_only_wrong_parameters",
    changes_metrics=False,
)
def norm_gradient_summed_per_micro_batch(hidden_states: Callable, policy: Policy, *args: object) -> object:
    """Gradients of replicated weights are summed over tp per micro-batch, in a buffer that accumulates."""
    partial = [
        parameter.grad
        for name, parameter in policy.model.named_parameters()
        if policy.shards[name].gradient_is_partial and parameter.grad is not None
    ]
    all_sum_(partial, policy.mesh["tp"])
    return hidden_states(policy, *args)


@fault(
    seam="sum_gradients",
    origin="pytorch/torchtitan#2387 (fixed in #2416)",
    signature="only routers wrong: each rank has the part of its own tokens, and the copies drift apart from the "
    "first step; norms, experts, all else and the loss right",
    shows_in={"model": {"source": "tiny-qwen3-moe"}, "layout": {"tp": 2, "sequence_parallel": True}},
    hidden_in={"layout": {"sequence_parallel": False}},
    detected_by="tests/faults/test_unseen.py::test_routers_alone_have_their_ranks_part",
    changes_metrics=False,
)
def router_gradient_not_summed_over_tp(
    sum_gradients: Callable, model: object, shards: Shards, mesh: object, *more: object
) -> None:
    """Routers, replicated over tp and applied to a rank's own tokens, keep the gradient of those tokens."""
    left_out = {
        name: replace(shard, gradient_is_partial=False) if name.endswith("mlp.gate.weight") else shard
        for name, shard in shards.items()
    }
    sum_gradients(model, left_out, mesh, *more)


@fault(
    seam="sum_gradients",
    origin="NVIDIA-NeMo/RL#3788, ROCm/TransformerEngine#715, modelscope/mcore-bridge#101",
    signature="norms between blocks, and the last one, exactly tp times the right gradient; q_norm and k_norm, which "
    "need the sum, and all other parameters right; loss right; no effect under sequence parallelism",
    shows_in={"layout": {"tp": 2}},
    hidden_in={"layout": {"sequence_parallel": True}},
    detected_by="tests/faults/test_unseen.py::test_norms_that_were_whole_are_tp_times_too_big",
    changes_metrics=False,
)
def whole_norm_gradients_summed_over_tp(
    sum_gradients: Callable, model: object, shards: Shards, mesh: object, *more: object
) -> None:
    """All replicated weights are marked for the sum over tp, including norms of replicated activations."""
    all_parts = {
        name: replace(shard, gradient_is_partial=shard.gradient_is_partial or shard.dim is None)
        for name, shard in shards.items()
    }
    sum_gradients(model, all_parts, mesh, *more)


@fault(
    family="J",
    seam="workbench.policy.logprobs.vocabulary_parallel:whole_mean",
    origin="NVIDIA/Megatron-LM#7452 (finding 1), #7464 and #7466, earlier #737",
    signature="right log-probabilities and entropies; the smoothed part of the loss is another number on every tp "
    "rank, and its gradient 1 / (columns of a rank) instead of 1 / V: about tp times too big; no effect without "
    "smoothing",
    shows_in={"layout": {"tp": 2}, "loss": {"name": "sft", "surrogate": {"label_smoothing": 0.1}}},
    hidden_in={"loss": {"surrogate": {"label_smoothing": 0.0}}},
    detected_by="tests/faults/test_unseen_at_first.py::test_labels_are_smoothed_over_a_slice_of_the_vocabulary",
)
def smoothing_over_local_vocabulary(whole_mean: Callable, logits_TV: Tensor, vocabulary: int, axis: Axis) -> Tensor:
    """Label smoothing over a vocabulary-parallel head takes the mean over the columns of one tp rank."""
    return logits_TV.mean(-1)
