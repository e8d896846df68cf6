"""Historical mistakes planted in dumps, on which the causes of check were written: tuned cases, no measurement.

Each has where it happened, and the causes that are right for it (kind, and words of its description).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from experiments.checked_steps.tuned.trainer import (
    Kind,
    Step,
    advantages,
    correction,
    draw,
    kl_values,
    mean,
    policy_values,
    train,
    weights,
)

LENGTHS = (9, 4, 7, 12, 5, 8, 3, 6, 10, 2, 11, 5)
PAIRS = (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2)
ALL = ("coefficients", "losses", "counts")
KINDS = {
    "ppo": Kind(
        LENGTHS, PAIRS, clip=(0.2, 0.28), kl=0.05, correction=2.0, dp=2, micro_batches=2, tools=True, records=ALL, cp=2
    ),
    "padded": Kind(LENGTHS, PAIRS, "ppo", "document", kl=0.1, padded=True, silent=(3,), temperature=0.7, seed=1),
    "gspo": Kind(
        LENGTHS, PAIRS, "gspo", "document", clip=(0.03, 0.04), dp=2, records=(*ALL, "ratios"), flat=(2,), seed=2
    ),
    "drgrpo": Kind(
        LENGTHS, PAIRS, "ppo", "constant", constant=16.0, estimator="dr_grpo", padded=True, tools=True, seed=3
    ),
    "cispo": Kind(
        LENGTHS, PAIRS, "cispo", dtype="bfloat16", correction=1.5, micro_batches=3, spread=0.3, seed=4, tools=True
    ),
    "number": Kind(
        LENGTHS, PAIRS, "ppo", "token", estimator="rloo", kl=0.2, dp=3, silent=(1, 6), records=("losses",), seed=5
    ),
    "uneven": Kind(
        (5, 7, 3, 4, 9, 6, 2, 8, 5), (0, 0, 0, 1, 1, 2, 2, 2, 2), correction=1.2, records=(*ALL, "correction_weights")
    ),
    "number2": Kind(LENGTHS, PAIRS, "ppo", "document_sum", estimator="rloo", spread=0.25, seed=8),
    "gspo2": Kind(LENGTHS, PAIRS, "gspo", "document", clip=(0.03, 0.04), tools=True, seed=9),
    "bf16": Kind(LENGTHS, PAIRS, "ppo", "document", kl=0.3, dtype="bfloat16", padded=True, spread=0.3, seed=7),
}


@dataclass(frozen=True)
class Fault:
    """A mistake: id, kind of step, sentence, origin, parts of the wrong trainer, and (kind, words) that are right."""

    id: str
    kind: str
    mistake: str
    origin: str
    wrong: Mapping[str, Any]
    right: tuple[tuple[str, tuple[str, ...]], ...]


FAULTS: list[Fault] = []


def fault(id: str, kind: str, mistake: str, origin: str, *right: tuple[str, ...], **wrong: Any) -> None:
    """Add a mistake."""
    FAULTS.append(Fault(id, kind, mistake, origin, wrong, tuple((kind, words) for kind, *words in right)))


def shifted(value_T: Tensor, step: Step, by: int) -> Tensor:
    """Values of the token before (1) or after (-1) in the document, 0 at its end."""
    same_T = step.ids_T.roll(by) == step.ids_T
    return torch.where(same_T, value_T.roll(by), torch.zeros_like(value_T))


def counted(step: Step, count_N: Tensor, *, documents: float = 1.0) -> Tensor:
    """[T] weights 1 / (documents * count) of the document."""
    return torch.where(step.mask_T, (1 / (documents * count_N))[step.ids_T], 0.0)


def pieces_mean(step: Step, by: str, *, averaged: bool = True) -> Tensor:
    """[T] 1 / trained tokens of the token's micro-batch or rank, averaged over these."""
    pieces_T = step.of_rows(by)[step.ids_T]
    tokens_P = torch.bincount(pieces_T[step.mask_T]).double()
    over = len(tokens_P) if averaged else 1
    return torch.where(step.mask_T, 1 / tokens_P[pieces_T] / over, 0.0)


# ---- denominators ---------------------------------------------------------------------------------------------------

fault(
    "micro_batch_means",
    "ppo",
    "mean of the micro-batches' token means",
    "NVIDIA-NeMo/RL#266",
    ("denominator", "micro-batch"),
    weights=lambda s: pieces_mean(s, "micro_batch"),
)
fault(
    "rank_means",
    "ppo",
    "each rank divides by its own tokens, gradients are averaged",
    "PrimeIntellect-ai/prime-rl#2358",
    ("denominator", "rank"),
    weights=lambda s: pieces_mean(s, "rank"),
)
fault(
    "micro_batch_sums",
    "cispo",
    "micro-batch means are summed",
    "NVIDIA-NeMo/RL#86",
    ("denominator", "micro"),
    ("factor", "micro"),
    weights=lambda s: pieces_mean(s, "micro_batch", averaged=False),
)
fault(
    "tool_tokens_counted",
    "ppo",
    "divided by response lengths, tools' tokens too",
    "THUDM/slime#365",
    ("denominator", "tool"),
    weights=lambda s: counted(s, torch.full_like(s.lengths_N, float(s.tokens["token_mask"].sum()))),
    counts=lambda s: {"tokens": float(s.tokens["token_mask"].sum())},
)
fault(
    "masked_documents_counted",
    "number",
    "one token for each document without any",
    "radixark/miles#2796",
    ("denominator", "without a trained token"),
    ("factor", "masked"),
    weights=lambda s: counted(s, torch.full_like(s.lengths_N, float(s.lengths_N.clamp_min(1).sum()))),
)
fault(
    "documents_for_tokens",
    "number",
    "divided by documents, each over its own tokens",
    "marin-community/marin#2376",
    ("denominator", "documents", "own tokens"),
    weights=lambda s: weights(s, "document"),
)
fault(
    "own_lengths_with_tools",
    "uneven",
    "documents over all their tokens",
    "OpenRLHF b3d29278",
    ("denominator", "documents"),
    weights=lambda s: weights(s, "document"),
)
fault(
    "padded_width",
    "drgrpo",
    "divided by the padded width, not the constant",
    "verl loss_scale_factor",
    ("denominator", "width"),
    ("factor", "16"),
    weights=lambda s: counted(s, torch.full_like(s.lengths_N, 13.0), documents=float((s.lengths_N > 0).sum())),
)
fault(
    "all_documents",
    "padded",
    "documents without a trained token are counted",
    "huggingface/trl#6365",
    ("denominator", "documents without a trained token"),
    ("factor", "documents"),
    weights=lambda s: counted(s, s.lengths_N, documents=float(len(s.lengths_N))),
)
fault(
    "silent_groups_dropped",
    "gspo",
    "documents with an advantage of 0 are not counted",
    "huggingface/trl#7068",
    ("denominator", "advantage"),
    weights=lambda s: counted(
        s,
        s.lengths_N,
        documents=float((torch.zeros(12).index_add(0, s.ids_T, s.tokens["advantages"].abs().float()) > 0).sum()),
    ),
)
fault(
    "squared_documents",
    "padded",
    "gradient divided by documents twice",
    "ServiceNow/Fast-LLM#502",
    ("factor", "documents"),
    factor=1 / 11,
    reported=1.0,
)
fault(
    "penalty_of_micro_batches",
    "ppo",
    "the penalty is a mean of micro-batch means",
    "NovaSky-AI/SkyRL#1969",
    ("denominator", "KL", "micro-batch"),
    ("penalty", "micro-batch"),
    penalty_weights=lambda s: pieces_mean(s, "micro_batch"),
)
fault(
    "penalty_of_documents",
    "number",
    "the penalty is divided by documents, the policy by tokens",
    "huggingface/trl#6654",
    ("denominator", "KL", "documents"),
    ("penalty", "documents"),
    penalty_weights=lambda s: weights(s, "document"),
)
fault(
    "survivors",
    "uneven",
    "divided by the tokens whose weight is not truncated",
    "THUDM/slime#657",
    ("denominator", "correction"),
    weights=lambda s: counted(
        s,
        torch.full_like(
            s.lengths_N,
            float((s.mask_T & ((s.tokens["old_logprobs"] - s.tokens["sampler_logprobs"]).exp() <= 1.2)).sum()),
        ),
    ),
)
FAULTS.pop()  # a truncated weight has no survivors: the correction of the settings rejects nothing

# ---- factors --------------------------------------------------------------------------------------------------------

fault("times_cp", "ppo", "gradients times cp", "NVIDIA/Megatron-LM#673", ("factor", "cp"), factor=2.0, reported=1.0)
fault(
    "over_micro_batches",
    "cispo",
    "divided by micro-batches once more",
    "areal-project/AReaL#1273",
    ("factor", "micro_batches"),
    factor=1 / 3,
)
fault("over_dp", "gspo", "divided by ranks once more", "verl-project/verl#3741", ("factor", "dp"), factor=0.5)
fault(
    "metric_times_cp",
    "ppo",
    "the reported loss is that of every context-parallel rank",
    "ServiceNow/Fast-LLM#502",
    ("factor", "cp"),
    reported=2.0,
)
fault(
    "over_temperature",
    "padded",
    "the gradient has 1 / T once more",
    "NVIDIA-NeMo/RL#714",
    ("factor", "temperature"),
    ("temperature",),
    factor=1 / 0.7,
    reported=1.0,
)
fault(
    "sign",
    "number",
    "the advantage's sign is lost",
    "sign",
    ("factor", "sign"),
    policy=lambda s, x, v: -policy_values(s, x, v),
)

# ---- masks ----------------------------------------------------------------------------------------------------------

fault(
    "tools_train",
    "ppo",
    "the mask of tools is ignored",
    "huggingface/trl#4975",
    ("mask", "tool"),
    values=lambda s: {"loss_mask": s.tokens["token_mask"]},
)
fault(
    "first_lost",
    "gspo",
    "the first token of each document does not train",
    "verl-project/verl#3287",
    ("mask", "first"),
    values=lambda s: {"loss_mask": s.mask_T & (s.ids_T.roll(1) == s.ids_T)},
)
fault(
    "last_lost",
    "cispo",
    "the last token of each document does not train",
    "OpenRLHF GPTLMLoss",
    ("mask", "last"),
    values=lambda s: {"loss_mask": s.mask_T & (s.ids_T.roll(-1) == s.ids_T)},
)
fault(
    "mask_shifted",
    "drgrpo",
    "the mask is one token late",
    "verl-project/verl#3287",
    ("mask", "before"),
    values=lambda s: {"loss_mask": shifted(s.mask_T, s, 1) & s.tokens["token_mask"]},
)
fault(
    "last_micro_batch",
    "ppo",
    "gradients of earlier micro-batches are overwritten",
    "NVIDIA-NeMo/Automodel#3530",
    ("mask", "micro-batch"),
    ("factor", "micro-batch"),
    gradients=lambda s, g: torch.where((s.of_rows("micro_batch") % 2 == 1)[s.ids_T], g, 0),
)
fault(
    "a_rank_is_lost",
    "gspo",
    "gradients of rank 1 are not reduced",
    "pytorch/torchtitan#2318",
    ("mask", "rank"),
    ("factor", "rank"),
    gradients=lambda s, g: torch.where((s.of_rows("rank") == 0)[s.ids_T], g, 0),
)
fault(
    "negative_lost",
    "bf16",
    "tokens with negative advantages do not train",
    "signal",
    ("mask", "negative"),
    ("estimator", "negative"),
    policy=lambda s, x, v: policy_values(s, x, {**v, "advantages": v["advantages"].clamp_min(0)}),
)
fault(
    "padding_counts",
    "bf16",
    "documents divide by their padded width",
    "radixark/miles SkyRL#211",
    ("denominator", "width"),
    ("denominator", "padding"),
    weights=lambda s: counted(s, torch.full_like(s.lengths_N, 13.0), documents=float((s.lengths_N > 0).sum())),
)

# ---- shifts ---------------------------------------------------------------------------------------------------------

for name, kind, by in (("old_logprobs", "ppo", 1), ("ref_logprobs", "padded", -1), ("sampler_logprobs", "cispo", 1)):
    fault(
        f"{name}_shifted",
        kind,
        f"{name} of a neighbour",
        "PrimeIntellect-ai/prime-rl#606",
        ("shift", name),
        values=lambda s, name=name, by=by: {name: shifted(s.tokens[name], s, by)},
    )
fault(
    "old_of_row",
    "uneven",
    "old log-probabilities rolled over the packed row",
    "verl-project/verl#4250",
    ("shift", "old"),
    values=lambda s: {"old_logprobs": s.tokens["old_logprobs"].roll(1)},
)
fault(
    "advantages_shifted",
    "drgrpo",
    "advantages one token late, 0 at first",
    "allenai/open-instruct",
    ("shift", "advantages"),
    values=lambda s: {"advantages": shifted(s.tokens["advantages"], s, 1)},
)


def compacted(value_T: Tensor, step: Step) -> Tensor:
    """Values of trained tokens at the beginning of each document, 0 after: a tool's tokens were left out."""
    out_T = torch.zeros_like(value_T)
    for number in range(len(step.lengths_N)):
        own_T = value_T[(step.ids_T == number) & step.mask_T]
        out_T[torch.nonzero(step.ids_T == number).squeeze(1)[: len(own_T)]] = own_T
    return out_T


fault(
    "compacted",
    "ppo",
    "old log-probabilities without the tool's, from the beginning",
    "huggingface/trl#4975",
    ("shift", "old"),
    values=lambda s: {"old_logprobs": compacted(s.tokens["old_logprobs"], s)},
)

# ---- order ----------------------------------------------------------------------------------------------------------


def reordered(step: Step, name: str, order_N: Tensor) -> Tensor:
    rows = step.tokens[name].reshape(len(order_N), -1)
    return rows[order_N].reshape(-1)


by_length = torch.tensor(LENGTHS).argsort(descending=True, stable=True)
fault(
    "sorted_by_length",
    "padded",
    "old log-probabilities stay sorted by length",
    "tenstorrent/tt-metal#46412",
    ("order", "old"),
    values=lambda s: {"old_logprobs": reordered(s, "old_logprobs", by_length)},
)
fault(
    "advantages_dealt",
    "ppo",
    "advantages are dealt to ranks in turn",
    "tenstorrent/tt-metal#46548",
    ("order", "advantages"),
    advantages=lambda s: advantages(s)[torch.arange(12).reshape(-1, 2).t().reshape(-1)],
)
fault(
    "advantages_of_sorted",
    "gspo",
    "advantages of documents sorted by length",
    "google/tunix#816",
    ("order", "advantages"),
    advantages=lambda s: advantages(s)[by_length],
)
fault(
    "advantages_swapped",
    "drgrpo",
    "two documents have each other's advantages",
    "areal-project/AReaL#1559",
    ("order", "advantages"),
    advantages=lambda s: advantages(s)[torch.tensor([0, 1, 2, 8, 4, 5, 6, 7, 3, 9, 10, 11])],
)

# ---- estimators -----------------------------------------------------------------------------------------------------

fault(
    "population_deviation",
    "ppo",
    "the deviation over n",
    "NousResearch/torchtitan#66",
    ("estimator", "divides by n"),
    advantages=lambda s: advantages(s, ddof=0),
)
fault(
    "epsilon",
    "padded",
    "1e-6 in place of 1e-4",
    "verl grpo",
    ("estimator", "1e-06"),
    advantages=lambda s: advantages(s, epsilon=1e-6),
)
fault(
    "parentheses",
    "gspo",
    "reward - mean / deviation",
    "PrimeIntellect-ai/prime-rl#390",
    ("estimator", "parenthes"),
    advantages=lambda s: advantages(s, how="missing parentheses"),
)
fault(
    "normalised",
    "drgrpo",
    "divided by the deviation",
    "hkust Dr. GRPO",
    ("estimator", "deviation"),
    advantages=lambda s: advantages(s, how="grpo"),
)
fault(
    "group_mean_for_rloo",
    "number",
    "the group's mean, its own reward too",
    "OpenRLHF#923",
    ("estimator", "group's mean"),
    advantages=lambda s: advantages(s, how="dr_grpo"),
)
fault(
    "no_baseline",
    "drgrpo",
    "rewards are the advantages",
    "alibaba/ROLL",
    ("estimator", "reward"),
    advantages=lambda s: s.documents["rewards"].clone(),
)
fault(
    "rewards_and_batch",
    "ppo",
    "advantages are whitened over the batch again",
    "verl-project/verl#6348",
    ("estimator", "whitened"),
    advantages=lambda s: whitened(s),
)


def whitened(step: Step) -> Tensor:
    A_N = advantages(step)
    each_T = A_N[step.ids_T][step.mask_T]
    return (A_N - each_T.mean()) / (each_T.var() + 1e-8).sqrt()


fault(
    "masked_in_baseline",
    "number",
    "documents without a trained token enter the baseline",
    "NVIDIA-NeMo/RL#3467",
    ("mask", "without a trained token"),
    ("group", "without a trained token"),
    advantages=lambda s: advantages(s, masked=True),
)
fault(
    "kl_reversed",
    "padded",
    "the penalty's log ratio has the other sign",
    "verl-project/verl#6058",
    ("estimator", "KL"),
    kl=lambda s, x, v: (x - v["ref_logprobs"]).exp() - 1 - (x - v["ref_logprobs"]),
)
fault(
    "kl_k2",
    "number",
    "k2 in place of k3",
    "THUDM/slime#2114",
    ("estimator", "k2"),
    kl=lambda s, x, v: kl_values(s, x, v, "k2"),
)
fault(
    "token_ratio_for_gspo",
    "gspo",
    "tokens' ratios in place of the document's",
    "PrimeIntellect-ai/prime-rl#1123",
    ("estimator", "ppo"),
    policy=lambda s, x, v: policy_values(s, x, v, loss="ppo"),
)
fault(
    "sum_for_mean",
    "gspo",
    "the sum of log ratios in place of their mean",
    "NVIDIA-NeMo/RL#2269",
    ("estimator", "sum"),
    policy=lambda s, x, v: policy_values(
        s, v["old_logprobs"] + (x - v["old_logprobs"]) * s.lengths_N[s.ids_T].float(), v
    ),
)
fault(
    "ratio_reversed",
    "drgrpo",
    "old over policy",
    "ratio",
    ("estimator", "ratio"),
    policy=lambda s, x, v: policy_values(s, 2 * v["old_logprobs"] - x, v),
)
fault(
    "optimistic",
    "ppo",
    "the larger of both surrogates",
    "min and max",
    ("clip", "larger"),
    ("estimator", "larger"),
    policy=lambda s, x, v: policy_values(s, x, v, optimistic=True),
)

# ---- stale, rounded, temperature, group -----------------------------------------------------------------------------

fault(
    "sampler_for_old",
    "ppo",
    "the sampler's log-probabilities as the old ones",
    "huggingface/trl#4159",
    ("stale", "sampler", "old"),
    values=lambda s: {"old_logprobs": s.tokens["sampler_logprobs"]},
)
fault(
    "policy_for_old",
    "cispo",
    "the live policy as the old one",
    "tinker-cloud#66",
    ("stale", "policy", "old"),
    values=lambda s: {"old_logprobs": s.tokens["policy_logprobs"].detach()},
)
fault(
    "ref_is_old",
    "number",
    "the old policy as the reference",
    "miles#1829",
    ("stale", "old", "ref"),
    values=lambda s: {"ref_logprobs": s.tokens["old_logprobs"]},
)
fault(
    "correction_of_policy",
    "uneven",
    "the correction's weight from the live policy",
    "THUDM/slime#179",
    ("stale", "policy", "correction"),
    ("correction", "policy"),
    policy=lambda s, x, v: policy_values(s, x, v, mu_T=(x - v["sampler_logprobs"]).detach()),
)
fault(
    "correction_with_gradient",
    "uneven",
    "the weight is not detached",
    "verl-project/verl#4105",
    ("correction", "gradient"),
    policy=lambda s, x, v: policy_values(s, x, v, mu_T=x - v["sampler_logprobs"]),
)
fault(
    "correction_inverse",
    "ppo",
    "sampler over old",
    "verl k1 rejection",
    ("correction", "inver"),
    policy=lambda s, x, v: policy_values(s, x, v, mu_T=v["sampler_logprobs"] - v["old_logprobs"]),
)
fault(
    "no_correction",
    "cispo",
    "no correction",
    "linkedin/Liger-Kernel#1082",
    ("correction", "no correction"),
    policy=lambda s, x, v: policy_values(s, x, v, correction=torch.ones_like),
)
fault(
    "unbounded",
    "uneven",
    "weights have no bound",
    "huggingface/trl#5231",
    ("correction", "no bound"),
    policy=lambda s, x, v: policy_values(s, x, v, correction=lambda w: w),
)
fault(
    "zeroed",
    "cispo",
    "weights beyond the bound are 0",
    "huggingface/trl",
    ("correction", "reject"),
    ("correction", "0"),
    policy=lambda s, x, v: policy_values(s, x, v, correction=lambda w: torch.where(w > 1.5, 0, w)),
)
fault(
    "correction_on_kl",
    "ppo",
    "the weight multiplies the penalty too",
    "NVIDIA-NeMo/RL#2958",
    ("correction", "KL"),
    ("penalty", "correction"),
    kl=lambda s, x, v: kl_values(s, x, v) * correction(s, v),
)
fault(
    "rounded_old",
    "padded",
    "old log-probabilities in bfloat16",
    "frontier 27",
    ("rounded", "old", "bfloat16"),
    values=lambda s: {"old_logprobs": s.tokens["old_logprobs"].bfloat16().float()},
)
fault(
    "rounded_ref_half",
    "padded",
    "reference log-probabilities in float16",
    "rounded",
    ("rounded", "ref", "float16"),
    values=lambda s: {"ref_logprobs": s.tokens["ref_logprobs"].half().float()},
)
fault(
    "rounded_advantages",
    "padded",
    "advantages in bfloat16",
    "rounded",
    ("rounded", "advantages"),
    values=lambda s: {"advantages": s.tokens["advantages"].bfloat16().float()},
)
fault(
    "temperature_on_logprobs",
    "padded",
    "log-probabilities of the policy divided by T",
    "NVIDIA-NeMo/RL 66b",
    ("temperature", "policy"),
    values=lambda s: {"policy_logprobs": s.tokens["policy_logprobs"] / 0.7},
)
fault(
    "temperature_on_old",
    "padded",
    "old log-probabilities times T",
    "NVIDIA-NeMo/RL#660",
    ("temperature", "old"),
    values=lambda s: {"old_logprobs": s.tokens["old_logprobs"] * 0.7},
)
fault(
    "one_group",
    "ppo",
    "all documents are one group",
    "NVIDIA-NeMo/RL#2176",
    ("group", "all documents"),
    advantages=lambda s: advantages(s, torch.zeros(12)),
)
fault(
    "groups_of_ranks",
    "gspo",
    "groups of a rank",
    "google/tunix#816",
    ("group", "rank"),
    advantages=lambda s: advantages(s, s.documents["group_ids"] * 2 + s.of_rows("rank")),
)
fault(
    "groups_across",
    "uneven",
    "groups of three documents in a row",
    "areal-project/AReaL#1563",
    ("group", "3"),
    advantages=lambda s: advantages(s, torch.arange(9) // 3),
)
fault(
    "groups_shifted",
    "drgrpo",
    "groups begin one document late",
    "areal-project/AReaL#1559",
    ("group", "late"),
    advantages=lambda s: advantages(s, (torch.arange(12) + 3) // 4),
)

# ---- clip and penalty -----------------------------------------------------------------------------------------------

fault(
    "one_clip",
    "ppo",
    "0.2 on both sides",
    "NovaSky-AI/SkyRL#1928",
    ("clip", "0.2"),
    policy=lambda s, x, v: policy_values(s, x, v, clip=(0.2, 0.2)),
)
fault(
    "clip_missing",
    "drgrpo",
    "nothing is clipped",
    "tinker-cookbook#822",
    ("clip", "nothing"),
    ("estimator", "importance"),
    policy=lambda s, x, v: policy_values(s, x, v, clip=(1.0, 1e9)),
)
fault(
    "dual",
    "gspo",
    "a dual clip",
    "verl-project/verl clip_ratio_c",
    ("clip", "dual"),
    policy=lambda s, x, v: policy_values(s, x, v, dual=1.01),
)
FAULTS.pop()  # its bound is in no setting
fault(
    "kl_missing",
    "padded",
    "no penalty",
    "huggingface/trl beta",
    ("penalty", "no KL"),
    kl=lambda s, x, v: 0 * kl_values(s, x, v),
)
fault(
    "kl_without_gradient",
    "number",
    "the penalty has no gradient",
    "NovaSky-AI/SkyRL#1353",
    ("penalty", "gradient"),
    kl=lambda s, x, v: kl_values(s, x.detach(), v),
)
FAULTS.pop()  # this kind records numbers alone, which do not move
fault(
    "kl_no_gradient",
    "ppo",
    "the penalty has no gradient",
    "NovaSky-AI/SkyRL#1353",
    ("penalty", "gradient"),
    kl=lambda s, x, v: kl_values(s, x.detach(), v),
)
fault(
    "kl_coefficient",
    "bf16",
    "a third of the coefficient",
    "linkedin/Liger-Kernel beta",
    ("penalty", "KL"),
    kl=lambda s, x, v: kl_values(s, x, v) / 3,
)
fault(
    "kl_over_micro_batches",
    "ppo",
    "the penalty is divided by micro-batches again",
    "NovaSky-AI/SkyRL#1822",
    ("penalty", "micro_batches"),
    ("penalty", "0.5"),
    kl=lambda s, x, v: kl_values(s, x, v) / 2,
)


fault(
    "shard_edges",
    "gspo",
    "one label is lost at each edge of a context-parallel shard",
    "OpenRLHF GPTLMLoss",
    ("mask", "tokens"),
    gradients=lambda s, g: torch.where(torch.arange(len(g)) % 9 == 8, 0, g),
)
FAULTS.pop()  # of gspo every token has the gradient of its document
fault(
    "shard_edges",
    "uneven",
    "one label is lost at each edge of a context-parallel shard",
    "OpenRLHF GPTLMLoss",
    ("mask", "tokens"),
    gradients=lambda s, g: torch.where(torch.arange(len(g)) % 9 == 8, 0, g),
)
fault(
    "rounded_gradients",
    "number2",
    "gradients in bfloat16",
    "verl logits / T in bf16",
    ("rounded", "coefficients"),
    gradients=lambda s, g: g.bfloat16().float(),
)
fault(
    "clip_of_another",
    "number2",
    "0.17 in place of 0.2 above",
    "settings",
    ("clip", "clip_high"),
    policy=lambda s, x, v: policy_values(s, x, v, clip=(0.2, 0.13)),
)
fault(
    "bound_of_another",
    "uneven",
    "weights truncated at 1.1",
    "settings",
    ("correction", "1.1"),
    policy=lambda s, x, v: policy_values(s, x, v, correction=lambda w: w.clamp(max=1.1)),
)
fault(
    "last_loss",
    "ppo",
    "the reported loss is that of the last micro-batches",
    "verl-project/verl#2259",
    ("mask", "reported"),
    ("factor", "reported"),
    reported_of=lambda s: (s.of_rows("micro_batch") % 2 == 1)[s.ids_T],
)
fault(
    "constant_of_another",
    "drgrpo",
    "divided by 11 tokens a document",
    "verl loss_scale_factor",
    ("denominator", "11"),
    factor=16 / 11,
)
fault(
    "ratio_of_tools",
    "gspo2",
    "the document's ratio is a mean over a tool's tokens too",
    "inclusionAI/AReaL#1346",
    ("mask", "tool"),
    policy=lambda s, x, v: policy_values(
        s,
        v["old_logprobs"]
        + (x - v["old_logprobs"]) * (s.lengths_N / torch.bincount(s.ids_T[s.tokens["token_mask"]]))[s.ids_T].float(),
        v,
    ),
)
fault(
    "counted_of_micro_batch",
    "ppo",
    "micro-batch means; the count is that of the last micro-batch",
    "NVIDIA-NeMo/RL#373",
    ("denominator", "micro-batch"),
    weights=lambda s: pieces_mean(s, "micro_batch"),
    counts=lambda s: {"tokens": float((s.mask_T & (s.of_rows("micro_batch") == 3)[s.ids_T]).sum())},
)


def dump_of(one: Fault) -> Step:
    """Return the trained step of a mistake."""
    return train(draw(KINDS[one.kind]), **one.wrong)


def clean(number: int) -> Step:
    """Return a right step of drawn sizes, groups, layout, precision and settings."""
    g = torch.Generator().manual_seed(1000 + number)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=g))]

    dp, micro_batches, size = pick(1, 2), pick(1, 2, 3), pick(2, 4)
    documents = 12 if size == 2 else 24
    lengths = tuple(int(n) for n in torch.randint(1, 40, (documents,), generator=g))
    kind = Kind(
        lengths,
        tuple(n // size for n in range(documents)),
        pick("ppo", "gspo", "cispo", "reinforce", "importance_sampling"),
    )
    denominator = pick("token", "document", "document_sum", "constant")
    kind = replace(kind, denominator=denominator, constant=64.0, clip=pick((0.2, 0.2), (0.2, 0.28), (3e-4, 4e-4)))
    kind = replace(
        kind, kl=pick(0.0, 0.02, 0.3), correction=pick(0.0, 1.3, 2.0), estimator=pick("grpo", "dr_grpo", "rloo")
    )
    kind = replace(
        kind, dtype=pick("float32", "bfloat16"), dp=dp, micro_batches=micro_batches, padded=pick(True, False)
    )
    kind = replace(kind, tools=pick(True, False), silent=pick((), (1, 5)), spread=pick(0.01, 0.1, 0.5), seed=number)
    records = (*ALL, "ratios", "loss_weights") + ("correction_weights",) * bool(kind.correction)
    return train(draw(replace(kind, records=records)))


__all__ = ["FAULTS", "KINDS", "clean", "dump_of", "mean"]
