"""Known bugs: missing or extra gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.faults import fault
from workbench.losses.terms import LossInputs, Term
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.model import Policy
from workbench.specs.losses import CorrectionSpec, KLSpec


@fault(
    seam="workbench.losses.build:kl_term",
    origin="NVIDIA-NeMo/RL#2958",
    signature="loss right; tokens whose estimate is clamped get the gradient of their weight times the bound, but "
    "should get none from the penalty; all other tokens right",
    shows_in={
        "loss": {
            "kl": {"coefficient": 0.5, "estimator": "k1", "importance": "old", "gradient": "score", "input_clamp": 0.1}
        }
    },
    hidden_in={"loss": {"kl": {"input_clamp": None}}},
    detected_by="tests/faults/test_unseen.py::test_a_weight_beyond_the_clamp_is_all_that_is_wrong",
    changes_metrics=False,
)
def clamped_kl_keeps_weight_gradient(kl_term: Callable, inputs: LossInputs, spec: KLSpec) -> Term:
    """A clamp stops the gradient of a KL estimate, but not that of the importance weight that multiplies it."""
    term = kl_term(inputs, spec)
    if spec.input_clamp is None or spec.gradient != "score":
        return term
    clamped_T = inputs.log_ratio(spec.against).detach().abs() > spec.input_clamp
    logprobs_T = torch.where(clamped_T, inputs.counted_logprobs_T, 0.0)
    return replace(term, values_T=term.values_T + term.values_T.detach() * (logprobs_T - logprobs_T.detach()))


@fault(
    seam="workbench.losses.clipped:clip_ratio",
    origin="rllm-org/rllm#81",
    signature="tokens that are reported as clipped keep ratio times advantage as their gradient, and their value; all "
    "other tokens, the penalty and all metrics right; no effect under a loss without a clip",
    hidden_in={"loss": {"name": "reinforce"}},
    detected_by="tests/faults/test_unseen.py::test_a_clip_that_is_never_applied_is_an_importance_weight",
)
def clip_never_applied(
    clip_ratio: Callable, log_ratio_T: Tensor, advantages_T: Tensor, *more: object, **bounds: object
) -> Term:
    """The unclipped surrogate is averaged instead of the maximum of both branches; only the report clips."""
    term = clip_ratio(log_ratio_T, advantages_T, *more, **bounds)
    return replace(term, values_T=-log_ratio_T.exp() * advantages_T)


@fault(
    seam="workbench.losses.build:apply_correction",
    origin="verl-project/verl#4105",
    signature="loss right; a token's gradient has an extra part, its loss times the gradient of its log weight: "
    "exactly twice the policy term's gradient on-policy, if the weight is not at a bound",
    shows_in={"loss": {"old_policy": "current", "correction": {"kind": "tis"}}},
    hidden_in={"loss": {"correction": {"kind": "none"}}},
    changes_metrics=False,
)
def correction_weight_not_detached(
    apply_correction: Callable, term: Term, inputs: LossInputs, spec: CorrectionSpec
) -> Term:
    """Policy / sampler multiplies the loss of a token without being detached."""
    right = apply_correction(term, inputs, spec)
    if spec.ratio != "token":
        return right
    logprobs_T = inputs.counted_logprobs_T
    live_T = torch.where(right.extras["truncated"], 0.0, logprobs_T - logprobs_T.detach())
    return replace(right, values_T=right.values_T * live_T.exp())


@fault(
    seam="workbench.losses.build:entropy_bonus",
    origin="huggingface/trl#6625",
    signature="loss and metrics right; the gradient is that without a bonus, exactly 0 if the bonus is the only term",
    shows_in={"loss": {"entropy_coefficient": 0.3}},
    hidden_in={"loss": {"entropy_coefficient": 0.0}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_bonus_without_gradient_is_that_of_no_bonus",
    changes_metrics=False,
)
def entropy_without_gradient(entropy_bonus: Callable, *args: object, **options: object) -> Term:
    """A chunked operator ignores the incoming gradient of its entropy."""
    term = entropy_bonus(*args, **options)
    return replace(term, values_T=term.values_T.detach())


@fault(
    seam="workbench.policy.model:Policy.token_logprobs",
    origin="verl-project/verl#6913",
    signature="loss and metrics right, every gradient exactly 0",
    shows_in={"policy": {"logprobs": "chunked"}},
    hidden_in={"policy": {"logprobs": "reference"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_detached_head_output_trains_nothing",
    changes_metrics=False,
)
def head_output_detached(token_logprobs: Callable, self: Policy, *args: object, **options: object) -> TokenLogprobs:
    """The output of a fused head is detached and then set to require a gradient, so that backward raises no error."""
    head_output: TokenLogprobs = token_logprobs(self, *args, **options)
    if self.implementation != "chunked":
        return head_output
    return head_output.map(lambda x_T: x_T.detach().requires_grad_())


@fault(
    seam="workbench.policy.model:Policy.head_arguments",
    origin="ServiceNow/Fast-LLM 0f90f20b (fp32_lm_head)",
    signature="gradient of the head exactly 0 (a tied embedding keeps its gradient as an embedding), all others and "
    "the loss right",
    shows_in={"model": {"tied": False}},
    changes_metrics=False,
)
def head_weight_without_gradient(head_arguments: Callable, policy: object) -> dict:
    """The weight of the output head is cast to float32 as a copy, and the copy's gradient is lost."""
    arguments = head_arguments(policy)
    return arguments | {"weight_VD": arguments["weight_VD"].detach()}


@fault(
    seam="workbench.losses.build:kl_term",
    origin="NovaSky-AI/SkyRL#1353",
    signature="loss right; the gradient is that of the other terms alone, exactly 0 if the penalty is the only one",
    shows_in={"loss": {"kl": {"coefficient": 0.3}}},
    hidden_in={"loss": {"kl": {"coefficient": 0.0}}},
    changes_metrics=False,
)
def kl_without_gradient(kl_term: Callable, *args: object) -> Term:
    """The KL penalty is computed without recording a graph."""
    term = kl_term(*args)
    return replace(term, values_T=term.values_T.detach())


@fault(
    seam="workbench.losses.build:kl_term",
    origin="NVIDIA-NeMo/RL#2506",
    signature="loss right; a token's part from the penalty is k' instead of k' + k, for k1 the same 1 on every token "
    "(0 in expectation) instead of 1 - d: the error is smaller near the reference; the policy term right",
    shows_in={"loss": {"kl": {"coefficient": 0.3, "gradient": "score", "estimator": "k1"}}},
    hidden_in={"loss": {"kl": {"gradient": "path"}}},
    detected_by="tests/faults/test_unseen_at_first.py::test_without_the_score_a_penalty_has_the_gradient_of_its_path",
    changes_metrics=False,
)
def kl_without_score_gradient(kl_term: Callable, inputs: LossInputs, spec: KLSpec) -> Term:
    """The estimate is differentiated as if the tokens were fixed, although the policy samples them: k' without k."""
    return kl_term(inputs, spec.model_copy(update={"gradient": "path"}))


@fault(
    seam="transformers.models.qwen3.modeling_qwen3:Qwen3DecoderLayer.forward",
    origin="huggingface/transformers#21381 and #23170, mlfoundations/open_clip#573, pytorch/pytorch#7617",
    signature="loss and metrics right; the head and the last norm have their gradient, all decoder layers and the "
    "embedding have 0",
    shows_in={"model": {"tied": False}},
    detected_by="tests/faults/test_unseen.py::test_without_layers_the_head_and_the_last_norm_train",
    changes_metrics=False,
)
def layers_without_gradient(forward: Callable, self: Any, *args: object, **options: object) -> object:
    """Reentrant checkpointing after a frozen embedding: without a gradient of its input, a layer's output has none."""
    with torch.no_grad():
        return forward(self, *args, **options)


@fault(
    seam="transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeSparseMoeBlock.forward",
    origin="NVIDIA-NeMo/Automodel#2995",
    signature="loss and metrics right; gradient of every router exactly 0, experts of the last layer right, gradients "
    "below a router wrong by the missing part through it",
    shows_in={"model": {"source": "tiny-qwen3-moe"}},
    hidden_in={"model": {"source": "tiny-qwen3"}},
    detected_by="tests/faults/test_unseen.py::test_a_detached_router_spares_the_last_experts",
    changes_metrics=False,
)
def router_without_gradient(forward: Callable, self: Any, hidden_states: Tensor) -> Tensor:
    """Routing weights are gathered by a collective without a gradient: a router learns from auxiliary losses alone."""
    tokens_TD = hidden_states.flatten(0, -2)
    _, weights_TK, experts_TK = self.gate(tokens_TD)
    return self.experts(tokens_TD, experts_TK, weights_TK.detach()).view_as(hidden_states)


@fault(
    seam="workbench.losses.sequence:log_sequence_ratio",
    origin="PrimeIntellect-ai/prime-rl#1123",
    signature="loss and metrics right; the gradient is that of the penalties alone (without one backward fails)",
    shows_in={"loss": {"name": "gspo"}},
    hidden_in={"loss": {"name": "gspo_token"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_detached_sequence_ratio_leaves_the_penalty",
    changes_metrics=False,
)
def sequence_ratio_without_gradient(log_sequence_ratio: Callable, *args: object) -> Tensor:
    """GSPO's ratio is detached as in its per-token form, but without the token's own gradient path."""
    return log_sequence_ratio(*args).detach()
