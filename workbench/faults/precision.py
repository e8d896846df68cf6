"""Known bugs: precision and fused kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.faults import fault
from workbench.losses.terms import LossInputs
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.model import Policy
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import TrainingRow


@fault(
    seam="workbench.policy.model:token_logprobs",
    origin="verl-project/verl, its fused head (read, not run)",
    signature="gradient, loss and log-probabilities right, unless the loss has an entropy bonus; each entropy off by "
    "up to 1 in 256 of itself, so that many share few values",
    hidden_in={"record": {"metrics": "none", "tokens": False}},
    detected_by="tests/faults/test_unseen.py::test_a_rounded_entropy_is_the_only_wrong_quantity",
    changes_gradient=False,
)
def entropy_in_bfloat16(token_logprobs: Callable, *args: object, **options: object) -> TokenLogprobs:
    """A fused head computes log-probabilities in float32 and stores the entropy in the dtype of the hidden states."""
    head_output = token_logprobs(*args, **options)
    if head_output.entropy_T is None:
        return head_output
    return head_output._replace(entropy_T=head_output.entropy_T.bfloat16().to(head_output.entropy_T.dtype))


@fault(
    seam="loss_inputs",
    origin="linkedin/Liger-Kernel#1298 (reduction none)",
    signature="loss and metrics right; every token has the gradient coefficient of the first trained one of its "
    "micro-batch, regardless of its own advantage, weight and clip: cosine far from 1; no effect if all tokens weigh "
    "the same (a likelihood averaged over tokens)",
    hidden_in={"loss": {"name": "sft", "kl": {"coefficient": 0.0}}},
    detected_by="tests/faults/test_unseen.py::test_every_token_pulls_as_the_first",
    changes_metrics=False,
)
def first_cotangent_for_all(
    loss_inputs: Callable, row: TrainingRow, output: TokenLogprobs, *more: object
) -> LossInputs:
    """A kernel written for a scalar loss reads the incoming gradient of the first token, and takes it for all."""
    return loss_inputs(row, output._replace(logprobs_T=_TakeFirst.apply(output.logprobs_T, row.loss_mask_T)), *more)


class _TakeFirst(Function):
    """The identity, whose gradient on every trained token is that of the first trained token."""

    @staticmethod
    def forward(ctx: Any, logprobs_T: Tensor, loss_mask_T: Tensor) -> Tensor:
        ctx.save_for_backward(loss_mask_T)
        return logprobs_T.clone()

    @staticmethod
    def backward(ctx: Any, cotangents_T: Tensor) -> tuple[Tensor, None]:
        (loss_mask_T,) = ctx.saved_tensors
        if not loss_mask_T.any():
            return cotangents_T, None
        return torch.where(loss_mask_T, cotangents_T[loss_mask_T][0], 0.0), None


@fault(
    seam="workbench.policy.model:Policy.hidden_states",
    origin="deepspeedai/DeepSpeed#1800, hiyouga/LlamaFactory#9769, pytorch/pytorch#194628",
    signature="loss, metrics and log-probabilities right; every gradient off by about 1e-3 of itself, more with more "
    "micro-batches; no effect with one",
    needs="micro_batches",
    detected_by="tests/faults/test_unseen.py::test_sums_in_bfloat16_are_off_by_thousandths_in_the_gradient_alone",
    changes_metrics=False,
)
def gradients_kept_in_bfloat16(hidden_states: Callable, policy: Policy, *args: object) -> object:
    """The accumulation buffer of micro-batches has the dtype of bfloat16 weights."""
    for parameter in policy.model.parameters():
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.bfloat16())
    return hidden_states(policy, *args)


@fault(
    seam="workbench.policy.logprobs.chunked:add_gemm_",
    origin="linkedin/Liger-Kernel#1324, #1391 and #1454, NVIDIA/Megatron-LM#2739",
    signature="gradient of the head (and of an embedding tied to it) off by about 1e-3 of itself, more with more "
    "chunks; loss and all other gradients right",
    shows_in={"model": {"tied": False}, "policy": {"logprobs": "chunked", "chunk_tokens": 4}},
    hidden_in={"policy": {"logprobs": "reference", "chunk_tokens": 4096}},
    changes_metrics=False,
)
def head_gradient_in_bfloat16(add_gemm_: Callable, weight_VD: Tensor, *more: Tensor, first: bool) -> None:
    """The gradients of the output head are summed over chunks in the dtype of a bfloat16 weight."""
    add_gemm_(weight_VD, *more, first=first)
    weight_VD.copy_(weight_VD.bfloat16())


@fault(
    seam="workbench.policy.model:token_logprobs",
    origin="NovaSky-AI/SkyRL, its fused head (read, not run)",
    signature="log-probabilities of every token off by about 1e-3 nats to either side and all gradients by about 1e-3 "
    "of themselves; no effect at temperature 1",
    shows_in={"policy": {"temperature": 0.7}},
    hidden_in={"policy": {"temperature": 1.0}},
    detected_by="tests/faults/test_unseen_at_first.py::test_eight_bits_of_a_head_move_every_log_probability_by_thousandths",
)
def head_over_temperature_in_bfloat16(
    token_logprobs: Callable,
    hidden_TD: Tensor,
    *,
    weight_VD: Tensor,
    temperature: float | Tensor = 1.0,
    **options: object,
) -> TokenLogprobs:
    """The weight instead of the logits is divided by the temperature, and the quotient is stored in bfloat16."""
    if isinstance(temperature, Tensor) or temperature == 1.0:
        return token_logprobs(hidden_TD, weight_VD=weight_VD, temperature=temperature, **options)
    rounded_VD = (weight_VD / temperature).bfloat16().to(weight_VD.dtype)
    return token_logprobs(hidden_TD, weight_VD=rounded_VD, temperature=1.0, **options)


@fault(
    seam="workbench.policy.logprobs.chunked:_product_",
    origin="verl-project/verl, its fused head (read, not run)",
    signature="log-probabilities of every token off by about 1e-3 nats to either side, more with larger logits, and "
    "all gradients by about 1e-3 of themselves; no factor",
    shows_in={"policy": {"logprobs": "chunked"}},
    hidden_in={"policy": {"logprobs": "reference"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_eight_bits_of_a_head_move_every_log_probability_by_thousandths",
)
def logits_in_bfloat16(product_: Callable, logits_CV: Tensor, hidden_CD: Tensor, weight_VD: Tensor) -> None:
    """A fused head stores logits in bfloat16, so that log-probabilities and entropy have eight bits."""
    product_(logits_CV, hidden_CD, weight_VD)
    logits_CV.copy_(logits_CV.bfloat16())


@fault(
    seam="shift_targets",
    origin="THUDM/slime#245 (rollout_log_probs; again in #892)",
    signature="the policy's own log-probabilities right, old ones off by up to 1 in 256 of themselves to either side, "
    "and with them each ratio, more on unlikely tokens; no effect if the policy is its own old one",
    hidden_in={"loss": {"old_policy": "current"}},
    detected_by="tests/faults/test_unseen.py::test_rounded_old_logprobs_are_off_by_their_last_bit",
)
def old_logprobs_in_bfloat16(shift_targets: Callable, row: RolloutBatch) -> TrainingRow:
    """The old log-probabilities, the denominator of the ratio, are stored with eight bits."""
    return shift_targets(replace(row, old_logprobs_T=row.old_logprobs_T.bfloat16().to(row.old_logprobs_T.dtype)))


@fault(
    seam="workbench.policy.model:Policy.token_logprobs",
    origin="verl-project/verl#5349, #2656 and #2899",
    signature="every log-probability too small, by log(1 + padding / sum of exp of logits): more if logits are small; "
    "ratios below 1 in the first step; right if the tile divides the vocabulary",
)
def padded_vocabulary_counted(
    token_logprobs: Callable, self: Policy, *args: object, outputs: Iterable[str] = (), **options: object
) -> TokenLogprobs:
    """A kernel that computes 32 columns of the vocabulary at a time adds exp(0) for each padding column."""
    right = token_logprobs(self, *args, outputs={*outputs, "logsumexp"}, **options)
    padding = -self.vocabulary_size % TILE
    if not padding:
        return right
    padded_T = torch.logaddexp(right.logsumexp_T, right.logsumexp_T.new_full((), math.log(padding)))
    return right._replace(logprobs_T=right.logprobs_T + right.logsumexp_T - padded_T, logsumexp_T=padded_T)


TILE = 32
"""Columns that a kernel computes at a time."""


@fault(
    seam="transformers.models.qwen3.modeling_qwen3:apply_rotary_pos_emb",
    origin="huggingface/transformers#29285, KellerJordan/modded-nanogpt#39, NVIDIA/Megatron-LM#744",
    signature="log-probabilities off by about 1e-3 nats to either side, except for the first token of a document, "
    "which attends only to itself; all gradients by about 1e-3 of themselves",
    detected_by="tests/faults/test_unseen.py::test_rounded_rotary_tables_spare_the_first_step_of_a_document",
)
def rotary_tables_in_bfloat16(
    apply_rotary_pos_emb: Callable, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: object, **options: object
) -> object:
    """The tables of rotary angles are cast to the dtype of a bfloat16 model, in a run of higher precision."""
    return apply_rotary_pos_emb(q, k, cos.bfloat16().to(cos.dtype), sin.bfloat16().to(sin.dtype), *more, **options)


@fault(
    seam="sum_gradients",
    origin="no single report: the reduction of MixedPrecisionPolicy(param_dtype=torch.bfloat16) without reduce_dtype",
    signature="loss, metrics and log-probabilities right; every gradient off by about 1e-3 of itself; nothing "
    "with one rank, which sums nothing",
    shows_in={"layout": {"dp": 2}},
    changes_metrics=False,
)
def reduction_in_bfloat16(
    sum_gradients: Callable, model: object, shards: object, mesh: object, dtype: object, *more: object
) -> None:
    """Gradients are summed over ranks in the dtype of the model's computation."""
    sum_gradients(model, shards, mesh, torch.bfloat16, *more)


@fault(
    seam="transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeSparseMoeBlock.forward",
    origin="no single report: what --moe-router-dtype fp32 of NVIDIA/Megatron-LM is for",
    signature="log-probabilities off by about 1e-3 nats, and by much more where two experts are so close that others "
    "are chosen; a model without experts is right",
    shows_in={"model": {"source": "tiny-qwen3-moe"}},
    hidden_in={"model": {"source": "tiny-qwen3"}},
)
def router_in_bfloat16(forward: Callable, self: Any, hidden_states: Tensor) -> Tensor:
    """A router computes its probabilities from hidden states in bfloat16, in a run of higher precision."""
    tokens_TD = hidden_states.flatten(0, -2)
    _, weights_TK, experts_TK = self.gate(tokens_TD.bfloat16().to(tokens_TD.dtype))
    weights_TK = weights_TK.bfloat16().to(weights_TK.dtype)
    return self.experts(tokens_TD, experts_TK, weights_TK).view_as(hidden_states)
