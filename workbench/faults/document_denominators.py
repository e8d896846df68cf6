"""Known bugs: wrong denominator of a document or an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workbench.faults import fault
from workbench.reduction.scaling import Cut
from workbench.rollouts.batch import PADDING
from workbench.rollouts.targets import TrainingRow
from workbench.specs.losses import LossSpec


@fault(
    seam="step_weights",
    origin="verl-project/verl#911 and #1233 (mended in #931)",
    signature="loss and gradient too small by about the mean length and turned: long documents weigh no more than "
    "short ones; right where a mean over documents was asked for",
    shows_in={"loss": {"denominator": "document_sum"}},
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_unseen.py::test_weights_of_documents_are_what_each_fault_says",
)
def length_divides_document_sum(step_weights: Callable) -> Callable:
    """Two ways to aggregate have the same lines: what was to be summed over a document's tokens is averaged."""

    def divide_by_lengths(rows: list, spec: LossSpec, **how: object) -> tuple:
        asked = {"denominator": "document"} if spec.denominator == "document_sum" else {}
        return step_weights(rows, spec.model_copy(update=asked), **how)

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

    def divide_by_lengths_too(rows: list, spec: LossSpec, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, **how)
        if spec.denominator == "token":
            for row, named in zip(rows, weights, strict=True):
                for name in ("policy", "penalty", "token"):
                    named[name] = named[name].map(lambda w_T, row=row: w_T / row.lengths_T.double())
        return weights, totals

    return divide_by_lengths_too


@fault(
    seam="step_weights",
    origin="huggingface/trl#6654 (length squared over tokens), unslothai/unsloth-zoo#1282",
    signature="a document weighs its length times documents / tokens of the step too much: no factor, another "
    "direction, long documents win; right with documents of one length, and under other surrogates",
    shows_in={"loss": {"name": "luspo"}},
    hidden_in={"loss": {"denominator": "token"}},
    detected_by="tests/faults/test_unseen.py::test_weights_of_documents_are_what_each_fault_says",
)
def luspo_over_tokens(step_weights: Callable) -> Callable:
    """A loss that multiplies by a document's length is averaged over tokens, so that length counts twice.

    LUSPO's value of a document, its length times its ratio, stands on each of its tokens, and their sum is divided by
    the tokens of the step instead of by length and documents.
    """

    def average_over_tokens(rows: list, spec: LossSpec, **how: object) -> tuple:
        asked = {"denominator": "token"} if spec.surrogate.kind == "luspo" else {}
        return step_weights(rows, spec.model_copy(update=asked), **how)

    return average_over_tokens


@fault(
    seam="step_weights",
    origin="verl-project/verl#7913 and #5614",
    signature="micro-batches of a rank times too big, less the share of masked answers, and turned: answers of "
    "micro-batches with few others weigh more; the penalty right; nothing under other surrogates",
    shows_in={"data": {"micro_batches": 3}, "loss": {"name": "gmpo", "kl": {"coefficient": 0.0}}},
    hidden_in={"loss": {"name": "gspo"}},
    detected_by="tests/faults/test_unseen.py::test_weights_of_documents_are_what_each_fault_says",
)
def mean_over_all_rows(step_weights: Callable) -> Callable:
    """A mean over the rows of a micro-batch, those in which nothing trains among them.

    GMPO ends in a plain mean over the answers of a micro-batch, masked ones too, where every other loss is divided by
    the answers of the step.
    """

    def average_over_rows(rows: list, spec: LossSpec, cut: Cut | None = None, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, cut=cut, **how)
        if spec.surrogate.kind != "gmpo":
            return weights, totals
        here = spec.model_copy(update={"denominator": "document", "documents_counted": "all"})
        dp = 1 if cut is None else cut.dp
        for row, named in zip(rows, weights, strict=True):
            alone = step_weights([row], here)[0][0]["policy"]
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
    """Documents * C divides a loss with a constant length C; here C is the longest document of the micro-batch."""

    def divide_by_width(rows: list, spec: Any, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, **how)
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
    "in which nothing trains; nothing under a denominator that does not count tokens",
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_wrong_count_of_tokens_is_one_factor",
)
def per_sample_count_floor(step_weights: Callable) -> Callable:
    """The guard against a division by 0, max(tokens, 1), is put on each document's count before these are added up."""

    def count_at_least_one(rows: list, spec: Any, **how: object) -> tuple:
        floored = spec.scaling.model_copy(update={"least_tokens": 1})
        return step_weights(rows, spec.model_copy(update={"scaling": floored}), **how)

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
    """Token-mean is taken over the answers to each prompt, and its mean over prompts, instead of over the batch."""

    def average_over_prompts(rows: list, spec: LossSpec, **how: object) -> tuple:
        asked = {"denominator": "prompt_group"} if spec.denominator == "token" else {}
        return step_weights(rows, spec.model_copy(update=asked), **how)

    return average_over_prompts


@fault(
    seam="step_weights",
    origin="THUDM/slime#365",
    signature="loss and every gradient exactly T / T' of the right ones, cosine 1: T trained tokens, T' tokens from "
    "the first trained one of each document to its end; nothing where masks have no holes",
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_wrong_count_of_tokens_is_one_factor",
)
def response_length_in_denominator(step_weights: Callable) -> Callable:
    """Tokens are counted as lengths of responses instead of as the sum of the mask, so the answers of tools count."""

    def count_whole_responses(rows: list[TrainingRow], spec: Any, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, **how)
        longer = totals.tokens / max(sum(map(_response_tokens, rows)), 1)
        if spec.denominator == "token":
            for named in weights:
                for name in ("policy", "penalty"):
                    named[name] = named[name].map(lambda weights_T: weights_T * longer)
        return weights, totals

    return count_whole_responses


def _response_tokens(row: TrainingRow) -> int:
    """Targets from the first trained one of each document on."""
    ids_T, found = row.document_ids_T, 0
    for document in ids_T[row.loss_mask_T].unique():
        mine_T = (ids_T == document) & (row.source_T != PADDING)
        found += int((row.loss_mask_T[mine_T].cumsum(0) > 0).sum())
    return found


@fault(
    seam="step_weights",
    origin="huggingface/trl#6365 and #7068",
    signature="loss and every gradient exactly M / N of the right ones, cosine 1: M documents that train, N documents; "
    "nothing under a mean over tokens",
    shows_in={"loss": {"denominator": "document"}},
    hidden_in={"loss": {"denominator": "token"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_rows_without_signal_shrink_a_mean_over_documents",
)
def rows_without_signal_counted(step_weights: Callable) -> Callable:
    """Answers that say nothing are taken out of the numerator and left in the number of rows."""

    def count_all(rows: list, spec: LossSpec, **how: object) -> tuple:
        return step_weights(rows, spec.model_copy(update={"documents_counted": "all"}), **how)

    return count_all


@fault(
    seam="step_weights",
    origin="verl-project/verl#906, #5625 and #5641",
    signature="no factor, another direction: tokens of micro-batches with short answers weigh more; nothing with one "
    "micro-batch",
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen_at_first.py::test_other_means_are_the_sums_that_their_weights_say",
)
def sample_share_times_token_mean(step_weights: Callable) -> Callable:
    """The token mean of a micro-batch is weighed with its share of the samples.

    Micro-batches of many sizes, made by length, are added up by their share of the samples, where a mean over tokens
    wants their share of the tokens.
    """

    def weigh_with_samples(rows: list, spec: LossSpec, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, **how)
        if spec.denominator != "token":
            return weights, totals
        samples = [int(row.document_ids_T.max()) + 1 for row in rows]
        for row, named, held in zip(rows, weights, samples, strict=True):
            alone, share = step_weights([row], spec)[0][0], held / sum(samples)
            for name in ("policy", "penalty", "token"):
                named[name] = alone[name].map(lambda w_T, share=share: w_T * share)
        return weights, totals

    return weigh_with_samples


@fault(
    seam="step_weights",
    origin="radixark/miles#2369",
    signature="no factor, another direction: rollouts of several samples weigh more; right where each rollout is one "
    "sample, and under other denominators",
    shows_in={"loss": {"denominator": "rollout"}},
    hidden_in={"loss": {"denominator": "token"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_other_means_are_the_sums_that_their_weights_say",
)
def samples_for_rollouts(step_weights: Callable) -> Callable:
    """A rollout that was cut into several samples weighs as often as it was cut."""

    def average_over_samples(rows: list, spec: LossSpec, **how: object) -> tuple:
        asked = {"denominator": "document"} if spec.denominator == "rollout" else {}
        return step_weights(rows, spec.model_copy(update=asked), **how)

    return average_over_samples
