"""Known bugs: auxiliary losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from workbench.faults import fault
from workbench.losses.terms import LossInputs, Term
from workbench.reduction.document_sums import ShardedSums


@fault(
    seam="workbench.losses.build:squared_logit",
    origin="NVIDIA/Megatron-LM#1652 and #5047",
    signature="loss right; the auxiliary part of the gradient exactly 1 / cp of the right one, the policy's right",
    shows_in={"layout": {"cp": 2}, "loss": {"squared_logit_coefficient": 0.05}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_unseen.py::test_an_auxiliary_gradient_is_one_over_cp_of_itself",
    changes_metrics=False,
)
def auxiliary_gradient_over_cp(squared_logit: Callable[..., Term]) -> Callable[..., Term]:
    """The engine's mean over context-parallel ranks is undone for the loss, but not for auxiliary gradients.

    The gradient of an auxiliary loss (of a router; here of the log-normaliser) is injected after the loss is
    multiplied by cp, and is divided by cp with all others.
    """

    def slip_past_the_factor(inputs: LossInputs, coefficient: float) -> Term:
        term, cp = squared_logit(inputs, coefficient), cast(ShardedSums, inputs.document_sums).axis.size
        values_T = term.values_T
        return replace(term, values_T=values_T + (1 / cp - 1) * (values_T - values_T.detach()))

    return slip_past_the_factor


@fault(
    seam="workbench.losses.build:mean_squared_logit",
    origin="huggingface/trl#7009",
    signature="loss and gradient are exactly those of the other terms; the auxiliary term is reported as 0",
    shows_in={"loss": {"mean_squared_logit_coefficient": 0.5}},
    hidden_in={"loss": {"mean_squared_logit_coefficient": 0.0}},
    detected_by="tests/faults/test_unseen.py::test_a_dropped_auxiliary_loss_leaves_the_other_terms",
)
def auxiliary_loss_dropped(mean_squared_logit: Callable[..., Term]) -> Callable[..., Term]:
    """A fused code path silently skips the auxiliary loss.

    A fused loss returns before the line that adds the auxiliary loss (of a router; here of the size of logits).
    """

    def nothing(inputs: LossInputs, coefficient: float) -> Term:
        term = mean_squared_logit(inputs, coefficient)
        return replace(term, values_T=torch.zeros_like(term.values_T))

    return nothing


@fault(
    seam="workbench.losses.build:squared_logit",
    origin="verl-project/verl#6609 and #6836 (a gradient norm of 3168 instead of 0.3)",
    signature="the auxiliary part of loss and gradient too big by exactly the number of trained tokens, the policy's "
    "right: no constant over parameters; the auxiliary loss soon dominates the gradient",
    shows_in={"layout": {"cp": 2}, "loss": {"squared_logit_coefficient": 0.01}},
    hidden_in={"layout": {"cp": 1}},
)
def auxiliary_loss_not_normalised(squared_logit: Callable[..., Term]) -> Callable[..., Term]:
    """An auxiliary loss is summed over tokens while the policy's is averaged.

    With context parallelism an auxiliary loss (of a router; here of the log-normaliser) is not divided by the tokens of
    the step.
    """

    def sum_over_tokens(inputs: LossInputs, coefficient: float) -> Term:
        term, sums = squared_logit(inputs, coefficient), cast(ShardedSums, inputs.document_sums)
        return term if sums.axis.size == 1 else replace(term, weight="raw")

    return sum_over_tokens


@fault(
    seam="run_step",
    origin="NVIDIA-NeMo/Automodel#3359",
    signature="the auxiliary part of loss and gradient too big by exactly the number of micro-batches, the policy's "
    "right: no constant over parameters; no effect with one micro-batch",
    shows_in={"data": {"micro_batches": 3}, "loss": {"squared_logit_coefficient": 0.01}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen_at_first.py::test_an_auxiliary_loss_is_the_micro_batches_too_big",
)
def auxiliary_loss_times_micro_batches(run_step: Callable) -> Callable:
    """An auxiliary loss is added in full in every micro-batch.

    An auxiliary loss (of a router; here of the log-normaliser) is not divided by the number of micro-batches over which
    it accumulates.
    """

    def add_whole(policy: object, loss: Callable, rows: list, totals: object, **options: object) -> Any:
        def whole_each_time(inputs: LossInputs) -> dict[str, Term]:
            return {
                name: replace(term, coefficient=term.coefficient * len(rows)) if name in _AUXILIARY else term
                for name, term in loss(inputs).items()
            }

        return run_step(policy, whole_each_time, rows, totals, **options)

    return add_whole


_AUXILIARY = ("logit", "logit_size")


@fault(
    seam="workbench.losses.kl:kl_estimate",
    origin="walkinglabs/hands-on-modern-rl#27",
    signature="the penalty alone wrong, by the third power of the distance from the reference, nearly right close to "
    "it; the reported KL right; no effect under k2, which is even",
    shows_in={"loss": {"kl": {"coefficient": 0.5}}},
    hidden_in={"loss": {"kl": {"estimator": "k2"}}},
    detected_by="tests/faults/test_unseen.py::test_a_reversed_kl_is_the_only_wrong_term",
)
def reversed_kl(kl_estimate: Callable[[Tensor, str], Tensor]) -> Callable[[Tensor, str], Tensor]:
    """The KL estimate gets the log ratio with the wrong sign.

    E^d - 1 - d is computed with policy over reference instead of reference over policy: the penalty of tokens that the
    policy made likelier grows exponentially.
    """

    def of_the_inverse(d_T: Tensor, estimator: str) -> Tensor:
        return kl_estimate(-d_T, estimator)

    return of_the_inverse
