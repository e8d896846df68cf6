"""Known bugs: temperature, behaviour policy, sampling support."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from workbench.faults import fault
from workbench.losses.terms import LossInputs, Term
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.model import Policy
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import TrainingRow
from workbench.specs.losses import CorrectionSpec


@fault(
    seam="workbench.losses.build:apply_correction",
    origin="THUDM/slime#179",
    signature="the weight of each token is too big by its ratio policy / old: policy term and its gradient off by no "
    "constant, penalties right; no effect on-policy",
    shows_in={"loss": {"correction": {"kind": "importance_sampling"}}},
    hidden_in={"loss": {"old_policy": "current"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_weight_of_the_live_policy_spares_the_penalty",
)
def correction_weight_of_current_policy(
    apply_correction: Callable, term: Term, inputs: LossInputs, spec: CorrectionSpec
) -> Term:
    """Policy / sampler, instead of old / sampler, multiplies a term that contains policy / old already."""
    return apply_correction(term, replace(inputs, old_logprobs_T=inputs.policy_logprobs_T.detach()), spec)


@fault(
    seam="shift_targets",
    origin="huggingface/trl#6789 and #7269, NovaSky-AI/SkyRL#877, vllm-project/vllm#42259",
    signature="every weight against the sampler, and with it the policy term and its gradient, exactly the top-p mass "
    "times the right one, cosine 1; other terms right; no effect without such a weight",
    shows_in={"loss": {"correction": {"kind": "importance_sampling"}}},
    hidden_in={"loss": {"correction": {"kind": "none"}}, "record": {"metrics": "none"}},
)
def kept_mass_ignored(shift_targets: Callable, row: RolloutBatch) -> TrainingRow:
    """The sampler's log-probabilities are over the top-p support (0.9 of the mass), the trainer's over all tokens."""
    right = shift_targets(row)
    if right.sampler_logprobs_T is None:
        return right
    truncated_T = right.sampler_logprobs_T - math.log(TOP_P_MASS)
    return replace(right, sampler_logprobs_T=torch.where(right.loss_mask_T, truncated_T, 0.0))


TOP_P_MASS = 0.9


@fault(
    seam="workbench.losses.clipped:clip_ratio",
    origin="ChenmienTan/RL2#21",
    signature="tokens with a negative advantage and a ratio below 1 - epsilon keep their gradient, and their loss is "
    "smaller in size; all others right, as are log-probabilities, ratios and the penalty",
    shows_in={"loss": {"surrogate": {"clip_low": 0.02}}},
    hidden_in={"loss": {"surrogate": {"clip_low": 0.5}}},
    detected_by="tests/faults/test_unseen.py::test_a_lower_bound_at_epsilon_frees_tokens_of_negative_advantage",
)
def lower_clip_at_epsilon(clip_ratio: Callable, *values: object, clip_low: float, **bounds: object) -> Term:
    """The ratio is clipped to [epsilon, 1 + epsilon], so tokens that became unlikelier are pushed further down."""
    return clip_ratio(*values, clip_low=1 - clip_low, **bounds)


@fault(
    seam="run_step",
    origin="OpenRLHF/OpenRLHF#853, databricks/compose-rl#105, huggingface/trl#3029",
    signature="the penalty alone wrong, not 0 if policy and reference are the same, and its gradient by no "
    "constant; log-probabilities, ratios and the policy term right",
    shows_in={"policy": {"temperature": 0.7}, "loss": {"kl": {"coefficient": 0.3}}},
    hidden_in={"policy": {"temperature": 1.0}},
    detected_by="tests/faults/test_unseen.py::test_a_reference_without_temperature_moves_the_penalty_alone",
)
def reference_at_temperature_one(
    run_step: Callable, policy: Policy, loss: object, rows: list, *more: object, **options: object
) -> object:
    """The reference is evaluated without the policy's temperature: the policy is drawn towards a flatter one."""
    return run_step(policy, loss, _without_temperature(policy, rows, "ref_logprobs_T"), *more, **options)


@fault(
    seam="run_step",
    origin="huggingface/trl#4159 (fixed in #4163), allenai/open-instruct#1678, vllm-project/vime#64",
    signature="weights against the sampler wrong by the token's p at its temperature over p at 1, most of them too big "
    "for temperatures below 1; the policy term with them; log-probabilities of the policy, ratios against the old "
    "policy and the penalty right",
    shows_in={"policy": {"temperature": 0.7}, "loss": {"correction": {"kind": "tis"}}},
    hidden_in={"policy": {"temperature": 1.0}},
    detected_by="tests/faults/test_unseen.py::test_other_logprobs_of_the_sampler_move_weights_and_the_policy_term",
)
def sampler_logprobs_before_temperature(
    run_step: Callable, policy: Policy, loss: object, rows: list, *more: object, **options: object
) -> object:
    """A sampler returns the log-probabilities of its raw logits, but samples from those divided by the temperature."""
    return run_step(policy, loss, _without_temperature(policy, rows, "sampler_logprobs_T"), *more, **options)


def _without_temperature(policy: Policy, rows: list, field: str) -> list:
    """Rows with the log-probabilities of a field moved by the policy's own at temperature 1 minus those at its own."""
    changed = []
    for local in rows:
        row = local.row
        with torch.no_grad():
            hidden_TD = policy.hidden_states(row.tokens_T, row.positions_T, local.attention)
            raw_T, own_T = (
                each.token_logprobs(hidden_TD, row.targets_T, outputs=()).logprobs_T
                for each in (replace(policy, temperature=1.0), policy)
            )
        moved_T = getattr(row, field) + torch.where(row.loss_mask_T, raw_T - own_T, 0.0)
        changed.append(replace(local, row=replace(row, **{field: moved_T})))
    return changed


@fault(
    seam="workbench.losses.build:apply_correction",
    origin="NVIDIA-NeMo/RL#2269, huggingface/trl#5814",
    signature="a document's weight is the right one to the power of its length: long documents vanish or are at the "
    "bound, those of one token are right; no constant factor",
    shows_in={"loss": {"correction": {"kind": "sequence_tis_mean"}}},
    hidden_in={"loss": {"correction": {"kind": "tis"}}},
)
def sequence_weight_sums_logs(apply_correction: Callable, term: Term, inputs: LossInputs, spec: CorrectionSpec) -> Term:
    """Log(old / sampler) of a document is summed instead of averaged: both are called sequence-level."""
    summed = spec.model_copy(update={"ratio": "document_sum"}) if spec.ratio == "document_mean" else spec
    return apply_correction(term, inputs, summed)


@fault(
    seam="workbench.policy.model:Policy.token_logprobs",
    origin="NVIDIA-NeMo/RL, use_fused_linear_logprobs (7ea279ab: read, not run)",
    signature="values that are no log-probabilities, those of temperature 1 over the temperature; the gradient is that "
    "of the softmax of temperature 1. If old ones are computed the same way every ratio starts at 1",
    shows_in={"policy": {"temperature": 0.7}},
    hidden_in={"policy": {"temperature": 1.0}},
)
def temperature_divides_logprobs(
    token_logprobs: Callable,
    self: Policy,
    hidden_TD: Tensor,
    targets_T: Tensor,
    temperature_T: Tensor | None = None,
    **options: object,
) -> TokenLogprobs:
    """The output of the fused head is treated as logits: log p of temperature 1 is divided by the temperature."""
    raw = token_logprobs(replace(self, temperature=1.0), hidden_TD, targets_T, **options)
    divisor = self.temperature if temperature_T is None else temperature_T
    return raw._replace(logprobs_T=raw.logprobs_T / divisor)


@fault(
    seam="workbench.policy.model:Policy.token_logprobs",
    origin="NVIDIA-NeMo/RL#660, verl-project/verl#3133, THUDM/slime#557, PrimeIntellect-ai/prime-rl#697, "
    "ServiceNow/Fast-LLM e4d5845a",
    signature="ratios that are not 1 in the first step: at 0.7 a mean of 1.2 here (1.08 where Fast-LLM saw it), "
    "gradient 0.85 of the right one with cosine 0.88; entropy that of another temperature",
    shows_in={"policy": {"temperature": 0.7}},
    hidden_in={"policy": {"temperature": 1.0}},
)
def temperature_missing_in_policy(
    token_logprobs: Callable,
    self: Policy,
    hidden_TD: Tensor,
    targets_T: Tensor,
    temperature_T: Tensor | None = None,
    **options: object,
) -> TokenLogprobs:
    """Log-probabilities of the policy are at temperature 1, the recorded ones at the sampler's temperature."""
    return token_logprobs(replace(self, temperature=1.0), hidden_TD, targets_T, **options)
