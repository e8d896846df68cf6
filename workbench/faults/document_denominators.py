"""Known bugs: wrong denominator of a document or a completion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workbench.faults import fault
from workbench.reduction.scaling import StepLayout
from workbench.rollouts.batch import PADDING
from workbench.rollouts.targets import TrainingRow
from workbench.specs.losses import LossSpec


@fault(
    seam="step_weights",
    origin="verl-project/verl#911 and #1233 (fixed in #931)",
    signature="loss and gradient too small by about the mean length and turned: long documents weigh no more than "
    "short ones; right if a mean over documents is requested",
    shows_in={"loss": {"denominator": "document_sum"}},
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_unseen.py::test_weights_of_documents_are_what_each_fault_says",
)
def length_divides_document_sum(step_weights: Callable) -> Callable:
    """Two aggregations share their code: the sum over a document's tokens becomes a mean."""

    def divide_by_lengths(rows: list, spec: LossSpec, **options: object) -> tuple:
        changes = {"denominator": "document"} if spec.denominator == "document_sum" else {}
        return step_weights(rows, spec.model_copy(update=changes), **options)

    return divide_by_lengths


@fault(
    seam="step_weights",
    origin="marin-community/marin#2376",
    signature="loss and gradient too small by about the mean length and turned: long documents weigh no more than "
    "short ones; with documents of one length that length is the factor",
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_other_means_are_the_sums_that_their_weights_say",
)
def length_slipped_into_token_mean(step_weights: Callable) -> Callable:
    """The mean over a document's tokens of GRPO stays inside the mean over all tokens of DAPO."""

    def divide_by_lengths_too(rows: list, spec: LossSpec, **options: object) -> tuple:
        weights, totals = step_weights(rows, spec, **options)
        if spec.denominator == "token":
            for row, named in zip(rows, weights, strict=True):
                for name in ("policy", "penalty", "token"):
                    named[name] = named[name].map(lambda w_T, row=row: w_T / row.lengths_T.double())
        return weights, totals

    return divide_by_lengths_too


@fault(
    seam="step_weights",
    origin="huggingface/trl#6654 (length squared over tokens), unslothai/unsloth-zoo#1282",
    signature="the weight of a document is too large by its length times documents / tokens of the step: no factor, "
    "another direction, towards long documents; right with documents of one length, and under other surrogates",
    shows_in={"loss": {"name": "luspo"}},
    hidden_in={"loss": {"denominator": "token"}},
    detected_by="tests/faults/test_unseen.py::test_weights_of_documents_are_what_each_fault_says",
)
def luspo_over_tokens(step_weights: Callable) -> Callable:
    """A loss that multiplies by a document's length is averaged over tokens, so that length counts twice.

    Each token of a document has LUSPO's value, length times ratio, and their sum is divided by the tokens of the step
    instead of by length and documents.
    """

    def average_over_tokens(rows: list, spec: LossSpec, **options: object) -> tuple:
        changes = {"denominator": "token"} if spec.surrogate.kind == "luspo" else {}
        return step_weights(rows, spec.model_copy(update=changes), **options)

    return average_over_tokens


@fault(
    seam="step_weights",
    origin="verl-project/verl#7913 and #5614",
    signature="too big by a rank's number of micro-batches, less the share of masked completions, and turned: "
    "completions of micro-batches with few others weigh more; the penalty right; no effect under other surrogates",
    shows_in={"data": {"micro_batches": 3}, "loss": {"name": "gmpo", "kl": {"coefficient": 0.0}}},
    hidden_in={"loss": {"name": "gspo"}},
    detected_by="tests/faults/test_unseen.py::test_weights_of_documents_are_what_each_fault_says",
)
def mean_over_all_rows(step_weights: Callable) -> Callable:
    """The loss is a mean over all rows of a micro-batch, including those without trained tokens.

    GMPO ends in a plain mean over the completions of a micro-batch, masked ones too, while every other loss is divided
    by the completions of the step.
    """

    def average_over_rows(rows: list, spec: LossSpec, cut: StepLayout | None = None, **options: object) -> tuple:
        weights, totals = step_weights(rows, spec, step_layout=cut, **options)
        if spec.surrogate.kind != "gmpo":
            return weights, totals
        local = spec.model_copy(update={"denominator": "document", "documents_counted": "all"})
        dp = 1 if cut is None else cut.dp
        for row, named in zip(rows, weights, strict=True):
            alone = step_weights([row], local)[0][0]["policy"]
            named["policy"] = alone.map(lambda w_T: w_T / dp)
        return weights, totals

    return average_over_rows


@fault(
    seam="step_weights",
    origin="verl's seq-mean-token-sum-norm without loss_scale_factor",
    signature="each micro-batch times C / its own width: one factor with one micro-batch, another direction with "
    "several",
    shows_in={"data": {"micro_batches": 3}, "loss": {"name": "dr_grpo", "denominator_constant": 16.0}},
    hidden_in={"loss": {"denominator": "token", "denominator_constant": None}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_padded_width_is_a_factor_of_each_micro_batch",
)
def padded_width_in_denominator(step_weights: Callable) -> Callable:
    """The constant C of a loss divided by documents * C is replaced by the longest document of the micro-batch."""

    def divide_by_width(rows: list, spec: Any, **options: object) -> tuple:
        weights, totals = step_weights(rows, spec, **options)
        if spec.denominator == "constant":
            for row, named in zip(rows, weights, strict=True):
                ids_T = row.document_ids_T[row.document_ids_T >= 0]
                width = int(torch.bincount(ids_T, minlength=1).max()) or 1
                for name in ("policy", "penalty"):
                    named[name] = named[name].map(lambda w_T, width=width: w_T * spec.denominator_constant / width)
        return weights, totals

    return divide_by_width


@fault(
    seam="step_weights",
    origin="radixark/miles#2796, redai-infra/Relax#205; the same expression in THUDM/slime",
    signature="loss and every gradient exactly T / (T + M) of the right ones, cosine 1: T trained tokens, M documents "
    "without trained tokens; no effect under a denominator that does not count tokens",
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_wrong_count_of_tokens_is_one_factor",
)
def per_sample_count_floor(step_weights: Callable) -> Callable:
    """The guard against a division by 0, max(tokens, 1), is applied to each document's count before the sum."""

    def count_at_least_one(rows: list, spec: Any, **options: object) -> tuple:
        floored = spec.scaling.model_copy(update={"least_tokens": 1})
        return step_weights(rows, spec.model_copy(update={"scaling": floored}), **options)

    return count_at_least_one


@fault(
    seam="step_weights",
    origin="verl-project/verl#593 and #2776",
    signature="no factor, another direction: tokens weigh more the fewer their prompt has; right with one prompt, and "
    "under a mean over documents",
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_other_means_are_the_sums_that_their_weights_say",
)
def prompt_mean_for_token_mean(step_weights: Callable) -> Callable:
    """The token mean is taken over the completions of each prompt, then over prompts, instead of over the batch."""

    def average_over_prompts(rows: list, spec: LossSpec, **options: object) -> tuple:
        changes = {"denominator": "prompt_group"} if spec.denominator == "token" else {}
        return step_weights(rows, spec.model_copy(update=changes), **options)

    return average_over_prompts


@fault(
    seam="step_weights",
    origin="THUDM/slime#365",
    signature="loss and every gradient exactly T / T' of the right ones, cosine 1: T trained tokens, T' tokens from "
    "the first trained one of each document to its end; no effect if masks have no holes",
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_wrong_count_of_tokens_is_one_factor",
)
def response_length_in_denominator(step_weights: Callable) -> Callable:
    """Tokens are counted as lengths of responses instead of as the sum of the mask, so tool outputs count."""

    def count_whole_responses(rows: list[TrainingRow], spec: Any, **options: object) -> tuple:
        weights, totals = step_weights(rows, spec, **options)
        longer = totals.tokens / max(sum(map(_response_tokens, rows)), 1)
        if spec.denominator == "token":
            for named in weights:
                for name in ("policy", "penalty"):
                    named[name] = named[name].map(lambda weights_T: weights_T * longer)
        return weights, totals

    return count_whole_responses


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
def rows_without_signal_counted(step_weights: Callable) -> Callable:
    """Completions without signal are removed from the numerator but left in the number of rows."""

    def count_all(rows: list, spec: LossSpec, **options: object) -> tuple:
        return step_weights(rows, spec.model_copy(update={"documents_counted": "all"}), **options)

    return count_all


@fault(
    seam="step_weights",
    origin="verl-project/verl#906, #5625 and #5641",
    signature="no factor, another direction: tokens of micro-batches with short completions weigh more; no effect with "
    "one micro-batch",
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen_at_first.py::test_other_means_are_the_sums_that_their_weights_say",
)
def sample_share_times_token_mean(step_weights: Callable) -> Callable:
    """The token mean of a micro-batch is weighted by its share of the samples.

    Micro-batches of different sizes, packed by length, are weighted by their share of the samples instead of their
    share of the tokens.
    """

    def weigh_with_samples(rows: list, spec: LossSpec, **options: object) -> tuple:
        weights, totals = step_weights(rows, spec, **options)
        if spec.denominator != "token":
            return weights, totals
        samples = [int(row.document_ids_T.max()) + 1 for row in rows]
        for row, named, count in zip(rows, weights, samples, strict=True):
            alone, share = step_weights([row], spec)[0][0], count / sum(samples)
            for name in ("policy", "penalty", "token"):
                named[name] = alone[name].map(lambda w_T, share=share: w_T * share)
        return weights, totals

    return weigh_with_samples


@fault(
    seam="step_weights",
    origin="radixark/miles#2369",
    signature="no factor, another direction: rollouts of several samples weigh more; right if each rollout is one "
    "sample, and under other denominators",
    shows_in={"loss": {"denominator": "rollout"}},
    hidden_in={"loss": {"denominator": "token"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_other_means_are_the_sums_that_their_weights_say",
)
def samples_for_rollouts(step_weights: Callable) -> Callable:
    """A rollout that was split into several samples counts once per sample."""

    def average_over_samples(rows: list, spec: LossSpec, **options: object) -> tuple:
        changes = {"denominator": "document"} if spec.denominator == "rollout" else {}
        return step_weights(rows, spec.model_copy(update=changes), **options)

    return average_over_samples
