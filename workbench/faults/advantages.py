"""Known bugs: advantages and groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from workbench.faults import fault
from workbench.losses.terms import LossInputs
from workbench.reduction.document_sums import ShardedSums
from workbench.rollouts.advantages.registry import WITHOUT_BASELINE, AdvantageInputs, Estimate
from workbench.rollouts.advantages.tokens import whiten
from workbench.rollouts.batch import RolloutBatch
from workbench.specs.run import RunSpec
from workbench.train.step import compute_advantages


@fault(
    seam="estimate_advantages",
    origin="axon-rl/gem#113, amazon-science/reskill#12",
    signature="right log-probabilities; all advantages shifted and scaled by one pair of numbers of the step, so that "
    "completions whose group has no signal train too; the policy term alone is wrong",
    shows_in={"data": {"advantages": {"name": "grpo"}}},
    hidden_in={"data": {"advantages": {"name": "recorded"}}},
    detected_by="tests/faults/test_unseen.py::test_twice_normalised_advantages_have_mean_0_and_deviation_1",
)
def advantages_normalised_twice(estimate_advantages: Callable[..., Estimate]) -> Callable[..., Estimate]:
    """Advantages that are already normalised within their groups are whitened over the step.

    The actor divides by the deviation of the group; the learner then subtracts the mean of all tokens and divides by
    their deviation.
    """

    def whiten_groups(name: str, inputs: AdvantageInputs, **settings: object) -> Estimate:
        estimate = estimate_advantages(name, inputs, **settings)
        if name != "grpo":
            return estimate
        return estimate._replace(advantages_T=whiten(estimate.advantages_T, inputs.loss_mask_T))

    return whiten_groups


@fault(
    seam="pack_step",
    origin="google/tunix#816 and #820",
    signature="right log-probabilities; completions alone in their micro-batch get an advantage of 0, others one "
    "against fewer; the policy term alone is wrong; no effect if groups are kept together",
    shows_in={"data": {"micro_batches": 3, "advantages": {"name": "grpo"}}},
    hidden_in={"data": {"keep_groups": True}},
    detected_by="tests/faults/test_unseen_at_first.py::test_baselines_of_micro_batches_turn_the_policy_term_alone",
)
def baseline_per_micro_batch(pack_step: Callable) -> Callable:
    """Micro-batches are smaller than a group, and each computes the baseline from its own completions."""

    def pack_then_compare(batch: RolloutBatch, spec: RunSpec, *args: object) -> list[RolloutBatch]:
        return [compute_advantages(row, spec) for row in pack_step(batch, spec, *args)]

    return pack_then_compare


@fault(
    seam="compute_advantages",
    origin="inclusionAI/AReaL#1559 and #1563, NVIDIA-NeMo/RL#2176",
    signature="right log-probabilities, advantages of other signs and sizes; the policy term alone points elsewhere; "
    "no effect if advantages use no group",
    shows_in={"data": {"advantages": {"name": "grpo"}}},
    hidden_in={"data": {"advantages": {"name": "recorded"}}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_wrong_advantages_turn_the_policy_term_alone",
)
def groups_by_position(make_advantages: Callable) -> Callable:
    """Groups are formed by position, regardless of the prompt.

    Rewards are reshaped to prompts x completions, although a completion was dropped or documents arrived in another
    order, so groups mix prompts.
    """

    def make_by_position(batch: RolloutBatch, spec: RunSpec) -> RolloutBatch:
        if batch.group_ids_N is None:
            return make_advantages(batch, spec)
        group_size = max(batch.num_documents // batch.group_ids_N.unique().numel(), 1)
        by_position_N = torch.arange(batch.num_documents) // group_size
        wrong = make_advantages(replace(batch, group_ids_N=by_position_N), spec)
        return replace(wrong, group_ids_N=batch.group_ids_N)

    return make_by_position


@fault(
    seam="kl_in_reward",
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
def kl_added_to_reward(kl_in_reward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The KL penalty is added to the reward instead of subtracted, so that distance from the reference is rewarded."""

    def with_other_sign(*args: object) -> Tensor:
        return -kl_in_reward(*args)

    return with_other_sign


@fault(
    seam="workbench.rollouts.advantages.groups:_deviation_of_others",
    origin="NVIDIA-NeMo/RL#1519",
    signature="right log-probabilities; advantages of such completions 1 / epsilon (a million) times too big, "
    "and with them the policy term and the gradient's norm; other completions right",
    shows_in={"data": {"advantages": {"name": "leave_one_out"}}},
    hidden_in={"data": {"advantages": {"name": "rloo"}}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_deviation_of_zero_makes_advantages_of_millions",
)
def leave_one_out_over_zero_deviation(deviation_of_others: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Advantages are divided by a deviation of 0.

    A completion is compared with the others of its group and divided by their deviation, which is 0 if they are equal
    or there is only one, so that only epsilon is left in the denominator.
    """

    def never_zero(rewards: Tensor, *more: object) -> Tensor:
        return deviation_of_others(rewards, *more).clamp_min(torch.finfo(rewards.dtype).tiny)

    return never_zero


@fault(
    seam="estimate_advantages",
    origin="NVIDIA-NeMo/RL#3467, verl-project/verl#6362 and #6375",
    signature="right log-probabilities, advantages shifted in groups with a masked completion and right in the others; "
    "the policy term alone is wrong",
    shows_in={"data": {"advantages": {"name": "grpo"}}},
    hidden_in={"data": {"advantages": {"name": "reinforce_plus_plus"}}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_wrong_advantages_turn_the_policy_term_alone",
)
def masked_rows_in_baseline(estimate_advantages: Callable) -> Callable:
    """Rejected, truncated or filtered completions enter mean and deviation of their group but do not train."""

    def estimate_over_all(name: str, inputs: AdvantageInputs, **settings: object) -> Estimate:
        compares = name not in WITHOUT_BASELINE
        return estimate_advantages(name, inputs, **({"masked_in_baseline": True} if compares else {}) | settings)

    return estimate_over_all


@fault(
    seam="workbench.losses.sequence:advantages_at",
    origin="areal-project/AReaL#1346 (padding in the advantage of a sequence)",
    signature="the policy term of a document is too small by the share of its tokens that train, penalties and ratios "
    "right: no constant, another direction; no effect if each token keeps its advantage",
    shows_in={"loss": {"name": "gspo", "surrogate": {"advantage_level": "document"}}},
    hidden_in={"loss": {"surrogate": {"advantage_level": "token"}}},
    detected_by="tests/faults/test_unseen.py::test_a_document_advantage_over_all_tokens_spares_the_penalty",
)
def prompt_in_document_advantage(
    advantages_at: Callable[[LossInputs, str], Tensor],
) -> Callable[[LossInputs, str], Tensor]:
    """A document's advantage is a mean that counts prompt and tool tokens, whose advantage is 0."""

    def over_all_tokens(inputs: LossInputs, advantage_level: str) -> Tensor:
        means_T = advantages_at(inputs, advantage_level)
        if advantage_level != "document" or not isinstance(inputs.sums, ShardedSums):
            return means_T
        whole_T = inputs.sums.row.document_ids_T
        tokens_N = torch.bincount(whole_T[whole_T >= 0], minlength=1)
        return means_T * inputs.document_lengths_T / tokens_N[inputs.document_ids_T.clamp_min(0)]

    return over_all_tokens


@fault(
    seam="pack_step",
    origin="THUDM/slime#2235 (whitening over too few ranks)",
    signature="right log-probabilities, another mean advantage on each rank; a gradient of about the right size in "
    "another direction; no effect at dp = 1",
    shows_in={"layout": {"dp": 2}, "data": {"advantages": {"name": "reinforce_plus_plus"}}},
    hidden_in={"layout": {"dp": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_wrong_advantages_turn_the_policy_term_alone",
)
def whitening_per_rank(pack_step: Callable) -> Callable:
    """Mean and deviation of the whitening are taken over a rank's own tokens instead of over all of the step."""

    def pack_then_whiten(batch: RolloutBatch, spec: RunSpec, *args: object) -> list[RolloutBatch]:
        rows = pack_step(batch, spec, *args)
        if spec.data.advantages.name not in _WHITENED:
            return rows
        per_rank, whitened = len(rows) // spec.layout.dp, []
        for first in range(0, len(rows), per_rank):
            local = rows[first : first + per_rank]
            advantages_S = _advantages_of_rows(batch, spec, local)
            whitened += [replace(row, advantages_T=advantages_S[row.source_T]) for row in local]
        return whitened

    return pack_then_whiten


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
