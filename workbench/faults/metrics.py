"""Known bugs: metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.faults import fault
from workbench.losses.terms import LossInputs, Term
from workbench.metrics.values import Count, Maximum, Mean, Minimum, Sum, Value
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.model import Policy
from workbench.reduction.partial import Scalar
from workbench.rollouts.batch import PADDING
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Axis, Mesh
from workbench.specs.losses import LossSpec

Values = dict[str, Value]
Batches = Sequence[Mapping[str, Value]]
Numbers = dict[str, float]


@fault(
    seam="policy_metrics",
    origin="RLinf/RLinf#1529",
    signature="gradient and loss right; every share of clipped tokens is exactly 0, all other metrics right; no effect "
    "under a loss without a clip",
    hidden_in={"loss": {"name": "reinforce"}},
    detected_by="tests/faults/test_unseen.py::test_after_the_clip_no_ratio_is_outside",
    changes_gradient=False,
)
def clip_fraction_after_clip(policy_metrics: Callable, *args: object) -> Values:
    """The share of clipped tokens compares the clipped ratio with the bounds of the clip."""
    return {
        key: _scaled(value, 0.0) if key.startswith(("clip/policy/", "clip/region/")) else value
        for key, value in policy_metrics(*args).items()
    }


@fault(
    seam="workbench.policy.model:token_logprobs",
    origin="ServiceNow/Fast-LLM#520",
    signature="gradient, loss and log-probabilities right, unless the loss has an entropy bonus; the entropy "
    "about log(tp) nats too small where the distribution is flat",
    needs="tp",
    detected_by="tests/faults/test_denominators_and_metrics.py::test_the_entropy_of_a_shard_is_smaller_by_log_tp",
    changes_gradient=False,
)
def entropy_of_vocabulary_shard(token_logprobs: Callable, hidden_TD: Tensor, **options: Any) -> TokenLogprobs:
    """The softmax of the entropy is normalised over local logits, without the collective over tp."""
    head_output = token_logprobs(hidden_TD, **options)
    if head_output.entropy_T is None or options["axis"].size == 1:
        return head_output
    local = {
        "implementation": "reference",
        "axis": None,
        "first_token": 0,
        "outputs": ("entropy",),
        "targets_T": torch.zeros_like(options["targets_T"]),
    }
    with torch.no_grad():
        alone = token_logprobs(hidden_TD, **(options | local))
    return head_output._replace(entropy_T=alone.entropy_T)


@fault(
    seam="finish_metrics",
    origin="PrimeIntellect-ai/prime-rl#816",
    signature="gradient, loss and all other metrics right; every minimum is its maximum and above its mean",
    detected_by="tests/faults/test_unseen_at_first.py::test_swapped_extremes_are_each_other",
    changes_gradient=False,
)
def extremes_swapped(finish_metrics: Callable, *args: object) -> Numbers:
    """The reducers of minimum and maximum are swapped."""
    metrics = finish_metrics(*args)
    return {key: metrics.get(_swapped(key), metrics[key]) for key in metrics}  # some have one extreme alone


_OTHER = {"min": "max", "max": "min"}


def _swapped(key: str) -> str:
    group, _, statistic = key.rpartition("/")
    return f"{group}/{_OTHER.get(statistic, statistic)}"


@fault(
    seam="finish_metrics",
    origin="allenai/open-instruct#1808 (1.143e6 tokens for 285,750)",
    signature="gradient, loss, means and extremes right; every sum and count exactly dp * cp times too big",
    needs="dp",
    detected_by="tests/faults/test_denominators_and_metrics.py::test_counts_are_too_big_by_the_ranks",
    changes_gradient=False,
)
def global_counts_per_rank(finish_metrics: Callable, micro_batches: Batches, axis: Axis) -> Numbers:
    """Every rank has the finished metrics of the step, and counts are summed over ranks again."""
    counted = [key for key, value in micro_batches[0].items() if isinstance(value.reducer, Sum | Count)]
    whole = finish_metrics(micro_batches, axis)
    return whole | {key: whole[key] * axis.size for key in counted}


@fault(
    seam="policy_metrics",
    origin="THUDM/slime#2114",
    signature="gradient and loss right; the metric of the KL that the loss penalises exactly coefficient times the "
    "right one, other estimators and pairs right; no effect without a penalty",
    hidden_in={"loss": {"kl": {"coefficient": 0.0}}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_kl_changed_in_place_is_its_coefficient_too_small",
    changes_gradient=False,
)
def kl_changed_in_place(
    policy_metrics: Callable,
    inputs: LossInputs,
    terms: Mapping[str, Term],
    loss_mask_T: Tensor,
    level: str = "basic",
    loss_spec: LossSpec | None = None,
    *more: object,
) -> Values:
    """The tensor of the penalty is changed in place after it was passed to the log."""
    metrics = policy_metrics(inputs, terms, loss_mask_T, level, loss_spec, *more)
    if "kl" not in terms:
        return metrics
    logged = f"kl/policy_{loss_spec.kl.against}/{loss_spec.kl.estimator}_" if loss_spec else "kl/policy_ref/k3_"
    return {
        key: _scaled(value, terms["kl"].coefficient) if key.startswith(logged) else value
        for key, value in metrics.items()
    }


def _scaled(value: Value, factor: float) -> Value:
    """Multiply the total of a mean, and not its weight."""
    if not isinstance(value.reducer, Mean):
        return value
    return replace(value, sums=(value.sums[0] * factor, *value.sums[1:]))


@fault(
    seam="workbench.reduction.partial:Scalar.complete",
    origin="modelscope/ms-swift#9380",
    signature="gradient and metrics right; the reported loss is that of one cp rank's tokens, whose share depends on "
    "order and masks",
    needs="cp",
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_loss_over_dp_only_lacks_the_other_cp_ranks",
    changes_gradient=False,
)
def loss_reported_over_dp_only(_: Callable, self: Scalar, mesh: Mesh) -> Scalar:
    """The reported sum leaves out context-parallel ranks, so the log shows the part of those with cp rank 0."""
    return Scalar(all_sum(self.value.detach(), mesh["dp"]), frozenset())


@fault(
    seam="finish_metrics",
    origin="huggingface/trl#6380 and #7047, OpenRLHF's clip_ratio and ppo_kl",
    signature="gradient and loss right, also sums, counts and extremes; means tilted towards ranks with few trained "
    "tokens, NaN if a rank has none",
    needs="dp",
    detected_by="tests/faults/test_denominators_and_metrics.py::test_means_of_means_leave_sums_and_extremes_alone",
    changes_gradient=False,
)
def mean_of_rank_means(finish_metrics: Callable, micro_batches: Batches, axis: Axis) -> Numbers:
    """Means are averaged over ranks as finished numbers instead of as sum and count."""
    means = {key: value for key, value in micro_batches[0].items() if isinstance(value.reducer, Mean)}
    local = finish_metrics(micro_batches, Axis(axis.name))
    whole = finish_metrics(micro_batches, axis)
    if means:
        some = next(iter(means.values())).sums[0]
        averaged = all_sum(some.new_tensor([local[key] for key in means]), axis) / axis.size
        whole |= dict(zip(means, averaged.tolist(), strict=True))
    return whole


@fault(
    seam="finish_metrics",
    origin="verl-project/verl#2259",
    signature="gradient and loss right; counts of tokens and documents too small, means of another population; no "
    "effect with one micro-batch",
    needs="micro_batches",
    detected_by="tests/faults/test_denominators_and_metrics.py::test_metrics_of_the_last_micro_batch_count_fewer_tokens",
    changes_gradient=False,
)
def metrics_of_last_micro_batch(finish_metrics: Callable, micro_batches: Sequence[object], axis: object) -> Numbers:
    """Metrics are stored by name, and each micro-batch overwrites those of the previous one."""
    return finish_metrics(micro_batches[-1:], axis)


@fault(
    seam="run_step",
    origin="verl-project/verl#4711, #4778 and #5203",
    signature="gradient and loss right; every reported mean and share exactly dp times too big, so that shares pass "
    "1; sums, counts and extremes right",
    needs="dp",
    detected_by="tests/faults/test_unseen_at_first.py::test_scaled_means_are_too_large_by_dp",
    changes_gradient=False,
)
def metrics_scaled_by_dp(run_step: Callable, policy: Policy, *args: object, **options: object) -> Any:
    """Means are scaled like the loss for an engine that averages over dp, but are never averaged."""
    result, dp = run_step(policy, *args, **options), policy.mesh["dp"].size
    scaled = {
        key: value * dp if key.endswith(("/mean", "/fraction", "_mean")) else value
        for key, value in result.metrics.items()
    }
    return replace(result, metrics=scaled)


@fault(
    seam="policy_metrics",
    origin="NovaSky-AI/SkyRL#211",
    signature="gradient, loss and all other metrics right; the entropy's mean shifted towards that after padding, more "
    "with more padding; no effect in rows without padding",
    shows_in={"data": {"multiple_of": 160}},
    hidden_in={"data": {"multiple_of": None}},
    detected_by="tests/faults/test_unseen_at_first.py::test_padding_moves_the_entropy_alone",
    changes_gradient=False,
)
def padding_in_entropy(
    policy_metrics: Callable, inputs: LossInputs, terms: object, loss_mask_T: Tensor, level: str, *more: object
) -> Values:
    """The distribution after padding tokens is included in the policy's entropy."""
    right = policy_metrics(inputs, terms, loss_mask_T, level, *more)
    wide = policy_metrics(inputs, terms, loss_mask_T | (inputs.document_ids_T == PADDING), level)
    return right | {key: wide[key] for key in _KEYS if key in right}


_KEYS = ("entropy/policy/mean", "entropy/policy/min", "entropy/policy/max")


@fault(
    seam="policy_metrics",
    origin="ServiceNow/PipelineRL, loss reinforce (read, not run)",
    signature="gradient, loss and log-probabilities right; no reported ratio is above the bound, mean and sums too "
    "small, effective samples too many; no effect under a loss that does not truncate",
    shows_in={"loss": {"name": "truncated_reinforce"}},
    hidden_in={"loss": {"name": "reinforce"}},
    detected_by="tests/faults/test_unseen.py::test_truncated_ratios_are_reported_as_ratios",
    changes_gradient=False,
)
def ratio_truncated_before_log(
    policy_metrics: Callable,
    inputs: LossInputs,
    terms: object,
    loss_mask_T: object,
    level: str = "basic",
    loss_spec: LossSpec | None = None,
    *more: object,
) -> Values:
    """The variable of the ratio is overwritten by its truncated value before its statistics are computed."""
    metrics = policy_metrics(inputs, terms, loss_mask_T, level, loss_spec, *more)
    if loss_spec is None or loss_spec.surrogate.kind != "cispo":
        return metrics
    clamped_T = inputs.log_ratio().clamp(max=math.log1p(loss_spec.surrogate.clip_high))
    truncated = replace(inputs, policy_logprobs_T=inputs.old_logprobs_T + clamped_T)
    other = policy_metrics(truncated, terms, loss_mask_T, level, loss_spec, *more)
    return {key: other[key] if key.startswith("ratio/policy_old/") else value for key, value in metrics.items()}


@fault(
    seam="finish_metrics",
    origin="ServiceNow/Fast-LLM#520 (minima and maxima of ranks that compute no loss)",
    signature="gradient, loss and means right; minima of positive and maxima of negative numbers are 0 as soon as one "
    "rank has no trained token",
    shows_in={"layout": {"cp": 2}, "data": {"multiple_of": 160}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_zero_for_nothing_enters_extremes_alone",
    changes_gradient=False,
)
def zero_placeholder_in_extremes(finish_metrics: Callable, micro_batches: Batches, axis: object) -> Numbers:
    """The extreme of no tokens is 0 instead of infinite."""
    empty = {
        key
        for key, value in micro_batches[0].items()
        if isinstance(value.reducer, Maximum | Minimum)
        if all(metrics[key].maxima[0].isneginf() for metrics in micro_batches)
    }
    return finish_metrics(
        [{key: _zero(value) if key in empty else value for key, value in metrics.items()} for metrics in micro_batches],
        axis,
    )


def _zero(value: Value) -> Value:
    return replace(value, maxima=tuple(part.new_zeros(()) for part in value.maxima))
