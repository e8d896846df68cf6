"""Known bugs: advantages and groups; auxiliary losses and penalties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.faults import fault
from workbench.losses.terms import LossInputs, Term
from workbench.reduction.weights import compute_advantages
from workbench.rollouts.advantages.inputs import AdvantageInputs, Estimate
from workbench.rollouts.advantages.registry import WITHOUT_BASELINE
from workbench.rollouts.advantages.tokens import whiten
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.run import RunSpec


@fault(
    seam="workbench.reduction.weights:estimate_advantages",
    origin="axon-rl/gem#113, amazon-science/reskill#12",
    signature="right log-probabilities; all advantages shifted and scaled by one pair of numbers of the step, so that "
    "completions whose group has no signal train too; the policy term alone is wrong",
    shows_in={"data": {"advantages": {"name": "grpo"}}},
    hidden_in={"data": {"advantages": {"name": "recorded"}}},
    detected_by="tests/faults/test_unseen.py::test_twice_normalised_advantages_have_mean_0_and_deviation_1",
)
def advantages_normalised_twice(
    estimate_advantages: Callable, name: str, inputs: AdvantageInputs, **settings: object
) -> Estimate:
    """The learner whitens, over all tokens of the step, advantages that the actor normalised within their groups."""
    estimate = estimate_advantages(name, inputs, **settings)
    if name != "grpo":
        return estimate
    return estimate._replace(advantages_T=whiten(estimate.advantages_T, inputs.loss_mask_T))


@fault(
    seam="pack_step",
    origin="google/tunix#816 and #820",
    signature="right log-probabilities; completions alone in their micro-batch get an advantage of 0, others one "
    "against fewer; the policy term alone is wrong; no effect if groups are kept together",
    shows_in={"data": {"micro_batches": 3, "advantages": {"name": "grpo"}}},
    hidden_in={"data": {"keep_groups": True}},
    detected_by="tests/faults/test_unseen_at_first.py::test_baselines_of_micro_batches_turn_the_policy_term_alone",
)
def baseline_per_micro_batch(
    pack_step: Callable, batch: RolloutBatch, spec: RunSpec, *args: object
) -> list[RolloutBatch]:
    """Micro-batches are smaller than a group, and each computes the baseline from its own completions."""
    return [compute_advantages(row, spec) for row in pack_step(batch, spec, *args)]


@fault(
    seam="compute_advantages",
    origin="inclusionAI/AReaL#1559 and #1563, NVIDIA-NeMo/RL#2176",
    signature="right log-probabilities, advantages of other signs and sizes; the policy term alone points elsewhere; "
    "no effect if advantages use no group",
    shows_in={"data": {"advantages": {"name": "grpo"}}},
    hidden_in={"data": {"advantages": {"name": "recorded"}}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_wrong_advantages_turn_the_policy_term_alone",
)
def groups_by_position(compute_advantages: Callable, batch: RolloutBatch, spec: RunSpec) -> RolloutBatch:
    """Rewards are reshaped to prompts x completions, although some were dropped or reordered: groups mix prompts."""
    if batch.group_ids_N is None:
        return compute_advantages(batch, spec)
    group_size = max(batch.num_documents // batch.group_ids_N.unique().numel(), 1)
    by_position_N = torch.arange(batch.num_documents) // group_size
    wrong = compute_advantages(replace(batch, group_ids_N=by_position_N), spec)
    return replace(wrong, group_ids_N=batch.group_ids_N)


@fault(
    seam="workbench.reduction.weights:kl_in_reward",
    origin="nebuly-ai/optimate#298 (Chatllama)",
    signature="right log-probabilities; advantages move the other way with the distance from the reference, the more "
    "the greater the coefficient; the policy term alone is wrong; no effect without a penalty",
    shows_in={
        "data": {"advantages": {"name": "reinforce_plus_plus"}},
        "loss": {"kl": {"coefficient": 0.5, "estimator": "k1", "placement": "reward"}},
    },
    hidden_in={"loss": {"kl": {"coefficient": 0.0}}},
    detected_by="tests/faults/test_unseen.py::test_a_penalty_of_the_other_sign_moves_advantages_alone",
)
def kl_added_to_reward(kl_in_reward: Callable, *args: object) -> Tensor:
    """The KL penalty is added to the reward instead of subtracted, so that distance from the reference is rewarded."""
    return -kl_in_reward(*args)


@fault(
    seam="workbench.rollouts.advantages.groups:_deviation_of_others",
    origin="NVIDIA-NeMo/RL#1519",
    signature="right log-probabilities; advantages of such completions 1 / epsilon (a million) times too big, "
    "and with them the policy term and the gradient's norm; other completions right",
    shows_in={"data": {"advantages": {"name": "leave_one_out"}}},
    hidden_in={"data": {"advantages": {"name": "rloo"}}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_deviation_of_zero_makes_advantages_of_millions",
)
def leave_one_out_over_zero_deviation(deviation_of_others: Callable, rewards: Tensor, *more: object) -> Tensor:
    """Advantages are divided by the others' deviation, 0 if these are equal or one: only epsilon is left."""
    return deviation_of_others(rewards, *more).clamp_min(torch.finfo(rewards.dtype).tiny)


@fault(
    seam="workbench.reduction.weights:estimate_advantages",
    origin="NVIDIA-NeMo/RL#3467, verl-project/verl#6362 and #6375",
    signature="right log-probabilities, advantages shifted in groups with a masked completion and right in the others; "
    "the policy term alone is wrong",
    shows_in={"data": {"advantages": {"name": "grpo"}}},
    hidden_in={"data": {"advantages": {"name": "reinforce_plus_plus"}}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_wrong_advantages_turn_the_policy_term_alone",
)
def masked_rows_in_baseline(
    estimate_advantages: Callable, name: str, inputs: AdvantageInputs, **settings: object
) -> Estimate:
    """Rejected, truncated or filtered completions enter mean and deviation of their group but do not train."""
    compares = name not in WITHOUT_BASELINE
    return estimate_advantages(name, inputs, **({"masked_in_baseline": True} if compares else {}) | settings)


@fault(
    seam="workbench.losses.sequence:advantages_at",
    origin="areal-project/AReaL#1346 (padding in the advantage of a sequence)",
    signature="the policy term of a document is too small by the share of its tokens that train, penalties and ratios "
    "right: no constant, another direction; no effect if each token keeps its advantage",
    shows_in={"loss": {"name": "gspo", "surrogate": {"advantage_level": "document"}}},
    hidden_in={"loss": {"surrogate": {"advantage_level": "token"}}},
    detected_by="tests/faults/test_unseen.py::test_a_document_advantage_over_all_tokens_spares_the_penalty",
)
def prompt_in_document_advantage(advantages_at: Callable, inputs: LossInputs, advantage_level: str) -> Tensor:
    """A document's advantage is a mean that counts prompt and tool tokens, whose advantage is 0."""
    means_T = advantages_at(inputs, advantage_level)
    ids_T = inputs.document_ids_T
    if advantage_level != "document" or inputs.sums is None or ids_T is None:
        return means_T
    whole_T = inputs.sums.document_ids_T
    tokens_N = torch.bincount(whole_T[whole_T >= 0], minlength=1)
    return means_T * inputs.document_lengths_T / tokens_N[ids_T.clamp_min(0)]


@fault(
    seam="pack_step",
    origin="THUDM/slime#2235 (whitening over too few ranks)",
    signature="right log-probabilities, another mean advantage on each rank; a gradient of about the right size in "
    "another direction; no effect at dp = 1",
    shows_in={"layout": {"dp": 2}, "data": {"advantages": {"name": "reinforce_plus_plus"}}},
    hidden_in={"layout": {"dp": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_wrong_advantages_turn_the_policy_term_alone",
)
def whitening_per_rank(pack_step: Callable, batch: RolloutBatch, spec: RunSpec, *args: object) -> list[RolloutBatch]:
    """Mean and deviation of the whitening are taken over a rank's own tokens instead of over all of the step."""
    rows = pack_step(batch, spec, *args)
    if spec.data.advantages.name not in _WHITENED:
        return rows
    per_rank, whitened = len(rows) // spec.layout.dp, []
    for first in range(0, len(rows), per_rank):
        local = rows[first : first + per_rank]
        advantages_S = _advantages_of_rows(batch, spec, local)
        whitened += [replace(row, advantages_T=advantages_S[row.source_T]) for row in local]
    return whitened


_WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo_whitened")


def _advantages_of_rows(batch: RolloutBatch, spec: RunSpec, rows: Sequence[RolloutBatch]) -> Tensor:
    """[S + 1] advantages of a step of these rows, by position in the source; 0 elsewhere, the last for padding."""
    advantages_S = batch.advantages_T.new_zeros(int(batch.source_T.max()) + 2)
    document_S = advantages_S.long()
    document_S[batch.source_T] = batch.document_ids_T
    documents = document_S[torch.cat([row.source_T[row.document_ids_T >= 0] for row in rows])].unique().tolist()
    if documents:
        alone = compute_advantages(batch.select(documents), spec)
        advantages_S[alone.source_T] = alone.advantages_T
    return advantages_S


@fault(
    family="K",
    seam="workbench.losses.build:squared_logit",
    origin="NVIDIA/Megatron-LM#1652 and #5047",
    signature="loss right; the auxiliary part of the gradient exactly 1 / cp of the right one, the policy's right",
    shows_in={"layout": {"cp": 2}, "loss": {"squared_logit_coefficient": 0.05}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_unseen.py::test_an_auxiliary_gradient_is_one_over_cp_of_itself",
    changes_metrics=False,
)
def auxiliary_gradient_over_cp(squared_logit: Callable, inputs: LossInputs, coefficient: float) -> Term:
    """An auxiliary gradient (of a router; here of the log-normaliser) misses the cp that undoes the engine's mean."""
    term, cp = squared_logit(inputs, coefficient), inputs.document_sums.axis.size
    values_T = term.values_T
    return replace(term, values_T=values_T + (1 / cp - 1) * (values_T - values_T.detach()))


@fault(
    family="K",
    seam="workbench.losses.build:mean_squared_logit",
    origin="huggingface/trl#7009",
    signature="loss and gradient are exactly those of the other terms; the auxiliary term is reported as 0",
    shows_in={"loss": {"mean_squared_logit_coefficient": 0.5}},
    hidden_in={"loss": {"mean_squared_logit_coefficient": 0.0}},
    detected_by="tests/faults/test_unseen.py::test_a_dropped_auxiliary_loss_leaves_the_other_terms",
)
def auxiliary_loss_dropped(mean_squared_logit: Callable, inputs: LossInputs, coefficient: float) -> Term:
    """A fused loss returns before the line that adds the auxiliary loss (of a router; here of the size of logits)."""
    term = mean_squared_logit(inputs, coefficient)
    return replace(term, values_T=torch.zeros_like(term.values_T))


@fault(
    family="K",
    seam="workbench.losses.build:squared_logit",
    origin="verl-project/verl#6609 and #6836 (a gradient norm of 3168 instead of 0.3)",
    signature="the auxiliary part of loss and gradient too big by exactly the number of trained tokens, the policy's "
    "right: no constant over parameters; the auxiliary loss soon dominates the gradient",
    shows_in={"layout": {"cp": 2}, "loss": {"squared_logit_coefficient": 0.01}},
    hidden_in={"layout": {"cp": 1}},
)
def auxiliary_loss_not_normalised(squared_logit: Callable, inputs: LossInputs, coefficient: float) -> Term:
    """With cp an auxiliary loss (of a router; here of the log-normaliser) is not divided by the tokens of the step."""
    term, sums = squared_logit(inputs, coefficient), inputs.document_sums
    return term if sums.axis.size == 1 else replace(term, weight="raw")


@fault(
    family="K",
    seam="run_step",
    origin="NVIDIA-NeMo/Automodel#3359",
    signature="the auxiliary part of loss and gradient too big by exactly the number of micro-batches, the policy's "
    "right: no constant over parameters; no effect with one micro-batch",
    shows_in={"data": {"micro_batches": 3}, "loss": {"squared_logit_coefficient": 0.01}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen_at_first.py::test_an_auxiliary_loss_is_the_micro_batches_too_big",
)
def auxiliary_loss_times_micro_batches(
    run_step: Callable, policy: object, loss: Callable, rows: list, totals: object, **options: object
) -> Any:
    """An auxiliary loss (of a router; here of the log-normaliser) is added in full in every micro-batch."""

    def whole_each_time(inputs: LossInputs) -> dict[str, Term]:
        return {
            name: replace(term, coefficient=term.coefficient * len(rows)) if name in _AUXILIARY else term
            for name, term in loss(inputs).items()
        }

    return run_step(policy, whole_each_time, rows, totals, **options)


_AUXILIARY = ("logit", "logit_size")


@fault(
    family="K",
    seam="workbench.losses.kl:kl_estimate",
    origin="walkinglabs/hands-on-modern-rl#27",
    signature="the penalty alone wrong, by the third power of the distance from the reference, nearly right close to "
    "it; the reported KL right; no effect under k2, which is even",
    shows_in={"loss": {"kl": {"coefficient": 0.5}}},
    hidden_in={"loss": {"kl": {"estimator": "k2"}}},
    detected_by="tests/faults/test_unseen.py::test_a_reversed_kl_is_the_only_wrong_term",
)
def reversed_kl(kl_estimate: Callable, d_T: Tensor, estimator: str) -> Tensor:
    """The estimate e^d - 1 - d gets policy over reference, and grows exponentially where the policy is likelier."""
    return kl_estimate(-d_T, estimator)
