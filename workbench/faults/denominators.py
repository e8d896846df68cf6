"""Known bugs: wrong denominator of a step, a rank or a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from workbench.faults import fault
from workbench.reduction.scaling import StepLayout
from workbench.reduction.weights import TokenWeights
from workbench.specs.losses import LossSpec


@fault(
    seam="step_weights",
    origin="verl-project/verl#3741, #5366 and #5417",
    signature="loss and every gradient exactly 1 / dp of the right ones, cosine 1; no effect under another denominator",
    shows_in={"layout": {"dp": 2}, "loss": {"name": "dr_grpo", "denominator_constant": 16.0}},
    hidden_in={"loss": {"denominator": "token", "denominator_constant": None}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_factor_of_the_layout_is_one_factor",
)
def constant_denominator_without_dp(step_weights: Callable) -> Callable:
    """The constant denominator of Dr. GRPO is used with an engine that averages over data-parallel ranks.

    Every aggregation multiplies by dp, which cancels the mean over ranks, except the one with a constant length.
    """

    def leave_out_dp(rows: list, spec: LossSpec, cut: StepLayout | None = None, **options: object) -> tuple:
        weights, totals = step_weights(rows, spec, step_layout=cut, **options)
        if spec.denominator == "constant" and cut is not None:
            for named in weights:
                for name in ("policy", "penalty"):
                    named[name] = named[name].map(lambda w_T: w_T / cut.dp)
        return weights, totals

    return leave_out_dp


@fault(
    seam="step_weights",
    origin="huggingface/trl#5619, #5890 and #6024",
    signature="loss and every gradient exactly 1 / steps per generation of the right ones, cosine 1, for any layout "
    "and micro-batches; no effect under a mean over documents",
    hidden_in={"loss": {"denominator": "document"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_tokens_of_another_batch_are_one_factor_in_every_layout",
)
def denominator_of_another_batch(step_weights: Callable) -> Callable:
    """The denominator of a step counts the tokens of a batch that was generated for several steps.

    Documents are sampled for several optimizer steps at once, and each step is divided by the tokens of all of them.
    """

    def divide_by_generated(rows: list, spec: LossSpec, **options: object) -> tuple:
        weights, totals = step_weights(rows, spec, **options)
        if spec.denominator == "token":
            for named in weights:
                for name in ("policy", "penalty", "token"):
                    named[name] = named[name].map(lambda w_T: w_T / STEPS_PER_GENERATION)
        return weights, totals

    return divide_by_generated


STEPS_PER_GENERATION = 2


"""Optimizer steps of equal size for which documents are sampled at a time."""


@fault(
    seam="split_row",
    origin="NVIDIA-NeMo/RL#266, NVIDIA/Megatron-LM#7513, torchtitan context-parallel GRPO",
    signature="gradient about dp * cp times too big under a sum, and tilted towards ranks with few trained tokens; no "
    "tilt with equal masks",
    shows_in={"layout": {"dp": 2, "cp": 2, "order": "zigzag"}},
    hidden_in={"layout": {"dp": 1, "cp": 1}},
    detected_by="tests/parity/test_faults.py::test_local_denominator_is_too_big_and_tilted",
)
def local_denominator(split_row: Callable) -> Callable:
    """The loss of a rank is divided by the rank's own token count."""

    def split_then_count_locally(*args: object) -> object:
        local = split_row(*args)
        mask_T = local.row.loss_mask_T
        local_T = torch.where(mask_T, 1.0 / mask_T.sum().clamp_min(1).double(), 0.0).to(local.row.advantages_T.dtype)
        return replace(local, weights={name: TokenWeights(local_T, local_T) for name in local.weights})

    return split_then_count_locally


@fault(
    seam="step_weights",
    origin="NVIDIA-NeMo/RL#266 and #373, NovaSky-AI/SkyRL#925 and #1296, TRL's loss type bnpo",
    signature="no factor, another direction: tokens of micro-batches with few trained tokens weigh more; cosine below "
    "1, size near 1. With equal counts it is right",
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_mean_of_means_turns_the_gradient",
)
def mean_of_micro_batch_means(step_weights: Callable) -> Callable:
    """Each micro-batch is divided by its own tokens, and the step by its micro-batches.

    The loss is a mean over the step's micro-batches of all ranks of means over their own tokens: a mean of means.
    """

    def average_means(rows: list, spec: object, **options: object) -> tuple:
        weights, totals = step_weights(rows, spec, **options)
        for row, named in zip(rows, weights, strict=True):
            alone = step_weights([row], spec)[0][0]
            for name in ("policy", "penalty", "token"):
                named[name] = alone[name].map(lambda weights_T: weights_T / len(rows))
        return weights, totals

    return average_means


@fault(
    seam="step_weights",
    origin="ServiceNow/Fast-LLM#520, docs_per_step: one of two counters is reset to the step's total",
    signature="a sum of means instead of one mean: loss and gradient too big by about the number of micro-batches of "
    "the step, tilted towards those with few trained tokens; no effect with one micro-batch and with denominators that "
    "count documents only",
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/parity/test_faults.py::test_token_counts_of_micro_batches_make_a_mean_of_means",
)
def micro_batch_denominator(step_weights: Callable) -> Callable:
    """The token count of a micro-batch is used instead of that of the whole step; the document count is right."""

    def count_tokens_by_micro_batch(rows: list, spec: object, **options: object) -> tuple:
        weights, totals = step_weights(rows, spec, **options)
        for row, named in zip(rows, weights, strict=True):
            alone = step_weights([row], spec)[0][0]
            # Documents are counted over the whole step, tokens are not.
            for name in ("policy", "penalty", "token"):
                if name == "token" or spec.denominator == "token":
                    named[name] = alone[name]
        return weights, totals

    return count_tokens_by_micro_batch


@fault(
    seam="step_weights",
    origin="NVIDIA-NeMo/RL#3791 (32 times too big with 32 micro-batches)",
    signature="this term alone wrong, in loss and gradient: about micro-batches (of all ranks) times too big, those "
    "with few such tokens most; other terms right; no effect with one micro-batch",
    shows_in={"data": {"micro_batches": 3}, "loss": {"name": "vapo"}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen.py::test_a_likelihood_counted_in_micro_batches_is_the_only_wrong_term",
)
def nll_denominator_per_micro_batch(step_weights: Callable) -> Callable:
    """The likelihood of rewarded completions is averaged over those of each micro-batch, and the averages are summed.

    The policy term is divided by the tokens of the step, but the likelihood of rewarded completions by their tokens in
    the micro-batch.
    """

    def count_per_micro_batch(rows: list, spec: LossSpec, **options: object) -> tuple:
        weights, totals = step_weights(rows, spec, **options)
        for row, named in zip(rows, weights, strict=True):
            alone = step_weights([row], spec)[0][0]
            named |= {name: pair for name, pair in alone.items() if name == "positive_token"}
        return weights, totals

    return count_per_micro_batch


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
def rejected_tokens_in_denominator(step_weights: Callable) -> Callable:
    """A mean over surviving tokens is divided by all tokens before the rejection."""

    def count_rejected_too(rows: list, spec: Any, **options: object) -> tuple:
        all_counted = spec.correction.model_copy(update={"denominator": "original"})
        return step_weights(rows, spec.model_copy(update={"correction": all_counted}), **options)

    return count_rejected_too
