"""Losses as trainers write them: correct ones, and real bugs, each with its origin.

Origins are issues and pull requests of the systems that they name, or [read]: seen in the source, not reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from workbench.sharding.collectives import all_gather, all_sum, gather_scatter, sum_identity, sum_sum


@dataclass(frozen=True)
class Right:
    """A loss that keeps every invariant with its engine.

    Attributes:
        loss: what a trainer calls for each micro-batch.
        engine: sum or mean.
        like: who writes it so.
    """

    loss: Callable
    engine: str
    like: str


@dataclass(frozen=True)
class Mistake:
    """A loss that is correct on one rank, and the expected proof.

    Attributes:
        loss: what a trainer calls for each micro-batch.
        engine: sum or mean.
        invariant: the invariant that the mistake is about.
        also: other invariants that it breaks, a word each (some orders of cp pad documents).
        factor: what the gradient (or the loss, where the gradient is right) is multiplied with in that
            invariant's smallest counterexample; None: no factor.
        origin: where it was made.
        differing: what differs there.
    """

    loss: Callable
    engine: str
    invariant: str
    also: str
    factor: str | None
    origin: str
    differing: tuple[str, ...] = ("gradient", "loss")

    @property
    def breaks(self) -> set[str]:
        """Every invariant that it breaks."""
        return {self.invariant, *self.also.split()}


# -- shared parts ------------------------------------------------------------------------------------------------


def clipped(batch, outputs, advantages_T=None):
    """[T] the surrogate of PPO where a token counts, 0 elsewhere."""
    mask_T = batch.loss_mask_T
    advantages_T = batch.advantages_T if advantages_T is None else advantages_T
    ratio_T = torch.where(mask_T, outputs.policy_logprobs_T - batch.old_logprobs_T, 0.0).exp()
    worst_T = -torch.minimum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.28) * advantages_T)
    return torch.where(mask_T, worst_T, 0.0)


def kl(batch, outputs):
    """[T] k3 against the reference where a token counts."""
    d_T = torch.where(batch.loss_mask_T, batch.ref_logprobs_T - outputs.policy_logprobs_T, 0.0)
    return d_T.exp() - 1 - d_T


def own_tokens(batch):
    return batch.loss_mask_T.sum().double()


def by_document(values_T, batch, totals):
    """[T] of each token, the sum over those of its document that are here."""
    ids_T = batch.document_ids_T + 1  # padding first
    sums_N = values_T.new_zeros(totals.all_documents + 1).index_add(0, ids_T, values_T)
    return sums_N, ids_T


def sequence_ratio_loss(batch, outputs, totals, complete):
    """GSPO, with the sum of a document's log-ratios completed in some way over cp."""
    log_ratio_T = torch.where(batch.loss_mask_T, outputs.policy_logprobs_T - batch.old_logprobs_T, 0.0)
    sums_N, ids_T = by_document(log_ratio_T, batch, totals)
    ratio_T = (complete(sums_N)[ids_T] / batch.lengths_T).exp()
    worst_T = -torch.minimum(ratio_T * batch.advantages_T, ratio_T.clamp(0.9, 1.1) * batch.advantages_T)
    return torch.where(batch.loss_mask_T, worst_T / batch.lengths_T, 0.0).sum() / totals.documents


def whole_row(values_T, axis):
    """The row's values in rank order, without gradient."""
    return torch.cat(all_gather(values_T, axis))


def replicated_loss(batch, logprobs_T, totals):
    """The sum over the row, computed by every cp rank."""
    axis = totals.mesh["cp"]
    mask_T, old_T, advantages_T = (
        whole_row(x, axis) for x in (batch.loss_mask_T, batch.old_logprobs_T, batch.advantages_T)
    )
    ratio_T = torch.where(mask_T, logprobs_T - old_T, 0.0).exp()
    worst_T = -torch.minimum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.28) * advantages_T)
    return torch.where(mask_T, worst_T, 0.0).sum() / totals.tokens


# -- right -----------------------------------------------------------------------------------------------------


def token_mean(batch, outputs, totals):
    return clipped(batch, outputs).sum() / totals.tokens


def token_mean_undoing_the_average(batch, outputs, totals):
    return clipped(batch, outputs).sum() / totals.tokens * (totals.dp * totals.cp)


def document_mean(batch, outputs, totals):
    return (clipped(batch, outputs) / batch.lengths_T).sum() / totals.documents * (totals.dp * totals.cp)


def constant_length(batch, outputs, totals):
    return clipped(batch, outputs).sum() / (totals.documents * 16) * (totals.dp * totals.cp)


def own_mean_by_its_share(batch, outputs, totals):
    own = own_tokens(batch)
    mean = clipped(batch, outputs).sum() / own.clamp_min(1)
    return mean * own / totals.tokens * (totals.dp * totals.cp)


def with_kl_and_entropy(batch, outputs, totals):
    entropy_T = torch.where(batch.loss_mask_T, outputs.entropy_T, 0.0)
    return (clipped(batch, outputs) + 0.1 * kl(batch, outputs) - 0.01 * entropy_T).sum() / totals.tokens


def gspo(batch, outputs, totals):
    return sequence_ratio_loss(batch, outputs, totals, lambda sums_N: sum_sum(sums_N, totals.mesh["cp"]))


def replicated_over_cp(batch, outputs, totals):
    gathered_T = gather_scatter(outputs.policy_logprobs_T, totals.mesh["cp"], dim=0)
    return replicated_loss(batch, gathered_T, totals) / totals.cp


RIGHT = {
    "token mean, sum": Right(token_mean, "sum", "torchtitan RL, FSDP without averaging"),
    "token mean, mean": Right(token_mean_undoing_the_average, "mean", "NeMo-RL on DTensor, x dp x cp"),
    "document mean": Right(document_mean, "mean", "verl seq-mean-token-mean over the global batch"),
    "constant length": Right(constant_length, "mean", "Dr. GRPO"),
    "own mean by its share": Right(own_mean_by_its_share, "mean", "AReaL, micro-batch weight over total weight"),
    "kl and entropy": Right(with_kl_and_entropy, "sum", "one count for every term"),
    "gspo": Right(gspo, "sum", "a document's sum over cp, with the summing adjoint"),
    "replicated over cp": Right(replicated_over_cp, "sum", "NeMo-RL on Megatron: log-probabilities gathered, / cp"),
}


# -- mistakes: wrong denominator -------------------------------------------------------------------------------


def own_mean(batch, outputs, totals):
    return clipped(batch, outputs).sum() / own_tokens(batch).clamp_min(1)


def counted_over_dp_only(batch, outputs, totals):
    tokens = all_sum(own_tokens(batch), totals.mesh["dp"]).clamp_min(1)
    return clipped(batch, outputs).sum() / tokens / totals.micro_batches


def mean_of_micro_batch_means(batch, outputs, totals):
    tokens = all_sum(own_tokens(batch), totals.mesh["dp_cp"]).clamp_min(1)
    return clipped(batch, outputs).sum() / tokens / totals.micro_batches


def sum_of_micro_batch_means(batch, outputs, totals):
    tokens = all_sum(own_tokens(batch), totals.mesh["dp_cp"]).clamp_min(1)
    return clipped(batch, outputs).sum() / tokens


def lengths_of_the_shard(batch, outputs, totals):
    sums_N, ids_T = by_document(batch.loss_mask_T.double(), batch, totals)
    return (clipped(batch, outputs) / sums_N[ids_T].clamp_min(1)).sum() / totals.documents


def divided_by_padded_tokens(batch, outputs, totals):
    tokens = all_sum(torch.tensor(float(len(batch.loss_mask_T))), totals.mesh["dp_cp"])
    return clipped(batch, outputs).sum() / (tokens * totals.micro_batches)


def one_token_at_least(batch, outputs, totals):
    silent = totals.all_documents - totals.documents
    return clipped(batch, outputs).sum() / (totals.tokens + silent)


def silent_documents_counted(batch, outputs, totals):
    return (clipped(batch, outputs) / batch.lengths_T).sum() / totals.all_documents


def kl_by_its_own_mean(batch, outputs, totals):
    tokens = all_sum(own_tokens(batch), totals.mesh["dp_cp"]).clamp_min(1)
    penalty = 0.1 * kl(batch, outputs).sum() / tokens / totals.micro_batches
    return clipped(batch, outputs).sum() / totals.tokens + penalty


def entropy_of_padding_too(batch, outputs, totals):
    return (clipped(batch, outputs).sum() - 0.01 * outputs.entropy_T.sum()) / totals.tokens


# -- mistakes: factors of the layout ---------------------------------------------------------------------------


def cp_left_out(batch, outputs, totals):
    return clipped(batch, outputs).sum() / totals.tokens * totals.dp


def cp_once_too_often(batch, outputs, totals):
    return clipped(batch, outputs).sum() / totals.tokens * totals.cp


def dp_left_out(batch, outputs, totals):
    return clipped(batch, outputs).sum() / (totals.documents * 16) * totals.cp


def divided_by_accumulation(batch, outputs, totals):
    return clipped(batch, outputs).sum() / totals.tokens / totals.micro_batches


def times_accumulation(batch, outputs, totals):
    return clipped(batch, outputs).sum() / totals.tokens * totals.micro_batches


def tokens_of_tp_ranks_too(batch, outputs, totals):
    tokens = totals.tokens * totals.tp
    return clipped(batch, outputs).sum() / tokens


def summed_over_tp(batch, outputs, totals):
    return sum_sum(clipped(batch, outputs).sum() / totals.tokens, totals.mesh["tp"])


def averaged_over_stages_too(batch, outputs, totals):
    return clipped(batch, outputs).sum() / totals.tokens / totals.mesh["pp"].size


def experts_ranks_counted_again(batch, outputs, totals):
    return clipped(batch, outputs).sum() / totals.tokens * totals.mesh["ep"].size


# -- bugs: tokens of other ranks ---------------------------------------------------------------------------------


def gspo_without_adjoint(batch, outputs, totals):
    return sequence_ratio_loss(batch, outputs, totals, lambda sums_N: sum_identity(sums_N, totals.mesh["cp"]))


def gspo_of_the_shard(batch, outputs, totals):
    return sequence_ratio_loss(batch, outputs, totals, lambda sums_N: sums_N)


def replicated_and_sliced(batch, outputs, totals):
    axis = totals.mesh["cp"]
    pieces = all_gather(outputs.policy_logprobs_T, axis)
    pieces[axis.rank] = outputs.policy_logprobs_T
    return replicated_loss(batch, torch.cat(pieces), totals)


def replicated_and_not_divided(batch, outputs, totals):
    return replicated_loss(batch, gather_scatter(outputs.policy_logprobs_T, totals.mesh["cp"], dim=0), totals)


def whitened_on_the_rank(batch, outputs, totals):
    own_T = batch.advantages_T[batch.loss_mask_T]
    if len(own_T) < 2:
        return clipped(batch, outputs).sum() / totals.tokens
    white_T = (batch.advantages_T - own_T.mean()) / (own_T.std() + 1e-6)
    return clipped(batch, outputs, white_T).sum() / totals.tokens


def baseline_of_the_micro_batch(batch, outputs, totals):
    advantages_T = batch.advantages_T.clone()
    for group in batch.group_ids_T[batch.loss_mask_T].unique():
        members_T = (batch.group_ids_T == group) & batch.loss_mask_T
        documents = batch.document_ids_T[members_T].unique()
        rewards = [batch.rewards_T[batch.document_ids_T == d][0] for d in documents]
        advantages_T[members_T] = batch.rewards_T[members_T] - torch.stack(rewards).mean()
    return clipped(batch, outputs, advantages_T).sum() / totals.tokens


def groups_by_place(batch, outputs, totals):
    pairs_T = batch.document_ids_T.clamp_min(0) // 2
    kept = batch.loss_mask_T
    sums = torch.zeros(totals.all_documents + 1).double().index_add(0, pairs_T[kept], batch.rewards_T[kept].double())
    counts = torch.zeros_like(sums).index_add(0, pairs_T[kept], torch.ones_like(batch.rewards_T[kept]).double())
    sums, counts = (all_sum(x, totals.mesh["cp"]) for x in (sums, counts))
    baseline_T = (sums / counts.clamp_min(1))[pairs_T].to(batch.rewards_T.dtype)
    return clipped(batch, outputs, batch.rewards_T - baseline_T).sum() / totals.tokens


# -- mistakes: empty ranks -------------------------------------------------------------------------------------


def nothing_over_nothing(batch, outputs, totals):
    own = own_tokens(batch)
    return clipped(batch, outputs).sum() / own * (own / totals.tokens)


def no_backward_where_nothing_trains(batch, outputs, totals):
    if not batch.loss_mask_T.any():
        return torch.zeros((), dtype=torch.float64)
    return clipped(batch, outputs).sum() / totals.tokens


MISTAKES = {
    # denominators
    "own mean": Mistake(
        own_mean,
        "mean",
        "cp_degree",
        also="dp_split micro_batch_split packing_order cp_order empty_ranks",
        factor=None,
        origin="PrimeIntellect-ai/prime-rl#2358; OpenRLHF GPTLMLoss, unweighted means of shards [read]",
    ),
    "counted over dp only": Mistake(
        counted_over_dp_only,
        "sum",
        "cp_degree",
        also="micro_batch_split packing_order cp_order empty_ranks",
        factor=None,
        origin="num/den reduced over dp where it is dp x cp, in a fork of NVIDIA/Megatron-LM",
    ),
    "mean of micro-batch means": Mistake(
        mean_of_micro_batch_means,
        "sum",
        "micro_batch_split",
        also="packing_order empty_ranks",
        factor=None,
        origin="NVIDIA-NeMo/RL#266, #373; NovaSky-AI/SkyRL#925",
    ),
    "sum of micro-batch means": Mistake(
        sum_of_micro_batch_means,
        "sum",
        "micro_batch_split",
        also="packing_order",
        factor=None,
        origin="a branch of ServiceNow/Fast-LLM, the count of labels shared by micro-batch [read]",
    ),
    "lengths of the shard": Mistake(
        lengths_of_the_shard,
        "sum",
        "cp_degree",
        also="cp_order",
        factor=None,
        origin="ServiceNow/Fast-LLM 60aed36e; areal-project/AReaL#990",
    ),
    "padded tokens": Mistake(
        divided_by_padded_tokens,
        "sum",
        "padding",
        also="micro_batch_split packing_order cp_order masked_rows empty_ranks",
        factor="tokens / padded tokens",
        origin="areal-project/AReaL#1346; Dr. GRPO by the padded width of a micro-batch, verl",
    ),
    "one token at least": Mistake(
        one_token_at_least,
        "sum",
        "masked_rows",
        also="",
        factor="tokens / (tokens + silent documents)",
        origin="radixark/miles#2796, each document clamped to one token in the global count",
    ),
    "silent documents counted": Mistake(
        silent_documents_counted,
        "sum",
        "masked_rows",
        also="",
        factor="documents / all documents",
        origin="huggingface/trl#6439, #6365",
    ),
    "kl by its own mean": Mistake(
        kl_by_its_own_mean,
        "sum",
        "micro_batch_split",
        also="packing_order empty_ranks",
        factor=None,
        origin="NovaSky-AI/SkyRL#1822, #1969, penalties as means of micro-batch means",
    ),
    "entropy of padding": Mistake(
        entropy_of_padding_too,
        "sum",
        "padding",
        also="cp_order masked_rows empty_ranks",
        factor=None,
        origin="NovaSky-AI/SkyRL#211",
    ),
    # factors of the layout
    "cp left out": Mistake(
        cp_left_out,
        "mean",
        "cp_degree",
        also="empty_ranks",
        factor="1 / cp",
        origin="THUDM/slime#987; NovaSky-AI/SkyRL#1420",
    ),
    "cp once too often": Mistake(
        cp_once_too_often,
        "sum",
        "cp_degree",
        also="empty_ranks",
        factor="cp",
        origin="NVIDIA/Megatron-LM#673, #906; NovaSky-AI/SkyRL#1751",
    ),
    "dp left out": Mistake(
        dp_left_out, "mean", "dp_split", also="empty_ranks", factor="1 / dp", origin="verl-project/verl#3741, #5366"
    ),
    "averaged over stages": Mistake(
        averaged_over_stages_too,
        "sum",
        "pipeline",
        also="",
        factor="1 / pp",
        origin="no report: data-parallel ranks counted as all ranks over tp and cp, without pp",
    ),
    "ranks of experts counted again": Mistake(
        experts_ranks_counted_again,
        "sum",
        "expert_degree",
        also="",
        factor="ep",
        origin="no report: ep taken for an axis of its own, whose ranks are those of dp x cp",
    ),
    "divided by accumulation": Mistake(
        divided_by_accumulation,
        "sum",
        "micro_batch_split",
        also="empty_ranks",
        factor="1 / micro_batches",
        origin="PrimeIntellect-ai/prime-rl#2424; modelscope/ms-swift#10096",
    ),
    "times accumulation": Mistake(
        times_accumulation,
        "sum",
        "micro_batch_split",
        also="empty_ranks",
        factor="micro_batches",
        origin="verl-project/verl#6957; NVIDIA-NeMo/RL#3791, 32.0 times",
    ),
    "tokens of tp ranks": Mistake(
        tokens_of_tp_ranks_too, "sum", "tp", also="", factor="1 / tp", origin="huggingface/transformers#39648"
    ),
    "summed over tp": Mistake(
        summed_over_tp, "sum", "tp", also="", factor="tp", origin="THUDM/slime#1748, radixark/miles#852"
    ),
    # tokens of other ranks
    "gspo without adjoint": Mistake(
        gspo_without_adjoint,
        "sum",
        "cp_degree",
        also="cp_order",
        factor=None,
        origin="THUDM/slime#1383; deepspeedai/DeepSpeed#6841",
        differing=("gradient",),
    ),
    "gspo of the shard": Mistake(
        gspo_of_the_shard,
        "sum",
        "cp_degree",
        also="cp_order",
        factor=None,
        origin="what verl-project/verl#7914 guards against",
    ),
    "replicated and sliced": Mistake(
        replicated_and_sliced,
        "sum",
        "cp_degree",
        also="empty_ranks",
        factor="cp",
        origin="ServiceNow/Fast-LLM#502, #520",
        differing=("loss",),
    ),
    "replicated, not divided": Mistake(
        replicated_and_not_divided,
        "sum",
        "cp_degree",
        also="empty_ranks",
        factor="cp",
        origin="NVIDIA-NeMo/RL divides by cp for this",
    ),
    "whitened on the rank": Mistake(
        whitened_on_the_rank,
        "sum",
        "dp_split",
        also="micro_batch_split packing_order cp_degree cp_order",
        factor=None,
        origin="THUDM/slime#2235",
    ),
    "baseline of the micro-batch": Mistake(
        baseline_of_the_micro_batch,
        "sum",
        "micro_batch_split",
        also="dp_split packing_order cp_degree cp_order",
        factor=None,
        origin="NVIDIA-NeMo/RL#2176; google/tunix#816, #820",
    ),
    "groups by place": Mistake(
        groups_by_place,
        "sum",
        "packing_order",
        also="dp_split micro_batch_split masked_rows",
        factor=None,
        origin="areal-project/AReaL#1559, #1563",
    ),
    # empty ranks
    "nothing over nothing": Mistake(
        nothing_over_nothing,
        "sum",
        "empty_ranks",
        also="",
        factor=None,
        origin="a count of 0, surogate#74",
        differing=("not a number",),
    ),
    "no backward": Mistake(
        no_backward_where_nothing_trains,
        "sum",
        "empty_ranks",
        also="",
        factor=None,
        origin="THUDM/slime#2123, radixark/miles#683",
        differing=("error",),
    ),
}
