"""Known bugs: wrong denominator of a step, a rank, a micro-batch, a document or a completion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.faults import fault
from workbench.reduction.weights import StepLayout, TokenWeights
from workbench.rollouts.batch import PADDING
from workbench.rollouts.targets import TrainingRow
from workbench.specs.losses import CompatSpec, LossSpec


def _reweigh(named: dict[str, TokenWeights], change: Callable[..., Tensor], *more: str) -> None:
    """Change the weights of the policy term, of penalties, and of more."""
    named |= {name: named[name].map(change) for name in ("policy", "penalty", *more)}


@fault(
    seam="step_weights",
    origin="verl-project/verl#3741, #5366 and #5417",
    signature="loss and every gradient exactly 1 / dp of the right ones, cosine 1; no effect under another denominator",
    shows_in={"layout": {"dp": 2}, "loss": {"name": "dr_grpo", "denominator_constant": 16.0}},
    hidden_in={"loss": {"denominator": "token", "denominator_constant": None}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_factor_of_the_layout_is_one_factor",
)
def constant_denominator_without_dp(
    step_weights: Callable, rows: list, spec: LossSpec, step_layout: StepLayout | None = None, **options: object
) -> tuple:
    """Every aggregation multiplies by dp, which cancels the mean over ranks, except the one with a constant length."""
    weights, totals = step_weights(rows, spec, step_layout=step_layout, **options)
    if spec.denominator == "constant" and step_layout is not None:
        for named in weights:
            _reweigh(named, lambda w_T: w_T / step_layout.dp)
    return weights, totals


@fault(
    seam="step_weights",
    origin="huggingface/trl#5619, #5890 and #6024",
    signature="loss and every gradient exactly 1 / steps per generation of the right ones, cosine 1, for any layout "
    "and micro-batches; no effect under a mean over documents",
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_tokens_of_another_batch_are_one_factor_in_every_layout",
)
def denominator_of_another_batch(step_weights: Callable, rows: list, spec: LossSpec, **options: object) -> tuple:
    """A step is divided by the tokens of all documents that were sampled at once for several optimizer steps."""
    weights, totals = step_weights(rows, spec, **options)
    if spec.denominator == "token":
        for named in weights:
            _reweigh(named, lambda w_T: w_T / STEPS_PER_GENERATION, "token")
    return weights, totals


STEPS_PER_GENERATION = 2
"""Optimizer steps of equal size for which documents are sampled at a time."""


@fault(
    seam="split_row",
    origin="NVIDIA-NeMo/RL#266, NVIDIA/Megatron-LM#7452, finding 9 (#7513), torchtitan context-parallel GRPO",
    signature="gradient about dp * cp times too big under a sum, and tilted towards ranks with few trained tokens; no "
    "tilt with equal masks",
    shows_in={"layout": {"dp": 2, "cp": 2, "order": "zigzag"}},
    hidden_in={"layout": {"dp": 1, "cp": 1}},
    detected_by="tests/parity/test_faults.py::test_local_denominator_is_too_big_and_tilted",
)
def local_denominator(split_row: Callable, *args: object) -> object:
    """The loss of a rank is divided by the rank's own token count."""
    local = split_row(*args)
    mask_T = local.row.loss_mask_T
    local_T = torch.where(mask_T, 1.0 / mask_T.sum().clamp_min(1).double(), 0.0).to(local.row.advantages_T.dtype)
    return replace(local, weights={name: TokenWeights(local_T, local_T) for name in local.weights})


@fault(
    seam="step_weights",
    origin="THUDM/slime#657, NVIDIA-NeMo/RL#4242, mlcommons/training#905",
    signature="the policy term and its gradient exactly kept / trained tokens of the right ones, cosine 1 without a "
    "penalty; a KL or entropy term is right; no effect if no token is rejected",
    shows_in={
        "loss": {
            "kl": {"coefficient": 0.0},
            "correction": {"kind": "icepop", "denominator": "survivors", "ratio_low": 0.9, "ratio_high": 1.1},
        }
    },
    hidden_in={"loss": {"correction": {"ratio_low": 0.01, "ratio_high": 100.0}}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_rejected_tokens_shrink_the_policy_term",
)
def rejected_tokens_in_denominator(step_weights: Callable, rows: list, spec: Any, **options: object) -> tuple:
    """A mean over surviving tokens is divided by all tokens before the rejection."""
    all_counted = spec.correction.model_copy(update={"denominator": "original"})
    return step_weights(rows, spec.model_copy(update={"correction": all_counted}), **options)


@fault(
    seam="step_weights",
    origin="verl-project/verl#911 and #1233 (fixed in #931)",
    signature="loss and gradient too small by about the mean length and turned: long documents weigh no more than "
    "short ones; right if a mean over documents is requested",
    shows_in={"loss": {"denominator": "document_sum"}},
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_unseen.py::test_document_weights_match_each_fault",
)
def length_divides_document_sum(step_weights: Callable, rows: list, spec: LossSpec, **options: object) -> tuple:
    """Two aggregations share their code: the sum over a document's tokens becomes a mean."""
    changes = {"denominator": "document"} if spec.denominator == "document_sum" else {}
    return step_weights(rows, spec.model_copy(update=changes), **options)


@fault(
    seam="step_weights",
    origin="marin-community/marin#2376",
    signature="loss and gradient too small by about the mean length and turned: long documents weigh no more than "
    "short ones; with documents of one length that length is the factor",
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_wrong_means_match_sums_with_their_weights",
)
def length_slipped_into_token_mean(step_weights: Callable, rows: list, spec: LossSpec, **options: object) -> tuple:
    """The mean over a document's tokens of GRPO stays inside the mean over all tokens of DAPO."""
    weights, totals = step_weights(rows, spec, **options)
    if spec.denominator == "token":
        for row, named in zip(rows, weights, strict=True):
            _reweigh(named, lambda w_T, row=row: w_T / row.lengths_T.double(), "token")
    return weights, totals


@fault(
    seam="step_weights",
    origin="huggingface/trl#6654 (length squared over tokens), unslothai/unsloth-zoo#1282",
    signature="the weight of a document is too large by its length times documents / tokens of the step: no factor, "
    "another direction, towards long documents; right with documents of one length, and under other surrogates",
    shows_in={"loss": {"name": "luspo"}},
    hidden_in={"loss": {"denominator": "token"}},
    detected_by="tests/faults/test_unseen.py::test_document_weights_match_each_fault",
)
def luspo_over_tokens(step_weights: Callable, rows: list, spec: LossSpec, **options: object) -> tuple:
    """LUSPO's values, length times ratio, are divided by the tokens of the step, so that length counts twice."""
    changes = {"denominator": "token"} if spec.surrogate.kind == "luspo" else {}
    return step_weights(rows, spec.model_copy(update=changes), **options)


@fault(
    seam="step_weights",
    origin="verl-project/verl#7913 and #5614",
    signature="too big by a rank's number of micro-batches, less the share of masked completions, and turned: "
    "completions of micro-batches with few others weigh more; the penalty right; no effect under other surrogates",
    shows_in={"data": {"micro_batches": 3}, "loss": {"name": "gmpo", "kl": {"coefficient": 0.0}}},
    hidden_in={"loss": {"name": "gspo"}},
    detected_by="tests/faults/test_unseen.py::test_document_weights_match_each_fault",
)
def mean_over_all_rows(
    step_weights: Callable, rows: list, spec: LossSpec, step_layout: StepLayout | None = None, **options: object
) -> tuple:
    """GMPO ends in a mean over all rows of a micro-batch, masked ones too, instead of over completions of the step."""
    weights, totals = step_weights(rows, spec, step_layout=step_layout, **options)
    if spec.surrogate.kind != "gmpo":
        return weights, totals
    local = spec.model_copy(update={"denominator": "document", "compat": _counting_all(spec)})
    dp = 1 if step_layout is None else step_layout.dp
    for row, named in zip(rows, weights, strict=True):
        alone = step_weights([row], local)[0][0]["policy"]
        named["policy"] = alone.map(lambda w_T: w_T / dp)
    return weights, totals


@fault(
    seam="step_weights",
    origin="verl's seq-mean-token-sum-norm without loss_scale_factor",
    signature="each micro-batch times C / its own width: one factor with one micro-batch, another direction with "
    "several",
    shows_in={"data": {"micro_batches": 3}, "loss": {"name": "dr_grpo", "denominator_constant": 16.0}},
    hidden_in={"loss": {"denominator": "token", "denominator_constant": None}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_padded_width_is_a_factor_of_each_micro_batch",
)
def padded_width_in_denominator(step_weights: Callable, rows: list, spec: Any, **options: object) -> tuple:
    """The constant C of a loss divided by documents * C is replaced by the longest document of the micro-batch."""
    weights, totals = step_weights(rows, spec, **options)
    if spec.denominator == "constant":
        for row, named in zip(rows, weights, strict=True):
            ids_T = row.document_ids_T[row.document_ids_T >= 0]
            width = int(torch.bincount(ids_T, minlength=1).max()) or 1
            _reweigh(named, lambda w_T, width=width: w_T * spec.denominator_constant / width)
    return weights, totals


@fault(
    seam="step_weights",
    origin="radixark/miles#2796, redai-infra/Relax#205; the same expression in THUDM/slime",
    signature="loss and every gradient exactly T / (T + M) of the right ones, cosine 1: T trained tokens, M documents "
    "without trained tokens; no effect under a denominator that does not count tokens",
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_wrong_count_of_tokens_is_one_factor",
)
def per_sample_count_floor(step_weights: Callable, rows: list, spec: Any, **options: object) -> tuple:
    """The guard against a division by 0, max(tokens, 1), is applied to each document's count before the sum."""
    scaling = spec.compat.scaling.model_copy(update={"least_tokens": 1})
    compat = spec.compat.model_copy(update={"scaling": scaling})
    return step_weights(rows, spec.model_copy(update={"compat": compat}), **options)


@fault(
    seam="step_weights",
    origin="verl-project/verl#593 and #2776",
    signature="no factor, another direction: tokens weigh more the fewer their prompt has; right with one prompt, and "
    "under a mean over documents",
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_wrong_means_match_sums_with_their_weights",
)
def prompt_mean_for_token_mean(step_weights: Callable, rows: list, spec: LossSpec, **options: object) -> tuple:
    """The token mean is taken over the completions of each prompt, then over prompts, instead of over the batch."""
    changes = {"denominator": "prompt_group"} if spec.denominator == "token" else {}
    return step_weights(rows, spec.model_copy(update=changes), **options)


@fault(
    seam="step_weights",
    origin="THUDM/slime#365",
    signature="loss and every gradient exactly T / T' of the right ones, cosine 1: T trained tokens, T' tokens from "
    "the first trained one of each document to its end; no effect if masks have no holes",
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_wrong_count_of_tokens_is_one_factor",
)
def response_length_in_denominator(
    step_weights: Callable, rows: list[TrainingRow], spec: Any, **options: object
) -> tuple:
    """Tokens are counted as lengths of responses instead of as the sum of the mask, so tool outputs count."""
    weights, totals = step_weights(rows, spec, **options)
    longer = totals.tokens / max(sum(map(_response_tokens, rows)), 1)
    if spec.denominator == "token":
        for named in weights:
            _reweigh(named, lambda w_T: w_T * longer)
    return weights, totals


def _response_tokens(row: TrainingRow) -> int:
    """Number of targets from the first trained one of each document on."""
    ids_T, tokens = row.document_ids_T, 0
    for document in ids_T[row.loss_mask_T].unique():
        inside_T = (ids_T == document) & (row.source_T != PADDING)
        tokens += int((row.loss_mask_T[inside_T].cumsum(0) > 0).sum())
    return tokens


@fault(
    seam="step_weights",
    origin="huggingface/trl#6365 and #7068",
    signature="loss and every gradient exactly M / N of the right ones, cosine 1: M documents that train, N documents; "
    "no effect under a mean over tokens",
    shows_in={"loss": {"denominator": "document"}},
    hidden_in={"loss": {"denominator": "token"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_rows_without_signal_shrink_a_mean_over_documents",
)
def rows_without_signal_counted(step_weights: Callable, rows: list, spec: LossSpec, **options: object) -> tuple:
    """Completions without signal are removed from the numerator but left in the number of rows."""
    return step_weights(rows, spec.model_copy(update={"compat": _counting_all(spec)}), **options)


@fault(
    seam="step_weights",
    origin="verl-project/verl#906, #5625 and #5641",
    signature="no factor, another direction: tokens of micro-batches with short completions weigh more; no effect with "
    "one micro-batch",
    needs="micro_batches",
    detected_by="tests/faults/test_unseen_at_first.py::test_wrong_means_match_sums_with_their_weights",
)
def sample_share_times_token_mean(step_weights: Callable, rows: list, spec: LossSpec, **options: object) -> tuple:
    """The token mean of a micro-batch is weighted by its share of the samples instead of its share of the tokens."""
    weights, totals = step_weights(rows, spec, **options)
    if spec.denominator != "token":
        return weights, totals
    samples = [int(row.document_ids_T.max()) + 1 for row in rows]
    for row, named, count in zip(rows, weights, samples, strict=True):
        alone, share = step_weights([row], spec)[0][0], count / sum(samples)
        for name in ("policy", "penalty", "token"):
            named[name] = alone[name].map(lambda w_T, share=share: w_T * share)
    return weights, totals


@fault(
    seam="step_weights",
    origin="radixark/miles#2369",
    signature="no factor, another direction: rollouts of several samples weigh more; right if each rollout is one "
    "sample, and under other denominators",
    shows_in={"loss": {"denominator": "rollout"}},
    hidden_in={"loss": {"denominator": "token"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_wrong_means_match_sums_with_their_weights",
)
def samples_for_rollouts(step_weights: Callable, rows: list, spec: LossSpec, **options: object) -> tuple:
    """A rollout that was split into several samples counts once per sample."""
    changes = {"denominator": "document"} if spec.denominator == "rollout" else {}
    return step_weights(rows, spec.model_copy(update=changes), **options)


def _counting_all(spec: LossSpec) -> CompatSpec:
    return spec.compat.model_copy(update={"documents_counted": "all"})
