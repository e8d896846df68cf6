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
from workbench.train.step import make_advantages


@fault(
    seam="estimate_advantages",
    origin="axon-rl/gem#113, amazon-science/reskill#12",
    signature="right log-probabilities; all advantages shifted and scaled by one pair of numbers of the step, so that "
    "answers whose group says nothing train too; the policy term alone is wrong",
    shows_in={"data": {"advantages": {"name": "grpo"}}},
    hidden_in={"data": {"advantages": {"name": "recorded"}}},
    detected_by="tests/faults/test_unseen.py::test_twice_normalised_advantages_have_mean_0_and_deviation_1",
)
def advantages_normalised_twice(estimate_advantages: Callable[..., Estimate]) -> Callable[..., Estimate]:
    """Advantages that are normalised inside their groups already are whitened over the step.

    The actor divides by the deviation of the group, and the learner by that of all tokens, after it has taken off their
    mean.
    """

    def whiten_groups(name: str, inputs: AdvantageInputs, **settings: object) -> Estimate:
        found = estimate_advantages(name, inputs, **settings)
        if name != "grpo":
            return found
        return found._replace(advantages_T=whiten(found.advantages_T, inputs.loss_mask_T))

    return whiten_groups


@fault(
    seam="pack_step",
    origin="google/tunix#816 and #820",
    signature="right log-probabilities; answers alone in their micro-batch get an advantage of 0, others one against "
    "fewer; the policy term alone is wrong; nothing where groups are kept together",
    shows_in={"data": {"micro_batches": 3, "advantages": {"name": "grpo"}}},
    hidden_in={"data": {"keep_groups": True}},
    detected_by="tests/faults/test_unseen_at_first.py::test_baselines_of_micro_batches_turn_the_policy_term_alone",
)
def baseline_per_micro_batch(pack_step: Callable) -> Callable:
    """A micro-batch is smaller than a group, and each micro-batch makes the baseline of the answers that it holds."""

    def pack_then_compare(batch: RolloutBatch, spec: RunSpec, *args: object) -> list[RolloutBatch]:
        return [make_advantages(row, spec) for row in pack_step(batch, spec, *args)]

    return pack_then_compare


@fault(
    seam="make_advantages",
    origin="inclusionAI/AReaL#1559 and #1563, NVIDIA-NeMo/RL#2176",
    signature="right log-probabilities, advantages of other signs and sizes; the policy term alone points elsewhere; "
    "nothing where advantages look at no group",
    shows_in={"data": {"advantages": {"name": "grpo"}}},
    hidden_in={"data": {"advantages": {"name": "recorded"}}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_wrong_advantages_turn_the_policy_term_alone",
)
def groups_by_position(make_advantages: Callable) -> Callable:
    """Every so many answers are taken for a group, whatever prompt they answer.

    Rewards are reshaped to prompts x answers, though an answer was dropped or documents came in another order: groups
    run across prompts.
    """

    def make_by_position(batch: RolloutBatch, spec: RunSpec) -> RolloutBatch:
        if batch.group_ids_N is None:
            return make_advantages(batch, spec)
        answers = max(batch.num_documents // batch.group_ids_N.unique().numel(), 1)
        by_position_N = torch.arange(batch.num_documents) // answers
        made = make_advantages(replace(batch, group_ids_N=by_position_N), spec)
        return replace(made, group_ids_N=batch.group_ids_N)

    return make_by_position


@fault(
    seam="kl_in_reward",
    origin="nebuly-ai/optimate#298 (Chatllama)",
    signature="right log-probabilities; advantages move the other way with the distance from the reference, the more "
    "the greater the coefficient; the policy term alone is wrong; nothing without a penalty",
    shows_in={
        "data": {"advantages": {"name": "reinforce_plus_plus"}},
        "loss": {"kl": {"coefficient": 0.5, "estimator": "k1", "placement": "reward"}},
    },
    hidden_in={"loss": {"kl": {"coefficient": 0.0}}},
    detected_by="tests/faults/test_unseen.py::test_a_penalty_of_the_other_sign_moves_advantages_alone",
)
def kl_added_to_reward(kl_in_reward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The distance from the reference is taken with the other sign, so that leaving it is rewarded."""

    def with_other_sign(*args: object) -> Tensor:
        return -kl_in_reward(*args)

    return with_other_sign


@fault(
    seam="workbench.rollouts.advantages.groups:_deviation_of_others",
    origin="NVIDIA-NeMo/RL#1519",
    signature="right log-probabilities; advantages of such answers 1 / epsilon times too big, which is a million, and "
    "with them the policy term and the gradient's norm; other answers right",
    shows_in={"data": {"advantages": {"name": "leave_one_out"}}},
    hidden_in={"data": {"advantages": {"name": "rloo"}}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_deviation_of_zero_makes_advantages_of_millions",
)
def leave_one_out_over_zero_deviation(deviation_of_others: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A deviation of 0 divides.

    An answer is compared with the others of its group and divided by their deviation, which is 0 where they are equal
    or only one: epsilon is all that is left.
    """

    def never_zero(rewards: Tensor, *more: object) -> Tensor:
        return deviation_of_others(rewards, *more).clamp_min(torch.finfo(rewards.dtype).tiny)

    return never_zero


@fault(
    seam="estimate_advantages",
    origin="NVIDIA-NeMo/RL#3467, verl-project/verl#6362 and #6375",
    signature="right log-probabilities, advantages moved in groups that hold a masked answer and right in the others; "
    "the policy term alone is wrong",
    shows_in={"data": {"advantages": {"name": "grpo"}}},
    hidden_in={"data": {"advantages": {"name": "reinforce_plus_plus"}}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_wrong_advantages_turn_the_policy_term_alone",
)
def masked_rows_in_baseline(estimate_advantages: Callable) -> Callable:
    """Rejected, truncated or filtered answers move mean and deviation of their group though they do not train."""

    def estimate_over_all(name: str, inputs: AdvantageInputs, **settings: object) -> Estimate:
        compares = name not in WITHOUT_BASELINE
        return estimate_advantages(name, inputs, **({"masked_in_baseline": True} if compares else {}) | settings)

    return estimate_over_all


@fault(
    seam="workbench.losses.sequence:advantages_at",
    origin="areal-project/AReaL#1346 (padding in the advantage of a sequence)",
    signature="the policy term of a document is the share of its tokens that trains too small, penalties and ratios "
    "right: no constant, another direction; nothing where each token keeps its advantage",
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
    "another direction; nothing at dp = 1",
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
        each, found = len(rows) // spec.layout.dp, []
        for first in range(0, len(rows), each):
            mine = rows[first : first + each]
            made_S = _made_alone(batch, spec, mine)
            found += [replace(row, advantages_T=made_S[row.source_T]) for row in mine]
        return found

    return pack_then_whiten


_WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo_whitened")


def _made_alone(batch: RolloutBatch, spec: RunSpec, rows: Sequence[RolloutBatch]) -> Tensor:
    """[S + 1] advantages by place in the recording, of a step that is these rows; 0 elsewhere, last for padding."""
    made_S = batch.advantages_T.new_zeros(int(batch.source_T.max()) + 2)
    document_S = made_S.long()
    document_S[batch.source_T] = batch.document_ids_T
    documents = document_S[torch.cat([row.source_T[row.document_ids_T >= 0] for row in rows])].unique().tolist()
    if documents:
        alone = make_advantages(batch.select(documents), spec)
        made_S[alone.source_T] = alone.advantages_T
    return made_S
